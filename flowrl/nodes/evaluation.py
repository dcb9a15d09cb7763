"""Held-out evaluation: the same prompts and seeds every time, at one version, without tickets and batches.

Each evaluation ends with its last answer. `run` only keeps the call edge open until `finish`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

from flowrl.environments import EnvironmentRow, environment_rows
from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import Call
from flowrl.messages import Prompt, Sample
from flowrl.messages.episode import Episode
from flowrl.models import Chat, Policy, check_model, known_context, tokenizer_of
from flowrl.nodes.held_out_answers import (
    HeldOutScores,
    HeldOutSet,
    Marked,
    ScoredBy,
    full_marks,
)
from flowrl.nodes.scoring.reward_model import ModelScore, ScoreQuestion
from flowrl.nodes.sources.row_checks import PromptLimit, place_of, prompt_texts, require_rendered, rows_within
from flowrl.nodes.sources.row_source import SourceRow, prompt_fields, question_fields, task_fields
from flowrl.nodes.writers import ProgressCount
from flowrl.runtime.checkpoints.unfinished_evaluation import kept_answers, versions_in
from flowrl.runtime.ledger.ledger_client import EvaluationRow
from flowrl.runtime.samples.sample_notes import SampleRecord
from flowrl.tasks import Row, Rows, Task, check_answers, load_rows
from flowrl.tasks.evaluation_set import EvaluationSet, too_few
from flowrl.tasks.reward_calls.http import AWAY_S, Patience
from flowrl.tasks.rewards import names_model, open_reward
from flowrl.tasks.row_reading.row_loading import require_served
from flowrl.tasks.row_reading.rows_on_disk import pick_rows, prompt_ids


class Evaluation(Node):
    """Requests `num_samples` answers to each of `num_prompts` held-out prompts per task, before and after training.

    With `every`, also after every `every` steps: the trainers pause meanwhile, so that all answers have one
    version; rollouts continue. The generator's `evaluation` option says how answers are sampled. The task's reward or
    `function` scores them; if that names a reward model, the node behind `score` computes the model's scores. If there
    are several tasks, the metrics of the first keep their plain names, and the metrics of the others begin with the
    task's name. `also` names further tasks; they use the first task's system prompt and their own verifiers.

    `environments` are played by the node behind `play`, one episode for each held-out row and sample: the score is the
    episode's reward, and an episode that fails has no score. `agent_tasks` are given to that node's agents in the same
    way.

    `sets` are asked in addition to the held-out rows of `task`, or in place of them if `task` is (). Each set has its
    own number of prompts and samples, and its figures are named after it. With `agents`, the sets are given to agents.
    `training` is the task that is trained on: prompts that a set shares with it are counted.

    `prompt_limit` says how long a prompt for a generator may be, and what happens to longer prompts; the metric
    `evaluation_prompts_too_long` counts them, once. Episodes have their own limits.
    """

    generate: Call[Prompt, Sample]
    play: Call[Prompt, Episode]
    score: Call[ScoreQuestion, ModelScore]

    def __init__(
        self,
        task: Task | Sequence[Task],
        policy: Policy,
        *,
        num_prompts: int = 512,
        num_samples: int = 1,
        every: int = 0,
        also: Sequence[str] = (),
        environments: Sequence[str] = (),
        agent_tasks: Sequence[Task] = (),
        sets: Sequence[EvaluationSet] = (),
        agents: bool = False,
        asked_in: str = "",
        training: Task | None = None,
        prompt_limit: PromptLimit | None = None,
        function: str | Callable[..., Any] | None = None,
        concurrency: int = 64,
        timeout_s: float = 10.0,
        reward_concurrency: int | None = None,
        away_s: float = AWAY_S,
    ) -> None:
        first = (task,) if isinstance(task, Task) else tuple(task)
        like = (*first, *(one.task for one in sets))
        further = tuple(replace(like[0], name=name, reward="") for name in also if like)
        asked, played = (
            tuple(EvaluationSet(one.name, one, num=num_prompts, samples=num_samples) for one in tasks)
            for tasks in ((*first, *further), agent_tasks)
        )
        self.sets = asked if agents else (*sets, *asked)
        self.agent_sets = (*sets, *played) if agents else played
        self.environments = tuple(environments)
        self.asked_in = asked_in
        self.training = training
        self.limit = prompt_limit or PromptLimit()
        self.policy = policy
        self.num_prompts = num_prompts
        self.num_samples = num_samples
        self.every = every
        self.scored_by = {one.name: ScoredBy.of_task(one.task, function) for one in self.sets}
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.reward_concurrency = reward_concurrency
        self.away_s = away_s
        self._finished = asyncio.Event()
        self._held_out: list[HeldOutSet] = []

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that a generator answers."""
        return tuple(one.task for one in self.sets)

    @property
    def _set_names(self) -> tuple[str, ...]:
        return (*(one.name for one in (*self.sets, *self.agent_sets)), *self.environments)

    @property
    def asks_model(self) -> bool:
        """Whether a reward model scores answers."""
        return any(by.by_model for by in self.scored_by.values())

    def facts(self) -> Facts:
        played = (*self.environments, *self.agent_sets)
        unused = [port for port, asked in (("generate", self.sets), ("play", played)) if not asked]
        without_scorer: dict[str, str] = {}
        if self.asks_model:
            first = next(name for name, by in self.scored_by.items() if by.by_model)
            without_scorer["score"] = (
                f"the reward of {first!r} names reward_model, but no reward model is there to score held-out answers; "
                "name its directory with --reward-model if the graph has that option, name another reward, or set "
                "--evaluate 0 and score afterwards with flowrl evaluate MODEL --reward-model DIRECTORY"
            )
        return Facts(
            concurrency=self.concurrency,
            longest_context=self.limit.tokens,
            context_by=self.limit.option,
            held_out_sets=self._set_names,
            optional=("score", *unused),
            unconnected=without_scorer,
        )

    def check(self, facts: Any) -> list[str]:
        least = {"num_prompts": 1, "num_samples": 1, "every": 0, "concurrency": 1}
        problems = [
            f"{name} is {getattr(self, name)}; it needs at least {low}"
            for name, low in least.items()
            if getattr(self, name) < low
        ]
        names = self._set_names
        if not names or len(set(names)) < len(names):
            problems.append("it needs one or more tasks or environments, each once")
        problems += self.limit.find_problems()
        problems += [
            f"the reward of {one.name!r} names reward_model, but episodes have rewards of their own; leave it out"
            for one in self.agent_sets
            if names_model(one.task.reward)
        ]
        problems += [
            f"the set {one.name!r} has a {name}, but agents answer it, and they sample as in the episodes; leave it out"
            for one in self.agent_sets
            for name in ("temperature", "top_p", "top_k")
            if getattr(one, name) is not None
        ]
        problems += [
            f"the set {one.name!r} has top_p or top_k, but its answers are greedy, which these do not change; leave "
            "them out, or set temperature above 0"
            for one in self.sets
            if one.asked_at == 0 and (one.top_p is not None or one.top_k is not None)
        ]
        return problems

    def preflight(self) -> str | None:
        check_model(self.policy)
        said: list[str] = []
        for one in self.sets:
            rows = self._check_set(one)
            if text := require_rendered(self.policy, one.task, rows, prompt_texts):
                said.append(f"{one.name}: {text}")
            if self.limit.too_long == "error" and not self.policy.built_in:
                self._fitting_rows(one, rows, Chat(tokenizer_of(self.policy), one.task.system_prompt))
        for one in self.agent_sets:
            self._check_set(one)
        for name in self.environments:
            rows_played = self._played_rows(name)
            if len(rows_played) < self.num_prompts:
                raise ConfigError(too_few(name, len(rows_played), self.num_prompts))
        for one in (*self.sets, *self.agent_sets):
            if one.whole or (one.takes_fewer and len(load_rows(one.task).held_out) != one.num):
                said.append(self._describe_set(one))  # its number of prompts is not obvious from the options
        return "; ".join(said) or None

    def _check_set(self, one: EvaluationSet) -> Sequence[Row]:
        """The prompts of a set. Raises ConfigError if there are too few, or if the reward cannot score them."""
        rows = one.chosen(load_rows(one.task, whole=one.whole))
        one.require_enough(rows)
        require_served(one.task, rows, "prompts")
        try:
            check_answers(one.task, rows)
            if one.name in self.scored_by:
                self.scored_by[one.name].with_verifier(one.task, rows).load_functions(rows)
        except ConfigError as problem:
            raise ConfigError(f"{problem}; a run that trains asks no held-out prompts with --evaluate 0") from problem
        return rows

    def asked_rows(self) -> dict[str, str]:
        """Set -> digest of its rows, with which a continued run checks that the rows are the same."""
        sets = {one.name: digest_of_rows(self._check_set(one)) for one in (*self.sets, *self.agent_sets)}
        ids = {name: "\n".join(row.prompt_id for row in self._played_rows(name)) for name in self.environments}
        return sets | {name: hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for name, text in ids.items()}

    def _describe_set(self, one: EvaluationSet) -> str:
        """The text that says what a set asks, and how many of its prompts are trained on."""
        found = load_rows(one.task, whole=one.whole)
        rows = one.chosen(found)
        trained = load_rows(self.training, whole=True) if self.training is not None else Rows((), ())
        known = {*prompt_ids(trained.train), *prompt_ids(trained.held_out)}
        shared = sum(one in known for one in prompt_ids(rows))
        number, of = len(rows), len(one.choice(found))
        asked = f"{number:,} of {of:,} {'' if one.whole else 'held-out '}prompts" if number < of else f"{of:,} prompts"
        text = f"{one.name}: {asked}, {one.samples} answer{'s' if one.samples > 1 else ''} each"
        if not one.whole:
            return text if number < of else f"{text}: all that are held out, fewer than the {one.num} asked for"
        text += f", {found.repeated} rows with the prompt of another left out" if found.repeated else ""
        text += f", {found.low_scores} with a score below min_score left out" if found.low_scores else ""
        text += f", {shared} of them are in the training data too" if shared else ""
        return "; ".join((text, *found.opened))

    async def setup(self) -> None:
        if self.sets:
            tokenizer = await self.blocking(tokenizer_of, self.policy, progress=self.context.progress)
            self._held_out += [await self._open_task(one, tokenizer) for one in self.sets]
        played = partial(HeldOutSet, ask=self.play, count=self.context.metric)
        for name in self.environments:
            rows = self._played_rows(name)
            self._held_out.append(played(name, rows, self.num_samples, prompt_fields))
        for one in self.agent_sets:
            asked = one.chosen(await self.blocking(load_rows, one.task, whole=one.whole))
            fields: Callable[[Any], Mapping[str, Any]] = partial(task_fields, one.task)
            if self.asked_in:
                fields = partial(question_fields, self.asked_in, one.name)
            self._held_out.append(played(one.name, asked, one.samples, fields))

    async def _open_task(self, one: EvaluationSet, tokenizer: Any) -> HeldOutSet:
        chat = Chat(tokenizer, one.task.system_prompt)
        found = await self.blocking(load_rows, one.task, whole=one.whole)
        chosen = one.chosen(found)
        rows, num_long = await self.blocking(self._fitting_rows, one, chosen, chat)
        by = await self.blocking(self.scored_by[one.name].with_verifier, one.task, rows)
        by = await self.blocking(by.load_functions, ())
        if unrendered := len(chosen) - len(await self.blocking(_rendered_rows, chosen, chat)):
            self.context.metric("evaluation_prompts_unrendered", unrendered)
            self.context.progress(f"{one.name}: {unrendered} held-out prompts cannot be rendered and are not asked")
        if num_long:
            self.context.metric("evaluation_prompts_too_long", num_long)
            left_out = self.limit.too_long == "drop"
            self.context.progress(
                f"{one.name}: {num_long} of {num_long + len(rows) if left_out else len(rows)} held-out prompts have "
                f"more than {self._most_tokens} tokens and {'are not asked' if left_out else 'lose their beginning'}"
            )
        patience = Patience(self.away_s, self.context.outside, self.context.progress)
        opened = partial(open_reward, timeout_s=self.timeout_s, concurrency=self.reward_concurrency, patience=patience)
        count, most = self.context.metric, self._most_tokens

        def fields_of(row: Row) -> Mapping[str, Any]:
            text, token_ids = chat.with_tools(row.tools).encode_prompt(row.turns)
            asked = token_ids if most is None else token_ids[-most:]  # a longer prompt loses its beginning
            return {"text": text, "token_ids": asked, "columns": row.columns, **one.asked_as}

        scores = HeldOutScores(by, one.task, self.score, open_client=opened, count=count)
        return HeldOutSet(one.name, rows, one.samples, fields_of, self.generate, count, scores)

    def _fitting_rows(self, one: EvaluationSet, rows: Sequence[Row], chat: Chat) -> tuple[Sequence[Row], int]:
        """The rows of a set that are asked, and how many prompts are too long. Raises ConfigError."""
        rows = _rendered_rows(rows, chat)
        most = self._most_tokens
        return (rows, 0) if most is None else rows_within(rows, chat, most, self.limit, task=one.name)

    @property
    def _most_tokens(self) -> int | None:
        """Most tokens of a prompt; None: neither the engine's options nor the model's files say."""
        if self.limit.tokens is not None:
            return self.limit.tokens
        try:
            context = known_context(self.policy)
        except ConfigError:
            context = None
        known = [one for one in (context, self.limit.engine) if one is not None]
        return min(known) - 1 if known else None

    async def run(self) -> None:
        with self.context.waiting("the end of training"):
            await self._finished.wait()

    async def finish(self) -> None:
        """Declare that no further evaluation will be requested."""
        self._finished.set()

    async def close(self) -> None:
        for held_out in self._held_out:
            if held_out.scores is not None:
                await held_out.scores.close()

    async def evaluate(self, *, phase: str, step: int) -> dict[str, float]:
        """Request, score and record answers. `phase` is before, during or after; weights must not change meanwhile.

        The figures of the first set have plain names. If its name is shown, they come first under that name as well.
        """
        slots = asyncio.Semaphore(self.concurrency)
        total = sum(len(held_out.rows) * held_out.num_samples for held_out in self._held_out)
        kept = await self.blocking(kept_answers, Path(self.context.run_dir), phase=phase, step=step)
        progress = ProgressCount("answers", self.context.progress, total=total, there=len(kept))
        whole = {one.name for one in (*self.sets, *self.agent_sets) if one.whole}  # these names are always shown
        figures: dict[str, float] = {}
        booked: list[EvaluationRow] = []

        async def answer_row(held_out: HeldOutSet, row: SourceRow, member: int) -> Answered | None:
            if (record := kept.get((held_out.name, row.prompt_id, member))) is not None:
                return answer_of_record(record)
            async with slots:
                prompt = held_out.make_prompt(row, member=member, where=(self.name, phase, step))
                marked = await held_out.ask_and_score(prompt, row)
            if marked is None:
                return None
            progress.count_items()
            return self._book_answer(held_out, row, member, phase, step, marked)

        for index, held_out in enumerate(self._held_out):
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(answer_row(held_out, row, member))
                    for row in held_out.rows
                    for member in range(held_out.num_samples)
                ]
            answered = [found for task in asked if (found := task.result()) is not None]
            if not answered:
                raise FlowrlError(
                    f"{self.name}: none of {len(asked)} held-out answers of {held_out.name!r} has a score "
                    f"at version {step}; the counters evaluation_* in metrics.jsonl say why"
                )
            rows = [row for row, _ in answered]
            if len(known := versions_of(rows)) > 1:
                raise FlowrlError(
                    f"{self.name}: the evaluation {phase} training saw the versions {min(known)} to {max(known)}, but "
                    "it needs one; this is an error in flowrl, please report it"
                )
            booked += rows
            summary = summarize_answers(rows, held_out.num_samples, tells_right=held_out.tells_right)
            summary |= mean_parts([parts for _, parts in answered])
            if index or held_out.name in whole:
                figures |= {f"{held_out.name}/{name}": value for name, value in summary.items()}
            figures |= summary if index == 0 else {}
        progress.report_end()
        self.context.ledger.evaluation(booked)  # all or none: a resumed run repeats an evaluation that has no rows
        return figures

    def _book_answer(
        self, held_out: HeldOutSet, row: SourceRow, member: int, phase: str, step: int, marked: Marked
    ) -> Answered:
        """Keep an answer among the samples, and make its row of the ledger."""
        versions = marked.sample.whole_versions[marked.sample.whole_mask]
        correct = full_marks(marked.score) if marked.correct is None else marked.correct
        place = {"phase": phase, "step": step, "task": held_out.name, "parts": marked.parts}
        told = correct if held_out.tells_right else None
        self.context.samples.held_out(marked.sample, **place, score=marked.score, correct=told)
        booked = EvaluationRow(
            phase=phase,
            step=step,
            prompt_id=row.prompt_id,
            member=member,
            score=marked.score,
            correct=correct,
            response_tokens=marked.sample.response_tokens,
            oldest_version=int(versions.min()) if versions.size else None,
            newest_version=int(versions.max()) if versions.size else None,
            task=held_out.name,
        )
        return booked, marked.parts

    def _played_rows(self, environment: str) -> Sequence[EnvironmentRow]:
        """The rows of an environment that are played; they do not depend on the order of the data."""
        rows = environment_rows(environment).held_out
        return sorted(rows, key=lambda row: row.prompt_id)[: self.num_prompts]


def _rendered_rows(rows: Sequence[Row], chat: Chat) -> Sequence[Row]:
    """The rows whose prompts the template renders. Raises ConfigError if there is none."""
    refused = {number for number, row in enumerate(rows) if prompt_texts(row).why_unrendered(chat)}
    if rows and len(refused) == len(rows):
        raise ConfigError(
            f"none of the {len(rows)} held-out prompts can be rendered, the first, {place_of(rows[0])}: "
            f"{prompt_texts(rows[0]).why_unrendered(chat)}; use another template, or set --evaluate 0"
        )
    return pick_rows(rows, [number for number in range(len(rows)) if number not in refused]) if refused else rows


Answered = tuple[EvaluationRow, Mapping[str, float]]
"""The ledger's row of an answer, and the parts of its score if a reward model is one of them."""


def answer_of_record(record: SampleRecord) -> Answered:
    """The answer that an earlier run of the command has kept."""
    versions = versions_in(record)
    booked = EvaluationRow(
        phase=record["phase"],
        step=record["step"],
        prompt_id=record["prompt_id"],
        member=record["member"],
        score=record["reward"],
        correct=full_marks(record["reward"]) if record["correct"] is None else record["correct"],
        response_tokens=record["response_tokens"],
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        task=record["task"],
    )
    return booked, record["parts"]


def digest_of_rows(rows: Iterable[Row]) -> str:
    """A digest that is the same for the same prompts with the same columns and tools."""
    found = hashlib.blake2b(digest_size=16)
    for row in rows:
        found.update(json.dumps([row.prompt_id, dict(row.columns), row.tools], default=str).encode())
    return found.hexdigest()


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k): the probability that one of k answers drawn from n is right (arXiv 2107.03374)."""
    return 1.0 - comb(num_answers - num_correct, k) / comb(num_answers, k)


def summarize_answers(rows: Sequence[EvaluationRow], num_samples: int, *, tells_right: bool = True) -> dict[str, float]:
    """An evaluation's metrics. If `tells_right`, they include the share of right answers, and with several answers per
    prompt also mean@k and, for each k of `draws_of`, pass@k."""
    figures = {"exact_match": sum(row.correct for row in rows) / len(rows)} if tells_right else {}
    figures |= {
        "score": sum(row.score for row in rows) / len(rows),
        "num_answers": len(rows),
        "response_tokens_mean": sum(row.response_tokens for row in rows) / len(rows),
    }
    if known := versions_of(rows):
        figures |= {"oldest_version": min(known), "newest_version": max(known)}
    if num_samples < 2 or not tells_right:
        return figures
    figures[f"mean_at_{num_samples}"] = figures["exact_match"]
    answers: dict[str, list[bool]] = {}
    for row in rows:
        answers.setdefault(row.prompt_id, []).append(row.correct)
    for k in draws_of(num_samples):
        passed = [pass_at_k(len(given), sum(given), k) for given in answers.values() if len(given) >= k]
        if passed:
            figures[f"pass_at_{k}"] = sum(passed) / len(passed)
    return figures


def mean_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each part over the answers that have it, by the part's name in training's metrics."""
    names = dict.fromkeys(name for of in parts for name in of)
    values = {name: [of[name] for of in parts if name in of] for name in names}
    return {f"reward/{name}": sum(found) / len(found) for name, found in values.items()}


def versions_of(rows: Sequence[EvaluationRow]) -> set[int]:
    """The versions of the first and the last token of each answer; an answer without a token has none."""
    ends = {version for row in rows for version in (row.oldest_version, row.newest_version)}
    return {version for version in ends if version is not None}


def draws_of(num_samples: int) -> list[int]:
    """The values of k for pass@k: 2, 4, 8, … up to the number of answers per prompt, and that number itself."""
    powers = (1 << power for power in range(1, num_samples.bit_length()))
    return sorted({*powers, num_samples} - {1})

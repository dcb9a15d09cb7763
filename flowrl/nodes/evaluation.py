"""Held-out evaluation: the same prompts and seeds every time, at one version, without tickets and batches.

Each evaluation ends with its last answer. `run` only keeps the call edge open until `finish`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import comb
from typing import Any, TypeVar

from flowrl.environments import environment_rows
from flowrl.episode import Episode
from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import Call
from flowrl.messages import Prompt, Sample
from flowrl.models import Chat, Policy, check_model, load_tokenizer, resolve
from flowrl.nodes.environment_source import prompt_fields
from flowrl.nodes.held_out_rows import HeldOutEpisodes, HeldOutRows, HeldOutTask, held_out_prompt
from flowrl.nodes.row_source import SourceRow
from flowrl.nodes.task_source import task_fields
from flowrl.runtime.ledger.ledger_client import EvaluationRow
from flowrl.tasks import Task, load_rows, reward_parts
from flowrl.tasks.rewards import check_reward, open_reward, uses_http
from flowrl.tasks.rows import HELD_OUT_ONE_IN

R = TypeVar("R", bound=SourceRow)
CORRECT = 1.0 - 1e-6
"""A score of at least this is an exact match."""


class Evaluation(Node):
    """Requests `num_samples` answers to each of `num_prompts` held-out prompts per task, before and after training.

    With `every`, also after every `every` steps: the trainers pause meanwhile, so that all answers have one
    version, while rollouts continue. The generator's `evaluation` option sets how answers are sampled. The
    task's verifier or `function` scores them. If there are several tasks, the metrics of the first keep their
    plain names, and the others' begin with the task's name. `also` names further tasks; they use the first
    task's system prompt and their own verifiers. `environments` are played by the node that `play` asks, one
    episode for each held-out row and sample: the score is the episode's reward, and an episode that fails has none.
    `agent_tasks` are given to that node's agents in the same way.
    """

    generate: Call[Prompt, Sample]
    play: Call[Prompt, Episode]

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
        function: str | Callable[..., Any] | None = None,
        concurrency: int = 64,
        timeout_s: float = 10.0,
    ) -> None:
        first = (task,) if isinstance(task, Task) else tuple(task)
        self.tasks = (*first, *(Task(name, system_prompt=first[0].system_prompt) for name in also if first))
        self.environments = tuple(environments)
        self.agent_tasks = tuple(agent_tasks)
        self.policy = policy
        self.num_prompts = num_prompts
        self.num_samples = num_samples
        self.every = every
        self.parts = {task.name: reward_parts(task, function) for task in self.tasks}
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self._finished = asyncio.Event()
        self._held_out: list[HeldOutRows] = []

    def facts(self) -> Facts:
        played = (*self.environments, *self.agent_tasks)
        unused = [port for port, asked in (("generate", self.tasks), ("play", played)) if not asked]
        return Facts(concurrency=self.concurrency, optional=tuple(unused))

    def check(self, facts: Any) -> list[str]:
        least = {"num_prompts": 1, "num_samples": 1, "every": 0, "concurrency": 1}
        problems = [
            f"{name} is {getattr(self, name)}; it needs at least {low}"
            for name, low in least.items()
            if getattr(self, name) < low
        ]
        names = [*(task.name for task in (*self.tasks, *self.agent_tasks)), *self.environments]
        if not names or len(set(names)) < len(names):
            problems.append("it needs one or more tasks or environments, each once")
        return problems

    def preflight(self) -> None:
        check_model(self.policy)
        for task in self.tasks:
            rows = self._enough(task.name, self._rows(load_rows(task).held_out))
            check_reward(self.parts[task.name], (row.columns for row in rows))
        for task in self.agent_tasks:
            self._enough(task.name, self._rows(load_rows(task).held_out))
        for name in self.environments:
            self._enough(name, self._rows(environment_rows(name).held_out))

    async def setup(self) -> None:
        if self.tasks:
            model_dir = await self.blocking(resolve, self.policy, progress=self.context.progress)
            tokenizer = await self.blocking(load_tokenizer, model_dir)
            self._held_out += [await self._task(task, tokenizer) for task in self.tasks]
        for name in self.environments:
            self._held_out.append(self._played(name, environment_rows(name).held_out, prompt_fields))
        for task in self.agent_tasks:
            rows = await self.blocking(load_rows, task)
            self._held_out.append(self._played(task.name, rows.held_out, partial(task_fields, task)))

    def _played(
        self, name: str, held_out: Sequence[SourceRow], fields: Callable[[Any], Mapping[str, Any]]
    ) -> HeldOutEpisodes:
        rows = self._rows(held_out)
        return HeldOutEpisodes(name, rows, fields=fields, play=self.play, count=self.context.metric)

    async def _task(self, task: Task, tokenizer: Any) -> HeldOutTask:
        parts = self.parts[task.name]
        rows = await self.blocking(load_rows, task)
        await self.blocking(check_reward, parts, ())
        return HeldOutTask(
            task,
            self._rows(rows.held_out),
            Chat(tokenizer, task.system_prompt),
            open_reward(parts, timeout_s=self.timeout_s),
            generate=self.generate,
            with_messages=uses_http(parts),
            count=self.context.metric,
        )

    async def run(self) -> None:
        with self.context.waiting("the end of training"):
            await self._finished.wait()

    async def finish(self) -> None:
        """Declare that no further evaluation will be requested."""
        self._finished.set()

    async def close(self) -> None:
        for held_out in self._held_out:
            await held_out.close()

    async def evaluate(self, *, phase: str, step: int) -> dict[str, float]:
        """Request, score and record answers. `phase` is before, during or after; weights must not change meanwhile."""
        slots = asyncio.Semaphore(self.concurrency)
        figures: dict[str, float] = {}
        for index, held_out in enumerate(self._held_out):
            rows = await self._answers(held_out, phase, step, slots)
            _require_one_version(self.name, phase, rows)
            self.context.ledger.evaluation(rows)
            prefix = f"{held_out.name}/" if index else ""
            figures |= {f"{prefix}{name}": value for name, value in summary(rows, self.num_samples).items()}
        return figures

    async def _answers(
        self, held_out: HeldOutRows, phase: str, step: int, slots: asyncio.Semaphore
    ) -> list[EvaluationRow]:
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._answer(held_out, row, member, phase, step, slots))
                for row in held_out.rows
                for member in range(self.num_samples)
            ]
        rows = [row for task in asked if (row := task.result()) is not None]
        if not rows:
            raise FlowrlError(
                f"{self.name}: all {len(asked)} held-out episodes of {held_out.name!r} failed {phase} training; the "
                "counters evaluation_* in metrics.jsonl say why"
            )
        return rows

    async def _answer(
        self, held_out: HeldOutRows, row: SourceRow, member: int, phase: str, step: int, slots: asyncio.Semaphore
    ) -> EvaluationRow | None:
        async with slots:
            where = (self.name, phase, step)
            prompt = held_out_prompt(held_out, row, member=member, num_samples=self.num_samples, where=where)
            marked = await held_out.judge(prompt, row)
        if marked is None:
            return None
        versions = marked.sample.whole_versions[marked.sample.whole_mask]
        return EvaluationRow(
            phase=phase,
            step=step,
            prompt_id=row.prompt_id,
            member=member,
            score=marked.score,
            correct=marked.score >= CORRECT,
            response_tokens=marked.sample.response_tokens,
            oldest_version=int(versions.min()) if versions.size else None,
            newest_version=int(versions.max()) if versions.size else None,
            task=held_out.name,
        )

    def _rows(self, held_out: Sequence[R]) -> tuple[R, ...]:
        """The rows to use; they do not depend on the order of the data."""
        return tuple(sorted(held_out, key=lambda row: row.prompt_id)[: self.num_prompts])

    def _enough(self, name: str, rows: Sequence[R]) -> Sequence[R]:
        """`rows` if they are as many as wanted. Raises ConfigError."""
        if len(rows) < self.num_prompts:
            raise ConfigError(
                f"{name!r} has {len(rows) or 'no'} held-out rows (one row in {HELD_OUT_ONE_IN} is held out), but "
                f"{self.num_prompts} are to be evaluated; ask for at most {len(rows)}, or add rows"
            )
        return rows


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k): the probability that one of k answers drawn from n is right (arXiv 2107.03374)."""
    return 1.0 - comb(num_answers - num_correct, k) / comb(num_answers, k)


def summary(rows: Sequence[EvaluationRow], num_samples: int) -> dict[str, float]:
    """An evaluation's metrics; with several answers per prompt also mean@k and, for each power of two, pass@k."""
    answers: dict[str, list[bool]] = {}
    for row in rows:
        answers.setdefault(row.prompt_id, []).append(row.correct)
    figures = {
        "exact_match": sum(row.correct for row in rows) / len(rows),
        "score": sum(row.score for row in rows) / len(rows),
        "num_answers": len(rows),
        "response_tokens_mean": sum(row.response_tokens for row in rows) / len(rows),
    }
    if known := versions_of(rows):
        figures |= {"oldest_version": min(known), "newest_version": max(known)}
    if num_samples > 1:
        figures[f"mean_at_{num_samples}"] = figures["exact_match"]
    for k in draws(num_samples):
        passed = [pass_at_k(len(given), sum(given), k) for given in answers.values() if len(given) >= k]
        if passed:
            figures[f"pass_at_{k}"] = sum(passed) / len(passed)
    return figures


def versions_of(rows: Sequence[EvaluationRow]) -> set[int]:
    """The versions of the first and the last token of each answer; an answer without a token has none."""
    ends = {version for row in rows for version in (row.oldest_version, row.newest_version)}
    return {version for version in ends if version is not None}


def draws(num_samples: int) -> list[int]:
    """The values of k for pass@k: 2, 4, 8, … up to the number of answers per prompt, and that number itself."""
    powers = (1 << power for power in range(1, num_samples.bit_length()))
    return sorted({*powers, num_samples} - {1})


def _require_one_version(name: str, phase: str, rows: Sequence[EvaluationRow]) -> None:
    known = versions_of(rows)
    if len(known) > 1:
        raise FlowrlError(
            f"{name}: the evaluation {phase} training saw the versions {min(known)} to {max(known)}, but it needs "
            "one; this is an error in flowrl, please report it"
        )

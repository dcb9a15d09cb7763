"""Held-out evaluation: the same prompts and seeds every time, at one version, without tickets and batches.

Each evaluation ends with its last answer. `run` only keeps the call edge open until `finish`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import Call
from flowrl.messages import Prompt, Sample
from flowrl.models import Chat, Policy, check_model, load_tokenizer, resolve
from flowrl.nodes.source import sampling_seed
from flowrl.runtime.ledger.ledger_client import EvaluationRow
from flowrl.tasks import Row, Task, conversation, load_rows, reward_parts
from flowrl.tasks.judge import BadReward
from flowrl.tasks.reward_client import RewardClient
from flowrl.tasks.rewards import check_reward, open_reward, uses_http
from flowrl.tasks.rows import HELD_OUT_ONE_IN

CORRECT = 1.0 - 1e-6
"""A score of at least this is an exact match."""


@dataclass(frozen=True)
class HeldOut:
    """One task as it is asked."""

    task: Task
    rows: tuple[Row, ...]
    chat: Chat
    client: RewardClient


class Evaluation(Node):
    """Requests `num_samples` answers to each of `num_prompts` held-out prompts per task, before and after training.

    With `every`, also after every `every` steps: the trainers pause meanwhile, so that all answers have one
    version, while rollouts continue. The generator's `evaluation` option sets how answers are sampled. The
    task's verifier or `function` scores them. If there are several tasks, the metrics of the first keep their
    plain names, and the others' begin with the task's name. `also` names further tasks; they use the first
    task's system prompt and their own verifiers.
    """

    generate: Call[Prompt, Sample]

    def __init__(
        self,
        task: Task | Sequence[Task],
        policy: Policy,
        *,
        num_prompts: int = 512,
        num_samples: int = 1,
        every: int = 0,
        also: Sequence[str] = (),
        function: str | Callable[..., Any] | None = None,
        concurrency: int = 64,
        timeout_s: float = 10.0,
    ) -> None:
        first = (task,) if isinstance(task, Task) else tuple(task)
        self.tasks = (*first, *(Task(name, system_prompt=first[0].system_prompt) for name in also))
        self.policy = policy
        self.num_prompts = num_prompts
        self.num_samples = num_samples
        self.every = every
        self.parts = {task.name: reward_parts(task, function) for task in self.tasks}
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self._finished = asyncio.Event()
        self._held_out: list[HeldOut] = []

    def facts(self) -> Facts:
        return Facts(concurrency=self.concurrency)

    def check(self, facts: Any) -> list[str]:
        least = {"num_prompts": 1, "num_samples": 1, "every": 0, "concurrency": 1}
        problems = [
            f"{name} is {getattr(self, name)}; it needs at least {low}"
            for name, low in least.items()
            if getattr(self, name) < low
        ]
        if not self.tasks or len({task.name for task in self.tasks}) < len(self.tasks):
            problems.append("it needs one task or more, each once")
        return problems

    def preflight(self) -> None:
        check_model(self.policy)
        for task in self.tasks:
            found = len(self._rows(task))
            if found < self.num_prompts:
                raise ConfigError(
                    f"task {task.name!r} has {found or 'no'} held-out rows (one row in {HELD_OUT_ONE_IN} is held "
                    f"out), but {self.num_prompts} are to be evaluated; ask for at most {found}, or add rows"
                )
            check_reward(self.parts[task.name], (row.columns for row in self._rows(task)))

    async def setup(self) -> None:
        model_dir = await self.blocking(resolve, self.policy, progress=self.context.progress)
        tokenizer = await self.blocking(load_tokenizer, model_dir)
        for task in self.tasks:
            rows = await self.blocking(self._rows, task)
            parts = self.parts[task.name]
            await self.blocking(check_reward, parts, ())
            client = open_reward(parts, timeout_s=self.timeout_s)
            self._held_out.append(HeldOut(task, rows, Chat(tokenizer, task.system_prompt), client))

    async def run(self) -> None:
        with self.context.waiting("the end of training"):
            await self._finished.wait()

    async def finish(self) -> None:
        """Declare that no further evaluation will be requested."""
        self._finished.set()

    async def close(self) -> None:
        for held_out in self._held_out:
            await held_out.client.close()

    async def evaluate(self, *, phase: str, step: int) -> dict[str, float]:
        """Request, score and record answers. `phase` is before, during or after; weights must not change meanwhile."""
        slots = asyncio.Semaphore(self.concurrency)
        figures: dict[str, float] = {}
        for index, held_out in enumerate(self._held_out):
            rows = await self._answers(held_out, phase, step, slots)
            _require_one_version(self.name, phase, rows)
            self.context.ledger.evaluation(rows)
            prefix = f"{held_out.task.name}/" if index else ""
            figures |= {f"{prefix}{name}": value for name, value in summary(rows, self.num_samples).items()}
        return figures

    async def _answers(self, held_out: HeldOut, phase: str, step: int, slots: asyncio.Semaphore) -> list[EvaluationRow]:
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._answer(held_out, row, member, phase, step, slots))
                for row in held_out.rows
                for member in range(self.num_samples)
            ]
        return [task.result() for task in asked]

    async def _answer(
        self, held_out: HeldOut, row: Row, member: int, phase: str, step: int, slots: asyncio.Semaphore
    ) -> EvaluationRow:
        async with slots:
            sample = await self.generate(self._prompt(held_out, row, member, phase, step))
        score = await self._score(held_out, row, sample)
        versions = sample.versions[sample.policy_mask]
        return EvaluationRow(
            phase=phase,
            step=step,
            prompt_id=row.prompt_id,
            member=member,
            score=score,
            correct=score >= CORRECT,
            response_tokens=sample.response_tokens,
            oldest_version=int(versions.min()) if versions.size else None,
            newest_version=int(versions.max()) if versions.size else None,
            task=held_out.task.name,
        )

    async def _score(self, held_out: HeldOut, row: Row, sample: Sample) -> float:
        """The score of one answer; 0 if the function returns none."""
        columns = dict(row.columns)
        if uses_http(self.parts[held_out.task.name]):
            columns["messages"] = conversation(held_out.task, row)
        try:
            verdicts = await held_out.client.ask([sample.prompt_text], [sample.response_text], [columns])
        except BadReward as bad:
            self.context.metric(f"evaluation_{bad.reason}", 1)
            return 0.0
        return verdicts.scores[0]

    def _prompt(self, held_out: HeldOut, row: Row, member: int, phase: str, step: int) -> Prompt:
        text, token_ids = held_out.chat.prompt(row.turns)
        group_id = f"{self.name}:{held_out.task.name}:{phase}:{step}:{row.prompt_id}"
        return Prompt(
            sample_id=f"{group_id}:{member}",
            group_id=group_id,
            prompt_id=row.prompt_id,
            epoch=0,
            member=member,
            group_size=self.num_samples,
            seed=sampling_seed(0, row.prompt_id, 0, member),
            text=text,
            token_ids=token_ids,
            columns=row.columns,
        )

    def _rows(self, task: Task) -> tuple[Row, ...]:
        """The prompts to use; they do not depend on the order of the task's rows."""
        rows = sorted(load_rows(task).held_out, key=lambda row: row.prompt_id)
        return tuple(rows[: self.num_prompts])


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k): the probability that one of k answers drawn from n is right (arXiv 2107.03374)."""
    return 1.0 - comb(num_answers - num_correct, k) / comb(num_answers, k)


def summary(rows: Sequence[EvaluationRow], num_samples: int) -> dict[str, float]:
    """An evaluation's metrics; with several answers per prompt also mean@k and, for each power of two, pass@k."""
    correct: dict[str, int] = {}
    for row in rows:
        correct[row.prompt_id] = correct.get(row.prompt_id, 0) + row.correct
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
        passed = sum(pass_at_k(num_samples, count, k) for count in correct.values())
        figures[f"pass_at_{k}"] = passed / len(correct)
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

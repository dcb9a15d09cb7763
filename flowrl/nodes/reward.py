"""The reward node calls a reward function for each sample and shapes its verdict.

Each wait for a verdict ends with the verdict, after `timeout_s`, or when the worker process dies. A
sample without a verdict fails, with the reason in the ledger; a function that fails `FAILURES_IN_A_ROW`
times in a row ends the run, because no sample would ever be trained on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.errors import ConfigError, FlowrlError, SampleFailed
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Sample, Scored
from flowrl.nodes.shaping import Shaping
from flowrl.tasks import Row, Task, asked_columns, load_rows, reward_parts
from flowrl.tasks.judge import BadReward, Verdicts
from flowrl.tasks.reward_client import RewardClient
from flowrl.tasks.rewards import (
    HTTP_CONCURRENCY,
    adapted_text,
    check_reward,
    gathers,
    needs_rows,
    open_reward,
    uses_http,
)

FAILURES_IN_A_ROW = 256
FIX_FUNCTION = "fix the function, its signature and its result"


class Reward(Node):
    """Scores samples by the verifier of `task`, or by `function` if one is given.

    `function` is a function defined at the top of a file, or a reward as text (`flowrl.tasks.rewards`):
    `file.py:function`, `http://HOST:PORT/PATH`, or a weighted sum of several, each logged by name. See
    `flowrl.tasks.judge` for a function's signature. Synchronous functions run in `concurrency` worker
    processes, which are killed after `timeout_s`; of `async` functions and HTTP requests `concurrency` run
    at a time. None means 1, or 64 if a reward is requested over HTTP.
    """

    rollouts: In[Sample]
    scored: Out[Scored]

    def __init__(
        self,
        task: Task,
        *,
        function: str | Callable[..., Any] | None = None,
        timeout_s: float = 10.0,
        concurrency: int | None = None,
        shaping: Shaping | None = None,
    ) -> None:
        self.task = task
        self.parts = reward_parts(task, function)
        self.timeout_s = timeout_s
        together = uses_http(self.parts) or gathers(self.parts)
        self.concurrency = (HTTP_CONCURRENCY if together else 1) if concurrency is None else concurrency
        self._processes = 1 if concurrency is None else concurrency
        self.shaping = shaping or Shaping()
        self._client: RewardClient | None = None
        self._columns: Mapping[str, dict[str, Any]] = {}
        """Prompt id -> what the reward gets of the row besides its columns."""
        self._failures = 0

    def facts(self) -> Facts:
        return Facts(drops=True, concurrency=self.concurrency)

    def check(self, facts: Any) -> list[str]:
        problems = self.shaping.problems()
        if self.timeout_s <= 0:
            problems.append(f"timeout_s is {self.timeout_s}; it has to be above 0")
        if self.concurrency < 1:
            problems.append(f"concurrency is {self.concurrency}; it needs at least 1")
        return problems

    def notes(self) -> list[str]:
        found = adapted_text(self.parts)
        return [] if found is None else [found]

    def preflight(self) -> str | None:
        """Load the functions, check their columns in every row, and try the reward on the first row."""
        found = load_rows(self.task, whole=True)
        rows = (*found.train, *found.held_out)
        check_reward(self.parts, (row.columns for row in rows))
        asyncio.run(self._trial(rows[0]))
        return adapted_text(self.parts)

    async def _trial(self, row: Row) -> None:
        client = open_reward(self.parts, timeout_s=self.timeout_s, retries=0)
        columns = {**row.columns, **asked_columns(self.parts, self.task, row)}
        try:
            await client.ask([row.prompt], [row.answer or ""], [columns])
        except BadReward as bad:
            remedy = "start the server, or fix its answer" if uses_http(self.parts) else FIX_FUNCTION
            raise ConfigError(f"the trial reward failed: {bad}; {remedy}") from bad
        finally:
            await client.close()

    async def setup(self) -> None:
        await self.blocking(check_reward, self.parts, ())
        self._client = open_reward(self.parts, timeout_s=self.timeout_s, concurrency=self._processes)
        rows = (await self.blocking(load_rows, self.task)).train if needs_rows(self.parts) else ()
        self._columns = {row.prompt_id: asked_columns(self.parts, self.task, row) for row in rows}

    async def run(self) -> None:
        await self.rollouts.each(self._score, concurrency=self.concurrency)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _score(self, sample: Sample) -> None:
        assert self._client is not None
        columns = {**sample.columns, **self._columns.get(sample.prompt_id, {})}
        try:
            with self.context.busy("score"):
                verdicts = await self._client.ask([sample.prompt_text], [sample.response_text], [columns])
        except BadReward as bad:
            self._count_failure(bad)
            raise SampleFailed(bad.reason) from bad
        self._failures = 0
        scored = self.scored_sample(sample, verdicts)
        self.context.ledger.scored(scored)
        await self.scored.send(scored)

    def scored_sample(self, sample: Sample, verdicts: Verdicts) -> Scored:
        """`sample` with the shaped reward, on which it is trained, and the verdict before shaping."""
        parts = {name: values[0] for name, values in verdicts.logs.items()}
        reward = self.shaping.shaped(
            verdicts.rewards[0], parts, num_tokens=sample.response_tokens, truncated=sample.truncated
        )
        fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(Sample)}
        return Scored(**fields, reward=reward, raw_reward=verdicts.scores[0], reward_parts=parts, scored_s=time.time())

    def _count_failure(self, bad: BadReward) -> None:
        """Report the first of consecutive failures, and raise if only failures occur."""
        self._failures += 1
        self.context.metric(bad.reason, 1)
        if self._failures == 1:
            self.context.progress(f"a sample failed: {bad}")
        if self._failures >= FAILURES_IN_A_ROW:
            raise FlowrlError(f"the reward failed for {self._failures} samples in a row; the last time: {bad}")

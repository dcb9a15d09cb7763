"""The reward node: asks a reward function about each sample, and shapes its verdict.

Each wait for a verdict ends with it, with `timeout_s`, or with the death of the worker process. A
sample without a verdict fails, with the reason in the books; a function that fails `FAILURES_IN_A_ROW`
times in a row ends the run, because nothing would ever be trained.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from flowrl.errors import ConfigError, FlowrlError, SampleFailed
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Sample, Scored
from flowrl.nodes.shaping import Shaping
from flowrl.tasks import Row, Task, load_rows
from flowrl.tasks.asking import Asking, way_of_asking
from flowrl.tasks.judge import BadReward, Judge, Verdicts, load_judge, place_of

FAILURES_IN_A_ROW = 256


class Reward(Node):
    """Scores samples by the verifier of `task`, or by `function` if one is given.

    `function` is `file.py:function`, `package.module:function`, or a function defined at the top of a
    file; see `flowrl.tasks.judge` for its signature. Synchronous functions run in `concurrency` worker
    processes and are killed after `timeout_s`; of an `async` one `concurrency` calls run at a time.
    """

    rollouts: In[Sample]
    scored: Out[Scored]

    def __init__(
        self,
        task: Task,
        *,
        function: str | Callable[..., Any] | None = None,
        timeout_s: float = 10.0,
        concurrency: int = 1,
        shaping: Shaping | None = None,
    ) -> None:
        self.task = task
        self.function = function
        self.timeout_s = timeout_s
        self.concurrency = concurrency
        self.shaping = shaping or Shaping()
        self._asking: list[Asking] = []
        self._free: asyncio.Queue[Asking]
        self._failures = 0

    @property
    def place(self) -> str:
        """The reward function as `place:function`."""
        if self.function is None:
            return self.task.verifier
        return self.function if isinstance(self.function, str) else place_of(self.function)

    def facts(self) -> Facts:
        return Facts(drops=True, concurrency=self.concurrency)

    def check(self, facts: Any) -> list[str]:
        problems = self.shaping.problems()
        if self.timeout_s <= 0:
            problems.append(f"timeout_s is {self.timeout_s}; it has to be above 0")
        if self.concurrency < 1:
            problems.append(f"concurrency is {self.concurrency}; it needs at least 1")
        return problems

    def preflight(self) -> None:
        """Load the function, look for its columns in every row, and try it on the first."""
        judge = load_judge(self.place)
        rows = load_rows(self.task)
        for row in (*rows.train, *rows.held_out):
            judge.check_columns(row.columns)
        asyncio.run(self._trial(judge, rows.train[0]))

    async def _trial(self, judge: Judge, row: Row) -> None:
        asking = way_of_asking(judge, self.timeout_s)
        try:
            await asking.ask([row.prompt], [row.answer or ""], [row.columns])
        except BadReward as bad:
            raise ConfigError(
                f"the trial reward failed: {bad}; mend the function, its signature and its result"
            ) from bad
        finally:
            await asking.close()

    async def setup(self) -> None:
        judge = await self.blocking(load_judge, self.place)
        self._asking = [way_of_asking(judge, self.timeout_s) for _ in range(self.concurrency)]
        self._free = asyncio.Queue()
        for asking in self._asking:
            self._free.put_nowait(asking)

    async def run(self) -> None:
        await self.rollouts.each(self._score, concurrency=self.concurrency)

    async def close(self) -> None:
        for asking in self._asking:
            await asking.close()

    async def _score(self, sample: Sample) -> None:
        asking = await self._free.get()
        try:
            with self.context.busy("score"):
                verdicts = await asking.ask([sample.prompt_text], [sample.response_text], [sample.columns])
        except BadReward as bad:
            self._count_failure(bad)
            raise SampleFailed(bad.reason) from bad
        finally:
            self._free.put_nowait(asking)
        self._failures = 0
        scored = self.scored_sample(sample, verdicts)
        self.context.ledger.scored(scored)
        await self.scored.send(scored)

    def scored_sample(self, sample: Sample, verdicts: Verdicts) -> Scored:
        """`sample` with the reward that is trained on, and the verdict before shaping."""
        parts = {name: values[0] for name, values in verdicts.logs.items()}
        reward = self.shaping.shaped(
            verdicts.rewards[0], parts, num_tokens=sample.response_tokens, truncated=sample.truncated
        )
        fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(Sample)}
        return Scored(**fields, reward=reward, raw_reward=verdicts.scores[0], reward_parts=parts, scored_s=time.time())

    def _count_failure(self, bad: BadReward) -> None:
        """Tell of the first failure in a row, and give up where nothing but failures comes."""
        self._failures += 1
        self.context.metric(bad.reason, 1)
        if self._failures == 1:
            self.context.progress(f"a sample failed: {bad}")
        if self._failures >= FAILURES_IN_A_ROW:
            raise FlowrlError(f"the reward failed for {self._failures} samples in a row; the last time: {bad}")

"""The reward node calls a reward function for each sample and shapes its verdict.

Each wait for a verdict ends with the verdict, after `timeout_s`, or when the worker process dies. While no reward
server can be reached, the node waits (`context.outside`) until a server answers; after `away_s` the run ends. A sample
without a verdict fails, with the reason in the ledger. A function that fails for many samples in a row
ends the run (`FailingRewards`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.errors import SampleFailed
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Sample, Scored
from flowrl.nodes.scoring.reward_functions import FailingRewards, RewardFunctions
from flowrl.nodes.scoring.shaping import Shaping, add_reward
from flowrl.tasks import Task, reward_parts
from flowrl.tasks.reward_calls.http import AWAY_S
from flowrl.tasks.reward_calls.judge import BadReward
from flowrl.tasks.rewards import adapted_text, names_model, samples_at_once


class Reward(Node):
    """Scores samples by the verifier of `task`, or by `function` if one is given.

    `function` is a function defined at the top of a file, or a reward as text (`flowrl.tasks.rewards`):
    `file.py:function`, `http://HOST:PORT/PATH`, or a weighted sum of several, each logged by name. See
    `flowrl.tasks.reward_calls.judge` for a function's signature. Synchronous functions run in `concurrency` worker
    processes, which are killed after `timeout_s`; of `async` functions, `concurrency` calls run at a time. Both get one
    sample per call, or up to 64 waiting samples if they expect many. Servers are asked about `concurrency` samples at a
    time. None means 1, 4 for check=code, or 64 for servers. If none of the servers can be reached, the node waits
    `away_s`; then the run ends.
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
        away_s: float = AWAY_S,
        shaping: Shaping | None = None,
    ) -> None:
        self.task = task
        self.parts = reward_parts(task, function)
        self.timeout_s = timeout_s
        self._processes = concurrency
        self.away_s = away_s
        self._functions = RewardFunctions(task, self.parts, timeout_s=timeout_s, processes=concurrency, away_s=away_s)
        self.shaping = shaping or Shaping()
        self._failing = FailingRewards()

    def facts(self) -> Facts:
        return Facts(drops=True, concurrency=self.concurrency)

    @property
    def concurrency(self) -> int:
        """Number of samples that are scored at a time."""
        return samples_at_once(self._functions.parts, self._processes)

    def check(self, facts: Any) -> list[str]:
        problems = self.shaping.find_problems()
        if compared := [part.place for part in self.parts if part.convention == "pairwise"]:
            problems.append(
                f"{compared[0]} compares two responses, but a reward scores one; pass it to PairMaker as prefer="
            )
        if names_model(self.task.reward):
            problems.append(f"its reward {self.task.reward!r} names a reward model; a RewardModel node scores with one")
        if self.timeout_s <= 0:
            problems.append(f"timeout_s is {self.timeout_s}; it has to be above 0")
        if self._processes is not None and self._processes < 1:
            problems.append(f"concurrency is {self._processes}; it needs at least 1")
        if self.away_s < 0:
            problems.append(f"away_s is {self.away_s}; it needs at least 0")
        return problems

    def notes(self) -> list[str]:
        found = adapted_text(self.parts)
        return [] if found is None else [found]

    def preflight(self) -> str | None:
        return self._functions.preflight()

    async def setup(self) -> None:
        await self.blocking(self._functions.open_client, self.context)

    async def run(self) -> None:
        await self.rollouts.each(self._score_sample, concurrency=self.concurrency)

    async def close(self) -> None:
        await self._functions.close()

    async def _score_sample(self, sample: Sample) -> None:
        try:
            with self.context.busy("score"):
                verdicts = await self._functions.score_sample(sample)
        except BadReward as bad:
            self._failing.note_failed(self.context, bad.reason, str(bad))
            raise SampleFailed(bad.reason) from bad
        self._failing.note_scored()
        # The shaped reward is trained on; the raw reward is the verdict before shaping.
        parts = {name: values[0] for name, values in verdicts.logs.items()}
        reward = self.shaping.shape_reward(
            verdicts.rewards[0], parts, num_tokens=sample.response_tokens, truncated=sample.truncated
        )
        scored = add_reward(sample, reward=reward, raw_reward=verdicts.scores[0], reward_parts=parts)
        self.context.ledger.scored(scored)
        await self.scored.send(scored)

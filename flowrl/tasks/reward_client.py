"""The three ways to call a reward function: directly, awaited, or in a process that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flowrl.tasks.judge import BadReward, Judge, Verdicts
from flowrl.tasks.worker import RewardWorker

TRUSTED = "flowrl.tasks.verify:"
"""Functions that cannot block; they are called directly."""


class RewardClient(Protocol):
    """A client of one reward function."""

    async def ask(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Sequence[Mapping[str, Any]]
    ) -> Verdicts: ...
    async def close(self) -> None: ...


def route_of(judge: Judge, timeout_s: float) -> RewardClient:
    """The client that fits the function."""
    if judge.is_async:
        return _Awaited(judge, timeout_s)
    if judge.place.startswith(TRUSTED):
        return _InPlace(judge)
    return RewardWorker(judge.place, timeout_s=timeout_s)


class _InPlace:
    """A function that returns almost immediately."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def ask(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Sequence[Mapping[str, Any]]
    ) -> Verdicts:
        return self._judge(prompts, responses, columns)

    async def close(self) -> None: ...


class _Awaited:
    """An `async` function."""

    def __init__(self, judge: Judge, timeout_s: float) -> None:
        self._judge = judge
        self._timeout_s = timeout_s

    async def ask(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Sequence[Mapping[str, Any]]
    ) -> Verdicts:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._judge.ask(prompts, responses, columns)
        except TimeoutError:
            raise BadReward("reward_timed_out", f"{self._judge.place} took more than {self._timeout_s} s") from None

    async def close(self) -> None: ...

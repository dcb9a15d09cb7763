"""The two ways to call a reward function: directly, or in a process that can be ended with all that it has started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from flowrl.tasks.checks.answer_checks import CHECKS, OF_MIXTURE_WITH_CODE
from flowrl.tasks.checks.code_tests import call_s
from flowrl.tasks.name_options import parse_options, split_name
from flowrl.tasks.reward_calls.judge import Judge, Verdicts
from flowrl.tasks.reward_calls.worker import RewardWorker
from flowrl.tasks.rows import OF_TASK

TRUSTED = "flowrl.tasks.verify:"
"""Functions that cannot block; they are called directly."""
OWN_LIMITS: dict[str, Callable[[Sequence[Mapping[str, Any]]], float]] = {
    CHECKS["code"]: call_s,
    f"{CHECKS['code']}_without_namespaces": call_s,
    OF_MIXTURE_WITH_CODE: lambda columns: call_s([row for row in columns if _is_code(row)]),
}
"""Functions that limit the time of their calls themselves -> the longest time of a call, in seconds."""


def _is_code(row: Mapping[str, Any]) -> bool:
    """Whether the source of a mixture's row has check=code."""
    source = str(row.get(OF_TASK, ""))
    return parse_options(source, split_name(source)[1]).get("check") == "code"


class RewardClient(Protocol):
    """A client of one reward function."""

    async def ask(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Sequence[Mapping[str, Any]]
    ) -> Verdicts: ...
    async def close(self) -> None: ...


def route_of(
    judge: Judge, timeout_s: float, *, asks: Sequence[str] = (), report: Callable[[str], None] = lambda text: None
) -> RewardClient:
    """The client that fits the function; `asks` are the verifiers that the function asks. `report` gets a line about
    an `async` function that blocks."""
    if judge.place.startswith(TRUSTED):
        return _InPlace(judge)
    own_s = OWN_LIMITS.get(judge.place)
    return RewardWorker(
        judge.place, timeout_s=timeout_s, own_s=own_s, asks=asks, is_async=judge.is_async, report=report
    )


class _InPlace:
    """A function that returns almost immediately."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def ask(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Sequence[Mapping[str, Any]]
    ) -> Verdicts:
        return self._judge(prompts, responses, columns)

    async def close(self) -> None: ...

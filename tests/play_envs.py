"""Environments whose episodes tests of the environment node play."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from flowrl.environments import Action, Env, Observation, Step

CALCULATOR = {
    "type": "function",
    "function": {"name": "sum", "parameters": {"type": "object", "properties": {"of": {"type": "string"}}}},
}


class Echo(Env):
    """Runs in the node. Repeats what is said and rewards it; ends with the word "end"."""

    cooperative = True

    def __init__(self, tools: int = 0, size: int = 0) -> None:
        self.tools, self.size = tools, size

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        return Observation(f"start {seed}", tools=(CALCULATOR,) if self.tools else ())

    async def step(self, action: Action) -> Step:
        said = " ".join([action.text, *(json.dumps(dict(call.arguments)) for call in action.tool_calls)])
        return Step(
            Observation(said + "x" * self.size), reward=0.5, terminated="end" in action.text, metrics={"steps": 1}
        )


class Failing(Env):
    """Fails at its first step as often as `times` says, by seed; counts in the class, as it runs in the node."""

    cooperative = True
    begun = 0

    def __init__(self, times: int = 1, hang: int = 0) -> None:
        self.times, self.hang = times, hang

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        type(self).begun += 1
        self.number = type(self).begun
        return Observation("start")

    async def step(self, action: Action) -> Step:
        if self.number > self.times:
            return Step(Observation(), reward=1.0, terminated=True)
        if self.hang:
            await asyncio.get_running_loop().create_future()
        raise LookupError("no such move")


class Two(Env):
    """Two seats."""

    seats = 2
    cooperative = True

    async def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, ...]:
        return (Observation("a"), Observation("b"))

    async def step(self, action: Action, seat: int = 0) -> Step:  # type: ignore[override]
        return Step((Observation(), Observation()), reward=(0.0, 0.0), terminated=True)

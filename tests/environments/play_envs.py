"""Environments whose episodes tests of the environment node play."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
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
    """Raises, or hangs, in the first step of the first `times` episodes; `begun` is a file with a line for each."""

    cooperative = True

    def __init__(self, begun: str, times: int = 1, hang: int = 0) -> None:
        self.begun, self.times, self.hang = Path(begun), times, hang

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        with self.begun.open("a") as file:
            file.write("begun\n")
        self.number = len(self.begun.read_text().splitlines())
        return Observation("start")

    async def step(self, action: Action) -> Step:
        if self.number > self.times:
            return Step(Observation(), reward=1.0, terminated=True)
        if self.hang:
            await asyncio.get_running_loop().create_future()
        raise LookupError("no such move")


class Bids(Env):
    """Two seats hear each other; a number is the reward of who says it, "give" one for the other, "end" the end."""

    seats = 2
    cooperative = True

    async def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, ...]:
        return (Observation("you are 0"), Observation("you are 1"))

    async def step(self, action: Action, seat: int = 0) -> Step:  # type: ignore[override]
        said = action.text
        rewards = [0.0, 0.0]
        rewards[1 - seat if said == "give" else seat] = float(said) if said.isdigit() else 10.0
        heard = [Observation(), Observation()]
        heard[1 - seat] = Observation(f"other said {said}")
        return Step(tuple(heard), tuple(rewards), terminated=said == "end")


class BidsApart(Bids):
    """The same in a process of its own."""

    cooperative = False


class Silent(Bids):
    """Shows nothing before the first move."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, ...]:
        return (Observation(), Observation())

"""An environment of agents_stack.py: episodes of a few turns, and for every tenth row ten times as many."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any

from flowrl.environments import Action, Env, Observation, Step


class Uneven(Env):
    """What it shows and rewards follows from the row's seed and the actions alone.

    Of `often` rows one is `often` times as long; with 0 none is.
    """

    cooperative = True

    def __init__(self, turns: int = 3, step_s: float = 0.05, often: int = 10) -> None:
        self.turns, self.step_s, self.often = turns, step_s, often

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.state = zlib.crc32(str(seed).encode())
        long = self.often and self.state % self.often == 0
        self.left = self.turns * (self.often if long else 1)
        return Observation(f"{self.state % 90 + 10}+{seed % 9 + 1}=")

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self.step_s)  # what a tool would take
        self.left -= 1
        self.state = zlib.crc32(f"{self.state}{action.text}".encode())
        shown = Observation(f"{self.state % 90 + 10}+{self.state % 9 + 1}=")
        return Step(shown, reward=float(self.state % 2), terminated=not self.left)

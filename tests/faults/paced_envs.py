"""Environments whose steps take seconds, so that many episodes are half done at any time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any

from flowrl.environments import Action, Env, Observation, Step


class Paced(Env):
    """`turns` turns of `step_s` seconds each, in the node. What it shows follows from its seed and the actions.

    With `quick`, one row in so many has steps that take no time.
    """

    cooperative = True

    def __init__(self, turns: int = 6, step_s: float = 1.0, quick: int = 0) -> None:
        self.turns, self.step_s, self.quick = turns, step_s, quick

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.seed, self.steps = seed, 0
        if self.quick and not seed % self.quick:
            self.step_s = 0.0
        return Observation(f"{seed % 100}+{seed % 7}=")

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self.step_s)  # so slow is the environment
        self.steps += 1
        self.seed = zlib.crc32(f"{self.seed}{action.text}".encode())
        reward = float(self.seed % 2)
        return Step(Observation(f"{self.seed % 100}="), reward=reward, terminated=self.steps == self.turns)


class PacedProcess(Paced):
    """The same in a process an episode."""

    cooperative = False


class Terse(Env):
    """Two turns with hardly any text, so that nearly all tokens of an episode are sampled."""

    cooperative = True

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.left = 2
        return Observation(messages=({"role": "system", "content": "Talk."}, {"role": "user", "content": f"{seed}"}))

    async def step(self, action: Action) -> Step:
        self.left -= 1
        return Step(Observation("On."), reward=float(len(action.text) % 2), terminated=not self.left)

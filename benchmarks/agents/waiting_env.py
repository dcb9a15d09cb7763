"""An environment of benchmarks/agents/episodes.py: cooperative, and its steps only wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from flowrl.environments import Action, Env, Observation, Step


class Waiting(Env):
    """Steps that wait between `least_s` and `most_s`; after `steps` of them the episode is over.

    With `sums` it shows something that a character model answers with a few tokens.
    """

    cooperative = True

    def __init__(self, least_s: float = 0.5, most_s: float = 5.0, steps: int = 3, sums: bool = False) -> None:
        self.least_s, self.most_s, self.left, self.sums = least_s, most_s, steps, sums

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.random = random.Random(seed)
        return self.shown("go")

    def shown(self, word: str) -> Observation:
        return Observation(f"{self.random.randrange(10, 90)}+{self.random.randrange(1, 9)}=" if self.sums else word)

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self.random.uniform(self.least_s, self.most_s))  # what the benchmark is about
        self.left -= 1
        return Step(self.shown("on"), reward=1.0, terminated=not self.left)

"""`flowrl.environments.sticks_env:Sticks`: a game for two seats, small enough for a character model to learn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from flowrl.environments.protocol import Action, Env, Observation, Step
from flowrl.tasks.sticks import SticksRules


class Sticks(Env):
    """A seat sees how many sticks are left, and answers with the number that it takes: 1 to `take`.

    Who takes the last one wins: reward 1, the other 0. A reply that is no allowed move loses at once.
    """

    cooperative = True
    seats = 2

    def __init__(self, most: int = 16, least: int = 6, take: int = 3) -> None:
        self.rules = SticksRules(most, least, take)

    async def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, Observation]:
        self.left = self.rules.start(random.Random(seed))
        return Observation(str(self.left)), Observation()

    async def step(self, action: Action, seat: int = 0) -> Step:
        taken = self.rules.move(action.text, self.left)
        self.left -= taken
        if taken and self.left:
            shown = [Observation(), Observation()]
            shown[1 - seat] = Observation(str(self.left))
            return Step(tuple(shown), (0.0, 0.0))
        winner = seat if taken else 1 - seat
        rewards = (float(winner == 0), float(winner == 1))
        return Step((Observation(), Observation()), rewards, terminated=True, metrics={"not_allowed": float(not taken)})

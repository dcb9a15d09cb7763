"""A game small enough for a character model to learn: `Sticks` for two seats, `SticksAgainst` for one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from flowrl.environments.protocol import Action, Env, Observation, Step
from flowrl.errors import ConfigError
from flowrl.tasks.toy_tasks import SticksRules


class Sticks(Env):
    """A seat sees how many sticks are left, and answers with the number that it takes: 1 to `take`.

    The seat that takes the last stick wins: its reward is 1, the other seat's 0. A reply that is no allowed move loses
    at once.
    """

    cooperative = True
    seats = 2

    def __init__(self, most: int = 16, least: int = 6, take: int = 3) -> None:
        self.rules = SticksRules(most, least, take)

    async def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, Observation]:
        self.left = self.rules.draw_start(random.Random(seed))
        return Observation(str(self.left)), Observation()

    async def step(self, action: Action, seat: int = 0) -> Step:
        taken = self.rules.parse_move(action.text, self.left)
        self.left -= taken
        if taken and self.left:
            shown = [Observation(), Observation()]
            shown[1 - seat] = Observation(str(self.left))
            return Step(tuple(shown), (0.0, 0.0))
        winner = seat if taken else 1 - seat
        rewards = (float(winner == 0), float(winner == 1))
        return Step((Observation(), Observation()), rewards, terminated=True, metrics={"not_allowed": float(not taken)})


class SticksAgainst(Env):
    """The game for one seat; the environment plays the other one.

    If there is a winning move, the environment makes it with probability `skill`; otherwise it makes a random allowed
    move. The seed determines who begins, the number of sticks at the start, and the opponent's random choices.
    """

    cooperative = True

    def __init__(self, skill: float = 0.5, most: int = 16, least: int = 6, take: int = 3) -> None:
        if not 0 <= skill <= 1:
            raise ConfigError(f"sticks: skill is {skill}; it has to be in [0, 1]")
        self.rules, self.skill = SticksRules(most, least, take), skill

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._rng = random.Random(seed)
        self.left = self.rules.draw_start(self._rng)
        if self.left > self.rules.take and self._rng.random() < 0.5:
            self._opponent_reply()
        return Observation(str(self.left))

    async def step(self, action: Action) -> Step:
        taken = self.rules.parse_move(action.text, self.left)
        self.left -= taken
        won = taken > 0 and self.left == 0
        if taken and self.left:
            self._opponent_reply()
        over = taken == 0 or self.left == 0
        metrics = {"not_allowed": float(taken == 0)} if over else {}
        return Step(Observation("" if over else str(self.left)), float(won), terminated=over, metrics=metrics)

    def _opponent_reply(self) -> None:
        best = self.rules.winning_move(self.left)
        self.left -= (
            best if best and self._rng.random() < self.skill else self._rng.choice(self.rules.allowed_moves(self.left))
        )

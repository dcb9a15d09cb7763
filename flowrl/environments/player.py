"""Calls an environment, checks what it answers, and names what it does wrong. Used in both kinds of process."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from flowrl.environments.failure import boundary
from flowrl.environments.protocol import (
    Action,
    Env,
    Observation,
    Step,
    checked_reset,
    checked_state,
    checked_step,
)


class Player:
    """One environment object through its one episode. All methods raise EnvironmentFailed."""

    def __init__(self, name: str, make: Callable[[], Env]) -> None:
        with boundary(f"making {name}"):
            self.env = make()
        self._name = type(self.env).__name__

    async def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, ...]:
        with boundary(f"{self._name}.reset"):
            return checked_reset(self.env, await self.env.reset(task, seed))

    async def restore(self, state: bytes) -> None:
        with boundary(f"{self._name}.restore"):
            self.env.restore(state)

    async def step(self, action: Action, seat: int) -> Step:
        with boundary(f"{self._name}.step"):
            seats: tuple[int, ...] = () if self.env.seats == 1 else (seat,)
            return checked_step(self.env, await cast(Any, self.env.step)(action, *seats))

    def save(self) -> bytes | None:
        with boundary(f"{self._name}.save"):
            return checked_state(self.env, self.env.save())

    async def close(self) -> None:
        with boundary(f"{self._name}.close"):
            await self.env.close()


def seed_global_state(seed: int) -> None:
    """Seed the global generators that packages use: Python's, and those of numpy and torch if they are loaded."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)

"""A server of OpenEnv's own package on a free port of loopback, which it prints: one that echoes, one that counts."""

from __future__ import annotations

import os
import random
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.types import ConcurrencyConfig


class Guess(Action):
    message: str


class Move(Action):
    pile: int
    take: int


class Hint(Observation):
    text: str


class Piles(Observation):
    piles: list[int]


class GuessNumber(Environment):
    """Find a number; some words are orders to misbehave."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, size: int = 8, **_: Any) -> Hint:
        self._number = random.Random(seed).randrange(size)
        return Hint(text=f"A number below {size}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.message == "raise":
            raise ValueError("as ordered")
        if action.message == "die":
            os._exit(1)
        if action.message == "no reward":
            return Hint(text="over", done=True)
        if not action.message.isdigit():
            return Hint(text="No number.", reward=0.0)
        guess = int(action.message)
        right = guess == self._number
        hint = "right" if right else "too low" if guess < self._number else "too high"
        return Hint(text=f"{guess} is {hint}.", reward=float(right), done=right)

    @property
    def state(self) -> State:
        return State()


class TakeAway(Environment):
    """Piles to take from; its actions have two fields."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Piles:
        self._piles = [1, 2]
        return Piles(piles=self._piles)

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Piles:
        self._piles[action.pile] -= action.take
        over = not any(self._piles)
        return Piles(piles=self._piles, reward=1.0 if over else None, done=over)

    @property
    def state(self) -> State:
        return State()


GAMES = {"guess": (GuessNumber, Guess, Hint), "take": (TakeAway, Move, Piles)}

if __name__ == "__main__":
    sessions = int(sys.argv[2])
    app = create_fastapi_app(*GAMES[sys.argv[1]], concurrency_config=ConcurrencyConfig(max_concurrent_envs=sessions))
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])

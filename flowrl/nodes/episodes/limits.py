"""The bounds of an episode, and what happens to an episode that was cut off. Plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from flowrl.environments.middle import LEAST_BYTES

OnTruncated = Literal["train", "mask", "drop"]
LEAST = {"turns": 1, "tokens": 2, "turn_tokens": 1, "episodes": 1, "retries": 0, "observation_bytes": LEAST_BYTES}


@dataclass(frozen=True)
class Limits:
    """Bounds of one episode, of the attempts at it, and of the number of episodes at a time."""

    turns: int = 32
    """Most replies in an episode."""
    tokens: int | None = None
    """Most tokens of the whole episode, or of each of its sequences; None: as many as the model's context takes."""
    turn_tokens: int | None = None
    """Most tokens of one reply; None: as many as the generator's sampling allows."""
    reset_s: float = 120.0
    """Most seconds for the environment's reset."""
    step_s: float = 60.0
    """Most seconds for one step of the environment."""
    episode_s: float = 1800.0
    """Most seconds for an attempt; checked between turns."""
    expected_s: float | None = None
    """Your estimate of the seconds that an episode takes on average. It bounds nothing; `flowrl check` uses it to
    estimate the time of a step."""
    observation_bytes: int = 65536
    """Longest text of one message of the environment, in bytes of UTF-8; the middle of a longer text is cut out and
    marked."""
    episodes: int = 1024
    """Most episodes at a time."""
    retries: int = 2
    """Attempts after the first, if the environment failed."""
    on_truncated: OnTruncated = "train"
    """An episode that was cut off by turns, tokens, seconds or malformed calls is trained with the reward it has
    (train), kept out of the loss but compared with its group (mask), or dropped (drop)."""

    def problems(self) -> Iterator[str]:
        """Sentences that say what is wrong with a value."""
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                yield f"limits.{name} is {value}; it has to be {least} or more"
        for name in ("reset_s", "step_s", "episode_s", "expected_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield f"limits.{name} is {value}; it has to be above 0"
        if self.expected_s is not None and self.expected_s >= self.episode_s:
            yield (
                f"limits.expected_s is {self.expected_s:g}, but limits.episode_s ends an attempt after "
                f"{self.episode_s:g} s; raise episode_s"
            )
        if self.on_truncated not in get_args(OnTruncated):
            yield f"limits.on_truncated is {self.on_truncated!r}; choose one of {', '.join(get_args(OnTruncated))}"

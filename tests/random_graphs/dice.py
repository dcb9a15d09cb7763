"""Random numbers by name: what one decision draws does not depend on which others are asked for.

So a graph without one of its features is otherwise the same graph, and a node that decides again after a crash
decides alike.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """The random numbers of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def chance(self, probability: float, *name: object) -> bool:
        return self._named(name).random() < probability

    def number(self, least: int, most: int, *name: object) -> int:
        return self._named(name).randint(least, most)

    def share(self, *name: object) -> float:
        """From [0, 1)."""
        return self._named(name).random()

    def one_of(self, choices: Sequence[T], *name: object) -> T:
        return self._named(name).choice(choices)

    def weighed(self, weights: Mapping[str, float], *name: object) -> str:
        return self._named(name).choices(list(weights), list(weights.values()))[0]

    def _named(self, name: tuple[object, ...]) -> random.Random:
        return random.Random(f"{self._seed}/{name}")


def lot(*key: object) -> float:
    """From [0, 1), the same for the same key in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "big") / 2**32

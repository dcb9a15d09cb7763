"""Draws one of many by weight in O(log n): a Fenwick tree (P. M. Fenwick, 1994, DOI 10.1002/spe.4380240306).

Weights are kept as whole numbers, so that sums do not depend on the order in which weights were set: a run resumed from
a checkpoint makes the same draw as the run without the interruption.
"""

from __future__ import annotations

import random
from array import array

UNIT = 1 << 32
"""The whole number for weight 1. With weights up to 1, sums of 2^31 weights fit into 64 bits."""


class WeightedDraw:
    """Numbers from 0 to `size` − 1, each with a weight in [0, 1], at first 0."""

    def __init__(self, size: int) -> None:
        self._weights = array("q", bytes(8 * size))
        self._sums = array("q", bytes(8 * (size + 1)))
        """At place i the sum of the i & −i weights that end with number i − 1."""
        self._highest = 1 << size.bit_length() >> 1

    def set(self, number: int, weight: float) -> None:
        """Give a number another weight; one above 0 stays above 0, however small it is."""
        whole = max(1, round(weight * UNIT)) if weight > 0 else 0
        change = whole - self._weights[number]
        self._weights[number] = whole
        place = number + 1 if change else len(self._sums)
        while place < len(self._sums):
            self._sums[place] += change
            place += place & -place

    def draw(self, rng: random.Random) -> int | None:
        """A number, with a probability proportional to its weight; None if all weights are 0."""
        total = self._total()
        if not total:
            return None
        left, place, step = rng.randrange(total), 0, self._highest
        while step:
            if place + step < len(self._sums) and self._sums[place + step] <= left:
                place += step
                left -= self._sums[place]
            step >>= 1
        return place

    def _total(self) -> int:
        total, place = 0, len(self._sums) - 1
        while place:
            total += self._sums[place]
            place -= place & -place
        return total

"""Divide units over ranks and into micro-batches by the tokens of their trees. Needs only numpy.

In depth-first order of their forest, units that share a prefix are neighbours. Both divisions cut this order into
ranges, so a prefix is computed again only where a cut separates its sequences.

Invariants, checked by a property test: those of `flowrl.packing`, and
- the unique tokens of a micro-batch are within the budget, or it is a single unit;
- the largest rank exceeds that of the best division into such ranges by at most one unit's tokens plus one hundredth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.forest import Prefixes, Tokens, num_unique, order_key
from flowrl.packing import ByRows, PackedUnit

Passes = tuple[tuple[Tokens, ...], ...]
"""The sequences of each pass over a unit: one pass, or two if it has mismatched completions."""
LEAST_SHARED = 0.9
"""With the layout "auto", sequences are packed as trees if a forest has at most this share of their tokens."""
COARSE = 100
"""The size of the largest rank is searched to within a hundredth of its lower bound."""


@dataclass(frozen=True)
class ByTree:
    """Trees; `passes` holds the passes over each sequence of the batch, by the sequence's number."""

    token_budget: int
    passes: Sequence[Sequence[Tokens]]

    def deal(self, units: Sequence[PackedUnit], n: int) -> list[list[PackedUnit]]:
        ordered = self._ordered(units)
        if n == 1 or not ordered:
            return [ordered, *([] for _ in range(n - 1))]
        whole = self.num_places(ordered)
        low, high = whole // n, whole
        parts = [ordered]
        while high - low > max(1, low // COARSE):
            cap = (low + high) // 2
            found = self._cut(ordered, cap)
            if len(found) <= n:
                parts, high = found, cap
            else:
                low = cap
        return parts + [[] for _ in range(n - len(parts))]

    def micro_batches(self, units: Sequence[PackedUnit]) -> list[list[int]]:
        found = self._ordered([part for unit in units for part in unit.parts or (unit,)])
        parts = self._cut(found, self.token_budget) if self.token_budget else [found] if found else []
        return [[index for unit in part for index in unit.indices] for part in parts]

    def size(self, unit: PackedUnit) -> int:
        return self.num_places([unit])

    def num_places(self, units: Sequence[PackedUnit]) -> int:
        """Tokens of the larger pass over these units."""
        filled = _Filled()
        for unit in units:
            filled.add(self._passes(unit))
        return filled.size

    def _cut(self, ordered: Sequence[PackedUnit], cap: int) -> list[list[PackedUnit]]:
        """Ranges of units of at most `cap` tokens; a larger unit forms a range by itself."""
        parts: list[list[PackedUnit]] = []
        filled = _Filled()
        for unit in ordered:
            passes = self._passes(unit)
            filled.add(passes)
            if parts and filled.size <= cap:
                parts[-1].append(unit)
            else:
                parts.append([unit])
                filled = _Filled()
                filled.add(passes)
        return parts

    def _ordered(self, units: Sequence[PackedUnit]) -> list[PackedUnit]:
        return sorted(units, key=lambda unit: (order_key(self.passes[unit.indices[0]][0]), unit.indices))

    def _passes(self, unit: PackedUnit) -> Passes:
        return tuple(zip(*(self.passes[index] for index in unit.indices), strict=True))


def share(sequences: Sequence[Tokens]) -> bool:
    """Whether the sequences share enough tokens for trees to pay off."""
    return num_unique(sequences) <= LEAST_SHARED * sum(map(len, sequences))


def passes_over(sequences: Sequence[Tokens], token_budget: int, layout: str) -> tuple[list[list[int]], bool]:
    """(the sequences of each pass of a model, as indices; whether the passes are trees).

    A pass has at most `token_budget` tokens, padding included, or a single longer sequence.
    """
    units = [PackedUnit((index,), len(tokens), len(tokens)) for index, tokens in enumerate(sequences)]
    if layout == "tree" or (layout == "auto" and share(sequences)):
        return ByTree(token_budget, [(tokens,) for tokens in sequences]).micro_batches(units), True
    return ByRows(token_budget).micro_batches(units), False


class _Filled:
    """The tokens of the units so far."""

    def __init__(self) -> None:
        self._passes: tuple[Prefixes, ...] = ()

    def add(self, passes: Passes) -> None:
        self._passes = self._passes or tuple(Prefixes() for _ in passes)
        for prefixes, sequences in zip(self._passes, passes, strict=True):
            for sequence in sequences:
                prefixes.add(sequence)

    @property
    def size(self) -> int:
        return max((prefixes.num_places for prefixes in self._passes), default=0)

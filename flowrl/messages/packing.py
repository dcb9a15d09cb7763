"""Split a batch into ranks, optimizer steps and micro-batches by the tokens that passes over them compute.

Sequences are in padded rows (`ByRows`), or in trees of shared prefixes (`ByTree`). In depth-first order of their
forest, units that share a prefix are neighbours: both divisions of trees cut this order into ranges, so a prefix is
computed again only where a cut separates its sequences. Needs only numpy.

Invariants, checked by a property test:
- every sequence is in exactly one micro-batch of exactly one rank;
- neighbours of one pair are in the same micro-batch, in their order;
- the sequences of one sample are on the same rank in the same optimizer step, but may be in different micro-batches;
- an optimizer step trains the same samples for every number of ranks and every token budget;
- all ranks have the same `step_ends`, hence the same number of micro-batches (ZeRO-3's collectives need every rank in
  each of them); a rank with nothing to do has an empty micro-batch;
- a micro-batch padded to its longest sequence, or as a tree, holds at most `token_budget` tokens; those of trees are
  about equal;
- of trees, the largest rank exceeds that of the best division into such ranges by at most one unit's tokens plus one
  hundredth.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages.forest import Prefixes, Tokens, num_shared, num_unique, order_key

Passes = tuple[tuple[Tokens, ...], ...]
"""The sequences of each pass over a unit: one pass, or two if it has mismatched completions."""
LEAST_SHARED = 0.9
"""With the layout "auto", sequences are packed as trees if a forest has at most this share of their tokens."""
COARSE = 100
"""The size of the largest rank is searched to within a hundredth of its lower bound."""


@dataclass(frozen=True)
class PackedUnit:
    """Sequences that stay together: those of a pair, or of a single sample."""

    indices: tuple[int, ...]
    longest: int
    """Tokens of its longest sequence."""
    num_tokens: int
    parts: tuple[PackedUnit, ...] = ()
    """The parts that may be in different micro-batches; () if the unit has to stay in one."""

    @property
    def padded(self) -> int:
        """Number of tokens, padding included."""
        return len(self.indices) * self.longest


def join_pairs(lengths: Sequence[int], pairs: Sequence[str]) -> list[PackedUnit]:
    """Group neighbours with the same non-empty pair into one unit each, in the order of the samples.

    `lengths` are the numbers of tokens that a pass over each sample needs space for.
    """
    runs: list[list[int]] = []
    for index, pair in enumerate(pairs):
        if pair and runs and pairs[runs[-1][-1]] == pair:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [PackedUnit(tuple(run), max(lengths[i] for i in run), sum(lengths[i] for i in run)) for run in runs]


def split_by_sequences(units: Sequence[PackedUnit], lengths: Sequence[Sequence[int]]) -> list[PackedUnit]:
    """`units` of samples as units of their sequences, which are counted through all samples.

    `lengths` are the numbers of tokens of each sample's sequences.
    """
    starts = [0, *itertools.accumulate(map(len, lengths))]
    found = []
    for unit in units:
        places = [place for sample in unit.indices for place in range(starts[sample], starts[sample + 1])]
        sizes = [size for sample in unit.indices for size in lengths[sample]]
        alone = tuple(PackedUnit((place,), size, size) for place, size in zip(places, sizes, strict=True))
        parts = () if len(places) == len(unit.indices) else alone
        found.append(PackedUnit(tuple(places), max(sizes), sum(sizes), parts))
    return found


def split_units(units: Sequence[PackedUnit]) -> list[PackedUnit]:
    """The units that each have to be in a single micro-batch, the longest first."""
    found = [part for unit in units for part in unit.parts or (unit,)]
    return sorted(found, key=lambda unit: (-unit.longest, unit.indices))


@dataclass(frozen=True)
class RankPart:
    """The sequences that one rank trains."""

    sequences: tuple[int, ...]
    """Indices of the whole batch's sequences, in this rank's order."""
    micro_batches: tuple[tuple[int, ...], ...]
    """Indices into `sequences`."""
    step_ends: tuple[int, ...]
    """Number of micro-batches after which each optimizer step ends; the same for all ranks."""

    def by_sample(self, owners: Sequence[int]) -> tuple[list[int], tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """The rank's samples, its micro-batches with sequences counted through these samples, and `step_ends`.

        `owners` has, for each sequence of the whole batch, the sample that it belongs to.
        """
        samples = list(dict.fromkeys(owners[sequence] for sequence in self.sequences))
        order = {sample: number for number, sample in enumerate(samples)}
        counted = sorted(self.sequences, key=lambda sequence: (order[owners[sequence]], sequence))
        places = {sequence: place for place, sequence in enumerate(counted)}
        found = tuple(tuple(places[self.sequences[i]] for i in one) for one in self.micro_batches)
        return samples, found, self.step_ends


class Packing(Protocol):
    """How units are divided over ranks and into micro-batches."""

    def deal(self, units: Sequence[PackedUnit], n: int) -> list[list[PackedUnit]]:
        """The units of each of `n` ranks, balanced by tokens."""

    def micro_batches(self, units: Sequence[PackedUnit]) -> list[list[int]]:
        """Indices of the units of one rank, cut so that each micro-batch stays within the budget."""

    def size(self, unit: PackedUnit) -> int:
        """Tokens of a micro-batch that holds only this unit."""

    def num_places(self, units: Sequence[PackedUnit]) -> int:
        """Tokens of a micro-batch of these units, padding included."""


@dataclass(frozen=True)
class ByRows:
    """Right-padded rows: the micro-batches are sorted by length, longest first."""

    token_budget: int

    def deal(self, units: Sequence[PackedUnit], n: int) -> list[list[PackedUnit]]:
        """The longest unit first, each to the rank with the fewest tokens so far."""
        ranks: list[list[PackedUnit]] = [[] for _ in range(n)]
        loads = [(0, rank) for rank in range(n)]
        for unit in sorted(units, key=lambda unit: (-unit.longest, unit.indices)):
            load, rank = heapq.heappop(loads)
            ranks[rank].append(unit)
            heapq.heappush(loads, (load + unit.num_tokens, rank))
        return ranks

    def micro_batches(self, units: Sequence[PackedUnit]) -> list[list[int]]:
        """The units from the longest to the shortest, cut so that count × longest stays within the budget."""
        cut: list[list[int]] = []
        longest = 0
        for unit in split_units(units):
            if cut and (not self.token_budget or (len(cut[-1]) + len(unit.indices)) * longest <= self.token_budget):
                cut[-1].extend(unit.indices)
            else:
                cut.append(list(unit.indices))
                longest = unit.longest
        return cut

    def size(self, unit: PackedUnit) -> int:
        return unit.padded

    def num_places(self, units: Sequence[PackedUnit]) -> int:
        return sum(len(unit.indices) for unit in units) * max((unit.longest for unit in units), default=0)


def split_batch(
    units: Sequence[PackedUnit], num_ranks: int, *, optimizer_steps: int, packing: Packing
) -> list[RankPart]:
    """The parts of all ranks."""
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    micro_batches: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    step_ends: list[int] = []
    for step in np.array_split(np.arange(len(units)), optimizer_steps):
        dealt = packing.deal([units[i] for i in step], num_ranks)
        found = [packing.micro_batches(part) for part in dealt]
        most = max(1, *(len(part) for part in found))
        for rank, part in enumerate(found):
            for indices in part + [[]] * (most - len(part)):
                start = len(owned[rank])
                owned[rank].extend(indices)
                micro_batches[rank].append(tuple(range(start, len(owned[rank]))))
        step_ends.append(most + (step_ends[-1] if step_ends else 0))
    return [
        RankPart(tuple(sequences), tuple(found), tuple(step_ends))
        for sequences, found in zip(owned, micro_batches, strict=True)
    ]


def require_budget(
    units: Sequence[PackedUnit], token_budget: int, names: Sequence[str], packing: Packing | None = None
) -> None:
    """Raise ConfigError if a single sequence, or a single pair, exceeds the token budget. `names`: one for each
    sequence."""
    for unit in split_units(units) if token_budget else ():
        size = (packing or ByRows(token_budget)).size(unit)
        if size > token_budget:
            alone, name = len(unit.indices) == 1, names[unit.indices[0]]
            needs = f"has {unit.longest} tokens" if alone else f"needs {size} tokens, padding included"
            least = "the longest prompt plus the longest response" if alone else size
            raise ConfigError(
                f"{name} {needs}, more than the token budget of {token_budget} a micro-batch; raise token_budget to at "
                f"least {least}"
            )


@dataclass(frozen=True)
class ByTree:
    """Trees; `passes` holds the passes over each sequence of the batch, by the sequence's number.

    Where every unit is one sequence with one pass, as nearly always, a range in depth-first order has the tokens of its
    sequences less what each shares with the one before it. Keys and shared tokens are computed once for a batch.
    """

    token_budget: int
    passes: Sequence[Sequence[Tokens]]
    _keys: dict[int, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)
    _shared: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def deal(self, units: Sequence[PackedUnit], n: int) -> list[list[PackedUnit]]:
        ordered = self._in_order(units)
        if n == 1 or not ordered:
            return [ordered, *([] for _ in range(n - 1))]
        whole = self._num_in_order(ordered)
        low, high = whole // n, whole
        parts = [ordered]
        while high - low > max(1, low // COARSE):
            cap = (low + high) // 2
            found = self._cut_ranges(ordered, cap)
            if len(found) <= n:
                parts, high = found, cap
            else:
                low = cap
        return parts + [[] for _ in range(n - len(parts))]

    def micro_batches(self, units: Sequence[PackedUnit]) -> list[list[int]]:
        found = self._in_order([part for unit in units for part in unit.parts or (unit,)])
        parts = self._cut_ranges(found, self.token_budget) if self.token_budget else [found] if found else []
        if len(parts) > 1:
            parts = self._even_parts(found, parts)
        return [[index for unit in part for index in unit.indices] for part in parts]

    def _even_parts(self, ordered: Sequence[PackedUnit], parts: list[list[PackedUnit]]) -> list[list[PackedUnit]]:
        """Ranges of about equal sizes, as many as `parts`, if there are such: the largest one decides how much memory
        a step needs, and the number of ranges how long it takes."""
        sizes = [self._num_in_order(part) for part in parts]
        cap = sum(sizes) // len(parts) + max(self.size(unit) for unit in ordered)
        even = self._cut_ranges(ordered, cap) if cap < max(sizes) else parts
        return even if len(even) <= len(parts) else parts

    def size(self, unit: PackedUnit) -> int:
        return self._num_in_order([unit])

    def num_places(self, units: Sequence[PackedUnit]) -> int:
        """Tokens of the larger pass over these units."""
        filled = _Filled()
        for unit in units:
            filled.add(self._passes_over(unit))
        return filled.size

    def _num_in_order(self, ordered: Sequence[PackedUnit]) -> int:
        """As `num_places`, of units in depth-first order."""
        if not self._are_single(ordered):
            return self.num_places(ordered)
        indices = [unit.indices[0] for unit in ordered]
        alone = sum(len(self.passes[index][0]) for index in indices)
        return alone - sum(self._shared_by(*neighbours) for neighbours in pairwise(indices))

    def _cut_ranges(self, ordered: Sequence[PackedUnit], cap: int) -> list[list[PackedUnit]]:
        """Ranges of units of at most `cap` tokens; a larger unit forms a range by itself."""
        parts: list[list[PackedUnit]] = []
        if self._are_single(ordered):
            size = before = 0
            for unit in ordered:
                (index,) = unit.indices
                alone = len(self.passes[index][0])
                size += alone - self._shared_by(before, index) if parts else alone
                if parts and size <= cap:
                    parts[-1].append(unit)
                else:
                    parts.append([unit])
                    size = alone
                before = index
            return parts
        filled = _Filled()
        for unit in ordered:
            passes = self._passes_over(unit)
            filled.add(passes)
            if parts and filled.size <= cap:
                parts[-1].append(unit)
            else:
                parts.append([unit])
                filled = _Filled()
                filled.add(passes)
        return parts

    def _in_order(self, units: Sequence[PackedUnit]) -> list[PackedUnit]:
        for unit in units:
            if unit.indices[0] not in self._keys:
                self._keys[unit.indices[0]] = order_key(self.passes[unit.indices[0]][0])
        return sorted(units, key=lambda unit: (self._keys[unit.indices[0]], unit.indices))

    def _are_single(self, units: Sequence[PackedUnit]) -> bool:
        return all(len(unit.indices) == 1 and len(self.passes[unit.indices[0]]) == 1 for unit in units)

    def _shared_by(self, one: int, other: int) -> int:
        """Equal tokens at the beginning of two sequences."""
        if (one, other) not in self._shared:
            self._shared[one, other] = num_shared(self.passes[one][0], self.passes[other][0])
        return self._shared[one, other]

    def _passes_over(self, unit: PackedUnit) -> Passes:
        return tuple(zip(*(self.passes[index] for index in unit.indices), strict=True))


def share_enough(sequences: Sequence[Tokens]) -> bool:
    """Whether the sequences share enough tokens for trees to pay off."""
    return num_unique(sequences) <= LEAST_SHARED * sum(map(len, sequences))


def passes_over(sequences: Sequence[Tokens], token_budget: int, layout: str) -> tuple[list[list[int]], bool]:
    """(the sequences of each pass of a model, as indices; whether the passes are trees).

    A pass has at most `token_budget` tokens, padding included, or a single longer sequence.
    """
    units = [PackedUnit((index,), len(tokens), len(tokens)) for index, tokens in enumerate(sequences)]
    if layout == "tree" or (layout == "auto" and share_enough(sequences)):
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

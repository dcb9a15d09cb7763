"""Sequences of tokens as a forest: a prefix that several of them share is stored once. Needs only numpy.

The tokens are stored in depth-first order: each token is followed by the tokens that continue it, and nothing else, up
to its `end`. So a token's ancestors are the earlier places whose ends lie after it, and the places that see a token are
one range.

Invariants, checked by property tests:
- the places of a sequence, in their order, hold its tokens at the positions 0, 1, 2 ...;
- place `t` is place `s`, or comes after it in some sequence, if and only if `s <= t < ends[s]`;
- two sequences have the same places exactly as far as their tokens agree from the beginning;
- `num_unique` is the number of places.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Forest:
    """Merged sequences, one entry per place."""

    token_ids: Tokens
    positions: Places
    """Number of tokens before this place in its sequences."""
    ends: Places
    """The place after the last place that continues this one."""
    places: tuple[Places, ...]
    """For every sequence, in the given order, the place of each of its tokens."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def stems(self) -> tuple[Stem, ...]:
        """The runs of places between beginnings, branching points and leaves, in their order."""
        if not len(self):
            return ()
        goes_on = (np.diff(self.positions) == 1) & (np.diff(self.ends) == 0)
        starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1)).tolist()
        found: list[Stem] = []
        above: list[int] = []
        for start, stop in zip(starts, [*starts[1:], len(self)], strict=True):
            while above and above[-1] <= start:
                above.pop()
            found.append(Stem(start, stop, int(self.ends[start]), len(above)))
            above.append(found[-1].end)
        return tuple(found)


@dataclass(frozen=True)
class Stem:
    """Places without a branching point between them: `start` to `stop`, continued up to `end`."""

    start: int
    stop: int
    end: int
    depth: int
    """Number of stems above this one on the path from the root."""


def make_forest(sequences: Sequence[Tokens]) -> Forest:
    """The forest of `sequences`, which may be in any order."""
    places: list[Places] = [np.zeros(0, np.int64)] * len(sequences)
    tokens: list[Tokens] = [np.zeros(0, np.int32)]
    ends = np.zeros(sum(map(len, sequences)), np.int64)
    size, before, last = 0, places[0] if places else np.zeros(0, np.int64), np.zeros(0, np.int32)
    for index in sorted(range(len(sequences)), key=lambda index: order_key(sequences[index])):
        sequence = sequences[index]
        shared = num_shared(last, sequence)
        ends[before[shared:]] = size
        tokens.append(sequence[shared:])
        places[index] = np.concatenate((before[:shared], np.arange(size, size + len(sequence) - shared)))
        size += len(sequence) - shared
        before, last = places[index], sequence
    ends[before] = size
    positions = np.zeros(size, np.int64)
    for found in places:
        positions[found] = np.arange(len(found))
    return Forest(np.concatenate(tokens).astype(np.int32), positions, ends[:size], tuple(places))


def extended(forest: Forest, added: int) -> Forest:
    """`forest` followed by `added` sequences of one token each, which are not among its `places`."""
    size = len(forest)
    return Forest(
        np.concatenate((forest.token_ids, np.zeros(added, np.int32))),
        np.concatenate((forest.positions, np.zeros(added, np.int64))),
        np.concatenate((forest.ends, np.arange(size, size + added) + 1)),
        forest.places,
    )


class Prefixes:
    """The prefixes of the sequences added so far, to count places without making a forest."""

    def __init__(self) -> None:
        self.num_places = 0
        """Number of places in the forest of these sequences."""
        self._keys: list[bytes] = []
        self._sequences: list[Tokens] = []

    def add(self, sequence: Tokens) -> None:
        key = order_key(sequence)
        at = bisect_left(self._keys, key)
        beside = self._sequences[max(0, at - 1) : at + 1]  # the longest common prefix is shared with a neighbour
        self.num_places += len(sequence) - max((num_shared(one, sequence) for one in beside), default=0)
        self._keys.insert(at, key)
        self._sequences.insert(at, sequence)


def num_unique(sequences: Sequence[Tokens]) -> int:
    """Number of places of the forest of `sequences`."""
    prefixes = Prefixes()
    for sequence in sequences:
        prefixes.add(sequence)
    return prefixes.num_places


def num_shared(one: Tokens, other: Tokens) -> int:
    """Number of equal tokens at the beginning."""
    size = min(one.size, other.size)
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if different.size else size


def order_key(sequence: Tokens) -> bytes:
    """A key that sorts sequences so that those with a common prefix are neighbours, a prefix first."""
    return sequence.astype(">u4").tobytes()

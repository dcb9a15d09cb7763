"""Finds the rows that stay on disk, in one pass over all of them. Then each is known by its place and digest.

The rows that are taken, their order and their part are the same as for rows in memory (`Rows.split` and `Rows.every`).
In a mixture, rows are chosen within each source first, and then among those of all sources.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.tasks.row_reading.indexed_rows import Digests, IndexedRows, Ints, StoredRows
from flowrl.tasks.row_reading.record_formats import Reading
from flowrl.tasks.rows import HELD_OUT_ONE_IN, Row, Rows

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scan:
    """Rows as they were read; entry i of each array belongs to row i."""

    places: Ints
    """Store, number, offset, bytes and member of each row."""
    ids: Digests
    asked: Digests
    """The `asked_id` of each row, which decides its part."""
    scores: Floats

    def __len__(self) -> int:
        return len(self.ids)

    def taken(self, indices: Ints) -> Scan:
        """These rows, in this order."""
        return Scan(self.places[indices], self.ids[indices], self.asked[indices], self.scores[indices])


class _Found:
    """The entries of a scan while it is made."""

    def __init__(self) -> None:
        self._ids, self._asked, self._scores = array("Q"), array("Q"), array("d")

    def add(self, row: Row) -> None:
        self._ids.append(int(row.prompt_id, 16))
        self._asked.append(int(row.asked_id, 16))
        self._scores.append(row.score)

    def scan(self, places: Ints) -> Scan:
        ids, asked = (np.frombuffer(column, np.uint64) for column in (self._ids, self._asked))
        return Scan(places, ids, asked, np.frombuffer(self._scores, np.float64))


def scan_source(
    stored: StoredRows, stores: range, reading: Reading, note: Callable[[Row], None], *, every: bool, mixed: bool
) -> tuple[Scan, int]:
    """The rows of the stores of one source, and 0; in a mixture only the rows that are taken, and the number of other
    rows, which repeat their prompts. `note` is called with every row. Raises ConfigError."""
    own, asked, places = _Found(), _Found(), array("q")
    for store in stores:
        for address, row in stored.read(store, reading):
            note(row)
            places.extend((store, *address))
            if mixed:
                own.add(row)
            asked.add(stored.finished(store, row))
    found = np.frombuffer(places, np.int64).reshape(-1, 5)
    if not mixed:
        return asked.scan(found), 0
    among_own = own.scan(found)
    taken, _ = _chosen(among_own, every=every)
    trained_first = np.argsort(_held_out(among_own.asked[taken]), kind="stable")
    return asked.scan(found).taken(taken[trained_first]), len(found) - len(taken)


def rows_of(stored: StoredRows, scans: Sequence[Scan], *, every: bool) -> Rows:
    """Both parts of the rows of all sources; with `every` including rows that repeat a prompt, as in `Rows.every`."""
    found = scans[0]
    if len(scans) > 1:
        found = Scan(*(np.concatenate([getattr(scan, name) for scan in scans]) for name in Scan.__annotations__))
    indices, occurrences = _chosen(found, every=every)
    held_out = _held_out(found.asked[indices])
    train, others = (
        _indexed(stored, found.taken(indices[held_out == part]), occurrences[held_out == part])
        for part in (False, True)
    )
    return Rows(train, others, repeated=len(found) - len(indices))


def _held_out(asked: Digests) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = asked % HELD_OUT_ONE_IN == 0
    return found


def _indexed(stored: StoredRows, taken: Scan, occurrences: Ints) -> IndexedRows:
    rows = IndexedRows(stored, taken.places, taken.ids, taken.asked, occurrences)
    for index in np.flatnonzero(occurrences > 0):  # only these are read again: their ids are not the prompt's
        rows.ids[index] = int(rows.found(int(index)).prompt_id, 16)
    return rows


def _chosen(found: Scan, *, every: bool) -> tuple[Ints, Ints]:
    """(indices of the rows taken, in order; the number of each among the rows of its prompt, or -1 without `every`)."""
    groups: Any
    groups, firsts, group = np.unique(found.asked if every else found.ids, return_index=True, return_inverse=True)
    best = np.full(len(groups), -np.inf)
    np.maximum.at(best, group, found.scores)
    indices = np.flatnonzero(found.scores == best[group])
    indices = indices[np.lexsort((indices, firsts[group[indices]]))]
    _, starts, number = np.unique(firsts[group[indices]], return_index=True, return_inverse=True)
    if not every:
        return indices[starts], np.full(len(starts), -1)
    return indices, np.arange(len(indices)) - starts[number]

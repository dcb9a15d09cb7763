"""Rows that stay on disk: memory holds the place of each row, and the row is read when it is requested.

One pass over all data finds the places and digests of the rows, which take 64 bytes a row. The rows are read from the
stores of `row_stores`. Which rows are taken, their order and their part are the same as for rows in memory
(`Rows.split` and `Rows.every`). In a mixture, rows are chosen within each source first, and then among those of all
sources.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError
from flowrl.tasks.row_reading.record_formats import Reading
from flowrl.tasks.row_reading.row_stores import RowAddress, RowStore, row_changed
from flowrl.tasks.rows import HELD_OUT_ONE_IN, OF_TASK, Demonstration, Row, Rows, word_row

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
R = TypeVar("R")


class StoredRows:
    """The rows of several stores, put into the task's template, and with its choice for their reasoning.

    `sources` names the source of each store in a mixture; "" for a task with one source.
    """

    def __init__(self, stores: Sequence[RowStore], sources: Sequence[str], template: str, reasoning: str) -> None:
        self._stores, self.sources, self._template, self._reasoning = stores, sources, template, reasoning

    def read(self, store: int, reading: Reading) -> Iterator[tuple[RowAddress, Row]]:
        """Every row of a store, not yet finished. Raises ConfigError, and Malformed if `reading` stops at malformed
        records."""
        return self._stores[store].read_rows(reading)

    def finished(self, store: int, row: Row) -> Row:
        """A row of a store with its source's name, put into the task's template."""
        return word_row(row, self.sources[store], self._template, self._reasoning)

    def row(self, store: int, *address: int) -> Row:
        """One row. Raises ConfigError if its file has changed."""
        return self.finished(store, self._stores[store].read_row(*address))

    def has_changed(self, store: int, number: int) -> ConfigError:
        """The error for a row that is no longer what it was."""
        return row_changed(self._stores[store].place_of(number))


@runtime_checkable
class KnownById(Protocol):
    """Rows whose ids are known without reading them."""

    def prompt_ids(self) -> Iterator[str]: ...


class IndexedRows(Sequence[Row]):
    """Some of the rows of `stored`. Each line of `places` is one row: store, number, offset, bytes and member."""

    def __init__(self, stored: StoredRows, places: Ints, ids: Digests, asked: Digests, occurrences: Ints) -> None:
        self._stored, self._places, self.ids, self.asked, self._occurrences = stored, places, ids, asked, occurrences

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> IndexedRows: ...

    def __getitem__(self, index: int | slice) -> Row | IndexedRows:
        if isinstance(index, slice):
            return self.taken(np.arange(len(self))[index])
        row = self.found(index)
        self._require_same(index, row.prompt_id, self.ids)
        return row

    def found(self, index: int) -> Row:
        """One row. Raises ConfigError if what it asks has changed; its own id is not compared."""
        row = self._stored.row(*map(int, self._places[index]))
        if (occurrence := int(self._occurrences[index])) >= 0:
            values = {field.name: getattr(row, field.name) for field in dataclasses.fields(Row)}
            row = Demonstration(**values, occurrence=occurrence)
        self._require_same(index, row.asked_id, self.asked)
        return row

    def _require_same(self, index: int, found: str, known: Digests) -> None:
        if int(found, 16) != int(known[index]):
            raise self._stored.has_changed(*map(int, self._places[index][:2]))

    def taken(self, indices: Ints) -> IndexedRows:
        """These rows, in this order."""
        places, ids, asked, occurrences = self._arrays
        return IndexedRows(self._stored, places[indices], ids[indices], asked[indices], occurrences[indices])

    def joined(self, other: IndexedRows) -> IndexedRows:
        """These rows and then those of `other`, which are of the same stores."""
        pairs = zip(self._arrays, other._arrays, strict=True)
        return IndexedRows(self._stored, *(np.concatenate(pair) for pair in pairs))

    @property
    def _arrays(self) -> tuple[Ints, Digests, Digests, Ints]:
        return self._places, self.ids, self.asked, self._occurrences

    def prompt_ids(self) -> Iterator[str]:
        """The `prompt_id` of each row, without reading the row."""
        return hex_digests(self.ids)

    def sources(self) -> Iterator[str]:
        """The source of each row of a mixture."""
        return (self._stored.sources[store] for store in self._places[:, 0])

    def lowest(self, most: int | None, *keys: Digests) -> IndexedRows:
        """The rows with the lowest digests, in the order of the digests; of several `keys` the first is the primary
        one."""
        return self.taken(np.lexsort((keys or (self.ids,))[::-1])[:most])

    @functools.cached_property
    def by_id(self) -> Mapping[str, Row]:
        """Prompt id -> row, read when it is looked up."""
        return self.matched(None)

    def matched(self, found: Ints | None) -> Mapping[str, Row]:
        """Prompt id of each row -> the row at the index that `found` has for it."""
        return _ById(self, np.argsort(self.ids, kind="stable"), found)


class _ById(Mapping[str, Row]):
    """Prompt id -> row; with `found`, the row at the index that `found` has for it."""

    def __init__(self, rows: IndexedRows, order: Ints, found: Ints | None = None) -> None:
        self._rows, self._order, self._found = rows, order, found

    def __getitem__(self, prompt_id: str) -> Row:
        wanted = np.uint64(int(prompt_id, 16))
        place = int(np.searchsorted(self._rows.ids, wanted, sorter=self._order))
        if place == len(self._rows) or self._rows.ids[self._order[place]] != wanted:
            raise KeyError(prompt_id)
        index = self._order[place]
        return self._rows[int(index if self._found is None else self._found[index])]

    def __iter__(self) -> Iterator[str]:
        return self._rows.prompt_ids()

    def __len__(self) -> int:
        return len(self._rows)


def join_rows(rows: Sequence[R], others: Sequence[R]) -> Sequence[R]:
    """`rows` and then `others`, which are parts of the same rows."""
    if isinstance(rows, IndexedRows) and isinstance(others, IndexedRows):
        return cast("Sequence[R]", rows.joined(others))
    return (*rows, *others)


def pick_rows(rows: Sequence[R], indices: Sequence[int]) -> Sequence[R]:
    """The rows at these indices, in this order."""
    if isinstance(rows, IndexedRows):
        return cast("Sequence[R]", rows.taken(np.array(indices, np.int64)))
    return tuple(rows[index] for index in indices)


def prompt_ids(rows: Iterable[Any]) -> Iterator[str]:
    """The `prompt_id` of each row."""
    return rows.prompt_ids() if isinstance(rows, KnownById) else (row.prompt_id for row in rows)


def rows_by_id(rows: Sequence[Row]) -> Mapping[str, Row]:
    """Prompt id -> row."""
    return rows.by_id if isinstance(rows, IndexedRows) else {row.prompt_id: row for row in rows}


def match_rows(rows: Sequence[Row], found: Ints) -> Mapping[str, Row]:
    """Prompt id of each row -> the row at the index that `found` has for it."""
    if isinstance(rows, IndexedRows):
        return rows.matched(found)
    return {row.prompt_id: rows[index] for row, index in zip(rows, found, strict=True)}


def lowest_rows(rows: Sequence[Row], most: int | None) -> Sequence[Row]:
    """Up to `most` rows, those with the lowest prompt ids, which do not depend on the order of the data."""
    if isinstance(rows, IndexedRows):
        return rows.lowest(most)
    return tuple(sorted(rows, key=lambda row: row.prompt_id)[:most])


def lowest_asked(rows: Sequence[Row], most: int | None) -> Sequence[Row]:
    """Up to `most` rows with the lowest digests of what they ask, so that rows of one prompt are neighbours."""
    if isinstance(rows, IndexedRows):
        return rows.lowest(most, rows.asked, rows.ids)
    return tuple(sorted(rows, key=lambda row: (row.asked_id, row.prompt_id))[:most])


def asked_ids(rows: Iterable[Row]) -> Iterator[str]:
    """The `asked_id` of each row."""
    return hex_digests(rows.asked) if isinstance(rows, IndexedRows) else (row.asked_id for row in rows)


def row_sources(rows: Iterable[Row]) -> Iterator[str]:
    """The source of each row of a mixture."""
    return rows.sources() if isinstance(rows, IndexedRows) else (row.columns[OF_TASK] for row in rows)


def hex_digests(digests: Digests) -> Iterator[str]:
    """Digests as text."""
    return (f"{int(one):016x}" for one in digests)


# Finding the rows


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
    taken, _ = _choose_rows(among_own, every=every)
    trained_first = np.argsort(_is_held_out(among_own.asked[taken]), kind="stable")
    return asked.scan(found).taken(taken[trained_first]), len(found) - len(taken)


def part_rows(stored: StoredRows, scans: Sequence[Scan], *, every: bool) -> Rows:
    """Both parts of the rows of all sources; with `every` including rows that repeat a prompt, as in `Rows.every`."""
    found = scans[0]
    if len(scans) > 1:
        found = Scan(*(np.concatenate([getattr(scan, name) for scan in scans]) for name in Scan.__annotations__))
    indices, occurrences = _choose_rows(found, every=every)
    held_out = _is_held_out(found.asked[indices])
    train, others = (
        _index_chosen(stored, found.taken(indices[held_out == part]), occurrences[held_out == part])
        for part in (False, True)
    )
    return Rows(train, others, repeated=len(found) - len(indices))


def _is_held_out(asked: Digests) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = asked % HELD_OUT_ONE_IN == 0
    return found


def _index_chosen(stored: StoredRows, taken: Scan, occurrences: Ints) -> IndexedRows:
    rows = IndexedRows(stored, taken.places, taken.ids, taken.asked, occurrences)
    for index in np.flatnonzero(occurrences > 0):  # only these are read again: their ids are not the prompt's
        rows.ids[index] = int(rows.found(int(index)).prompt_id, 16)
    return rows


def _choose_rows(found: Scan, *, every: bool) -> tuple[Ints, Ints]:
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

"""Rows that stay on disk: memory holds the place of each row, and the row is read when it is requested.

`row_index` finds the places and digests of the rows in one pass over all data; they take 64 bytes a row. The rows are
read from the stores of `row_stores`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError
from flowrl.tasks.input_template import asked_of_source
from flowrl.tasks.row_reading.record_formats import Reading
from flowrl.tasks.row_reading.row_stores import RowAddress, RowStore, row_changed
from flowrl.tasks.rows import OF_TASK, Demonstration, Row

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
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
        return asked_of_source(row, self.sources[store], self._template, self._reasoning)

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
        return hexadecimal(self.ids)

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


def joined(rows: Sequence[R], others: Sequence[R]) -> Sequence[R]:
    """`rows` and then `others`, which are parts of the same rows."""
    if isinstance(rows, IndexedRows) and isinstance(others, IndexedRows):
        return cast("Sequence[R]", rows.joined(others))
    return (*rows, *others)


def picked(rows: Sequence[R], indices: Sequence[int]) -> Sequence[R]:
    """The rows at these indices, in this order."""
    if isinstance(rows, IndexedRows):
        return cast("Sequence[R]", rows.taken(np.array(indices, np.int64)))
    return tuple(rows[index] for index in indices)


def prompt_ids(rows: Iterable[Any]) -> Iterator[str]:
    """The `prompt_id` of each row."""
    return rows.prompt_ids() if isinstance(rows, KnownById) else (row.prompt_id for row in rows)


def by_id(rows: Sequence[Row]) -> Mapping[str, Row]:
    """Prompt id -> row."""
    return rows.by_id if isinstance(rows, IndexedRows) else {row.prompt_id: row for row in rows}


def matched(rows: Sequence[Row], found: Ints) -> Mapping[str, Row]:
    """Prompt id of each row -> the row at the index that `found` has for it."""
    if isinstance(rows, IndexedRows):
        return rows.matched(found)
    return {row.prompt_id: rows[index] for row, index in zip(rows, found, strict=True)}


def lowest(rows: Sequence[Row], most: int | None) -> Sequence[Row]:
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
    return hexadecimal(rows.asked) if isinstance(rows, IndexedRows) else (row.asked_id for row in rows)


def sources(rows: Iterable[Row]) -> Iterator[str]:
    """The source of each row of a mixture."""
    return rows.sources() if isinstance(rows, IndexedRows) else (row.columns[OF_TASK] for row in rows)


def hexadecimal(digests: Digests) -> Iterator[str]:
    """Digests as text."""
    return (f"{int(one):016x}" for one in digests)

"""Rows that stay in their files: where each one begins is held in memory, and the row is read when it is asked for.

A pass over the files finds, for every row that is taken, its place and its prompt's digest: 48 bytes a row. Which rows
are taken, in which order and in which part is as for rows in memory (`Rows.split` and `Rows.every`). How a row is found
in a file is in `extents`; what cannot be read from its middle is copied first (`spooled`).
The files have to stay as they are while they are used; a row that has changed is an error.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError
from flowrl.tasks.extents import extents_of, sliceable
from flowrl.tasks.malformed import Reading
from flowrl.tasks.rows import HELD_OUT_ONE_IN, Demonstration, Row, Rows
from flowrl.tasks.spooled import plain_file

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
Make = Callable[[str, Mapping[str, Any]], Row | None]
"""(place, record) -> the row, None if it is left out. Raises Malformed."""
R = TypeVar("R")
AUTO_BYTES = 256 << 20
"""Files of more bytes than this in sum stay on disk unless the task says otherwise."""


class RowFiles:
    """Files of which single rows are read. Reads from several threads do not disturb each other.

    Raises ConfigError for a file that cannot be cut into rows.
    """

    def __init__(self, paths: Sequence[Path], make: Make) -> None:
        self._make = make
        self._plain = tuple(map(plain_file, paths))
        self._extents = tuple(map(extents_of, paths, self._plain))
        self._open: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
        for handle in getattr(self, "_open", {}).values():
            os.close(handle)

    def rows(self, reading: Reading) -> Iterator[tuple[int, int, int, int, Row]]:
        """(file, number, offset, bytes, row) of every row, in order. Raises ConfigError, Malformed by `reading`."""
        for file, (extents, plain) in enumerate(zip(self._extents, self._plain, strict=True)):
            with plain.open("rb") as opened:
                for number, offset, content in extents.all(opened):
                    make = functools.partial(self._row, file, number, offset, content)
                    if (row := reading.at(extents.place(number), make)) is not None:
                        yield file, number, offset, len(content), row

    def row(self, file: int, number: int, offset: int, length: int) -> Row:
        """One row. Raises ConfigError if the file has changed."""
        if file not in self._open:
            self._open[file] = os.open(self._plain[file], os.O_RDONLY | os.O_CLOEXEC)
        try:
            row = self._row(file, number, offset, os.pread(self._open[file], length, offset))
        except (ConfigError, ValueError, csv.Error):  # what stands there is no row any more
            row = None
        if row is None:
            place = self._extents[file].place(number)
            raise ConfigError(f"{place}: the file has changed while it was used; start again")
        return row

    def _row(self, file: int, number: int, offset: int, content: bytes) -> Row | None:
        extents = self._extents[file]
        return self._make(extents.place(number), extents.record(number, offset, content))


class IndexedRows(Sequence[Row]):
    """Some of the rows of `files`: a row of `places` each, of file, number, offset and bytes."""

    def __init__(self, files: RowFiles, places: Ints, ids: Digests, occurrences: Ints) -> None:
        self._files, self._places, self.ids, self._occurrences = files, places, ids, occurrences

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> IndexedRows: ...

    def __getitem__(self, index: int | slice) -> Row | IndexedRows:
        if isinstance(index, slice):
            return self.taken(np.arange(len(self))[index])
        row = self._files.row(*map(int, self._places[index]))
        occurrence = int(self._occurrences[index])
        if occurrence < 0:
            return row
        values = {field.name: getattr(row, field.name) for field in dataclasses.fields(Row)}
        return Demonstration(**values, occurrence=occurrence)

    def taken(self, indices: Ints) -> IndexedRows:
        """These rows, in this order."""
        return IndexedRows(self._files, self._places[indices], self.ids[indices], self._occurrences[indices])

    def joined(self, other: IndexedRows) -> IndexedRows:
        """These rows and then those of `other`, which are of the same files."""
        pairs = zip(self._arrays, other._arrays, strict=True)
        return IndexedRows(self._files, *(np.concatenate(pair) for pair in pairs))

    @property
    def _arrays(self) -> tuple[Ints, Digests, Ints]:
        return self._places, self.ids, self._occurrences

    def prompt_ids(self) -> Iterator[str]:
        """What `row.prompt_id` is of each row, without reading it."""
        return (f"{int(one):016x}" for one in self.ids)

    def lowest(self, most: int | None) -> IndexedRows:
        """The rows with the lowest digests, in their order."""
        return self.taken(np.argsort(self.ids, kind="stable")[:most])

    @functools.cached_property
    def by_id(self) -> Mapping[str, Row]:
        """Prompt id -> row, read when it is looked up."""
        return _ById(self, np.argsort(self.ids, kind="stable"))


class _ById(Mapping[str, Row]):
    def __init__(self, rows: IndexedRows, order: Ints) -> None:
        self._rows, self._order = rows, order

    def __getitem__(self, prompt_id: str) -> Row:
        wanted = np.uint64(int(prompt_id, 16))
        place = int(np.searchsorted(self._rows.ids, wanted, sorter=self._order))
        if place == len(self._rows) or self._rows.ids[self._order[place]] != wanted:
            raise KeyError(prompt_id)
        return self._rows[int(self._order[place])]

    def __iter__(self) -> Iterator[str]:
        return self._rows.prompt_ids()

    def __len__(self) -> int:
        return len(self._rows)


def index_of(files: RowFiles, reading: Reading, *, every: bool) -> Rows:
    """Both parts of the rows of `files`; with `every` also rows that repeat a prompt, as `Rows.every` has them."""
    found: list[Any] = [array(kind) for kind in "qqqqQd"]
    for *place, row in files.rows(reading):
        for values, value in zip(found, (*place, int(row.asked_id, 16), row.score), strict=True):
            values.append(value)
    places = np.stack([np.asarray(values, np.int64) for values in found[:4]], axis=1)
    ids, scores = np.asarray(found[4], np.uint64), np.asarray(found[5], np.float64)
    taken, occurrences = _taken(ids, scores, every=every)
    rows = IndexedRows(files, places[taken], ids[taken], occurrences)
    held_out = rows.ids % HELD_OUT_ONE_IN == 0
    for index in np.flatnonzero(occurrences > 0):  # only these have to be read once more
        rows.ids[index] = int(rows[int(index)].prompt_id, 16)
    train, held_out_rows = (rows.taken(np.flatnonzero(held_out == part)) for part in (False, True))
    return Rows(train, held_out_rows, repeated=len(ids) - len(rows))


def _taken(ids: Digests, scores: npt.NDArray[np.float64], *, every: bool) -> tuple[Ints, Ints]:
    """(indices of the rows that are taken, in order, and which of its prompt's each is); -1 where there is but one."""
    groups, firsts, group = np.unique(ids, return_index=True, return_inverse=True)
    best = np.full(len(groups), -np.inf)
    np.maximum.at(best, group, scores)
    indices = np.flatnonzero(scores == best[group])
    indices = indices[np.lexsort((indices, firsts[group[indices]]))]
    _, starts, number = np.unique(firsts[group[indices]], return_index=True, return_inverse=True)
    if not every:
        return indices[starts], np.full(len(starts), -1)
    return indices, np.arange(len(indices)) - starts[number]


def joined(rows: Sequence[R], others: Sequence[R]) -> Sequence[R]:
    """`rows` and then `others`, which are parts of the same."""
    if isinstance(rows, IndexedRows) and isinstance(others, IndexedRows):
        return cast("Sequence[R]", rows.joined(others))
    return (*rows, *others)


def prompt_ids(rows: Iterable[Any]) -> Iterator[str]:
    """The `prompt_id` of each row."""
    return rows.prompt_ids() if isinstance(rows, IndexedRows) else (row.prompt_id for row in rows)


def by_id(rows: Sequence[Row]) -> Mapping[str, Row]:
    """Prompt id -> row."""
    return rows.by_id if isinstance(rows, IndexedRows) else {row.prompt_id: row for row in rows}


def lowest(rows: Sequence[Row], most: int | None) -> Sequence[Row]:
    """Up to `most` rows, those with the lowest prompt ids, which do not depend on the order of the data."""
    if isinstance(rows, IndexedRows):
        return rows.lowest(most)
    return tuple(sorted(rows, key=lambda row: row.prompt_id)[:most])


def indexable(paths: Sequence[Path] | None, wanted: str) -> bool:
    """Whether the rows of these files stay on disk; `wanted` is the task's option `rows`. Raises ConfigError."""
    other = next((path for path in paths or () if not sliceable(path)), None)
    if wanted == "disk" and (paths is None or other):
        raise ConfigError(
            f"rows=disk is for files of rows (.jsonl, .json, .csv, .tsv, .parquet), and "
            f"{other or 'a directory of save_to_disk'} is none; write it as .jsonl or .parquet, or leave rows out"
        )
    if wanted != "auto" or paths is None or other:
        return wanted == "disk"
    return sum(path.stat().st_size for path in paths) > AUTO_BYTES

"""Rows that stay on disk: memory holds the place of each row, and the row is read when it is requested.

One pass over all data finds the places and digests of the rows, which take 64 bytes a row. Which rows are taken, their
order and their part are the same as for rows in memory (`Rows.split` and `Rows.every`). In a mixture, rows are chosen
within each source first, and then among those of all sources.

A row is found again by its address in its store: the record's number, the offset of its first byte, its bytes, and
which of the record's rows it is. The files must not change while they are used.

A file that cannot be read from its middle is written once in a form that can: decompressed, or its rows pickled. The
libraries that read Parquet and saved datasets start threads, which a process that forks episodes must not have, so only
the process that makes the copy loads them. Such a copy is in flowrl's cache, for all processes of this machine and for
later runs. It is valid as long as the size and modification time of the file are the same. If the disk has no room for
the copy, it is removed and the run is refused.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import os
import pickle
import resource
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError
from flowrl.hub import gb_text, to_stderr
from flowrl.machine.cache import cache_dir, cached_directory
from flowrl.machine.disk import DiskRoom
from flowrl.tasks.row_reading.record_formats import (
    DECOMPRESSED,
    RawRow,
    Reading,
    arrow_rows,
    damage_of,
    format_records,
    has_arrow_rows,
    open_bytes,
    pickle_rows,
)
from flowrl.tasks.rows import HELD_OUT_ONE_IN, OF_TASK, Demonstration, Row, Rows

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
R = TypeVar("R")
RowAddress = tuple[int, int, int, int]
"""(number, offset, bytes, member)"""
Make = Callable[[str, RawRow], tuple[Row, ...]]
"""(place, record) -> its rows, () if it is left out. Raises Malformed."""
MOST_OPEN = 128
"""The most files that all tasks of a process keep open between two reads, and no more than a quarter of its limit."""
READ_BYTES = 1 << 16
CHANGED = (ConfigError, ValueError, IndexError, csv.Error, pickle.UnpicklingError, EOFError)
"""What is raised if a row is no longer at its address."""
COPY_BYTES = 1 << 20
UNUSED_DAYS = 30
"""A copy that no run has asked for in this many days is removed when another copy is made."""
COPIES = "rows"


# Stores of rows


class RowStore:
    """Single rows, or all rows in their order. Reads from several threads do not disturb each other.

    `word` gives a row the form in which it is asked: put into the task's template, with its source's name in a mixture.
    """

    def __init__(self, source: str, word: Callable[[Row], Row]) -> None:
        self.source, self.word = source, word

    def read_rows(self, reading: Reading) -> Iterator[tuple[RowAddress, Row]]:
        """Every row, in order, not yet worded. Raises ConfigError, and Malformed if `reading` stops at malformed
        records."""
        raise NotImplementedError

    def read_row(self, number: int, offset: int, length: int, member: int) -> Row:
        """The row at one address, not yet worded. Raises ConfigError if it is no longer there."""
        raise NotImplementedError

    def place_of(self, number: int) -> str:
        """The place of a record, as errors name it."""
        raise NotImplementedError


class HeldRows(RowStore):
    """Rows that are generated, or that the task keeps in memory, next to others that stay on disk."""

    def __init__(self, rows: Sequence[Row], source: str, word: Callable[[Row], Row]) -> None:
        super().__init__(source, word)
        self._rows = rows

    def read_rows(self, reading: Reading) -> Iterator[tuple[RowAddress, Row]]:
        for number, row in enumerate(self._rows):
            yield (number, 0, 0, 0), row

    def read_row(self, number: int, offset: int, length: int, member: int) -> Row:
        return self._rows[number]

    def place_of(self, number: int) -> str:
        return self._rows[number].place


class FileRows(RowStore):
    """The rows of one file, or of one split that save_to_disk has written.

    Raises ConfigError if the file cannot be divided into records.
    """

    def __init__(self, path: Path, split: str, make: Make, source: str, word: Callable[[Row], Row]) -> None:
        super().__init__(source, word)
        self._path, self._make = path, make
        self._plain = plain_file(path, split)
        with damage_of(path):
            self._records = format_records(path, self._plain)
        self._handle: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            _kept_open.discard(self._handle)
            os.close(self._handle)  # type: ignore[arg-type]

    def read_rows(self, reading: Reading) -> Iterator[tuple[RowAddress, Row]]:
        with damage_of(self._path):
            handle = self._keep_open()
            opened = self._plain.open("rb") if handle is None else io.BufferedReader(_FromStart(handle), READ_BYTES)
            with opened as file:
                for number, offset, content in self._records.find_extents(file):
                    made = functools.partial(self._make_rows, number, offset, content)
                    for member, row in enumerate(reading.attempt_record(self.place_of(number), made) or ()):
                        yield (number, offset, len(content), member), row

    def read_row(self, number: int, offset: int, length: int, member: int) -> Row:
        try:
            if (handle := self._keep_open()) is not None:
                content = os.pread(handle, length, offset)
            else:
                with self._plain.open("rb", buffering=0) as opened:
                    content = os.pread(opened.fileno(), length, offset)
            return self._make_rows(number, offset, content)[member]
        except CHANGED:
            raise row_changed(self.place_of(number)) from None
        except OSError as problem:
            raise ConfigError(
                f"{self.place_of(number)}: the file cannot be read any more ({problem.strerror or problem}); put it "
                "back as it was, and start again"
            ) from None

    def place_of(self, number: int) -> str:
        return self._records.place_of(number)

    def _make_rows(self, number: int, offset: int, content: bytes) -> tuple[Row, ...]:
        return self._make(self.place_of(number), self._records.parse_record(number, offset, content))

    def _keep_open(self) -> int | None:
        """A descriptor of the file, which keeps the file readable even if its name is removed; None if too many others
        are open."""
        if self._handle is None:
            with _opening:
                may, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                most = MOST_OPEN if may == resource.RLIM_INFINITY else min(MOST_OPEN, may // 4)
                if self._handle is None and len(_kept_open) < most:
                    self._handle = os.open(self._plain, os.O_RDONLY | os.O_CLOEXEC)
                    _kept_open.add(self._handle)
        return self._handle


_opening = threading.Lock()
_kept_open: set[int] = set()
"""Descriptors of the files of this process that stay open between two rows."""


class _FromStart(io.RawIOBase):
    """Reads an open file from its start, independently of other reads of it. The file itself stays open."""

    def __init__(self, handle: int) -> None:
        self._handle, self._offset = handle, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        number = os.preadv(self._handle, [buffer], self._offset)
        self._offset += number
        return number


def row_changed(place: str) -> ConfigError:
    """The error of a row that is no longer what it was when the index was made."""
    return ConfigError(f"{place}: the file has changed while it was used; start again")


# Copies


def plain_file(path: Path, split: str = "") -> Path:
    """The file in which the records of `path` are found: itself, or its copy, which is made if there is none.

    If a directory that save_to_disk has written has several splits, `split` is the one to read. Raises ConfigError if
    `path` cannot be read, or the disk of the cache is too small.
    """
    if path.suffix not in DECOMPRESSED and not has_arrow_rows(path):
        return path
    home = cache_dir() / COPIES
    room = DiskRoom(f"{path}: its rows", home, f", or write {path.name}:rows=memory")
    with damage_of(path):
        stats = _file_stats(path, split)
    recipe: dict[str, int | str] = {
        "file": str(path.resolve()),
        "bytes": sum(one.st_size for one in stats),
        "modified_ns": max((one.st_mtime_ns for one in stats), default=0),
        "form": 3 if has_arrow_rows(path) else 1,
    }

    def make(directory: Path) -> None:
        to_stderr(f"{path}: writing its rows into {home}, so that each can be read by itself")
        with (directory / COPIES).open("wb") as target:
            for part in copy_parts(path, split):
                room.require_room()
                room.num_bytes += target.write(part)
        to_stderr(f"{path}: {gb_text(room.num_bytes)} of rows in {home}")

    recipe |= {"split": split} if path.is_dir() else {}
    try:
        return cached_directory(COPIES, path.name, recipe, make, to_stderr, unused_days=UNUSED_DAYS) / COPIES
    except OSError as problem:
        raise room.describe_refused(problem) from None


def num_bytes_of(path: Path, split: str = "") -> int:
    """Size of a file, or of the rows of one split that save_to_disk has written."""
    return sum(file.st_size for file in _file_stats(path, split))


def _file_stats(path: Path, split: str) -> list[os.stat_result]:
    if not path.is_dir():
        return [path.stat()]
    home = path / split if (path / split).is_dir() else path
    return [file.stat() for file in sorted(home.rglob("*.arrow"))]


def copy_parts(path: Path, split: str) -> Iterator[bytes]:
    """The content of the copy. Raises ConfigError if `path` cannot be read."""
    with damage_of(path):
        if has_arrow_rows(path):
            yield from pickle_rows(arrow_rows(path, split))
        else:
            with open_bytes(path) as file:
                while part := file.read(COPY_BYTES):
                    yield part


# Rows that are read when they are requested


@runtime_checkable
class KnownById(Protocol):
    """Rows whose ids are known without reading them."""

    def prompt_ids(self) -> Iterator[str]: ...


class IndexedRows(Sequence[Row]):
    """Some of the rows of `stores`. Each line of `places` is one row: store, number, offset, bytes and member."""

    def __init__(
        self, stores: Sequence[RowStore], places: Ints, ids: Digests, asked: Digests, occurrences: Ints
    ) -> None:
        self.stores, self.places, self.occurrences = stores, places, occurrences
        self.ids, self.asked = ids, asked

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> IndexedRows: ...

    def __getitem__(self, index: int | slice) -> Row | IndexedRows:
        if isinstance(index, slice):
            return self.pick_rows(np.arange(len(self))[index])
        row = self.read_row(index)
        self._require_same(index, row.prompt_id, self.ids)
        return row

    def read_row(self, index: int) -> Row:
        """One row. Raises ConfigError if what it asks has changed; its own id is not compared."""
        number, *address = map(int, self.places[index])
        store = self.stores[number]
        row = store.word(store.read_row(*address))
        if (occurrence := int(self.occurrences[index])) >= 0:
            values = {field.name: getattr(row, field.name) for field in dataclasses.fields(Row)}
            row = Demonstration(**values, occurrence=occurrence)
        self._require_same(index, row.asked_id, self.asked)
        return row

    def _require_same(self, index: int, found: str, known: Digests) -> None:
        if int(found, 16) != int(known[index]):
            store, number = map(int, self.places[index][:2])
            raise row_changed(self.stores[store].place_of(number))

    def pick_rows(self, indices: Ints) -> IndexedRows:
        """These rows, in this order."""
        return IndexedRows(
            self.stores, self.places[indices], self.ids[indices], self.asked[indices], self.occurrences[indices]
        )

    def prompt_ids(self) -> Iterator[str]:
        """The `prompt_id` of each row, without reading the row."""
        return hex_digests(self.ids)

    @functools.cached_property
    def by_id(self) -> Mapping[str, Row]:
        """Prompt id -> row, read when it is looked up."""
        return _ById(self)


class _ById(Mapping[str, Row]):
    """Prompt id -> row; with `found`, the row at the index that `found` has for it."""

    def __init__(self, rows: IndexedRows, found: Ints | None = None) -> None:
        self._rows, self._found = rows, found
        self._order = np.argsort(rows.ids, kind="stable")

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
        of_both = IndexedRows(
            rows.stores,
            np.concatenate((rows.places, others.places)),
            np.concatenate((rows.ids, others.ids)),
            np.concatenate((rows.asked, others.asked)),
            np.concatenate((rows.occurrences, others.occurrences)),
        )
        return cast("Sequence[R]", of_both)
    return (*rows, *others)


def pick_rows(rows: Sequence[R], indices: Sequence[int]) -> Sequence[R]:
    """The rows at these indices, in this order."""
    if isinstance(rows, IndexedRows):
        return cast("Sequence[R]", rows.pick_rows(np.array(indices, np.int64)))
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
        return _ById(rows, found)
    return {row.prompt_id: rows[index] for row, index in zip(rows, found, strict=True)}


def lowest_rows(rows: Sequence[Row], most: int | None) -> Sequence[Row]:
    """Up to `most` rows, those with the lowest prompt ids, which do not depend on the order of the data."""
    if isinstance(rows, IndexedRows):
        return rows.pick_rows(np.argsort(rows.ids, kind="stable")[:most])
    return tuple(sorted(rows, key=lambda row: row.prompt_id)[:most])


def lowest_asked(rows: Sequence[Row], most: int | None) -> Sequence[Row]:
    """Up to `most` rows with the lowest digests of what they ask, so that rows of one prompt are neighbours."""
    if isinstance(rows, IndexedRows):
        return rows.pick_rows(np.lexsort((rows.ids, rows.asked))[:most])
    return tuple(sorted(rows, key=lambda row: (row.asked_id, row.prompt_id))[:most])


def asked_ids(rows: Iterable[Row]) -> Iterator[str]:
    """The `asked_id` of each row."""
    return hex_digests(rows.asked) if isinstance(rows, IndexedRows) else (row.asked_id for row in rows)


def row_sources(rows: Iterable[Row]) -> Iterator[str]:
    """The source of each row of a mixture."""
    if isinstance(rows, IndexedRows):
        return (rows.stores[store].source for store in rows.places[:, 0])
    return (row.columns[OF_TASK] for row in rows)


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

    def pick_rows(self, indices: Ints) -> Scan:
        """These rows, in this order."""
        return Scan(self.places[indices], self.ids[indices], self.asked[indices], self.scores[indices])


def scan_source(
    stores: Sequence[RowStore], own: range, reading: Reading, opened: dict[str, None], *, every: bool, mixed: bool
) -> tuple[Scan, int]:
    """The rows of those stores that are one source's `own`, and 0; in a mixture only the rows that are taken, and the
    number of other rows, which repeat their prompts. `opened` gets the columns that hold messages as text. Raises
    ConfigError."""
    places, scores = array("q"), array("d")
    worded, unworded = array("Q"), array("Q")  # two digests for each row: its own, and that of what it asks
    for number in own:
        store = stores[number]
        for address, row in store.read_rows(reading):
            if row.opened:
                opened.update(dict.fromkeys(row.opened))
            places.extend((number, *address))
            scores.append(row.score)
            if mixed:
                unworded.extend((int(row.prompt_id, 16), int(row.asked_id, 16)))
            asked = store.word(row)
            worded.extend((int(asked.prompt_id, 16), int(asked.asked_id, 16)))
    in_order, of_rows = np.frombuffer(places, np.int64).reshape(-1, 5), np.frombuffer(scores, np.float64)
    pairs, own_pairs = (np.frombuffer(both, np.uint64).reshape(-1, 2).T for both in (worded, unworded))
    found = Scan(in_order, pairs[0], pairs[1], of_rows)
    if not mixed:
        return found, 0
    among_own = Scan(in_order, own_pairs[0], own_pairs[1], of_rows)
    taken, _ = _choose_rows(among_own, every=every)
    trained_first = np.argsort(among_own.asked[taken] % HELD_OUT_ONE_IN == 0, kind="stable")
    return found.pick_rows(taken[trained_first]), len(found) - len(taken)


def part_rows(stores: Sequence[RowStore], scans: Sequence[Scan], *, every: bool) -> Rows:
    """Both parts of the rows of all sources; with `every` including rows that repeat a prompt, as in `Rows.every`."""
    found = scans[0]
    if len(scans) > 1:
        found = Scan(*(np.concatenate([getattr(scan, name) for scan in scans]) for name in Scan.__annotations__))
    indices, occurrences = _choose_rows(found, every=every)
    held_out = found.asked[indices] % HELD_OUT_ONE_IN == 0
    parts = []
    for part in (False, True):
        taken, numbers = found.pick_rows(indices[held_out == part]), occurrences[held_out == part]
        rows = IndexedRows(stores, taken.places, taken.ids, taken.asked, numbers)
        for index in np.flatnonzero(numbers > 0):  # only these are read again: their ids are not the prompt's
            rows.ids[index] = int(rows.read_row(int(index)).prompt_id, 16)
        parts.append(rows)
    train, others = parts
    return Rows(train, others, repeated=len(found) - len(indices))


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

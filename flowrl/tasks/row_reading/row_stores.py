"""Where single rows are read from: the rows of one file, which stay on disk, or rows in memory.

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
import functools
import io
import os
import pickle
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowrl.cache import cache_dir, cached_directory
from flowrl.disk_room import DiskRoom
from flowrl.errors import ConfigError
from flowrl.hub import gigabytes, to_stderr
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
from flowrl.tasks.rows import Row

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


class RowStore(Protocol):
    """All rows in their order, or single rows. Reads from several threads do not disturb each other."""

    def read_rows(self, reading: Reading) -> Iterator[tuple[RowAddress, Row]]:
        """Every row, in order. Raises ConfigError, and Malformed if `reading` stops at malformed records."""
        ...

    def read_row(self, number: int, offset: int, length: int, member: int) -> Row:
        """The row at one address. Raises ConfigError if it is no longer there."""
        ...

    def place_of(self, number: int) -> str:
        """The place of a record, as errors name it."""
        ...


class HeldRows:
    """Rows that are generated, or that the task keeps in memory, next to others that stay on disk."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def read_rows(self, reading: Reading) -> Iterator[tuple[RowAddress, Row]]:
        for number, row in enumerate(self._rows):
            yield (number, 0, 0, 0), row

    def read_row(self, number: int, offset: int, length: int, member: int) -> Row:
        return self._rows[number]

    def place_of(self, number: int) -> str:
        return self._rows[number].place


class FileRows:
    """The rows of one file, or of one split that save_to_disk has written.

    Raises ConfigError if the file cannot be divided into records.
    """

    def __init__(self, path: Path, split: str, make: Make) -> None:
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
        handle = self._keep_open()
        opened = self._plain.open("rb") if handle is None else io.BufferedReader(_FromStart(handle), READ_BYTES)
        with damage_of(self._path), opened as file:
            for number, offset, content in self._records.find_extents(file):
                made = functools.partial(self._make_rows, number, offset, content)
                for member, row in enumerate(reading.attempt_at(self.place_of(number), made) or ()):
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
                room.require()
                room.num_bytes += target.write(part)
        to_stderr(f"{path}: {gigabytes(room.num_bytes)} of rows in {home}")

    recipe |= {"split": split} if path.is_dir() else {}
    try:
        return cached_directory(COPIES, path.name, recipe, make, to_stderr, unused_days=UNUSED_DAYS) / COPIES
    except OSError as problem:
        raise room.refused(problem) from None


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

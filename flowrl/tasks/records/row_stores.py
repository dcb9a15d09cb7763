"""Where single rows are read from: the rows of one file, which stay on disk, or rows in memory.

A row is found again by its address in its store: the record's number, the offset of its first byte, its bytes, and
which of the record's rows it is. The files must not change while they are used.
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
from typing import IO, Any, Protocol

from flowrl.errors import ConfigError
from flowrl.tasks.records.compressed import damage_of
from flowrl.tasks.records.extents import extents_of
from flowrl.tasks.records.formats import RawRow
from flowrl.tasks.records.malformed import Reading
from flowrl.tasks.records.spooled import plain_file
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


class RowStore(Protocol):
    """All rows in their order, or single rows. Reads from several threads do not disturb each other."""

    def rows(self, reading: Reading) -> Iterator[tuple[RowAddress, Row]]:
        """Every row, in order. Raises ConfigError, and Malformed if `reading` stops at malformed records."""
        ...

    def row(self, number: int, offset: int, length: int, member: int) -> Row:
        """The row at one address. Raises ConfigError if it is no longer there."""
        ...

    def place(self, number: int) -> str:
        """The place of a record, as errors name it."""
        ...


class FileRows:
    """The rows of one file, or of one split that save_to_disk has written.

    Raises ConfigError if the file cannot be divided into records.
    """

    def __init__(self, path: Path, split: str, make: Make) -> None:
        self._path, self._make = path, make
        self._plain = plain_file(path, split)
        with damage_of(path):
            self._extents = extents_of(path, self._plain)
        self._handle: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            _kept_open.discard(self._handle)
            os.close(self._handle)  # type: ignore[arg-type]

    def rows(self, reading: Reading) -> Iterator[tuple[RowAddress, Row]]:
        with damage_of(self._path), self._whole() as opened:
            for number, offset, content in self._extents.all(opened):
                made = functools.partial(self._made, number, offset, content)
                for member, row in enumerate(reading.at(self.place(number), made) or ()):
                    yield (number, offset, len(content), member), row

    def row(self, number: int, offset: int, length: int, member: int) -> Row:
        try:
            return self._made(number, offset, self._read(offset, length))[member]
        except CHANGED:
            raise has_changed(self.place(number)) from None
        except OSError as problem:
            raise ConfigError(
                f"{self.place(number)}: the file cannot be read any more ({problem.strerror or problem}); put it back "
                "as it was, and start again"
            ) from None

    def place(self, number: int) -> str:
        return self._extents.place(number)

    def _made(self, number: int, offset: int, content: bytes) -> tuple[Row, ...]:
        return self._make(self.place(number), self._extents.record(number, offset, content))

    def _whole(self) -> IO[bytes]:
        handle = self._kept()
        return self._plain.open("rb") if handle is None else io.BufferedReader(_FromStart(handle), READ_BYTES)

    def _read(self, offset: int, length: int) -> bytes:
        if (handle := self._kept()) is not None:
            return os.pread(handle, length, offset)
        with self._plain.open("rb", buffering=0) as opened:
            return os.pread(opened.fileno(), length, offset)

    def _kept(self) -> int | None:
        """A descriptor of the file, which keeps the file readable even if its name is removed; None if too many others
        are open."""
        if self._handle is None:
            with _opening:
                if self._handle is None and len(_kept_open) < _most_open():
                    self._handle = os.open(self._plain, os.O_RDONLY | os.O_CLOEXEC)
                    _kept_open.add(self._handle)
        return self._handle


_opening = threading.Lock()
_kept_open: set[int] = set()
"""Descriptors of the files of this process that stay open between two rows."""


def _most_open() -> int:
    may, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if may == resource.RLIM_INFINITY else min(MOST_OPEN, may // 4)


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


def has_changed(place: str) -> ConfigError:
    """The error of a row that is no longer what it was when the index was made."""
    return ConfigError(f"{place}: the file has changed while it was used; start again")


class HeldRows:
    """Rows that are generated, or that the task keeps in memory, next to others that stay on disk."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def rows(self, reading: Reading) -> Iterator[tuple[RowAddress, Row]]:
        for number, row in enumerate(self._rows):
            yield (number, 0, 0, 0), row

    def row(self, number: int, offset: int, length: int, member: int) -> Row:
        return self._rows[number]

    def place(self, number: int) -> str:
        return self._rows[number].place

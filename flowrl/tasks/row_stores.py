"""Where single rows are read from: the rows of one file, which stay in it, or rows that are held.

A row is found again by its address in its store: the record's number, the offset of its first byte, its bytes, and
which of the record's rows it is. The files have to stay as they are while they are used.
"""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowrl.errors import ConfigError
from flowrl.tasks.extents import extents_of
from flowrl.tasks.formats import Record
from flowrl.tasks.malformed import Reading
from flowrl.tasks.rows import Row
from flowrl.tasks.spooled import plain_file

Address = tuple[int, int, int, int]
"""(number, offset, bytes, member)"""
Make = Callable[[str, Record], tuple[Row, ...]]
"""(place, record) -> its rows, () if it is left out. Raises Malformed."""
MOST_OPEN = 128
"""Of more files than this none stays open between two rows: a process may open some thousand."""


class RowStore(Protocol):
    """Rows in their order, and single ones. Reads from several threads do not disturb each other."""

    def rows(self, reading: Reading) -> Iterator[tuple[Address, Row]]:
        """Every row, in order. Raises ConfigError, Malformed by `reading`."""
        ...

    def row(self, number: int, offset: int, length: int, member: int) -> Row:
        """The row at one address. Raises ConfigError if it is no longer there."""
        ...


class FileRows:
    """The rows of one file, or of one split that save_to_disk has written.

    Raises ConfigError if it cannot be cut into records.
    """

    def __init__(self, path: Path, split: str, make: Make, *, stays_open: bool) -> None:
        self._make, self._stays_open = make, stays_open
        self._plain = plain_file(path, split)
        self._extents = extents_of(path, self._plain)
        self._handle: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            os.close(self._handle)  # type: ignore[arg-type]

    def rows(self, reading: Reading) -> Iterator[tuple[Address, Row]]:
        if self._stays_open:
            self._opened()  # from now on it is there, whatever becomes of its name
        with self._plain.open("rb") as opened:
            for number, offset, content in self._extents.all(opened):
                made = functools.partial(self._made, number, offset, content)
                for member, row in enumerate(reading.at(self._extents.place(number), made) or ()):
                    yield (number, offset, len(content), member), row

    def row(self, number: int, offset: int, length: int, member: int) -> Row:
        try:
            return self._made(number, offset, self._read(offset, length))[member]
        except (ConfigError, ValueError, csv.Error, IndexError):  # what stands there is no row any more
            place = self._extents.place(number)
            raise ConfigError(f"{place}: the file has changed while it was used; start again") from None

    def _made(self, number: int, offset: int, content: bytes) -> tuple[Row, ...]:
        return self._make(self._extents.place(number), self._extents.record(number, offset, content))

    def _read(self, offset: int, length: int) -> bytes:
        if not self._stays_open:
            with self._plain.open("rb", buffering=0) as opened:
                return os.pread(opened.fileno(), length, offset)
        return os.pread(self._opened(), length, offset)

    def _opened(self) -> int:
        if self._handle is None:
            self._handle = os.open(self._plain, os.O_RDONLY | os.O_CLOEXEC)
        return self._handle


class HeldRows:
    """Rows that are generated, or that the task wants in memory, beside others that stay on disk."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def rows(self, reading: Reading) -> Iterator[tuple[Address, Row]]:
        for number, row in enumerate(self._rows):
            yield (number, 0, 0, 0), row

    def row(self, number: int, offset: int, length: int, member: int) -> Row:
        return self._rows[number]


def file_stores(paths: Sequence[Path], split: str, make: Make) -> tuple[FileRows, ...]:
    """A store for each file. Raises ConfigError."""
    few = len(paths) <= MOST_OPEN
    return tuple(FileRows(path, split, make, stays_open=few) for path in paths)

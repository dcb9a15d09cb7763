"""Where each record of a file is, so that one record can be read without those before it.

An extent consists of the record's number, as its place names it, the offset of its first byte, and its bytes.
`extents_of` chooses how the extents of a file are found: as lines, elements of a JSON array, rows of a table, pickled
rows, or one text.
"""

from __future__ import annotations

import csv
import io
import itertools
import pickle
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from flowrl.errors import ConfigError
from flowrl.tasks.records.array_elements import elements
from flowrl.tasks.records.formats import (
    PARQUET,
    PLAIN,
    TABLES,
    RawRow,
    arrow_row,
    check_header,
    format_of,
    parsed_line,
    text_record,
)
from flowrl.tasks.records.formats import cells as cells_of
from flowrl.tasks.records.malformed import Malformed

Extent = tuple[int, int, bytes]
"""(number, offset, bytes) of a record."""
LENGTH = struct.Struct("<q")
"""What precedes a pickled row: its number of bytes."""


class Extents(Protocol):
    """How the records of one file are found and read."""

    def all(self, file: IO[bytes]) -> Iterator[Extent]:
        """Every extent, in order. Raises ConfigError if the file cannot be divided into extents."""
        ...

    def place(self, number: int) -> str:
        """The place of a record, as errors name it."""
        ...

    def record(self, number: int, offset: int, content: bytes) -> RawRow:
        """The record that an extent holds. Raises Malformed."""
        ...


def extents_of(path: Path, plain: Path) -> Extents:
    """How the records of `path` are found. `plain` has its content, decompressed or pickled if necessary. Raises
    ConfigError."""
    kind = format_of(path)
    if kind in TABLES:
        return TableRows(path, TABLES[kind], plain)
    if kind == PARQUET or path.is_dir():
        return PickledRows(path)
    if kind == PLAIN:
        return WholeText(path)
    return ArrayElements(path) if kind == ".json" and _is_array(plain) else Lines(path)


@dataclass
class Lines:
    """JSON lines."""

    path: Path

    def all(self, file: IO[bytes]) -> Iterator[Extent]:
        offset = 0
        for number, content in enumerate(file, start=1):
            if content.strip():
                yield number, offset, content
            offset += len(content)

    def place(self, number: int) -> str:
        return f"{self.path}:{number}"

    def record(self, number: int, offset: int, content: bytes) -> RawRow:
        return parsed_line(self.place(number), _text(offset, content))


@dataclass
class ArrayElements:
    """The elements of a file that is one JSON array."""

    path: Path

    def all(self, file: IO[bytes]) -> Iterator[Extent]:
        for number, (offset, content) in enumerate(elements(self.path, file), start=1):
            yield number, offset, content

    def place(self, number: int) -> str:
        return f"{self.path}, row {number}"

    def record(self, number: int, offset: int, content: bytes) -> RawRow:
        return parsed_line(self.place(number), _text(offset, content))


@dataclass
class WholeText:
    """A file that is one text."""

    path: Path

    def all(self, file: IO[bytes]) -> Iterator[Extent]:
        if content := file.read():
            yield 1, 0, content

    def place(self, number: int) -> str:
        return str(self.path)

    def record(self, number: int, offset: int, content: bytes) -> RawRow:
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", errors="surrogateescape")
        return text_record(self.path, text.read())


@dataclass
class TableRows:
    """The rows of a table, each of one line or, where a cell has line breaks, of several."""

    path: Path
    delimiter: str
    plain: Path
    header: list[str] = field(init=False)

    def __post_init__(self) -> None:
        csv.field_size_limit(sys.maxsize)
        with self.plain.open("rb") as file:
            _, _, self.header, _ = next(self._rows(file), (0, 0, [], b""))
        check_header(self.path, self.header)

    def all(self, file: IO[bytes]) -> Iterator[Extent]:
        for number, offset, values, content in itertools.islice(self._rows(file), 1, None):
            if values:
                yield number, offset, content

    def place(self, number: int) -> str:
        return f"{self.path}:{number}"

    def record(self, number: int, offset: int, content: bytes) -> RawRow:
        lines = io.StringIO(_text(offset, content), newline="")
        (values,) = csv.reader(lines, delimiter=self.delimiter, strict=True)
        return cells_of(self.place(number), self.header, values)

    def _rows(self, file: IO[bytes]) -> Iterator[tuple[int, int, list[str], bytes]]:
        """(last line, offset, values, bytes) of each row, including the header."""
        taken: list[bytes] = []
        lines = csv.reader(_kept(file, taken), delimiter=self.delimiter, strict=True)
        offset = 0
        try:
            for values in lines:
                content = b"".join(taken)
                taken.clear()
                yield lines.line_num, offset, values, content
                offset += len(content)
        except csv.Error as problem:
            raise ConfigError(
                f"{self.path}:{lines.line_num}: invalid CSV ({problem}); quote values as CSV does"
            ) from None


@dataclass
class PickledRows:
    """The rows of a Parquet file or saved dataset, as `pickled` has written them: each can be read without the
    others."""

    path: Path

    def all(self, file: IO[bytes]) -> Iterator[Extent]:
        offset, number = 0, 0
        while head := file.read(LENGTH.size):
            content = file.read(*LENGTH.unpack(head))
            number, offset = number + 1, offset + len(head)
            yield number, offset, content
            offset += len(content)

    def place(self, number: int) -> str:
        return f"{self.path}, row {number}"

    def record(self, number: int, offset: int, content: bytes) -> RawRow:
        found: RawRow | str = pickle.loads(content)
        if isinstance(found, str):
            raise Malformed(f"{self.place(number)}{found}")
        return found


def pickled(rows: Iterable[RawRow | str]) -> Iterator[bytes]:
    """The content of a file for `PickledRows`: rows, or in place of a malformed row a text that says what is wrong."""
    for row in rows:
        content = pickle.dumps(row, protocol=5)
        yield LENGTH.pack(len(content)) + content


def rows_of_batch(batch: Any) -> Iterator[RawRow | str]:
    """The rows of an Arrow batch, or in place of a malformed row a text that says what is wrong."""
    try:
        yield from batch.to_pylist()
    except (UnicodeDecodeError, OverflowError):
        for number in range(batch.num_rows):
            try:
                yield arrow_row("", batch, number)
            except Malformed as problem:
                yield str(problem)


def _text(offset: int, content: bytes) -> str:
    return content.decode("utf-8" if offset else "utf-8-sig", errors="surrogateescape")


def _kept(file: IO[bytes], taken: list[bytes]) -> Iterator[str]:
    """The lines of `file` as text. The bytes of each line are appended to `taken` when the line is requested."""
    begun = 0
    for found in file:
        for content in found.splitlines(keepends=True):  # also at a lone carriage return
            taken.append(content)
            yield _text(begun, content)
            begun += len(content)


def _is_array(plain: Path) -> bool:
    """Whether the content begins with a bracket. Read in pieces, for the whole array may be one line."""
    with plain.open("rb") as file:
        while piece := file.read(io.DEFAULT_BUFFER_SIZE):
            if found := piece.lstrip(b" \t\r\n\xef\xbb\xbf"):
                return found.startswith(b"[")
    return False

"""The records of one file: JSON lines and arrays, CSV, TSV, text, each also compressed; Parquet; saved datasets.

A text format divides its file into extents, each of which can be parsed without those before it: reading a file and
reading one of its records later are the same code. Rows of Parquet and of what `datasets` has saved are read by those
libraries, in batches. Every record has a place, such as `train.jsonl:17`, which errors name.

A .txt file is one record with the column `text`. Text is UTF-8. A line with other bytes is malformed, and so is a line
that its format does not allow: reading stops there, or skips the record and keeps the error (`Reading`).
"""

from __future__ import annotations

import bz2
import csv
import difflib
import gzip
import io
import json
import lzma
import pickle
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from flowrl.errors import ConfigError

T = TypeVar("T")
RawRow = Mapping[str, Any]
LINES, TABLES = (".jsonl", ".ndjson"), {".csv": ",", ".tsv": "\t"}
PLAIN, PARQUET = ".txt", ".parquet"
TEXTS = (*LINES, ".json", *TABLES, PLAIN)
FORMATS = ".jsonl, .json, .csv, .tsv, .parquet, .txt"
SAVED = ("dataset_dict.json", "state.json")
"""Files that identify a directory written by save_to_disk."""
PART_BYTES, ROWS_A_BATCH = 1 << 20, 1024
"""How much of a Parquet file is read and decoded at a time: a whole row group may be larger than memory."""
DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading a damaged file raises."""
LENGTH = struct.Struct("<q")
"""What precedes a pickled row: its number of bytes."""


# Records that cannot be used


class Malformed(ConfigError):
    """A record cannot be used. The error text starts with the record's place."""


class NothingInIt(Malformed):
    """A record holds nothing to use; it is left out and counted, even if malformed records stop the reading."""


class LowScore(ConfigError):
    """A record's score is below `min_score`; the record is left out and counted."""


def missing_column(place: str, record: RawRow, column: str, option: str) -> Malformed:
    """The error of a record without the column that an option of the task names."""
    return Malformed(f"{place}: no column {column!r}, which {option}= names; {column_hint(record, column, option)}")


def column_hint(record: RawRow, column: str, option: str) -> str:
    """Which column of the record could have been meant."""
    close = difflib.get_close_matches(column, record, 1)
    return f"did you mean {option}={close[0]}?" if close else f"set {option}= to one of {', '.join(record) or 'none'}"


@dataclass
class Reading:
    """How to handle malformed records: stop at the first, or skip them and keep their errors."""

    malformed: str = "stop"
    skipped: list[str] = field(default_factory=list)
    low_scores: int = 0
    """Number of records that were left out for their score."""

    def attempt_record(self, place: str, make: Callable[[], T]) -> T | None:
        """The result of `make` for the record at `place`; None if it raised for a record that is left out. A record
        with values that no message can carry is malformed."""
        try:
            return make()
        except LowScore:
            self.low_scores += 1
            return None
        except Malformed as malformed:
            problem = malformed
        except ConfigError as refusal:
            problem = Malformed(f"{place}: {refusal}")
        except RecursionError:
            problem = Malformed(f"{place}: values nested too deep; flatten them, or write them as text")
        if self.malformed == "stop" and not isinstance(problem, NothingInIt):
            raise problem from None
        self.skipped.append(str(problem))
        return None


# Files


def _open_zstandard(path: Path) -> IO[bytes]:
    import pyarrow

    opened: IO[bytes] = pyarrow.input_stream(path, compression="zstd")
    return opened


DECOMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}
"""Suffix of a compressed file -> what opens it."""


def open_bytes(path: Path) -> IO[bytes]:
    """The content of a file, decompressed if its name says so."""
    return io.BufferedReader(DECOMPRESSED[path.suffix](path)) if path.suffix in DECOMPRESSED else path.open("rb")


@contextmanager
def damage_of(path: Path) -> Iterator[None]:
    """Turn an error raised within because the file is damaged or cannot be opened into a ConfigError that names
    `path`."""
    try:
        yield
    except DAMAGED as problem:
        raise ConfigError(f"{path} cannot be read: {problem}; write it again") from None


def format_of(path: Path) -> str:
    """The suffix that says how a file is read, without the suffix of its compression; "" if it is unknown."""
    name = path.with_suffix("") if path.suffix in DECOMPRESSED else path
    known = TEXTS if name is not path else (*TEXTS, PARQUET)
    return name.suffix if name.suffix in known else ""


def has_arrow_rows(path: Path) -> bool:
    """Whether pyarrow or `datasets` read this file, or what save_to_disk wrote into this directory."""
    return format_of(path) == PARQUET or path.is_dir()


def read_records(path: Path, split: str, reading: Reading) -> Iterator[tuple[str, RawRow]]:
    """(place, record) of everything in a file, or in one split that save_to_disk has written. Raises ConfigError."""
    if has_arrow_rows(path):
        for number, row in enumerate(arrow_rows(path, split), start=1):
            place = f"{path}, row {number}"
            if (record := reading.attempt_record(place, partial(_usable_row, place, row))) is not None:
                yield place, record
        return
    with damage_of(path):
        records = format_records(path, path)
        with open_bytes(path) as file:
            for number, offset, content in records.find_extents(file):
                parse = partial(records.parse_record, number, offset, content)
                place = records.place_of(number)
                if (record := reading.attempt_record(place, parse)) is not None:
                    yield place, record


# Text formats


Extent = tuple[int, int, bytes]
"""(number, offset, bytes) of a record: its number, as its place names it, the offset of its first byte, and its
bytes."""


@dataclass
class JsonLines:
    """One object per line. Other formats find, name or parse their records in another way."""

    path: Path

    def find_extents(self, file: IO[bytes]) -> Iterator[Extent]:
        """Every extent, in order. Raises ConfigError if the file cannot be divided into extents."""
        offset = 0
        for number, content in enumerate(_split_lines(file), start=1):
            if not content.isspace():
                yield number, offset, content
            offset += len(content)

    def place_of(self, number: int) -> str:
        """The place of a record, as errors name it."""
        return f"{self.path}:{number}"

    def parse_record(self, number: int, offset: int, content: bytes) -> RawRow:
        """The record that an extent holds. Raises Malformed."""
        place = self.place_of(number)
        text = _decode_text(place, offset, content)
        try:
            record = json.loads(text)
        except json.JSONDecodeError as problem:
            raise Malformed(f"{place}: invalid JSON ({problem.msg}); write one object per line") from None
        except ValueError as problem:  # an integer of more digits than Python converts
            raise Malformed(f"{place}: {str(problem).partition(';')[0]}; write it as a string") from None
        except RecursionError:
            raise Malformed(f"{place}: values nested too deep; flatten them, or write them as text") from None
        if not isinstance(record, dict):
            raise Malformed(f"{place}: a {type(record).__name__} where an object was needed; write one object per line")
        return record


@dataclass
class ArrayElements(JsonLines):
    """The elements of a file that is one JSON array. A byte that is not UTF-8 spoils the whole array."""

    plain: Path

    def find_extents(self, file: IO[bytes]) -> Iterator[Extent]:
        for number, (offset, content) in enumerate(ArrayScan(self.path, file).find_elements(), start=1):
            if not content.isascii() and OTHER_BYTE.search(content.decode(errors="surrogateescape")):
                at = 0  # the array is read again, for the line of the byte
                with open_bytes(self.plain) as again:
                    for line_number, line in enumerate(again, start=1):
                        _decode_text(f"{self.path}:{line_number}", at, line)
                        at += len(line)
            yield number, offset, content

    def place_of(self, number: int) -> str:
        return f"{self.path}, row {number}"


@dataclass
class WholeText(JsonLines):
    """A file that is one text."""

    def find_extents(self, file: IO[bytes]) -> Iterator[Extent]:
        if content := file.read():
            yield 1, 0, content

    def place_of(self, number: int) -> str:
        return str(self.path)

    def parse_record(self, number: int, offset: int, content: bytes) -> RawRow:
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", errors="surrogateescape").read()
        if OTHER_BYTE.search(text):
            for line_number, line in enumerate(text.split("\n"), start=1):
                _require_utf8(f"{self.path}:{line_number}", line)
        return {"text": text}


@dataclass
class TableRows(JsonLines):
    """The rows of a table with a header, each of one line or, where a cell has line breaks, of several. Every value is
    text."""

    delimiter: str
    plain: Path
    header: list[str] = field(init=False)

    def __post_init__(self) -> None:
        csv.field_size_limit(sys.maxsize)
        with open_bytes(self.plain) as file:
            _, _, header, _ = next(self._find_rows(file), (0, 0, [], b""))
        _require_utf8(f"{self.path}:1", "".join(header))
        twice = sorted({name for name in header if header.count(name) > 1})
        if not header or twice or "" in header:
            found = f"has the column {twice[0]!r} twice" if twice and twice[0] else "does not name every column"
            raise ConfigError(f"{self.path}: its first line {found}; it has to name the columns, each once")
        self.header = header

    def find_extents(self, file: IO[bytes]) -> Iterator[Extent]:
        rows = self._find_rows(file)
        next(rows, None)  # the header
        for number, offset, values, content in rows:
            if values:
                yield number, offset, content

    def parse_record(self, number: int, offset: int, content: bytes) -> RawRow:
        text = _decode_text(self.place_of(number), offset, content, of_cells=self.delimiter)
        (values,) = csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter, strict=True)
        if len(values) != len(self.header):
            raise Malformed(
                f"{self.place_of(number)}: the row has {len(values)} cells, the header {len(self.header)}; quote what "
                "holds a delimiter"
            )
        return dict(zip(self.header, values, strict=True))

    def _find_rows(self, file: IO[bytes]) -> Iterator[tuple[int, int, list[str], bytes]]:
        """(last line, offset, values, bytes) of each row, including the header."""
        taken: list[bytes] = []

        def lines() -> Iterator[str]:
            begun = 0
            for content in _split_lines(file):
                taken.append(content)
                yield content.decode("utf-8" if begun else "utf-8-sig", errors="surrogateescape")
                begun += len(content)

        rows = csv.reader(lines(), delimiter=self.delimiter, strict=True)
        offset = 0
        try:
            for values in rows:
                content = b"".join(taken)
                taken.clear()
                yield rows.line_num, offset, values, content
                offset += len(content)
        except csv.Error as problem:
            raise ConfigError(
                f"{self.path}:{rows.line_num}: invalid CSV ({problem}); quote values as CSV does"
            ) from None


@dataclass
class PickledRows(JsonLines):
    """A copy of the rows of a Parquet file or saved dataset, as `pickle_rows` has written it."""

    def find_extents(self, file: IO[bytes]) -> Iterator[Extent]:
        offset, number = 0, 0
        while head := file.read(LENGTH.size):
            content = file.read(*LENGTH.unpack(head))
            number, offset = number + 1, offset + len(head)
            yield number, offset, content
            offset += len(content)

    def place_of(self, number: int) -> str:
        return f"{self.path}, row {number}"

    def parse_record(self, number: int, offset: int, content: bytes) -> RawRow:
        return _usable_row(self.place_of(number), pickle.loads(content))


def format_records(path: Path, plain: Path) -> JsonLines:
    """How the records of `path` are found in `plain`, which is the file itself or a copy that can be read from its
    middle. Raises ConfigError."""
    kind = format_of(path)
    if kind in TABLES:
        return TableRows(path, TABLES[kind], plain)
    if has_arrow_rows(path):
        return PickledRows(path)
    if kind == PLAIN:
        return WholeText(path)
    if kind == ".json":  # read in pieces, for a whole array may be one line
        with open_bytes(plain) as file:
            while piece := file.read(io.DEFAULT_BUFFER_SIZE):
                if begun := piece.lstrip(b" \t\r\n\xef\xbb\xbf"):
                    return ArrayElements(path, plain) if begun.startswith(b"[") else JsonLines(path)
    return JsonLines(path)


def pickle_rows(rows: Iterable[RawRow | str]) -> Iterator[bytes]:
    """The content of a file for `PickledRows`: rows, or in place of a malformed row a text that says what is wrong."""
    for row in rows:
        content = pickle.dumps(row, protocol=5)
        yield LENGTH.pack(len(content)) + content


def _split_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines with their ends; a lone carriage return ends a line, too."""
    for content in file:
        if b"\r" in content:
            yield from content.splitlines(keepends=True)
        else:
            yield content


OTHER_BYTE = re.compile("[\udc80-\udcff]")
"""How Python's surrogateescape represents a byte that is not UTF-8."""


def _decode_text(place: str, offset: int, content: bytes, *, of_cells: str = "") -> str:
    """The text of a record, without the file's mark. Raises Malformed for a byte that is not UTF-8, whose position is
    that in the line, or in the cells of a table with the delimiter `of_cells`."""
    encoding = "utf-8" if offset else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError:
        text = content.decode(encoding, errors="surrogateescape")
    if of_cells:
        text = "".join(next(csv.reader(io.StringIO(text, newline=""), delimiter=of_cells, strict=True)))
    _require_utf8(place, text)
    return text


def _require_utf8(place: str, text: str) -> None:
    if (found := OTHER_BYTE.search(text)) is not None:
        byte = ord(found.group()) - 0xDC00
        raise Malformed(
            f"{place}: the byte 0x{byte:02x} at position {found.start()} is not UTF-8; save the file as UTF-8"
        )


# JSON arrays of any length


CHUNK_BYTES = 1 << 20
BLANK = re.compile(r"[ \t\n\r]*")
MARK = "\xef\xbb\xbf"
"""The byte order mark of UTF-8."""
EXPONENT = len("e+1")
"""Number of characters that have to follow a number before it is certain that the number ends there."""
NEAR = 32
"""An error within this many characters of the end of what has been read may only mean that the element continues."""


class ArrayScan:
    """Finds the elements of the array in `file` without holding the array in memory. Errors name `path`.

    The bytes are scanned as Latin-1, so that each byte is one character and positions are offsets. This is safe: the
    syntax of JSON is ASCII, and no byte of a longer UTF-8 character is.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._text, self._at = "", 0
        """What has been read from the file and not yet dropped, and how much of it has been passed."""
        self._offset, self._line = 0, 1
        """Where `_text` begins in the file: offset and line."""
        self._decoder = json.JSONDecoder()

    def find_elements(self) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of each element. Raises ConfigError."""
        self.pass_over(MARK)
        if not self.pass_over("["):
            raise self.problem_at("Expecting '['")
        if not self.pass_over("]"):
            yield self.take_element()
            while self.pass_over(","):
                yield self.take_element()
            if not self.pass_over("]"):
                raise self.problem_at("Expecting ',' delimiter")
        self._skip_blanks()
        if self._at < len(self._text):
            raise self.problem_at("Extra data")

    def pass_over(self, wanted: str) -> bool:
        """Skip blanks, and `wanted` if it follows them; returns whether it did."""
        self._skip_blanks()
        found = self._text.startswith(wanted, self._at)
        self._at += len(wanted) if found else 0
        return found

    def take_element(self) -> tuple[int, bytes]:
        """(offset, bytes) of the next element; reads more of the file until its end is found."""
        self._skip_blanks()
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as problem:
                goes_on = "Unterminated" in problem.msg or problem.pos > len(self._text) - NEAR
                if not (goes_on and self._read_more()):
                    raise self.problem_at(problem.msg, problem.pos) from None
            except (ValueError, RecursionError) as problem:
                raise ConfigError(f"{self._path}: {str(problem).partition(';')[0]}; write it as a string") from None
            else:
                if end + EXPONENT <= len(self._text) or not self._read_more():  # a number may continue
                    break
        begin, self._at = self._at, int(end)
        return self._offset + begin, self._text[begin : self._at].encode("latin-1")

    def problem_at(self, what: str, position: int | None = None) -> ConfigError:
        """An error at this position of the text that has been read; None: where the scan is."""
        line = self._line + self._text.count("\n", 0, self._at if position is None else position)
        return ConfigError(f"{self._path}:{line}: invalid JSON ({what}); write the array again")

    def _skip_blanks(self) -> None:
        while True:
            blank = BLANK.match(self._text, self._at)
            assert blank is not None, "the pattern matches nothing, too"
            self._at = blank.end()
            if len(self._text) - self._at >= len(MARK) or not self._read_more():
                return

    def _read_more(self) -> bool:
        """Read more of the file, and drop what has been passed; False at the end of the file.

        At least as much is read as is left of the text, so that a long element is parsed only a few times.
        """
        found = self._file.read(max(CHUNK_BYTES, len(self._text) - self._at))
        if found:
            self._line += self._text.count("\n", 0, self._at)
            self._offset += self._at
            self._text, self._at = self._text[self._at :] + found.decode("latin-1"), 0
        return bool(found)


# Parquet, and what `datasets` has saved


def arrow_rows(path: Path, split: str) -> Iterator[RawRow | str]:
    """The rows of a Parquet file, or of one split that save_to_disk has written; in place of a malformed row a text
    that says what is wrong. Raises ConfigError."""
    for batch in _saved_batches(path, split) if path.is_dir() else _parquet_batches(path):
        try:
            rows = batch.to_pylist()
        except (UnicodeDecodeError, OverflowError):  # Arrow has not checked that texts are UTF-8
            rows = [_row_or_problem(batch, number) for number in range(batch.num_rows)]
        yield from rows


def _parquet_batches(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{path}: reading Parquet needs the package pyarrow; pip install pyarrow") from None
    try:
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=PART_BYTES)
    except (pyarrow.ArrowInvalid, OSError) as problem:
        raise ConfigError(f"{path} is no Parquet file ({problem}); write it again, or name a .jsonl file") from None
    number = 0
    try:
        for batch in file.iter_batches(batch_size=ROWS_A_BATCH):
            yield batch
            number += batch.num_rows
    except (pyarrow.ArrowException, OSError) as problem:
        raise ConfigError(f"{path} cannot be read after its row {number}: {problem}; write it again") from None


def _saved_batches(path: Path, split: str) -> Iterator[Any]:
    """The format `arrow` leaves columns of images, sound and other media as they are stored: bytes and path."""
    try:
        from datasets import Dataset, DatasetDict, load_from_disk
    except ImportError:
        raise ConfigError(f"{path}: reading it needs the package datasets; pip install datasets") from None
    try:
        found: Dataset | DatasetDict = load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as refusal:
        raise ConfigError(
            f"{path} is no dataset directory written by save_to_disk ({str(refusal).rstrip('.')}); save one there"
        ) from None
    if isinstance(found, DatasetDict):
        if split not in found:
            raise ConfigError(f"{path} has no split {split!r}; it has {', '.join(found)}: set the option split")
        found = found[split]
    yield from found.with_format("arrow").iter(ROWS_A_BATCH)


def _row_or_problem(batch: Any, number: int) -> RawRow | str:
    """One row of an Arrow batch; a text for one that has text which is not UTF-8, or a date that Python cannot hold."""
    record: dict[str, Any] = {}
    for name in batch.schema.names:
        try:
            record[name] = batch.column(name)[number].as_py()
        except UnicodeDecodeError as problem:
            return (
                f"the column {name!r} has the byte 0x{problem.object[problem.start]:02x} at position {problem.start}, "
                "which is not UTF-8; write it as UTF-8"
            )
        except OverflowError:
            return f"the column {name!r} has a date outside the years 1 to 9999; write it as text"
    return record


def _usable_row(place: str, row: RawRow | str) -> RawRow:
    """The row of `arrow_rows`. Raises Malformed for a text in its place."""
    if isinstance(row, str):
        raise Malformed(f"{place}: {row}")
    return row

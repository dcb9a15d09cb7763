"""Records from disk: JSON lines and arrays, CSV, TSV, Parquet, compressed files, directories, patterns, saved datasets.

A .txt file is one record with the column `text`; in a directory, .txt files are left out if it has other files of rows.
Text is UTF-8. A line with other bytes is malformed, and so is a line that its format does not allow.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from flowrl.errors import ConfigError
from flowrl.tasks.records.compressed import SUFFIXES, damage_of, open_text
from flowrl.tasks.records.malformed import Malformed, Reading
from flowrl.tasks.records.split_names import by_split

RawRow = Mapping[str, Any]
LINES, TABLES = (".jsonl", ".ndjson"), {".csv": ",", ".tsv": "\t"}
PLAIN, PARQUET = ".txt", ".parquet"
TEXTS = (*LINES, ".json", *TABLES, PLAIN)
FORMATS = ".jsonl, .json, .csv, .tsv, .parquet, .txt"
PATTERN = re.compile(r"[*?\[]")
OTHER_BYTE = re.compile("[\udc80-\udcff]")
"""How Python's surrogateescape represents a byte that is not UTF-8."""

PART_BYTES, ROWS_A_BATCH = 1 << 20, 1024
"""How much of a Parquet file is read and decoded at a time: a whole row group may be larger than memory."""
MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti")
"""Kinds of columns for which `datasets` makes objects that no message can carry."""
SAVED = ("dataset_dict.json", "state.json")
"""Files that identify a directory written by save_to_disk."""


def format_of(path: Path) -> str:
    """The suffix that says how a file is read, without the suffix of its compression; "" if it is unknown."""
    name = path.with_suffix("") if path.suffix in SUFFIXES else path
    known = TEXTS if name is not path else (*TEXTS, PARQUET)
    return name.suffix if name.suffix in known else ""


def is_file_task(path: Path) -> bool:
    """Whether `path` is a file, a directory or a pattern of files that `records` may be able to read."""
    return path.is_dir() or (path.is_file() and format_of(path) != "") or (not path.exists() and is_pattern(path))


def require_there(path: Path) -> None:
    """Raise ConfigError if `path` is named like a file of rows and does not exist."""
    if not format_of(path) or path.exists() or is_pattern(path):
        return
    near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.*")], 1)
    hint = f"did you mean {path.parent / near[0]}?" if near else "correct the path, which is relative to this directory"
    raise ConfigError(f"there is no task {str(path)!r}, for {path.resolve()} does not exist; {hint}")


def is_pattern(path: Path) -> bool:
    """Whether `path` is a pattern for the files that match it, such as data/part-*.jsonl."""
    return PATTERN.search(str(path)) is not None


def records(path: Path, reading: Reading, *, split: str = "train") -> Iterator[tuple[str, RawRow]]:
    """(place, record) of everything at `path`. Raises ConfigError if it cannot be read."""
    files = files_at(path, split)
    if files is None:
        yield from _saved(path, split)
    for file in files or ():
        yield from file_records(file, reading)


def files_at(path: Path, split: str) -> list[Path] | None:
    """The files of rows at `path`, in order; None for what save_to_disk wrote. Raises ConfigError if there are none."""
    if path.is_file():
        return [path]
    if is_pattern(path) and not path.exists():
        return _matching(path)
    return None if is_saved(path) else _files(path, split)


def file_records(path: Path, reading: Reading) -> Iterator[tuple[str, RawRow]]:
    """(place, record) of everything in one file, whose name says its format."""
    kind = format_of(path)
    if kind == PARQUET:
        yield from _parquet(path, reading)
        return
    with damage_of(path), open_text(path, newline="" if kind in TABLES else None) as text:
        if kind in TABLES:
            yield from _table(path, text, TABLES[kind], reading)
        else:
            yield from _plain(path, text, reading) if kind == PLAIN else _json(path, text, reading)


def _plain(path: Path, text: IO[str], reading: Reading) -> Iterator[tuple[str, RawRow]]:
    """The whole file as one text."""
    content = text.read()
    if content and (record := reading.attempt(lambda: text_record(path, content))) is not None:
        yield str(path), record


def text_record(path: Path, content: str) -> RawRow:
    """The record of a file that is one text. Raises Malformed."""
    _require_utf8_by_line(path, content)
    return {"text": content}


def _json(path: Path, text: IO[str], reading: Reading) -> Iterator[tuple[str, RawRow]]:
    """JSON lines, or a file that is one array."""
    first, blank = text.readline(), ""
    while first and not first.strip():
        first, blank = text.readline(), blank + first
    if format_of(path) == ".json" and first.lstrip().startswith("["):
        yield from _array(path, blank + first + text.read(), reading)
        return
    for number, line in enumerate(itertools.chain([first], text), start=blank.count("\n") + 1):
        place = f"{path}:{number}"
        record = reading.attempt(lambda place=place, line=line: parsed_line(place, line)) if line.strip() else None  # type: ignore[misc]
        if record is not None:
            yield place, record


def _array(path: Path, content: str, reading: Reading) -> Iterator[tuple[str, RawRow]]:
    _require_utf8_by_line(path, content)
    try:
        found = json.loads(content)
    except json.JSONDecodeError as problem:
        raise ConfigError(f"{path}:{problem.lineno}: invalid JSON ({problem.msg}); write the array again") from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path}: {str(problem).partition(';')[0]}; write it as a string") from None
    for number, record in enumerate(found, start=1):
        place = f"{path}, row {number}"
        if (checked := reading.attempt(lambda place=place, record=record: _object(place, record))) is not None:  # type: ignore[misc]
            yield place, checked


def parsed_line(place: str, line: str) -> RawRow:
    """The record that a line holds as JSON. Raises Malformed."""
    _require_utf8(place, line)
    try:
        record = json.loads(line)
    except json.JSONDecodeError as problem:
        raise Malformed(f"{place}: invalid JSON ({problem.msg}); write one object per line") from None
    except ValueError as problem:  # an integer of more digits than Python converts
        raise Malformed(f"{place}: {str(problem).partition(';')[0]}; write it as a string") from None
    except RecursionError:
        raise Malformed(f"{place}: values nested too deep; flatten them, or write them as text") from None
    return _object(place, record)


def _object(place: str, record: object) -> RawRow:
    if not isinstance(record, dict):
        raise Malformed(f"{place}: a {type(record).__name__} where an object was needed; write one object per line")
    return record


def _table(path: Path, text: IO[str], delimiter: str, reading: Reading) -> Iterator[tuple[str, RawRow]]:
    """CSV with a header. Every value is text."""
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = next(lines, [])
        check_header(path, header)
        for values in lines:
            place = f"{path}:{lines.line_num}"
            record = reading.attempt(lambda place=place, values=values: cells(place, header, values))  # type: ignore[misc]
            if values and record is not None:
                yield place, record
    except csv.Error as problem:
        raise ConfigError(f"{path}:{lines.line_num}: invalid CSV ({problem}); quote values as CSV does") from None


def check_header(path: Path, header: list[str]) -> None:
    """Raise ConfigError unless the first line of a table names every column once."""
    _require_utf8(f"{path}:1", "".join(header))
    twice = sorted({name for name in header if header.count(name) > 1})
    if not header or twice or "" in header:
        found = f"has the column {twice[0]!r} twice" if twice and twice[0] else "does not name every column"
        raise ConfigError(f"{path}: its first line {found}; it has to name the columns, each once")


def cells(place: str, header: list[str], values: list[str]) -> RawRow:
    """The record of a table's row. Raises Malformed."""
    _require_utf8(place, "".join(values))
    if values and len(values) != len(header):
        raise Malformed(
            f"{place}: the row has {len(values)} cells, the header {len(header)}; quote what holds a delimiter"
        )
    return dict(zip(header, values, strict=False))


def _require_utf8(place: str, text: str) -> None:
    if (found := OTHER_BYTE.search(text)) is not None:
        byte = ord(found.group()) - 0xDC00
        raise Malformed(
            f"{place}: the byte 0x{byte:02x} at position {found.start()} is not UTF-8; save the file as UTF-8"
        )


def _require_utf8_by_line(path: Path, content: str) -> None:
    if OTHER_BYTE.search(content) is not None:
        for number, line in enumerate(content.split("\n"), start=1):
            _require_utf8(f"{path}:{number}", line)


def _parquet(path: Path, reading: Reading) -> Iterator[tuple[str, RawRow]]:
    number = 0
    for batch in parquet_batches(path):
        yield from _of_batch(path, batch, number, reading)
        number += batch.num_rows


def parquet_batches(path: Path) -> Iterator[Any]:
    """The rows of a Parquet file, as Arrow batches. Raises ConfigError if it cannot be read."""
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


def _of_batch(path: Path, batch: Any, before: int, reading: Reading) -> Iterator[tuple[str, RawRow]]:
    """The rows of an Arrow batch that comes after `before` other rows. Arrow has not checked that texts are UTF-8."""
    try:
        found = batch.to_pylist()
    except (UnicodeDecodeError, OverflowError):
        found = None
    for number in range(batch.num_rows):
        place = f"{path}, row {before + number + 1}"
        record = found[number] if found else reading.attempt(lambda p=place, n=number: arrow_row(p, batch, n))  # type: ignore[misc]
        if record is not None:
            yield place, record


def arrow_row(place: str, batch: Any, number: int) -> RawRow:
    """One row of an Arrow batch. Raises Malformed for text that is not UTF-8, and for dates that Python cannot hold."""
    record: dict[str, Any] = {}
    for name in batch.schema.names:
        try:
            record[name] = batch.column(name)[number].as_py()
        except UnicodeDecodeError as problem:
            raise Malformed(
                f"{place}: the column {name!r} has the byte 0x{problem.object[problem.start]:02x} at position "
                f"{problem.start}, which is not UTF-8; write it as UTF-8"
            ) from None
        except OverflowError:
            raise Malformed(
                f"{place}: the column {name!r} has a date outside the years 1 to 9999; write it as text"
            ) from None
    return record


def _saved(path: Path, split: str) -> Iterator[tuple[str, RawRow]]:
    for number, record in enumerate(saved_records(path, split), start=1):
        yield f"{path}, row {number}", record


def is_saved(path: Path) -> bool:
    """Whether save_to_disk has written this directory."""
    return any((path / name).is_file() for name in SAVED)


def saved_records(path: Path, split: str) -> Iterator[RawRow]:
    """The records of a dataset, or of one split of several, saved by `datasets`. Raises ConfigError."""
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
    yield from _undecoded(found)


def _undecoded(dataset: Any) -> Any:
    """The dataset with its columns of images, sound and other media not decoded: they hold bytes and path, as in
    Parquet."""
    for name, feature in dataset.features.items():
        if type(feature).__name__ in MEDIA:
            dataset = dataset.cast_column(name, dataclasses.replace(feature, decode=False))
    return dataset


def _matching(pattern: Path) -> list[Path]:
    """The files that match a pattern, in the order of their names."""
    base = Path(*(part for part in pattern.parts[: _first_pattern(pattern)])) if pattern.parts else Path()
    rest = str(Path(*pattern.parts[_first_pattern(pattern) :]))
    try:
        found = sorted(path for path in base.glob(rest) if path.is_file())
    except (ValueError, OSError) as problem:
        raise ConfigError(
            f"the pattern {pattern} cannot be searched: {problem}; write ** as a part of its own"
        ) from None
    if not found:
        raise ConfigError(f"no file matches {pattern}; quote the pattern, and look at its folder")
    if other := [path for path in found if not format_of(path)]:
        raise ConfigError(f"{other[0]}, which matches {pattern}, is no file of rows; they end in {FORMATS}")
    return found


def _first_pattern(path: Path) -> int:
    return next(index for index, part in enumerate(path.parts) if PATTERN.search(part))


def _files(path: Path, split: str) -> list[Path]:
    """The files of a downloaded dataset: those whose names begin with the split, else those that name it as files on
    the Hub do.

    If no name contains a split, all files belong to `train`. A .json or .txt file counts only if there are no other
    files: datasets describe themselves in such files.
    """
    known = sorted(file for file in path.rglob("*") if file.is_file() and format_of(file))
    if saved := [file.parent for file in known if file.name in SAVED]:
        raise ConfigError(
            f"{path} is no dataset directory, but {saved[0]} in it is one that save_to_disk has written; name that one"
        )
    found = of_rows(known)
    if not found:
        raise ConfigError(
            f"{path} is no dataset directory: it was not written by save_to_disk and holds no file of rows "
            f"({FORMATS}); name a file, or save a dataset there"
        )
    return [file for file in found if file.name.startswith(split)] or _of_split(path, found, split)


def _of_split(path: Path, files: Sequence[Path], split: str) -> list[Path]:
    """The files with a word for the split in their names or their folders' names. Raises ConfigError if there are
    none."""
    splits = by_split(file.relative_to(path).as_posix() for file in files)
    if split not in splits:
        names = ", ".join(name for found in splits.values() for name in found[:2])
        raise ConfigError(
            f"{path} has no file of the split {split!r}, whose name begins with it, or has it as a word; it has "
            f"{names}: set the option split, or name the files with a pattern"
        )
    return [path / name for name in splits[split]]


def of_rows(files: Sequence[Path]) -> list[Path]:
    """The files of a dataset without those that may describe it, unless there are no others."""
    plain = [file for file in files if format_of(file) != PLAIN] or list(files)
    return [file for file in plain if format_of(file) != ".json"] or plain

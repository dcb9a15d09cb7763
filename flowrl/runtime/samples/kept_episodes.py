"""`episodes/`: episodes of a run as text, for `flowrl show`. Plain lines of JSON, one for each attempt that has ended.

`recent.jsonl` has the last attempts, whatever their outcome; `chosen.jsonl` has those that failed and one in a hundred
of the others, chosen by a hash of the sample's id, so that a resumed run chooses the same ones.

Invariants
- Each file is bounded: when it is full, it is renamed to `NAME.before.jsonl`, and replaces an earlier file of that
  name.
- Every line is complete, except that a killed process may leave an incomplete last one; the next writer removes it.
- A failure to write is reported once and does not end the run.
- After a resume, no line describes work that the resume has undone.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = "episodes"
RECENT, CHOSEN = "recent", "chosen"
MOST_BYTES = 32 << 20
"""Largest size of one file; there are at most four files."""
ONE_IN = 100
"""One episode in this many is kept in addition to the recent and the failed ones."""

EpisodeRow = Mapping[str, Any]


class BoundedLines:
    """Appends lines to a file of at most `most_lines` and MOST_BYTES; the previous full file stays next to it."""

    def __init__(self, path: Path, *, most_lines: int | None = None) -> None:
        self._path = path
        self._most_lines = most_lines if most_lines is not None else sys.maxsize
        path.parent.mkdir(exist_ok=True)
        self._open_file()

    def append_line(self, line: bytes) -> None:
        """Write one line. After an OSError the file may end with a part of it, and only `close` may be called."""
        if self._size + len(line) > MOST_BYTES or self._num_lines >= self._most_lines:
            self._file.close()
            self._path.replace(file_before(self._path))
            self._open_file()
        if self._file.write(line + b"\n") != len(line) + 1:
            raise OSError("the disk is full")
        self._size += len(line) + 1
        self._num_lines += 1

    def close(self) -> None:
        self._file.close()

    def _open_file(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        whole = self._path.read_bytes().rpartition(b"\n")[:2]
        self._size, self._num_lines = len(b"".join(whole)), whole[0].count(b"\n") + len(whole[1])
        self._file.truncate(self._size)


class KeptEpisodes:
    """Keeps the lines that environments send; at least the last `number` of them. 0 keeps nothing."""

    def __init__(self, run_dir: Path, number: int, warn: Callable[[str], None]) -> None:
        self._folder = run_dir / FOLDER
        self._number = number
        self._warn = warn
        self._warned = False
        self._files: dict[str, BoundedLines] = {}

    def add_attempt(self, sample_id: str, line: bytes, *, failed: bool) -> None:
        """Keep one attempt; `line` is its record as JSON."""
        if not self._number:
            return
        names = [RECENT, CHOSEN] if failed or is_chosen(sample_id) else [RECENT]
        try:
            for name in names:
                if name not in self._files:
                    most_lines = self._number if name == RECENT else None
                    self._files[name] = BoundedLines(self._folder / f"{name}.jsonl", most_lines=most_lines)
                self._files[name].append_line(line)
        except OSError as problem:
            self.close()  # the next attempt opens the files again, and cuts incomplete lines off
            self._files.clear()
            if not self._warned:
                self._warn(
                    f"{self._folder} cannot be written ({problem}); the run continues, and flowrl show lacks some"
                )
            self._warned = True

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def is_chosen(sample_id: str) -> bool:
    """Whether an episode that did not fail is one of those that `chosen.jsonl` keeps."""
    return zlib.crc32(sample_id.encode()) % ONE_IN == 0


def file_before(path: Path) -> Path:
    """The file of the lines before those in `path`."""
    return path.with_name(f"{path.stem}.before.jsonl")


def read_kept(run_dir: Path, sample_id: str | None = None) -> list[EpisodeRow]:
    """The attempts kept, of one sample or of all, in the order in which they ended. Damaged lines are left out."""
    found: dict[tuple[Any, ...], EpisodeRow] = {}
    for path in _list_files(run_dir):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if sample_id is not None and json.dumps(sample_id) not in line:
                continue
            record = _parse_line(line)
            if record is not None and sample_id in (None, record["sample_id"]):
                found[record["sample_id"], record["attempt"], record["ended_s"]] = record
    return sorted(found.values(), key=lambda record: float(record["ended_s"]))


def rewind_kept(run_dir: Path, until_s: float) -> None:
    """Remove the attempts that ended after `until_s`: a resumed run plays those episodes again."""
    for path in _list_files(run_dir):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if (record := _parse_line(line)) is not None and record["ended_s"] <= until_s]
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        temporary.replace(path)


def _list_files(run_dir: Path) -> Iterator[Path]:
    """The files that exist."""
    for name in (RECENT, CHOSEN):
        path = run_dir / FOLDER / f"{name}.jsonl"
        yield from (file for file in (file_before(path), path) if file.is_file())


def _parse_line(line: str) -> EpisodeRow | None:
    """The record of a line; None if the line is no record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"sample_id", "attempt", "ended_s"} <= record.keys() else None

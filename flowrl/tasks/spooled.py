"""Files that cannot be read from their middle, written once in a form that can: decompressed, or pickled row by row.

Rows are pickled of Parquet files and of what save_to_disk has written. The libraries that read these start threads,
which a process that forks episodes may not have, so only the process that makes the copy loads them.

Such a copy is in flowrl's cache, for all processes of this machine and for later runs, as long as the file has the same
size and time of change. While it is written, the disk keeps `RESERVE_BYTES` free; else the copy is removed and the run
refused.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from flowrl.cache import cache_dir, cached_directory
from flowrl.errors import ConfigError
from flowrl.hub.download import to_stderr
from flowrl.hub.hub_problems import gigabytes
from flowrl.tasks.compressed import DAMAGED, SUFFIXES
from flowrl.tasks.extents import pickled, rows_of_batch
from flowrl.tasks.formats import PARQUET, format_of, parquet_batches, saved_records

RESERVE_BYTES = 1 << 30
"""What a copy leaves free on the disk of the cache."""
CHECKED_BYTES = 64 << 20
"""Bytes between two looks at the disk."""
PART_BYTES = 1 << 20
UNUSED_DAYS = 30
"""After so many days without a run that has asked for it, a copy is removed when another one is made."""
NAME = "rows"


def plain_file(path: Path, split: str = "") -> Path:
    """The file whose extents are the records of `path`: itself, or its copy, which is made if there is none.

    `split` is the part to read of a directory that save_to_disk has written, if it has several. Raises ConfigError if
    `path` cannot be read, or the disk of the cache is too small.
    """
    if path.is_file() and path.suffix not in SUFFIXES and format_of(path) != PARQUET:
        return path
    spool = Spool(path, split)
    try:
        recipe = _recipe(path, split)
        return cached_directory(NAME, path.name, recipe, spool.make, to_stderr, unused_days=UNUSED_DAYS) / NAME
    except OSError as problem:
        raise spool.no_room(problem.strerror or str(problem)) from None


def num_bytes(path: Path, split: str = "") -> int:
    """Of a file, or of the rows of one split that save_to_disk has written."""
    return sum(file.st_size for file in _stats(path, split))


def _recipe(path: Path, split: str) -> dict[str, int | str]:
    found = _stats(path, split)
    recipe: dict[str, int | str] = {
        "file": str(path.resolve()),
        "bytes": sum(one.st_size for one in found),
        "modified_ns": max((one.st_mtime_ns for one in found), default=0),
        "form": 1,
    }
    return recipe | ({"split": split} if path.is_dir() else {})


def _stats(path: Path, split: str) -> list[os.stat_result]:
    if not path.is_dir():
        return [path.stat()]
    home = path / split if (path / split).is_dir() else path
    return [file.stat() for file in sorted(home.rglob("*.arrow"))]


class Spool:
    """The copy of one file while it is made; the disk is looked at now and then."""

    def __init__(self, path: Path, split: str) -> None:
        self._path, self._split, self._home = path, split, cache_dir() / NAME
        self._written, self._checked = 0, -CHECKED_BYTES

    def make(self, directory: Path) -> None:
        """Write the copy into `directory`. Raises ConfigError, or OSError if the disk does not take it."""
        to_stderr(f"{self._path}: writing its rows into {self._home}, so that each can be read by itself")
        with (directory / NAME).open("wb") as target:
            for part in _parts(self._path, self._split):
                if self._written - self._checked >= CHECKED_BYTES:
                    self._check(directory)
                self._written += target.write(part)
        to_stderr(f"{self._path}: {gigabytes(self._written)} of rows in {self._home}")

    def no_room(self, problem: str) -> ConfigError:
        """The error of a disk that does not take the copy."""
        return ConfigError(
            f"{self._path}: its rows cannot be kept in {self._home} after {gigabytes(self._written)} ({problem}); name "
            f"a directory on a larger disk in FLOWRL_CACHE, or write {self._path.name}:rows=memory"
        )

    def _check(self, directory: Path) -> None:
        self._checked = self._written
        if problem := short_of_room(directory):
            raise self.no_room(problem)


def short_of_room(directory: Path) -> str:
    """How much is free on a disk that has no room for more; "" if it has."""
    free = shutil.disk_usage(directory).free
    if free >= RESERVE_BYTES + CHECKED_BYTES:
        return ""
    return f"{gigabytes(free)} are free, of which {gigabytes(RESERVE_BYTES)} stay free"


def _parts(path: Path, split: str) -> Iterator[bytes]:
    if path.is_dir():
        return pickled(saved_records(path, split))
    if format_of(path) == PARQUET:
        return pickled(row for batch in parquet_batches(path) for row in rows_of_batch(batch))
    return _decompressed(path)


def _decompressed(path: Path) -> Iterator[bytes]:
    try:
        with SUFFIXES[path.suffix](path) as file:
            while part := file.read(PART_BYTES):
                yield part
    except DAMAGED as problem:
        raise ConfigError(f"{path} cannot be read: {problem}; write it again") from None

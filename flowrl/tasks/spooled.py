"""Files that cannot be read from their middle, written once in a form that can: decompressed, or Parquet row by row.

Such a copy is in flowrl's cache, for all processes of this machine and for later runs, as long as the file has the same
size and time of change. While it is written, the disk keeps `RESERVE_BYTES` free; else the copy is removed and the run
refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from flowrl.cache import cache_dir, cached_directory
from flowrl.errors import ConfigError
from flowrl.hub.download import to_stderr
from flowrl.hub.hub_problems import gigabytes
from flowrl.tasks.compressed import DAMAGED, SUFFIXES
from flowrl.tasks.extents import pickled
from flowrl.tasks.formats import PARQUET, format_of, parquet_batches

RESERVE_BYTES = 1 << 30
"""What a copy leaves free on the disk of the cache."""
CHECKED_BYTES = 64 << 20
"""Bytes between two looks at the disk."""
PART_BYTES = 1 << 20
NAME = "rows"


def plain_file(path: Path) -> Path:
    """The file whose extents are the records of `path`: itself, or its copy, which is made if there is none.

    Raises ConfigError if `path` cannot be read, or the disk of the cache is too small.
    """
    if path.suffix not in SUFFIXES and format_of(path) != PARQUET:
        return path
    at, now = path.resolve(), path.stat()
    recipe = {"file": str(at), "bytes": now.st_size, "modified_ns": now.st_mtime_ns, "form": 1}
    spool = Spool(path)
    try:
        return cached_directory(NAME, path.name, recipe, spool.make, to_stderr) / NAME
    except OSError as problem:
        raise spool.no_room(problem.strerror or str(problem)) from None


class Spool:
    """The copy of one file while it is made; the disk is looked at now and then."""

    def __init__(self, path: Path) -> None:
        self._path, self._home = path, cache_dir() / NAME
        self._written, self._checked = 0, -CHECKED_BYTES

    def make(self, directory: Path) -> None:
        """Write the copy into `directory`. Raises ConfigError, or OSError if the disk does not take it."""
        to_stderr(f"{self._path}: writing its rows into {self._home}, so that each can be read by itself")
        with (directory / NAME).open("wb") as target:
            for part in _parts(self._path):
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
        free = shutil.disk_usage(directory).free
        if free < RESERVE_BYTES + CHECKED_BYTES:
            raise self.no_room(f"{gigabytes(free)} are free, of which {gigabytes(RESERVE_BYTES)} stay free")


def _parts(path: Path) -> Iterator[bytes]:
    return pickled(parquet_batches(path)) if format_of(path) == PARQUET else _decompressed(path)


def _decompressed(path: Path) -> Iterator[bytes]:
    try:
        with SUFFIXES[path.suffix](path) as file:
            while part := file.read(PART_BYTES):
                yield part
    except DAMAGED as problem:
        raise ConfigError(f"{path} cannot be read: {problem}; write it again") from None

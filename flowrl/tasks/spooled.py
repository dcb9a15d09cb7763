"""Files that cannot be read from their middle, written once in a form that can: decompressed, or Parquet row by row.

Such a copy is in flowrl's cache, for all processes of this machine and for later runs, as long as the file has the same
size and time of change. While it is written, the disk keeps `RESERVE_BYTES` free; else the copy is removed and the run
refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flowrl.cache import cache_dir, cached_directory
from flowrl.errors import ConfigError
from flowrl.hub.download import to_stderr
from flowrl.hub.hub_problems import gigabytes
from flowrl.tasks.compressed import DAMAGED, SUFFIXES
from flowrl.tasks.extents import write_pickled
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

    def make(directory: Path) -> None:
        to_stderr(f"{path}: writing its rows into {cache_dir() / NAME}, so that each can be read by itself")
        with (directory / NAME).open("wb") as target:
            _write(path, Spool(path, directory, target.write).write)
        to_stderr(f"{path}: {gigabytes((directory / NAME).stat().st_size)} of rows in {cache_dir() / NAME}")

    return cached_directory(NAME, path.name, recipe, make, to_stderr) / NAME


class Spool:
    """Writes, and looks at the disk now and then."""

    def __init__(self, path: Path, directory: Path, target: Callable[[Any], int]) -> None:
        self._path, self._directory, self._target = path, directory, target
        self._written, self._checked = 0, -CHECKED_BYTES

    def write(self, content: Any) -> None:
        """Write bytes or a buffer. Raises ConfigError if the disk has too little left."""
        if self._written - self._checked >= CHECKED_BYTES:
            self._check()
        try:
            self._written += self._target(content)
        except OSError as problem:
            raise self._full(str(problem)) from None

    def _check(self) -> None:
        self._checked = self._written
        free = shutil.disk_usage(self._directory).free
        if free < RESERVE_BYTES + CHECKED_BYTES:
            raise self._full(f"{gigabytes(free)} are free, of which {gigabytes(RESERVE_BYTES)} stay free")

    def _full(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self._path} needs more than {gigabytes(self._written)} in {cache_dir()} for rows on disk, and "
            f"there is no room ({problem}); name a directory on a larger disk in FLOWRL_CACHE, or write "
            f"{self._path.name}:rows=memory"
        )


def _write(path: Path, write: Callable[[Any], None]) -> None:
    if format_of(path) == PARQUET:
        write_pickled(parquet_batches(path), write)
        return
    for part in _decompressed(path):
        write(part)


def _decompressed(path: Path) -> Iterator[bytes]:
    try:
        with SUFFIXES[path.suffix](path) as file:
            while part := file.read(PART_BYTES):
                yield part
    except DAMAGED as problem:
        raise ConfigError(f"{path} cannot be read: {problem}; write it again") from None

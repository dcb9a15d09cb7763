"""Files that cannot be read from their middle, written once in a form that can: decompressed, or pickled row by row.

The rows of Parquet files, and of what save_to_disk has written, are pickled. The libraries that read these formats
start threads, which a process that forks episodes must not have, so only the process that makes the copy loads them.

Such a copy is in flowrl's cache, for all processes of this machine and for later runs. It is valid as long as the size
and modification time of the file are the same. If the disk has no room for the copy, it is removed and the run is
refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from flowrl.cache import cache_dir, cached_directory
from flowrl.disk_room import DiskRoom
from flowrl.hub import gigabytes, to_stderr
from flowrl.tasks.records.compressed import SUFFIXES, damage_of
from flowrl.tasks.records.extents import pickled, rows_of_batch
from flowrl.tasks.records.formats import PARQUET, format_of, parquet_batches, saved_records

PART_BYTES = 1 << 20
UNUSED_DAYS = 30
"""A copy that no run has asked for in this many days is removed when another copy is made."""
NAME = "rows"


def plain_file(path: Path, split: str = "") -> Path:
    """The file whose extents are the records of `path`: itself, or its copy, which is made if there is none.

    If a directory that save_to_disk has written has several splits, `split` is the one to read. Raises ConfigError if
    `path` cannot be read, or the disk of the cache is too small.
    """
    if path.is_file() and path.suffix not in SUFFIXES and format_of(path) != PARQUET:
        return path
    home = cache_dir() / NAME
    room = DiskRoom(f"{path}: its rows", home, f", or write {path.name}:rows=memory")
    with damage_of(path):
        recipe = _recipe(path, split)

    def make(directory: Path) -> None:
        to_stderr(f"{path}: writing its rows into {home}, so that each can be read by itself")
        with (directory / NAME).open("wb") as target:
            for part in _parts(path, split):
                room.require()
                room.num_bytes += target.write(part)
        to_stderr(f"{path}: {gigabytes(room.num_bytes)} of rows in {home}")

    try:
        return cached_directory(NAME, path.name, recipe, make, to_stderr, unused_days=UNUSED_DAYS) / NAME
    except OSError as problem:
        raise room.refused(problem) from None


def num_bytes(path: Path, split: str = "") -> int:
    """Size of a file, or of the rows of one split that save_to_disk has written."""
    return sum(file.st_size for file in _stats(path, split))


def _recipe(path: Path, split: str) -> dict[str, int | str]:
    found = _stats(path, split)
    recipe: dict[str, int | str] = {
        "file": str(path.resolve()),
        "bytes": sum(one.st_size for one in found),
        "modified_ns": max((one.st_mtime_ns for one in found), default=0),
        "form": 1,
    }
    return recipe | ({"split": split, "form": 2} if path.is_dir() else {})


def _stats(path: Path, split: str) -> list[os.stat_result]:
    if not path.is_dir():
        return [path.stat()]
    home = path / split if (path / split).is_dir() else path
    return [file.stat() for file in sorted(home.rglob("*.arrow"))]


def _parts(path: Path, split: str) -> Iterator[bytes]:
    """The content of the copy. Raises ConfigError if `path` cannot be read."""
    with damage_of(path):
        if path.is_dir():
            yield from pickled(saved_records(path, split))
        elif format_of(path) == PARQUET:
            yield from pickled(row for batch in parquet_batches(path) for row in rows_of_batch(batch))
        else:
            with SUFFIXES[path.suffix](path) as file:
                while part := file.read(PART_BYTES):
                    yield part

"""`manifest.json`: every file of a checkpoint with its size and checksums, written last and read first.

A directory without this file is not a checkpoint. With it, any damage is detected before a run resumes from the
checkpoint: a missing, shortened or extended file, or a flipped bit, also in the manifest itself. Additional files are
ignored.

The checksum is CRC-32: it detects accidental errors of disks and copies at disk speed, about 2 GB/s per core. Files
are summed in pieces, in several threads, because zlib and reads release the interpreter lock: a checkpoint of 100 GB
takes about ten seconds on eight cores if the disk is as fast.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, FlowrlError

MANIFEST = "manifest.json"
FORMAT = 1
PIECE_BYTES = 256 << 20
"""Size of the pieces of a file. Each piece has its own checksum; pieces are summed in parallel."""
CHUNK_BYTES = 4 << 20
"""Bytes per read; a thread keeps no more in memory."""
THREADS = min(8, os.cpu_count() or 1)


class Abandoned(FlowrlError):
    """The run ends, so the writing of a checkpoint is abandoned."""


@dataclass(frozen=True)
class _Piece:
    path: Path
    start: int
    num_bytes: int


def write(directory: Path, facts: Mapping[str, Any], stop: threading.Event) -> None:
    """Sum all files in `directory` and write its manifest, with `facts` (JSON). Raises Abandoned on `stop`."""
    files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
    sizes = {name: path.stat().st_size for name, path in files.items() if name != MANIFEST}
    known = _known(directory, files)
    summed = _summed(directory, {name: size for name, size in sizes.items() if name not in known}, stop)
    content = {"format": FORMAT, **facts, "files": {name: known.get(name) or summed[name] for name in sizes}}
    sealed = {**content, "checksum": _seal(content)}
    (directory / MANIFEST).write_text(json.dumps(sealed, indent=1) + "\n", encoding="utf-8")


def _known(directory: Path, files: Mapping[str, Path]) -> dict[str, Any]:
    """The entries of the files that are hard links to those of another checkpoint, from its manifest.

    They are not read again: if one has changed since it was summed, that is found when it is verified.
    """
    left = {name: path.stat() for name, path in files.items() if path.stat().st_nlink > 1}
    known: dict[str, Any] = {}
    for other in sorted(directory.parent.glob("step_*"), reverse=True) if left else []:
        with suppress(ConfigError, OSError):
            entries = read(other)["files"]
            for name in [name for name in left if name in entries and (other / name).exists()]:
                if os.path.samestat((other / name).stat(), left[name]) and entries[name]["bytes"] == left[name].st_size:
                    known[name] = entries[name]
                    del left[name]
        if not left:
            break
    return known


def read(directory: Path) -> Mapping[str, Any]:
    """The manifest of a checkpoint. Raises ConfigError, with the file's name, if it is missing or damaged."""
    try:
        content = json.loads((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"it has no {MANIFEST}, so it was never finished") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.pop("checksum", None) != _seal(content):
        raise ConfigError(f"{MANIFEST} has changed since it was written (its own checksum differs)")
    if content["format"] != FORMAT:
        raise ConfigError(f"{MANIFEST} has format {content['format']}, but this flowrl reads {FORMAT}")
    return content


def verify(directory: Path) -> Mapping[str, Any]:
    """The manifest, after checking every file against it. Raises ConfigError for the first file that differs."""
    content = read(directory)
    sizes = {name: entry["bytes"] for name, entry in content["files"].items()}
    for name, num_bytes in sizes.items():
        _require_size(directory / name, name, num_bytes)
    try:
        found = _summed(directory, sizes, threading.Event())
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be read: {error.strerror}") from None
    for name, entry in content["files"].items():
        for number, (was, now) in enumerate(zip(entry["crc32"], found[name]["crc32"], strict=True)):
            if was != now:
                start, end = number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, sizes[name])
                raise ConfigError(f"{name} has changed since it was written (checksum of bytes {start} to {end})")
    return content


def _require_size(path: Path, name: str, num_bytes: int) -> None:
    try:
        found = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    if found is None:
        raise ConfigError(f"{name} is missing")
    if found != num_bytes:
        raise ConfigError(f"{name} has {found} bytes, but {num_bytes} were written")


def _summed(directory: Path, sizes: Mapping[str, int], stop: threading.Event) -> dict[str, Any]:
    """Size and checksums of each file, by name."""
    pieces = [(name, piece) for name, size in sizes.items() for piece in _pieces(directory / name, size)]
    found: dict[str, Any] = {name: {"bytes": size, "crc32": []} for name, size in sizes.items()}
    with ThreadPoolExecutor(THREADS, thread_name_prefix="flowrl-checksum") as threads:
        sums = threads.map(_sum, (piece for _, piece in pieces), (stop for _ in pieces))
        for (name, _), checksum in zip(pieces, sums, strict=True):
            found[name]["crc32"].append(checksum)
    return found


def _pieces(path: Path, size: int) -> Iterator[_Piece]:
    for start in range(0, size, PIECE_BYTES):
        yield _Piece(path, start, min(PIECE_BYTES, size - start))


def _sum(piece: _Piece, stop: threading.Event) -> str:
    """The checksum of a piece, as eight hexadecimal digits."""
    checksum, left = 0, piece.num_bytes
    buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
    with open(piece.path, "rb", buffering=0) as file:
        file.seek(piece.start)
        while left and (count := file.readinto(buffer[: min(CHUNK_BYTES, left)])):
            go_on(piece.path, stop)
            checksum, left = zlib.crc32(buffer[:count], checksum), left - count
    return f"{checksum:08x}"


def go_on(path: Path, stop: threading.Event) -> None:
    """Raise Abandoned if the run ends."""
    if stop.is_set():
        raise Abandoned(f"the run ends, so {path} is left unfinished")


def _seal(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"

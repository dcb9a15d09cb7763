"""Checkpoints as directories: how one becomes complete, stays intact, and is removed. `snapshots` says what is in it.

A directory becomes a checkpoint by its last rename, after its manifest is written (`manifest.json`); a crash during the
write leaves the previous checkpoint intact. `step_N` is complete at any time: the directory is written and removed
under the name `.step_N.tmp`, and a second `step_N` moves the first one to `.step_N.old` until it has replaced it. The
next run that claims the directory calls `recover_checkpoints`, which finishes or undoes what a crash interrupted. A run
that ends while one of its threads publishes stops the thread and waits for it: after that, nothing writes there.

The manifest has every file of the checkpoint with its size and checksums; it is written last and read first. A
directory without it is not a checkpoint. With it, any damage is detected before a run resumes from the checkpoint: a
missing, shortened or extended file, or a flipped bit, also in the manifest itself. Additional files are ignored. The
checksum is CRC-32: it detects accidental errors of disks and copies at disk speed, about 2 GB/s per core. Files are
summed in pieces, in several threads, because zlib and reads release the interpreter lock: a checkpoint of 100 GB takes
about ten seconds on eight cores if the disk is as fast.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, FlowrlError
from flowrl.runtime.ledger.ledger_file import sync_file
from flowrl.runtime.ledger.ledger_segments import SEGMENTS

STEP_DIR = re.compile(r"step_(\d{6,})")
ASIDE = ".old"
RUBBISH = ".tmp"
MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
PIECE_BYTES = 256 << 20
"""Size of the pieces of a file. Each piece has its own checksum; pieces are summed in parallel."""
CHUNK_BYTES = 4 << 20
"""Bytes per read; a thread keeps no more in memory."""
THREADS = min(8, os.cpu_count() or 1)


def link_files(source: Path, directory: Path, stop: threading.Event) -> bool:
    """Give `directory`, which has no manifest yet, the files that only the checkpoint `source` has, as hard links.

    Except the segments of the ledger, which `directory` has all of its own.
    Returns False, and changes nothing, if the file system has no hard links. Nobody may write to these files
    afterwards, because `source` has them too.
    """
    tried = directory / MANIFEST
    try:
        os.link(source / MANIFEST, tried)
    except OSError:
        return False
    tried.unlink()
    for path in sorted(source.rglob("*")):
        raise_if_stopped(path, stop)
        target = directory / path.relative_to(source)
        if target.parent.name == SEGMENTS and target.parent.parent == directory:
            continue
        if path.is_file() and target != tried and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
    return True


def publish_checkpoint(temporary: Path, final: Path, facts: Mapping[str, Any], stop: threading.Event) -> None:
    """Make a finished directory the checkpoint `final`, durably; replaces a checkpoint of that name.

    The manifest contains `facts`. Blocks until everything is on the disk. Setting `stop` raises
    `Abandoned` and leaves `final` as it was, unless the directory has been renamed already.
    """
    write_manifest(temporary, facts, stop)
    for path in (*temporary.rglob("*"), temporary):
        raise_if_stopped(temporary, stop)
        sync_file(path)
    _settle_aside(final)
    if final.exists():
        final.replace(_hidden_name(final, ASIDE))
    try:
        temporary.replace(final)
        sync_file(final.parent)
    finally:
        _settle_aside(final)


def recover_checkpoints(checkpoints: Path) -> None:
    """Restore or remove the remains of a run that was killed while it wrote, replaced or removed a checkpoint.

    No other run may write there: the caller holds the run directory's lock.
    """
    for aside in sorted(checkpoints.glob(f".step_*{ASIDE}")):
        _settle_aside(aside.with_name(aside.name[1:].removesuffix(ASIDE)))
    for rubbish in sorted(checkpoints.glob(f".step_*{RUBBISH}")):
        shutil.rmtree(rubbish, ignore_errors=True)  # a process of the killed run may still be writing there


def _hidden_name(final: Path, suffix: str) -> Path:
    return final.with_name(f".{final.name}{suffix}")


def _settle_aside(final: Path) -> None:
    """Remove the checkpoint moved aside for `final` if `final` exists; otherwise move it back."""
    aside = _hidden_name(final, ASIDE)
    if not aside.exists():
        return
    if final.exists():
        shutil.rmtree(aside)
    else:
        aside.replace(final)


def steps_of(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every checkpoint there, intact or damaged, oldest first."""
    found = ((STEP_DIR.fullmatch(path.name), path) for path in checkpoints.glob("step_*"))
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def prune_checkpoints(checkpoints: Path, keep: int, *, spared: Collection[int] = ()) -> None:
    """Remove all but the newest `keep` checkpoints and those of the steps `spared`; `keep` 0 keeps all."""
    for step, path in steps_of(checkpoints)[:-keep] if keep else []:
        if step not in spared:
            rubbish = _hidden_name(path, RUBBISH)
            shutil.rmtree(rubbish, ignore_errors=True)
            path.replace(rubbish)
            shutil.rmtree(rubbish)


class Abandoned(FlowrlError):
    """The run ends, so the writing of a checkpoint is abandoned."""


def write_manifest(directory: Path, facts: Mapping[str, Any], stop: threading.Event) -> None:
    """Sum all files in `directory` and write its manifest, with `facts` (JSON). Raises Abandoned on `stop`."""
    files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
    sizes = {name: path.stat().st_size for name, path in files.items() if name != MANIFEST}
    known = _find_linked(directory, files)
    summed = _sum_files(directory, {name: size for name, size in sizes.items() if name not in known}, stop)
    content = {"format": MANIFEST_FORMAT, **facts, "files": {name: known.get(name) or summed[name] for name in sizes}}
    sealed = {**content, "checksum": _checksum_of(content)}
    (directory / MANIFEST).write_text(json.dumps(sealed, indent=1) + "\n", encoding="utf-8")


def _find_linked(directory: Path, files: Mapping[str, Path]) -> dict[str, Any]:
    """The entries of the files that are hard links to those of another checkpoint, from its manifest.

    They are not read again: if one has changed since it was summed, that is found when it is verified.
    """
    left = {name: path.stat() for name, path in files.items() if path.stat().st_nlink > 1}
    known: dict[str, Any] = {}
    for other in sorted(directory.parent.glob("step_*"), reverse=True) if left else []:
        with suppress(ConfigError, OSError):
            entries = read_manifest(other)["files"]
            for name in [name for name in left if name in entries and (other / name).exists()]:
                if os.path.samestat((other / name).stat(), left[name]) and entries[name]["bytes"] == left[name].st_size:
                    known[name] = entries[name]
                    del left[name]
        if not left:
            break
    return known


def read_manifest(directory: Path) -> Mapping[str, Any]:
    """The manifest of a checkpoint. Raises ConfigError, with the file's name, if it is missing or damaged."""
    try:
        content = json.loads((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"it has no {MANIFEST}, so it was never finished") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum_of(content):
        raise ConfigError(f"{MANIFEST} has changed since it was written (its own checksum differs)")
    if content["format"] != MANIFEST_FORMAT:
        raise ConfigError(f"{MANIFEST} has format {content['format']}, but this flowrl reads {MANIFEST_FORMAT}")
    return content


def verify_files(directory: Path) -> Mapping[str, Any]:
    """The manifest, after checking every file against it. Raises ConfigError for the first file that differs."""
    content = read_manifest(directory)
    sizes = {name: entry["bytes"] for name, entry in content["files"].items()}
    for name, num_bytes in sizes.items():
        path = directory / name
        try:
            found_bytes = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
        if found_bytes is None:
            raise ConfigError(f"{name} is missing")
        if found_bytes != num_bytes:
            raise ConfigError(f"{name} has {found_bytes} bytes, but {num_bytes} were written")
    try:
        found = _sum_files(directory, sizes, threading.Event())
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be read: {error.strerror}") from None
    for name, entry in content["files"].items():
        for number, (was, now) in enumerate(zip(entry["crc32"], found[name]["crc32"], strict=True)):
            if was != now:
                start, end = number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, sizes[name])
                raise ConfigError(f"{name} has changed since it was written (checksum of bytes {start} to {end})")
    return content


def _sum_files(directory: Path, sizes: Mapping[str, int], stop: threading.Event) -> dict[str, Any]:
    """Size and checksums of each file, by name."""
    pieces = [(name, start) for name, size in sizes.items() for start in range(0, size, PIECE_BYTES)]
    found: dict[str, Any] = {name: {"bytes": size, "crc32": []} for name, size in sizes.items()}
    with ThreadPoolExecutor(THREADS, thread_name_prefix="flowrl-checksum") as threads:
        sums = threads.map(
            _sum_piece,
            (directory / name for name, _ in pieces),
            (start for _, start in pieces),
            (min(PIECE_BYTES, sizes[name] - start) for name, start in pieces),
            itertools.repeat(stop),
        )
        for (name, _), checksum in zip(pieces, sums, strict=True):
            found[name]["crc32"].append(checksum)
    return found


def _sum_piece(path: Path, start: int, num_bytes: int, stop: threading.Event) -> str:
    """The checksum of a piece of a file, as eight hexadecimal digits."""
    checksum, left = 0, num_bytes
    buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(CHUNK_BYTES, left)])):
            raise_if_stopped(path, stop)
            checksum, left = zlib.crc32(buffer[:count], checksum), left - count
    return f"{checksum:08x}"


def raise_if_stopped(path: Path, stop: threading.Event) -> None:
    """Raise Abandoned if the run ends."""
    if stop.is_set():
        raise Abandoned(f"the run ends, so {path} is left unfinished")


def _checksum_of(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"

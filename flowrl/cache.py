"""Directories that flowrl creates once and keeps, as those of models.

Invariants: a directory under its final name is complete, because it gets that name by one atomic rename;
one process creates it while all others wait for the lock, which is released at the latest when that process ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Progress = Callable[[str], None]


def cache_dir() -> Path:
    """`$FLOWRL_CACHE`, else `~/.cache/flowrl`."""
    return Path(os.environ.get("FLOWRL_CACHE") or Path.home() / ".cache" / "flowrl")


def cached_model(name: str, recipe: Mapping[str, Any], make: Callable[[Path], None], progress: Progress) -> Path:
    """The directory that `make(empty_dir)` fills, created at most once for each `recipe` (JSON values)."""
    return cached_directory("models", name, recipe, make, progress)


def cached_directory(
    kind: str, name: str, recipe: Mapping[str, Any], make: Callable[[Path], None], progress: Progress
) -> Path:
    """The same for directories of another `kind`, which are stored next to the models."""
    from filelock import FileLock, Timeout

    digest = hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=6).hexdigest()
    home = cache_dir() / kind
    final = home / f"{name}-{digest}"
    if final.is_dir():
        return final
    home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(home / f"{name}-{digest}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress(f"{name}: waiting for the process that is making {final}")
        lock.acquire()
    try:
        if not final.is_dir():
            _make(final, recipe, make)
    finally:
        lock.release()
    return final


def _make(final: Path, recipe: Mapping[str, Any], make: Callable[[Path], None]) -> None:
    """Fill a new directory next to `final` and rename it; remnants of a killed process are removed."""
    for leftover in final.parent.glob(f"{final.name}.part-*"):
        shutil.rmtree(leftover)
    part = Path(tempfile.mkdtemp(prefix=f"{final.name}.part-", dir=final.parent))
    try:
        make(part)
        (part / "flowrl.json").write_text(json.dumps(recipe, indent=1, sort_keys=True))
        part.chmod(0o755)
        part.rename(final)
    finally:
        shutil.rmtree(part, ignore_errors=True)

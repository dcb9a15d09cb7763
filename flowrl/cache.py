"""Directories that flowrl creates once and keeps, as those of models.

Invariants: a directory under its final name is complete, because it gets that name by one atomic rename;
one process creates it while all others wait for the lock, which is released at the latest when that process ends;
one that may be removed is removed under its lock, and only if it has not been asked for in `unused_days`, while whoever
asks for it later than a day after the last time takes the lock, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Progress = Callable[[str], None]
RECIPE = "flowrl.json"
"""What a directory was made from. It was last changed when the directory was last asked for, but for a day."""
DAY_S = 24 * 60 * 60


def cache_dir() -> Path:
    """`$FLOWRL_CACHE`, else `~/.cache/flowrl`."""
    return Path(os.environ.get("FLOWRL_CACHE") or Path.home() / ".cache" / "flowrl")


def cached_model(name: str, recipe: Mapping[str, Any], make: Callable[[Path], None], progress: Progress) -> Path:
    """The directory that `make(empty_dir)` fills, created at most once for each `recipe` (JSON values)."""
    return cached_directory("models", name, recipe, make, progress)


def cached_directory(
    kind: str,
    name: str,
    recipe: Mapping[str, Any],
    make: Callable[[Path], None],
    progress: Progress,
    *,
    unused_days: int | None = None,
) -> Path:
    """The same for directories of another `kind`, which are stored next to the models.

    With `unused_days`, those of this kind that nobody has asked for in so many days are removed when another is made.
    """
    from filelock import FileLock, Timeout

    digest = hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=6).hexdigest()
    home = cache_dir() / kind
    final = home / f"{name}-{digest}"
    if final.is_dir() and (unused_days is None or _days_unused(final) < 1):
        return final
    home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(home / f"{name}-{digest}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress(f"{name}: waiting for the process that is making {final}")
        lock.acquire()
    try:
        if final.is_dir():
            os.utime(final / RECIPE)
        else:
            _make(final, recipe, make)
            _remove_unused(home, unused_days, progress)
    finally:
        lock.release()
    return final


def _days_unused(directory: Path) -> float:
    """Since it was last asked for, or 0 if it is gone."""
    try:
        return (time.time() - (directory / RECIPE).stat().st_mtime) / DAY_S
    except FileNotFoundError:
        return 0.0


def _remove_unused(home: Path, days: int | None, progress: Progress) -> None:
    from filelock import FileLock, Timeout

    for recipe in home.glob(f"*/{RECIPE}"):
        directory = recipe.parent
        if days is None or _days_unused(directory) <= days:
            continue
        try:
            with FileLock(f"{directory}.lock", blocking=False):
                if _days_unused(directory) > days:
                    shutil.rmtree(directory)
                    progress(f"{directory} is removed: nobody has asked for it in {days} days")
        except Timeout:  # somebody asks for it just now
            continue


def _make(final: Path, recipe: Mapping[str, Any], make: Callable[[Path], None]) -> None:
    """Fill a new directory next to `final` and rename it; remnants of a killed process are removed."""
    for leftover in final.parent.glob(f"{final.name}.part-*"):
        shutil.rmtree(leftover)
    part = Path(tempfile.mkdtemp(prefix=f"{final.name}.part-", dir=final.parent))
    try:
        make(part)
        (part / RECIPE).write_text(json.dumps(recipe, indent=1, sort_keys=True))
        part.chmod(0o755)
        part.rename(final)
    finally:
        shutil.rmtree(part, ignore_errors=True)

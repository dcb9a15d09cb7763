"""Directories that flowrl creates once and keeps, such as those of models.

Invariants:
- a directory that has its final name and its recipe is complete: one atomic rename gives it that name, and another
  takes the name away before anything in it is removed;
- a directory without a recipe is made again;
- one process creates a directory while all others wait for its lock, which is released at the latest when that process
  ends;
- a directory that may be removed is removed under its lock, and only if nobody has asked for it in `unused_days`. A
  process that asks for it more than a day after the last request also takes the lock, unless this user may only read
  the cache;
- a lock is removed only by the process that holds it, and only if nothing else of that name exists.

If a removal fails, the request for a directory still succeeds.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

Progress = Callable[[str], None]
RECIPE = "flowrl.json"
"""File that says what its directory was made from. Its mtime is the directory's last use, to within a day."""
DAY_S = 24 * 60 * 60
LEFTOVER_DAYS = 30
"""Days after which the remains of killed processes are removed, for kinds whose directories are kept for good."""
ENTRY = re.compile(r"(.+-[0-9a-f]{12})(\.part-.+|\.lock)?")
"""A name in the cache: a directory, a directory that is being made or removed, or a directory's lock."""
LOCK = ".lock"
Entries = Mapping[str, Path]
"""Suffix of a name, as ENTRY has it -> the path; "" is the suffix of the directory itself."""
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def cache_dir() -> Path:
    """`$FLOWRL_CACHE`, else `~/.cache/flowrl`."""
    return Path(os.environ.get("FLOWRL_CACHE") or Path.home() / ".cache" / "flowrl")


def origin_of(directory: Path) -> Path:
    """The directory from which a cached `directory` was made, if its recipe names an `origin`; else `directory`
    itself."""
    try:
        recipe = json.loads((directory / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return directory
    return Path(recipe["origin"]) if isinstance(recipe, dict) and "origin" in recipe else directory


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
    """As `cached_model`, for directories of another `kind`, which are stored next to the models.

    With `unused_days`, directories of this kind that nobody has asked for in that many days are removed when another
    one is made.
    """
    digest = hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=6).hexdigest()
    final = cache_dir() / kind / f"{name}-{digest}"
    if (days := _days_unused(final)) is not None and (unused_days is None or days < 1):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(final, progress):
            if is_new := _days_unused(final) is None:
                _make_directory(final, recipe, make, progress)
            else:
                os.utime(final / RECIPE)
    except OSError as problem:
        if problem.errno in DENIED and _days_unused(final) is not None:
            return final  # complete, in a cache that this user may only read
        raise
    if is_new:
        for other, entries in sorted(_list_entries(final.parent).items()):
            remove = partial(_remove_old, final.parent / other, entries, unused_days, progress)
            _try_to_remove(final.parent / other, remove, progress)
    return final


@contextmanager
def hold_lock(final: Path, progress: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(_lock_of(final))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        name = final.name.rpartition("-")[0]
        progress(f"{name}: waiting for the process that is making {final}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make_directory(final: Path, recipe: Mapping[str, Any], make: Callable[[Path], None], progress: Progress) -> None:
    """Fill a new directory next to `final` and rename it; remnants of a killed process are removed."""
    for suffix, leftover in _list_entries(final.parent)[final.name].items():
        if suffix not in ("", LOCK):
            _try_to_remove(leftover, partial(shutil.rmtree, leftover), progress)
    if final.is_dir():  # without its recipe
        _discard_directory(final)
    part = Path(tempfile.mkdtemp(prefix=f"{final.name}.part-", dir=final.parent))
    try:
        make(part)
        (part / RECIPE).write_text(json.dumps(recipe, indent=1, sort_keys=True), encoding="utf-8")
        part.chmod(0o755)
        part.rename(final)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _try_to_remove(directory: Path, remove: Callable[[], None], progress: Progress) -> None:
    """Try to remove a directory. A failure is only reported: a directory of another user stays."""
    try:
        remove()
    except OSError as problem:
        progress(f"{directory} is kept because it cannot be removed: {problem.strerror or problem}")


def _remove_old(final: Path, entries: Entries, unused_days: int | None, progress: Progress) -> None:
    """Remove the old entries of one name, unless another process holds its lock."""
    from filelock import FileLock, Timeout

    if not _find_old(entries, unused_days):
        return
    try:
        with FileLock(_lock_of(final), blocking=False):
            for path, why in _find_old(_list_entries(final.parent)[final.name], unused_days).items():
                if path != _lock_of(final):
                    (_discard_directory if path == final else shutil.rmtree)(path)
                    progress(f"{path} is removed: {why}")
            if _list_entries(final.parent)[final.name].keys() == {LOCK}:
                _lock_of(final).unlink()  # a process that waits for it sees that its file is gone, and takes a new one
    except Timeout:
        return


def _find_old(entries: Entries, unused_days: int | None) -> dict[Path, str]:
    """The entries of one name that may be removed, each with the reason. The lock only if nothing else of the name
    exists."""
    most = LEFTOVER_DAYS if unused_days is None else unused_days
    final = entries.get("")
    unused = _days_unused(final) if final else None
    directories = [path for suffix, path in entries.items() if suffix != LOCK]
    left = [path for path in directories or entries.values() if path != final or unused is None]
    found = {path: "a process that was killed left it" for path in left if (_days_since_change(path) or 0) > most}
    if final and unused is not None and unused_days is not None and unused > unused_days:
        found[final] = f"nobody has asked for it in {unused_days} days"
    return found


def _list_entries(home: Path) -> Mapping[str, Entries]:
    """Name -> entries, for all directories of a kind: the directory, its lock, and parts being made or removed, or left
    over."""
    found: dict[str, dict[str, Path]] = defaultdict(dict)
    for path in home.glob("*"):
        if match := ENTRY.fullmatch(path.name):
            found[match[1]][match[2] or ""] = path
    return found


def _discard_directory(directory: Path) -> None:
    """Remove a directory, its name first: if the removal is interrupted, nobody takes the rest for a complete
    directory."""
    with tempfile.TemporaryDirectory(prefix=f"{directory.name}.part-removed-", dir=directory.parent) as bin_dir:
        directory.rename(Path(bin_dir) / directory.name)


def _days_unused(directory: Path) -> float | None:
    """Days since it was last asked for; None if it does not exist or is not complete."""
    return _days_since_change(directory / RECIPE)


def _days_since_change(path: Path) -> float | None:
    """None if it does not exist."""
    try:
        return (time.time() - path.stat().st_mtime) / DAY_S
    except (FileNotFoundError, NotADirectoryError):
        return None


def _lock_of(final: Path) -> Path:
    return final.with_name(final.name + LOCK)

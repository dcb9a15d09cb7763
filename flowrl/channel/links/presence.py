"""Presence: kernel file locks show which runs have a live process on this machine.

A run has files in two places: segments in shared memory, and sockets in a directory of the user. In each place
the run has a mark, an empty directory, and every process that makes files for the run holds a shared lock on both
marks. When no process holds the lock any more, the run's files have no owner, and may be removed.

The kernel releases a lock when its process ends, for whatever reason. So this does not depend on clocks or process
ids: clocks are changed, process ids are reused, and containers that share a place number their processes separately.

Invariants
- A process locks the marks before it makes its first file of the run.
- A process that removes a run's files holds an exclusive lock on the run's mark, and removes the mark last.

Waits: `Presence` waits for a sweep that holds the mark at that moment, until the sweep has removed the mark.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flowrl.channel.links.address import run_name, socket_root
from flowrl.channel.links.slab import SHM

NAME = re.compile(r"^(?:flowrl-)?(?P<run>[0-9a-f]{12})(?:-|$)")


def places() -> tuple[Path, Path]:
    """The directories in which runs make files on this machine."""
    return SHM, socket_root()


def mark(place: Path, run: str) -> Path:
    """The directory in `place` that processes of the run named `run` lock."""
    return place / (f"flowrl-{run}" if place == SHM else run)


class Presence:
    """Shows that this process makes files for a run, until `close` or its end. The last process removes the files."""

    def __init__(self, run_id: str) -> None:
        self._run = run_name(run_id)
        self._held = [(place, _hold(mark(place, self._run))) for place in places()]

    def close(self) -> None:
        for place, held in self._held:
            with suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _still(held, mark(place, self._run)):
                    clear(place, self._run)
            os.close(held)
        self._held = []


def found(place: Path) -> dict[str, list[Path]]:
    """Run -> this user's files of the run in `place`, without the mark. Files that vanish meanwhile are left out."""
    runs: dict[str, list[Path]] = defaultdict(list)
    for path in place.iterdir():
        if (match := NAME.match(path.name)) and _ours(path):
            files = runs[match["run"]]
            if path != mark(place, match["run"]):
                files.append(path)
    return runs


def remove_deserted(place: Path, run: str) -> list[Path]:
    """Remove a run's files in `place`, unless one of its processes is alive. Returns the removed files."""
    with _deserted(mark(place, run)) as deserted:
        return clear(place, run) if deserted else []


def clear(place: Path, run: str) -> list[Path]:
    """Remove a run's files in `place`, and the mark last. Returns the files."""
    files = found(place).get(run, [])
    for path in files:
        _remove(path)
    _remove(mark(place, run))
    return files


def _remove(path: Path) -> None:
    """Remove a file or directory. It is no error if another process removes it at the same time."""
    with suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _hold(path: Path) -> int:
    """Create the mark if it is missing, and return a descriptor of it that holds a shared lock."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # a sweep removed it in between
            continue
        fcntl.flock(held, fcntl.LOCK_SH)
        if _still(held, path):
            return held
        os.close(held)


@contextmanager
def _deserted(path: Path) -> Iterator[bool]:
    """True if no process holds the mark; none can lock it within this context. Also True if there is no mark."""
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield _still(held, path)
    except BlockingIOError:
        yield False
    finally:
        os.close(held)


def _still(held: int, path: Path) -> bool:
    """Whether `path` still names the locked directory."""
    try:
        now = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(now, os.fstat(held))


def _ours(path: Path) -> bool:
    """Whether this is a file, socket or directory of this user. Links are ignored: flowrl makes none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode)

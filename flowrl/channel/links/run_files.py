"""The files of runs on this machine: which there are, and the removal of those of a run without a process.

Every process that makes files for a run holds a shared lock on the run's marks (`presence`), so whoever gets an
exclusive lock on a mark knows that no process of the run is left.

As a script, this is the *heir* of a run on one machine: a process that survives all others of the run, however they
end, and then removes the run's files, because segments in shared memory are gigabytes. It sleeps until then in a
request for the locks, and ends at once after a run that has removed its files itself. Only the standard library is
used, so that the heir is small and starts fast.

usage: run_files.py RUN PLACE...
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHM = Path("/dev/shm")
NAME = re.compile(r"^(?:flowrl-)?(?P<run>[0-9a-f]{12})(?:-|$)")
HEIR = "heir"
"""File in a run's mark in shared memory that the heir locks: there is one on each machine."""


def mark(place: Path, run: str) -> Path:
    """The directory in `place` that processes of the run named `run` lock."""
    return place / (f"flowrl-{run}" if place == SHM else run)


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
        yield still_names(path, held)
    except BlockingIOError:
        yield False
    finally:
        os.close(held)


def still_names(path: Path, held: int) -> bool:
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


def inherit(run: str, places: list[Path]) -> None:
    """Wait until no process of the run is left, and remove what there is of its files in `places`."""
    for place in places:
        path = mark(place, run)
        with suppress(FileNotFoundError):
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(held, fcntl.LOCK_EX)
            if still_names(path, held):
                clear(place, run)
            os.close(held)


if __name__ == "__main__":
    if os.fork() == 0:  # no child of the process that started it, which may end its children
        inherit(sys.argv[1], [Path(place) for place in sys.argv[2:]])

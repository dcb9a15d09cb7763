"""Which runs have a process on this machine, told by locks that the kernel keeps.

A run leaves files in two places: segments in shared memory, sockets in a directory of the user. In each place
it has a mark, an empty directory, and every process that makes files for the run holds a shared lock on the
marks. Nobody holds one any more: the run's files are nobody's, and may go.

A lock ends with its process, however that ended. So neither clocks nor process ids matter, which are set, used
again, and counted differently by containers that share the place.

Invariants
- A process holds the marks before it makes its first file of the run.
- Who removes a run's files holds its mark exclusively, and removes the mark last.

Waits: `Presence` for a sweep that has the mark at that moment; it ends when the sweep has removed it.
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

from flowrl.channel.address import run_name, socket_root
from flowrl.channel.slab import SHM

NAME = re.compile(r"^(?:flowrl-)?(?P<run>[0-9a-f]{12})(?:-|$)")


def places() -> tuple[Path, Path]:
    """Where runs leave files on this machine."""
    return SHM, socket_root()


def mark(place: Path, run: str) -> Path:
    """What processes of the run named `run` lock in `place`."""
    return place / (f"flowrl-{run}" if place == SHM else run)


class Presence:
    """This process makes files for a run, until `close` or its end. The last one that closes removes them."""

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
    """Run -> this user's files of it in `place`, the mark not among them. What vanishes meanwhile is left out."""
    runs: dict[str, list[Path]] = defaultdict(list)
    for path in place.iterdir():
        if (match := NAME.match(path.name)) and _ours(path):
            files = runs[match["run"]]
            if path != mark(place, match["run"]):
                files.append(path)
    return runs


def remove_deserted(place: Path, run: str) -> list[Path]:
    """Remove what a run left in `place`, unless one of its processes lives; returns what is gone."""
    with _deserted(mark(place, run)) as deserted:
        return clear(place, run) if deserted else []


def clear(place: Path, run: str) -> list[Path]:
    """Remove what a run has in `place`; returns the files. Its mark goes last."""
    files = found(place).get(run, [])
    for path in files:
        _remove(path)
    _remove(mark(place, run))
    return files


def _remove(path: Path) -> None:
    """What another process removes at the same time is gone all the same."""
    with suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _hold(path: Path) -> int:
    """A descriptor of the mark with a shared lock on it. The mark is made if it is not there."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # a sweep came between
            continue
        fcntl.flock(held, fcntl.LOCK_SH)
        if _still(held, path):
            return held
        os.close(held)


@contextmanager
def _deserted(path: Path) -> Iterator[bool]:
    """True if no process holds the mark, and none does while this lasts. So it is where there is no mark."""
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
    """The locked directory is the one that has this name."""
    try:
        now = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(now, os.fstat(held))


def _ours(path: Path) -> bool:
    """A file, socket or directory of this user. Links are nobody's business: flowrl makes none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode)

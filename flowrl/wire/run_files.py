"""The files of runs on this machine: their names, who is present, and their removal when nobody is.

A run has files in two places: segments in shared memory, and sockets in a directory of the user. In each place
the run has a mark, an empty directory, and every process that makes files for the run holds a shared lock on both
marks (`Presence`). When no process holds the lock any more, the run's files have no owner, and may be removed.

The kernel releases a lock when its process ends, for whatever reason. So this does not depend on clocks or process
ids: clocks are changed, process ids are reused, and containers that share a place number their processes separately.

As a script, this is the *heir* of a run on one machine: a process that survives all others of the run, however they
end, and then removes the run's files, because segments in shared memory are gigabytes. It sleeps until then in a
request for the locks, and ends at once after a run that has removed its files itself. Only the standard library is
used, so that the heir is small and starts fast.

Invariants
- A process locks the marks before it makes its first file of the run.
- A process that removes a run's files holds an exclusive lock on the run's mark, and removes the mark last.
- On each machine where a run has processes, an heir removes the files when the last of them has ended.

Waits: `Presence` waits for a sweep that holds the mark at that moment, until the sweep has removed the mark.

usage: run_files.py RUN PLACE...
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

SHM = Path("/dev/shm")
NAME = re.compile(r"^(?:flowrl-)?(?P<run>[0-9a-f]{12})(?:-|$)")
HEIR = "heir"
"""File in a run's mark in shared memory that the heir locks: there is one on each machine."""


def mark_path(place: Path, run: str) -> Path:
    """The directory in `place` that processes of the run named `run` lock."""
    return place / (f"flowrl-{run}" if place == SHM else run)


def find_files(place: Path) -> dict[str, list[Path]]:
    """Run -> this user's files of the run in `place`, without the mark. Files that vanish meanwhile are left out."""
    runs: dict[str, list[Path]] = defaultdict(list)
    for path in place.iterdir():
        if (match := NAME.match(path.name)) and _is_ours(path):
            files = runs[match["run"]]
            if path != mark_path(place, match["run"]):
                files.append(path)
    return runs


def remove_deserted(place: Path, run: str) -> list[Path]:
    """Remove a run's files in `place`, unless one of its processes is alive. Returns the removed files."""
    with _lock_deserted(mark_path(place, run)) as deserted:
        return remove_files(place, run) if deserted else []


def remove_files(place: Path, run: str) -> list[Path]:
    """Remove a run's files in `place`, and the mark last. Returns the files."""
    files = find_files(place).get(run, [])
    for path in files:
        _remove_path(path)
    _remove_path(mark_path(place, run))
    return files


def _remove_path(path: Path) -> None:
    """Remove a file or directory. It is no error if another process removes it at the same time."""
    with suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


@contextmanager
def _lock_deserted(path: Path) -> Iterator[bool]:
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


def _is_ours(path: Path) -> bool:
    """Whether this is a file, socket or directory of this user. Links are ignored: flowrl makes none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode)


def await_end(run: str, places: list[Path]) -> None:
    """Wait until no process of the run is left, and remove what there is of its files in `places`."""
    for place in places:
        path = mark_path(place, run)
        with suppress(FileNotFoundError):
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(held, fcntl.LOCK_EX)
            if still_names(path, held):
                remove_files(place, run)
            os.close(held)


SOCKET_PATH_LIMIT = 107


def socket_root() -> Path:
    """The directory of all flowrl sockets of this user; only the user has access."""
    root = Path(tempfile.gettempdir()) / f"flowrl-{os.getuid()}"
    with suppress(FileExistsError):  # a directory, or what the error below names
        root.mkdir(mode=0o700)
    status = root.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise _config_error(
            f"{root} is not a directory of this user; remove it, or set TMPDIR to a directory of your own"
        )
    if status.st_mode & 0o077:
        root.chmod(0o700)
    return root


def _config_error(text: str) -> Exception:
    from flowrl.errors import ConfigError  # not at the top: the heir has only the standard library

    return ConfigError(text)


def run_name(run_id: str) -> str:
    """The prefix of every file name of a run on the machine; `find_files` knows the run's files by it."""
    return blake2b(run_id.encode(), digest_size=6).hexdigest()


def run_prefix(run_id: str, pid: int) -> str:
    """The run's name and a process id, which shows people which process made the files."""
    return f"{run_name(run_id)}-{pid}"


def ipc_path(run_id: str, driver_pid: int, host: str, incarnation: int) -> Path:
    """The path of an endpoint's unix socket. Creates its directory."""
    folder = socket_root() / run_prefix(run_id, driver_pid)
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{blake2b(host.encode(), digest_size=5).hexdigest()}-{incarnation}"
    if len(str(path)) > SOCKET_PATH_LIMIT:
        raise _config_error(f"{path} is too long for a unix socket; set TMPDIR to a shorter path")
    return path


def remove_socket(path: str) -> None:
    """Remove an endpoint's socket, and the directory if the socket was the last one in it."""
    Path(path).unlink(missing_ok=True)
    with suppress(OSError):
        Path(path).parent.rmdir()


def places() -> tuple[Path, Path]:
    """The directories in which runs make files on this machine."""
    return SHM, socket_root()


class Presence:
    """Shows that this process makes files for a run, until `close` or its end. The last process removes the files."""

    def __init__(self, run_id: str) -> None:
        self._run = run_name(run_id)
        self._held = [(place, _hold_mark(mark_path(place, self._run))) for place in places()]

    def close(self) -> None:
        for place, held in self._held:
            with suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if still_names(mark_path(place, self._run), held):
                    remove_files(place, self._run)
            os.close(held)
        self._held = []


def _hold_mark(path: Path) -> int:
    """Create the mark if it is missing, and return a descriptor of it that holds a shared lock."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # a sweep removed it in between
            continue
        fcntl.flock(held, fcntl.LOCK_SH)
        if still_names(path, held):
            return held
        os.close(held)


def leave_heir(run_id: str) -> None:
    """Start the process that removes the files of the run on this machine when none of its processes is left, unless
    there is one already. The caller has a `Presence`."""
    run = run_name(run_id)
    with suppress(OSError):  # the machine has no room for one: the next start removes the files
        held = os.open(mark_path(SHM, run) / HEIR, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            subprocess.run(
                [sys.executable, "-I", "-S", __file__, run, *map(str, places())],
                pass_fds=[held],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env={name: text for name, text in os.environ.items() if name == "LD_LIBRARY_PATH"},
            )
        finally:
            os.close(held)


def sweep() -> list[str]:
    """Remove segments and sockets of this user's runs that have no live process. Returns their paths."""
    return [str(path) for place in places() for run in find_files(place) for path in remove_deserted(place, run)]


def remove_run(run_id: str) -> list[str]:
    """Remove all files of one run, even if one of its processes is alive. For the driver, once every host has ended."""
    return [str(path) for place in places() for path in remove_files(place, run_name(run_id))]


if __name__ == "__main__":
    if os.fork() == 0:  # no child of the process that started it, which may end its children
        await_end(sys.argv[1], [Path(place) for place in sys.argv[2:]])

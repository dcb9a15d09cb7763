"""Presence: kernel file locks show which runs have a live process on this machine.

A run has files in two places: segments in shared memory, and sockets in a directory of the user. In each place
the run has a mark, an empty directory, and every process that makes files for the run holds a shared lock on both
marks. When no process holds the lock any more, the run's files have no owner, and may be removed.

The kernel releases a lock when its process ends, for whatever reason. So this does not depend on clocks or process
ids: clocks are changed, process ids are reused, and containers that share a place number their processes separately.

Invariants
- A process locks the marks before it makes its first file of the run.
- A process that removes a run's files holds an exclusive lock on the run's mark, and removes the mark last.
- On each machine where a run has processes, an heir (`run_files`) removes the files when the last of them has ended.

Waits: `Presence` waits for a sweep that holds the mark at that moment, until the sweep has removed the mark.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from flowrl.channel.links import run_files
from flowrl.channel.links.address import run_name, socket_root
from flowrl.channel.links.run_files import HEIR, SHM, clear, mark, still_names


def places() -> tuple[Path, Path]:
    """The directories in which runs make files on this machine."""
    return SHM, socket_root()


class Presence:
    """Shows that this process makes files for a run, until `close` or its end. The last process removes the files."""

    def __init__(self, run_id: str) -> None:
        self._run = run_name(run_id)
        self._held = [(place, _hold(mark(place, self._run))) for place in places()]

    def close(self) -> None:
        for place, held in self._held:
            with suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if still_names(mark(place, self._run), held):
                    clear(place, self._run)
            os.close(held)
        self._held = []


def _hold(path: Path) -> int:
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
        held = os.open(mark(SHM, run) / HEIR, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            subprocess.run(
                [sys.executable, "-I", "-S", run_files.__file__, run, *map(str, places())],
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

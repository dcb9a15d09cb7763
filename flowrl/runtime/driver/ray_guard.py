"""A small process that ends what is left of a run's own Ray after the driver has ended in any way.

Ray's processes notice the end of a driver, and of each other, but not all of them soon: after SIGKILL of the driver two
agents look for Ray's head for a minute, and a worker that is just starting looks for its raylet. All processes of the
run inherit an environment variable, by which the guard finds them and the processes that they have started.

While Ray starts, the guard can also report an error for the driver: if the raylet ends in this phase, a library of Ray
waits for it for ten seconds, holding the GIL, and then ends the driver. The driver tells the guard when this phase is
over.

This file is run as a script and uses only the standard library, so that the guard is small and starts fast.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "FLOWRL_RAY"
GRACE_S = 3.0
"""Time that processes have to end before the guard kills them."""
QUIET_S = 1.0
"""The guard ends when it has found no process for this long: a raylet that is ending may still start one."""
LOOK_EVERY_S = 0.2
WATCH_EVERY_S = 0.5
WATCH_SHARE = 0.01
"""While the driver runs, looking takes at most this share of one core, even on a machine with many processes."""
ESSENTIAL = ("gcs_server", "raylet")
"""Processes without which Ray does not start, by the names that the kernel shows."""
SPEAKS_WITHIN_S = 5.0
"""Time that the driver has to report the end of one of them; unless it is blocked, it looks every tenth of a second."""
MUTE = (
    "flowrl: Ray's {} has ended (killed, out of memory, or crashed) while Ray started, and Ray's library has stopped "
    "this process with it; the run has not begun, start it again"
)
GIVE_UP_S = 30.0
"""The guard gives up after this time: a process that SIGKILL does not end hangs in the kernel."""


class Guard:
    """The guard of this process's Ray. Create it before Ray starts."""

    def __init__(self, mark: str) -> None:
        os.environ[VARIABLE] = mark
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark],
            stdin=subprocess.PIPE,
            stdout=nothing,
            stderr=None,  # until Ray has started, see `speaking`
            start_new_session=True,  # a Ctrl-C in the terminal is for the driver
        )

    @contextmanager
    def let_speak(self) -> Iterator[None]:
        """Inside, the guard reports an error of Ray's start if this process cannot."""
        try:
            yield
        finally:
            self._report_settled()

    def _report_settled(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def dismiss(self) -> None:
        """End the guard: Ray was stopped, and this process continues."""
        os.environ.pop(VARIABLE, None)
        self._report_settled()
        self._process.terminate()
        self._process.wait()


def end_after_driver(driver: int, mark: str, *, hidden: dict[int, int]) -> None:
    """Wait for the end of process `driver`, the guard's parent; then end the processes with this mark, and `hidden`."""
    found = watch_driver(driver, mark, hidden)
    ended_s = quiet_s = time.monotonic()
    while time.monotonic() - ended_s < GIVE_UP_S:
        look_s = time.monotonic()
        _open_handles(of_run(mark), found)
        running = [process for process in found.values() if not _has_ended(process)]
        if running:
            quiet_s = time.monotonic()  # after the look: on a busy machine one look can take longer than QUIET_S
        elif look_s - quiet_s >= QUIET_S:
            return
        if look_s - ended_s > GRACE_S:
            for process in running:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


def speak_until_settled(driver: int, mark: str) -> dict[int, int]:
    """Until standard input is closed: if Ray ends and process `driver` does not notice, report that and kill `driver`.

    Returns the processes that cannot be found afterwards, as `watch` does.
    """
    handle = os.pidfd_open(driver)
    hidden, essential = dict[int, int](), dict[int, int]()
    names: dict[int, str] = {}
    while not _is_closed(sys.stdin.fileno(), LOOK_EVERY_S):
        pids = of_run(mark)
        _open_handles({pid for pid in pids if not _has_mark(mark, pid)}, hidden)
        names |= {pid: name for pid in pids if (name := _read_name(pid)) in ESSENTIAL}
        _open_handles({*names}, essential)
        ended = [names[pid] for pid, process in essential.items() if _has_ended(process)]
        if ended and not _is_closed(sys.stdin.fileno(), SPEAKS_WITHIN_S) and not _has_ended(handle):
            print(MUTE.format(ended[0]), file=sys.stderr, flush=True)
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            break
    # A reader of the driver's stderr waits until all copies are closed.
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), sys.stderr.fileno())
    return hidden


def _is_closed(pipe: int, within_s: float) -> bool:
    watch = select.poll()
    watch.register(pipe, 0)
    return bool(watch.poll(1000 * within_s))


def _read_name(pid: int) -> str:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def watch_driver(driver: int, mark: str, found: dict[int, int]) -> dict[int, int]:
    """Wait for the end of process `driver`. Returns pid -> pidfd of the run's processes that cannot be found
    afterwards.

    `found` contains those that are already known.

    A process that sets its own title (`setproctitle`) may have overwritten its environment, as Ray's agents do. Then
    only its parent shows to which run it belongs, and that parent, Ray's raylet, ends at the same moment as the driver.
    """
    handle = os.pidfd_open(driver)
    pause_s = 0.0
    while os.getppid() == driver and not _has_ended(handle, pause_s):
        start_s = time.monotonic()
        for pid in [pid for pid, process in found.items() if _has_ended(process)]:
            os.close(found.pop(pid))
        _open_handles({pid for pid in of_run(mark) if not _has_mark(mark, pid)}, found)
        pause_s = max(WATCH_EVERY_S, (time.monotonic() - start_s) / WATCH_SHARE)
    return found


def _open_handles(pids: set[int], found: dict[int, int]) -> None:
    for pid in pids - found.keys():
        with suppress(ProcessLookupError):
            found[pid] = os.pidfd_open(pid)


def _has_ended(process: int, within_s: float = 0.0) -> bool:
    watch = select.poll()  # `select.select` refuses descriptors from 1,024 on
    watch.register(process, select.POLLIN)
    return bool(watch.poll(1000 * within_s))


def of_run(mark: str) -> set[int]:
    """The processes with the mark in their environment, and those that they have started, except this process."""
    parents = _read_parents()
    found = {pid for pid in parents if _has_mark(mark, pid)}
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return found - {os.getpid()}


def _read_parents() -> dict[int, int]:
    """pid -> parent's pid, of every process."""
    found = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError):  # it has ended
                found[int(directory.name)] = int(
                    (directory / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()[1]
                )
    return found


def _has_mark(mark: str, pid: int) -> bool:
    """Whether the environment of a process has the mark. A process that has ended has no environment."""
    with suppress(OSError):  # it has ended, or belongs to another user
        return f"{VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


if __name__ == "__main__":
    with suppress(ProcessLookupError):
        end_after_driver(int(sys.argv[1]), sys.argv[2], hidden=speak_until_settled(int(sys.argv[1]), sys.argv[2]))

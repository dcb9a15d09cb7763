"""Processes on this machine whose end the kernel reports to the driver at once: Ray need not be alive for that.

Waits: `end` waits for the processes to end, and kills them after a time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flowrl.machine.orphans import has_ended

KILLED_WITHIN_S = 5.0
"""A process that SIGKILL does not end within this time hangs in the kernel: nothing else can end it."""
KILLED_AFTER_S = 0.05
"""Time for the kernel to end killed processes before they are looked for again."""
MOST_GENERATIONS = 20
ENDED = "ZX"
"""States of processes that have ended and that their parents have not waited for."""


class Processes:
    """Followed processes, by name. Only one event loop may use it."""

    def __init__(self) -> None:
        self._handles: dict[str, int] = {}
        """Name -> descriptor that becomes readable when the process has ended."""
        self._report: dict[str, Callable[[str], None]] = {}
        self._none_left = asyncio.Event()

    def follow_process(self, name: str, pid: int, on_end: Callable[[str], None]) -> None:
        """Call `on_end(name)` when process `pid` ends; never if there is no such process any more."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return
        self._handles[name], self._report[name] = handle, on_end
        asyncio.get_running_loop().add_reader(handle, self._report_end, name)

    def _report_end(self, name: str) -> None:
        self._stop_following(name)
        if report := self._report.pop(name, None):
            report(name)

    def _stop_following(self, name: str) -> None:
        handle = self._handles.pop(name)
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
        if not self._handles:
            self._none_left.set()

    def report_ended(self) -> None:
        """Report the processes that have ended and are not reported yet."""
        for name in [name for name, handle in self._handles.items() if has_ended(handle)]:
            self._report_end(name)

    def expect_ends(self) -> None:
        """Report no ends from now on."""
        self._report.clear()

    async def end_all(self, *, within_s: float) -> None:
        """Wait until all processes have ended. Those that still run after `within_s` are killed."""
        for patience_s in (within_s, KILLED_WITHIN_S):
            self._none_left.clear()
            if self._handles:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._none_left.wait(), patience_s)
            for handle in self._handles.values():
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Stop following all processes."""
        for name in list(self._handles):
            self._stop_following(name)


def pid_space() -> str:
    """Identifies the pid namespace: processes with the same value are on one machine and in one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8", errors="replace").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def find_children(*names: str, but: Collection[int] = ()) -> dict[str, int]:
    """Name -> pid of this process's children with these names, as the kernel reports them, without those in `but`."""
    mine = {pid: stat.name for pid, stat in _read_stats().items() if stat.parent == os.getpid() and pid not in but}
    return {name: pid for pid, name in mine.items() if name in names}


def end_descendants(*, but: Collection[int] = ()) -> None:
    """Kill all processes that this one has started, directly or through others, or adopted, except those in `but`."""
    for _ in range(MOST_GENERATIONS):  # a process may start another one before it is killed
        running = [pid for pid in find_descendants() if pid not in but]
        if not running:
            return
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(KILLED_AFTER_S)


def find_descendants() -> list[int]:
    """The pids of all processes below this one that have not ended."""
    stats = _read_stats()
    found, parents = [], [os.getpid()]
    while parents:
        parent = parents.pop()
        of_parent = [pid for pid, stat in stats.items() if stat.parent == parent]
        found += [pid for pid in of_parent if stats[pid].state not in ENDED]
        parents += of_parent
    return found


class _Stat(NamedTuple):
    """What the kernel reports about a process."""

    name: str
    state: str
    parent: int


def _read_stats() -> dict[int, _Stat]:
    found = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                before, _, rest = (directory / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")
                state, parent, *_ = rest.split()
                found[int(directory.name)] = _Stat(before.partition("(")[2], state, int(parent))
    return found

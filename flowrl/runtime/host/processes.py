"""Processes on this machine whose end the driver hears of at once, by the kernel's word: Ray need not be alive.

Waits: `end` for the processes to end, which it sees to after a time itself.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

KILLED_WITHIN_S = 5.0
"""A process that SIGKILL does not end in this time hangs in the kernel: nobody can do more."""


class Processes:
    """Followed processes, by name. Only one event loop may use it."""

    def __init__(self) -> None:
        self._handles: dict[str, int] = {}
        """Descriptors that are readable when their processes have ended."""
        self._report: dict[str, Callable[[str], None]] = {}
        self._none_left = asyncio.Event()

    def follow(self, name: str, pid: int, on_end: Callable[[str], None]) -> None:
        """Call `on_end(name)` when process `pid` ends; never if it has ended already."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return
        self._handles[name], self._report[name] = handle, on_end
        asyncio.get_running_loop().add_reader(handle, self._has_ended, name)

    def _has_ended(self, name: str) -> None:
        self._let_go(name)
        if report := self._report.pop(name, None):
            report(name)

    def _let_go(self, name: str) -> None:
        handle = self._handles.pop(name)
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
        if not self._handles:
            self._none_left.set()

    def look(self) -> None:
        """Tell of those that have ended and have not been told of yet."""
        for name in [name for name, handle in self._handles.items() if select.select([handle], [], [], 0)[0]]:
            self._has_ended(name)

    def expect_ends(self) -> None:
        """Tell nobody from now on."""
        self._report.clear()

    async def end(self, *, within_s: float) -> None:
        """Until all have ended: by themselves, or after `within_s` by SIGKILL."""
        for patience_s in (within_s, KILLED_WITHIN_S):
            self._none_left.clear()
            if self._handles:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._none_left.wait(), patience_s)
            for handle in self._handles.values():
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Follow them no more."""
        for name in list(self._handles):
            self._let_go(name)


def pid_space() -> str:
    """Processes with the same value mean the same process by a number: they are of one machine, and one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def children(*names: str) -> dict[str, int]:
    """Name -> pid of this process's own children of these names, as the kernel calls them."""
    found = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                name, rest = _stat(directory)
                if name in names and rest[1] == str(os.getpid()):
                    found[name] = int(directory.name)
    return found


def _stat(process: Path) -> tuple[str, list[str]]:
    """(name, state and all that follows)"""
    before, _, rest = (process / "stat").read_text().rpartition(") ")
    return before.partition("(")[2], rest.split()

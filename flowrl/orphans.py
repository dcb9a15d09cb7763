"""Adoption of orphans by a process, so that the end of what it started can be brought about and seen."""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a process becomes this one's child when its own parent, a descendant of this one, has ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def child_pids() -> list[int]:
    """Pids of this thread's; none where the kernel does not tell."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def has_ended(process: int, within_s: float | None = 0.0) -> bool:
    """Whether the process of a pidfd has ended, or does so in that time; None: wait for it.

    `select.select` cannot watch the descriptors of a process with more than 1,024.
    """
    watch = select.poll()
    watch.register(process, select.POLLIN)
    return bool(watch.poll(None if within_s is None else 1000 * within_s))

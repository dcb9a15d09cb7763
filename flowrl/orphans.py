"""Lets a process adopt orphans, so that it can end, and see the end of, every process that it or a descendant
started."""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, a descendant of this process whose own parent has ended becomes a child of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def child_pids() -> list[int]:
    """Pids of the main thread's children; empty if the kernel does not report them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()]
    except OSError:
        return []


def has_ended(process: int, within_s: float | None = 0.0) -> bool:
    """Whether the process of a pidfd has ended, or ends within that time; None: wait until it has ended.

    This uses `poll`, because `select.select` cannot watch all descriptors of a process with more than 1,024.
    """
    watch = select.poll()
    watch.register(process, select.POLLIN)
    return bool(watch.poll(None if within_s is None else 1000 * within_s))

"""Whether a process has one thread: only then can it be forked, or play another episode."""

from __future__ import annotations

import os
import threading
import time


def num_threads() -> int:
    """The kernel's number of threads, which includes those that libraries have started."""
    return len(os.listdir("/proc/self/task"))


def one_thread_left(within_s: float) -> bool:
    """Wait at most `within_s` for all threads but this one to end. Returns whether all have ended."""
    until_s = time.monotonic() + within_s
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        if not isinstance(thread, threading._DummyThread):  # one that Python did not start, and cannot join
            thread.join(max(0.0, until_s - time.monotonic()))
    while num_threads() > 1 and time.monotonic() < until_s:
        time.sleep(0.001)  # there is no event for a joined thread leaving the kernel
    return num_threads() == 1

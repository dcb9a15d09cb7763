"""Whether a process has one thread: only then can it be forked, or play another episode."""

from __future__ import annotations

import os
import threading
import time


def num_threads() -> int:
    """The kernel's number, which has those that libraries have started."""
    return len(os.listdir("/proc/self/task"))


def one_thread_left(within_s: float) -> bool:
    """Wait for the ends of all threads but this one, at most so long. Whether all have ended."""
    until_s = time.monotonic() + within_s
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        if not isinstance(thread, threading._DummyThread):  # one that Python did not start, and cannot join
            thread.join(max(0.0, until_s - time.monotonic()))
    while num_threads() > 1 and time.monotonic() < until_s:
        time.sleep(0.001)  # nothing tells when a thread that was joined has left the kernel
    return num_threads() == 1

"""Blocking calls of a library that are given up when a process that they depend on has ended.

Waits: `unless_ended` waits for the call's end, the end of one of the processes, or a time. It looks every LOOK_EVERY_S,
because the processes start while the call runs.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import suppress
from typing import Any, TypeVar

from flowrl.orphans import has_ended

R = TypeVar("R")

LOOK_EVERY_S = 0.1


class TookTooLong(Exception):
    """The call has not ended in time; it is still running."""


class ProcessEnded(Exception):
    """One of the processes has ended before the call."""

    def __init__(self, name: str, call: Future[Any]) -> None:
        super().__init__(name)
        self.name = name
        self.call = call
        """The call, which is still running."""


def unless_ended(
    call: Callable[[], R],
    processes: Callable[[], Mapping[str, int]],
    *,
    within_s: float = math.inf,
    told_after_s: float = math.inf,
    tell: Callable[[], None] = lambda: None,
) -> R:
    """The result of `call()`. `processes()` returns name -> pid of the processes that run, or are zombies, now.
    `tell()` is called once if the call takes `told_after_s` or longer.

    Raises what `call` raises, or ProcessEnded, or TookTooLong after `within_s`; `call` then continues in a daemon
    thread, and its result is dropped. The thread never ends: if it did, the kernel would also end the processes that
    `call` has started and that ask for this (Ray's do).
    """
    result: Future[R] = Future()
    threading.Thread(target=_call, args=(result, call), daemon=True).start()
    handles: dict[str, int] = {}
    start_s = time.monotonic()
    try:
        while True:
            with suppress(NotDone):
                return result.result(LOOK_EVERY_S)
            took_s = time.monotonic() - start_s
            if took_s >= within_s:
                raise TookTooLong
            if took_s >= told_after_s:
                told_after_s = math.inf
                tell()
            for name, pid in processes().items():
                if name not in handles:
                    with suppress(ProcessLookupError):
                        handles[name] = os.pidfd_open(pid)
            for name, handle in handles.items():
                if has_ended(handle) and not result.done():
                    raise ProcessEnded(name, result)
    finally:
        for handle in handles.values():
            os.close(handle)


def _call(result: Future[R], call: Callable[[], R]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:  # it is raised in the thread that waits
        result.set_exception(error)
    threading.Event().wait()

"""A time limit for a synchronous function: an alarm that raises an exception inside it.

The function runs in the main thread of the episode's process. So it leaves nothing behind when its time is over. A
thread that is given up would instead continue during the next call, with the same objects, and a loop in it would keep
the interpreter busy. The alarm cannot end code that never returns to the interpreter, or that keeps catching every
exception; `step_s` then ends the process, and the attempt is void.

A function that sets SIGALRM itself, as some packages do for limits of their own, switches this limit off.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

AGAIN_S = 1.0
"""Seconds after which the alarm is repeated, in case the function has caught it."""


class OutOfTime(BaseException):
    """Raised inside the function. It does not derive from Exception, so the function's own handlers let it pass."""


def within(limit_s: float, function: Callable[[], Any]) -> Any:
    """The function's result. Raises OutOfTime, and what the function raises. Only for the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "a synchronous tool runs in the main thread of its process alone, which has the alarm that ends it; make "
            "the tool `async def`, or leave the environment's `cooperative` False"
        )
    here = sys._getframe()

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if frame is not here:  # else the function has returned already, and the alarm came a moment too late
            raise OutOfTime

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
        return function()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

"""An event loop whose time jumps to the next timer as soon as nothing else is to be done.

A run of minutes takes the milliseconds that its Python code needs, and delays order the events of a run in the same
way each time. What would go to another thread is done at once, in this one: no thread can be late.

Sockets are looked at without waiting for them, so what goes through them has no place in virtual time.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any

from flowrl.runtime.activity.hostloop import in_node


class Stuck(Exception):
    """A run that will never end, found by the loop: it has nothing to do, or has been busy for too long."""


class Jumping(selectors.DefaultSelector):
    """Instead of waiting, it lets time pass."""

    def __init__(self, busy_s: float) -> None:
        super().__init__()
        self.now_s = 0.0
        self._until = time.process_time() + busy_s
        self._busy_s = busy_s

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if time.process_time() > self._until:
            self._until += self._busy_s  # what is cancelled now needs time to end
            raise Stuck(f"busy for more than {self._busy_s} s, at {self.now_s:.3f} s of its own time")
        if not events and timeout is None:
            raise Stuck(f"nothing is left that could happen, at {self.now_s:.3f} s of its own time")
        if not events and timeout:
            self.now_s += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. `busy_s`: seconds of this process's work after which it counts as stuck.

    Tasks and timers are listed by node, as `HostLoop` does it: of them alone the nodes here have any.
    """

    def __init__(self, busy_s: float) -> None:
        self._jumping = Jumping(busy_s)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task = super().create_task(coro, name=name, context=context)
        owner = in_node.get() if context is None else context.get(in_node)
        if owner is not None:
            owner.adopt(task)
        return task

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        if (owner := in_node.get()) is not None:
            owner.timers.add(timer)
        return timer

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # as an executor's thread hands over whatever was raised
            done.set_exception(error)
        return done


def run_virtually(main: Coroutine[Any, Any, Any], *, busy_s: float = 60.0) -> Any:
    """The result of `main` on a loop of its own. Raises Stuck."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(busy_s)) as runner:
        return runner.run(main)

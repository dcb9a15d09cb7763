"""A clock for tests of code that waits: its time passes only while everything waits, and costs the test no time.

Invariants
- Time advances only when no callback is due and no descriptor is ready, and then at once to the next timer. So a run of
  minutes takes the milliseconds that its Python code needs, and its delays order its events in the same way each time.
- Work for another thread is done at once, in this one: no thread can be late.

It is asyncio's time: `asyncio.sleep`, `timeout`, `call_later` and `loop.time()`. `time.monotonic()` and `time.time()`
stay the machine's. Sockets and child processes are polled without waiting, so what comes through them has no defined
moment in this time. Use the clock for code that waits for nothing outside its own process.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from flowrl.wire.activity import NodeLoop, place_of

R = TypeVar("R")


class Stuck(Exception):
    """The code will never end: nothing is left that could happen, or it has been busy for too long."""


class VirtualClock:
    """Runs coroutines in its own time, which begins at 0 and continues from one `run` to the next.

        clock = VirtualClock()
        clock.run(asyncio.sleep(3600))  # returns at once
        assert clock.now_s == 3600

    `busy_s`: seconds of this process's own work, in one `run`, after which the code counts as stuck.
    """

    def __init__(self, *, busy_s: float = 60.0) -> None:
        self.now_s = 0.0
        self._busy_s = busy_s

    def run(self, main: Coroutine[Any, Any, R]) -> R:
        """The result of `main`, on a loop of its own. Raises Stuck where the code can never end."""
        return run_on(lambda: VirtualLoop(self, self._busy_s), main)


def run_on(loop_factory: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[Any, Any, R]) -> R:
    """The result of `main`, on a new loop.

    The runner's own task has no result, for speed. At its end, the runner asks `signal` for the handler of SIGINT,
    which refers to the task. `signal` first formats any handler that is not a number, for an error that it then drops:
    it would format the task with its result, which for arrays can take longer than `main` itself.

    In a notebook, or another caller with a running loop, `main` has a thread of its own.
    """
    if asyncio._get_running_loop() is not None:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: run_on(loop_factory, main)).result()
    results = []

    async def keep() -> None:
        results.append(await main)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(keep())
    return results.pop()


class JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, it advances the clock."""

    def __init__(self, clock: VirtualClock, loop: asyncio.AbstractEventLoop, busy_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._loop = loop
        self._busy_s = busy_s
        self._until = time.process_time() + busy_s

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if time.process_time() > self._until:
            self._until += self._busy_s  # what is cancelled now needs time to end
            raise self._stuck(f"busy for more than {self._busy_s} s")
        if not events and timeout is None:
            raise self._stuck("nothing is left that could happen")
        if not events and timeout:
            self._clock.now_s += timeout
        return events

    def _stuck(self, what: str) -> Stuck:
        waiting = ", ".join(sorted(place_of(task) for task in asyncio.all_tasks(self._loop)))
        return Stuck(f"{what}, at {self._clock.now_s:.3f} s of its own time; the tasks there are: {waiting}")


class VirtualLoop(NodeLoop):
    """The event loop of a VirtualClock. It lists tasks and timers by node, as `HostLoop` does."""

    def __init__(self, clock: VirtualClock, busy_s: float) -> None:
        self._clock = clock
        super().__init__(JumpingSelector(clock, self, busy_s))

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # an executor's thread would hand over any exception
            done.set_exception(error)
        return done

"""What signals do to a run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from flowrl.runtime.telemetry.view import View

if TYPE_CHECKING:
    from flowrl.runtime.driver.driver import Driver


class RunSignals:
    """SIGINT and SIGTERM end the run in order, and a second one ends it at once. During the set-up, the first one ends
    it at once, because nothing is in flight yet and a model may take minutes to load. SIGUSR1 shows which node waits
    for what. SIGHUP says that the terminal is gone, and ends nothing. A run that is ending by itself (`stop_early`) has
    had no signal yet, so that the next one is its first.

    The sender of SIGTERM usually sends SIGKILL later, so the run writes a checkpoint as soon as possible. A run that
    only evaluates ends `at_once`: nothing is trained, and the same command continues with the answers that exist.
    """

    def __init__(self, driver: Driver, view: View, *, at_once: bool = False) -> None:
        self._driver = driver
        self._view = view
        self._at_once = at_once
        self._signalled = False
        self._describing: set[asyncio.Task[None]] = set()
        self._hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # as under nohup, also after the run

    def __enter__(self) -> Self:
        loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        loop.add_signal_handler(signal.SIGINT, self._stop, self._driver.interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._stop, self._driver.terminate)
        loop.add_signal_handler(signal.SIGUSR1, self._describe)
        if self._hangs_up:
            loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        return self

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *((signal.SIGHUP,) if self._hangs_up else ())):
            asyncio.get_running_loop().remove_signal_handler(number)

    def end_in_time(self, reason: str) -> None:
        """End the run as `Driver.end_in_time` does, or at once."""
        if self._at_once:
            self._view.warning(reason.partition(";")[0])
            self._stop_at_once()
        else:
            self._driver.end_in_time(reason)

    def _stop(self, begin: Callable[[], None]) -> None:
        if self._driver.begun and not (self._at_once or self._signalled):
            self._signalled = True
            begin()
        else:
            self._stop_at_once()

    def _stop_at_once(self) -> None:
        assert self._task is not None
        if not self._task.cancelling():
            again = "; the same command continues with the existing answers" if self._at_once else ""
            self._view.progress("driver", f"stopping at once{again}")
            self._task.cancel()

    def _hung_up(self) -> None:
        self._view.warning("the terminal is gone (SIGHUP); the run goes on, and SIGTERM ends it in order")

    def _describe(self) -> None:
        async def report() -> None:
            self._view.warning(await self._driver.lookout.describe())

        task = asyncio.get_running_loop().create_task(report())
        self._describing.add(task)
        task.add_done_callback(self._describing.discard)

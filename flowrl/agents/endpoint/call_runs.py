"""Runs of calls, independent of their clients: a retry joins the first run or repeats its answer, and samples nothing.

Invariants: a run continues while a client waits for it, and for `leave_s` after that; then it is cancelled, or its
answer is forgotten. An answer is delivered once: the effects of a delivery happen for the first client that receives
the answer. A wait ends with the run, or when the client leaves, which cancels the wait but not the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from flowrl.agents.endpoint.problems import ApiProblem

Sampled = TypeVar("Sampled")
Delivered = TypeVar("Delivered")
MOST_KEPT = 64
"""Maximum number of finished runs of a session whose answers can be repeated."""


class CallRun(Generic[Sampled, Delivered]):
    """One call being answered. `deliver` makes what clients see from what was sampled."""

    def __init__(self, key: bytes, task: asyncio.Task[Sampled], deliver: Callable[[Sampled], Delivered]) -> None:
        self.key = key
        self.task = task
        self.waiting = 0
        self.received = False
        """Whether a client has the whole answer."""
        self.given_up = False
        """Whether the session has ended; what was sampled since then is not part of it."""
        self.leaving: asyncio.TimerHandle | None = None
        self._deliver = deliver
        self._delivered: Delivered | None = None

    async def done_within(self, seconds: float) -> bool:
        await asyncio.wait({self.task}, timeout=seconds)
        return self.task.done()

    async def delivered(self) -> Delivered:
        """Raises ApiProblem if the run failed, or if it was cancelled because its session ended."""
        await asyncio.wait({self.task})
        if self.task.cancelled() or self.given_up:
            raise ApiProblem(409, "the session ended while this call was open, so its answer was given up")
        sampled = self.task.result()
        if self._delivered is None:
            self._delivered = self._deliver(sampled)
        return self._delivered


class CallRuns(Generic[Sampled, Delivered]):
    """The runs of one session.

    `begin` makes the task of a run; the owner of `begin` waits for the tasks at the end. `changed` is called when a
    client starts to wait, and when it stops.
    """

    def __init__(
        self,
        begin: Callable[[Coroutine[None, None, Sampled]], asyncio.Task[Sampled]],
        *,
        leave_s: float,
        most_open: int,
        changed: Callable[[], None],
    ) -> None:
        self.num_waiting = 0
        """Clients that wait for an answer."""
        self._begin = begin
        self._leave_s = leave_s
        self._most_open = most_open
        self._changed = changed
        self._runs: dict[CallRun[Sampled, Delivered], None] = {}
        """In the order in which they started."""
        self._closed = False

    @asynccontextmanager
    async def joined(
        self,
        key: bytes,
        work: Callable[[], Coroutine[None, None, Sampled]],
        deliver: Callable[[Sampled], Delivered],
        *,
        retried: bool,
    ) -> AsyncIterator[CallRun[Sampled, Delivered]]:
        """A run of the call `key`: if the call was `retried`, the run that the first attempt started, if that is still
        known.

        Leaving the block without an exception means that the client has the answer. Raises ApiProblem.
        """
        run = self._known(key) if retried else None
        if run is None:
            run = self._begun(key, work, deliver)
        run.waiting += 1
        self.num_waiting += 1
        if run.leaving is not None:
            run.leaving.cancel()
        self._changed()
        try:
            yield run
            run.received = True
        finally:
            run.waiting -= 1
            self.num_waiting -= 1
            self._left(run)
            self._changed()

    def close(self) -> None:
        """Cancel open runs; clients that wait for them get an ApiProblem."""
        self._closed = True
        runs = list(self._runs)
        self._runs.clear()
        for run in runs:
            if run.leaving is not None:
                run.leaving.cancel()
            run.given_up = True
            run.task.cancel()

    def _begun(
        self, key: bytes, work: Callable[[], Coroutine[None, None, Sampled]], deliver: Callable[[Sampled], Delivered]
    ) -> CallRun[Sampled, Delivered]:
        if self._closed:
            raise ApiProblem(409, "the session has ended; ask for another one")
        if sum(not run.task.done() for run in self._runs) >= self._most_open:
            message = f"the session has {self._most_open} calls open already; wait until one is answered"
            raise ApiProblem(429, message, retry_after_s=1)
        run = CallRun(key, self._begin(work()), deliver)
        run.task.add_done_callback(lambda task: self._ended(run))
        self._runs[run] = None
        return run

    def _known(self, key: bytes) -> CallRun[Sampled, Delivered] | None:
        """Among runs of equal calls, the one whose client has left; else the latest."""
        equal = [run for run in self._runs if run.key == key]
        lost = [run for run in equal if not run.waiting and not run.received]
        return next(reversed(lost or equal), None)

    def _ended(self, run: CallRun[Sampled, Delivered]) -> None:
        """Forget a failed run, so that a retry samples again, and the oldest finished runs beyond MOST_KEPT."""
        if run.task.cancelled() or run.task.exception() is not None:
            self._runs.pop(run, None)
        done = [other for other in self._runs if other.task.done() and not other.waiting]
        for other in done[: max(0, len(done) - MOST_KEPT)]:
            self._runs.pop(other)

    def _left(self, run: CallRun[Sampled, Delivered]) -> None:
        if not run.waiting and not run.received and run in self._runs:
            run.leaving = asyncio.get_running_loop().call_later(self._leave_s, self._give_up, run)

    def _give_up(self, run: CallRun[Sampled, Delivered]) -> None:
        self._runs.pop(run, None)
        run.task.cancel()

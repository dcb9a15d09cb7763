"""Tasks that wait for outside workers, and workers that wait for tasks.

Invariants

- A task is handed out once, to a worker that still waits. A task that was withdrawn is not handed out.
- Of several tasks, the task with the lowest place is handed out first; of several workers, the first is served first.

Waits: a task for a worker, without limit; a worker for a task, `WAIT_S` at most, or until the run has ended.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

from flowrl.agents.endpoint import RunEnded, SessionTask, Unavailable

WAIT_S = 3.0
"""How long a worker's request waits: less than the 5 s after which some HTTP clients leave."""


@dataclass(order=True)
class Offer:
    """A task that waits."""

    place: int
    number: int
    task: SessionTask = field(compare=False)
    taken: asyncio.Future[None] = field(compare=False)


class TaskOffers:
    """The tasks of one node that no worker has taken."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._offers: list[Offer] = []
        """A heap."""
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        """The worker that holds it is the next to be served; a lock is acquired in the order of asking."""
        self._ended = False

    async def taken(self, task: SessionTask, place: int) -> None:
        """Offer a task and wait until a worker has it. Cancelling withdraws it, unless it was handed out by then."""
        offer = Offer(place, next(self._numbers), task, asyncio.get_running_loop().create_future())
        heapq.heappush(self._offers, offer)
        self._changed.set()
        await offer.taken

    async def next(self) -> SessionTask:
        """Hand a task out. A cancelled call takes none. Raises Unavailable if there is none in time, and RunEnded."""
        try:
            async with asyncio.timeout(self._wait_s), self._turn:
                while (offer := self._first()) is None:
                    if self._ended:
                        raise RunEnded("the run has ended, so there is no further task")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable("no task is waiting now; ask again", retry_after_s=0) from None
        offer.taken.set_result(None)
        return offer.task

    def end(self) -> None:
        """There will be no further task; RunEnded is raised for waiting workers."""
        self._ended = True
        self._changed.set()

    def _first(self) -> Offer | None:
        while self._offers:
            offer = heapq.heappop(self._offers)
            if not offer.taken.done():  # else its wait was cancelled
                return offer
        return None

"""Slots that waiting tasks get by priority: the smallest first, then in order of arrival.

Invariants
- No task waits while a slot is free: a slot that is given back goes directly to the next task.
- A cancelled wait keeps no slot. If its slot was granted in the same tick, the next task gets that slot.
- The queue has at most one entry more than twice the number of waiting tasks. So the entries of cancelled waits do not
  accumulate, and each wait costs O(log n) without a search of the queue.

Waits: for a slot that is given back or added.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PrioritySlots:
    """See the module. Begins with `num_free` slots."""

    def __init__(self, num_free: int) -> None:
        self._num_free = num_free
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap of (priority, order of arrival, granted); entries whose wait was cancelled are still in it."""
        self._arrivals = itertools.count()
        self._num_waiting = 0

    @asynccontextmanager
    async def held(self, priority: int) -> AsyncIterator[None]:
        """Inside, hold one slot."""
        await self.take(priority)
        try:
            yield
        finally:
            self.add(1)

    async def take(self, priority: int) -> None:
        """Wait for a slot; `add(1)` gives it back."""
        if self._num_free:
            self._num_free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._arrivals), granted))
        self._num_waiting += 1
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self.add(1)
            raise
        finally:
            self._num_waiting -= 1
            self._shrink()

    def add(self, number: int) -> None:
        """Give back slots, or add new ones."""
        self._num_free += number
        while self._num_free and self._queue:
            *_, granted = heapq.heappop(self._queue)
            if not granted.done():
                granted.set_result(None)
                self._num_free -= 1

    def _shrink(self) -> None:
        """Remove the entries of cancelled waits once they outnumber the others."""
        if len(self._queue) > 2 * self._num_waiting:
            self._queue = [entry for entry in self._queue if not entry[2].done()]
            heapq.heapify(self._queue)

    def __len__(self) -> int:
        """The number of entries in the queue."""
        return len(self._queue)

"""The entry with the lowest key, where keys only rise and entries may leave for a time: a heap with lazy keys."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Key = tuple[float, int]
Current = Callable[[int], Key | None]


class RisingQueue:
    """Numbers by `current(number)`, their key now; None while a number is not there.

    A number that comes, or comes again, has to be `put`; one that leaves, or whose key rises, needs nothing: its old
    entry is found wrong when it is the first. Every number has at most one entry, so a put costs O(log n), and the
    entries that `first` corrects were put or corrected once since.
    """

    def __init__(self, current: Current) -> None:
        self._current = current
        self._heap: list[tuple[Key, int]] = []
        self._entered: set[int] = set()

    def put(self, number: int) -> None:
        """Let the number in, unless it has an entry, whose key is then corrected in time."""
        key = self._current(number)
        if number not in self._entered and key is not None:
            self._entered.add(number)
            heapq.heappush(self._heap, (key, number))

    def first(self) -> int | None:
        """The number with the lowest key; None if none is there."""
        while self._heap:
            key, number = self._heap[0]
            now = self._current(number)
            if now == key:
                return number
            if now is None:
                heapq.heappop(self._heap)
                self._entered.discard(number)
            else:
                heapq.heapreplace(self._heap, (now, number))
        return None

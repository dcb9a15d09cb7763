"""Finds the entry with the lowest key, where keys only rise and entries may leave and return: a heap with lazy keys."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Key = tuple[float, int]
Current = Callable[[int], Key | None]


class RisingQueue:
    """Numbers ordered by `current(number)`, their present key; it is None while a number is not in the queue.

    A number that enters or returns has to be `put`. A number that leaves, or whose key rises, needs no call: its old
    entry is found to be wrong when it comes first. Every number has at most one entry, so a put costs O(log n). Each
    correction in `first` is due to a change of the number's key since its entry was put or last corrected.
    """

    def __init__(self, current: Current) -> None:
        self._current = current
        self._heap: list[tuple[Key, int]] = []
        self._entered: set[int] = set()

    def put(self, number: int) -> None:
        """Add the number, unless it already has an entry; `first` corrects the key of that entry when necessary."""
        key = self._current(number)
        if number not in self._entered and key is not None:
            self._entered.add(number)
            heapq.heappush(self._heap, (key, number))

    def first(self) -> int | None:
        """The number with the lowest key; None if the queue is empty."""
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

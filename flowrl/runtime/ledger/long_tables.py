"""Tables that are too long for one event: a replica sends all rows but the last ones ahead of the event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any


class LongTables:
    """Rows of each replica that wait for the event that has the last rows of their table."""

    def __init__(self) -> None:
        self._early: dict[str, list[Any]] = defaultdict(list)

    def add(self, replica: str, rows: Sequence[Any]) -> None:
        """Rows that came ahead."""
        self._early[replica] += rows

    def whole(self, replica: str, last: Sequence[Any]) -> Sequence[Any]:
        """The table whose last rows have come."""
        return [*self._early.pop(replica, ()), *last]

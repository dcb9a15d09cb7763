"""Tables that are too long for one event: a replica sends all rows but the last ones before the event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

EARLY = "rows"
"""Kind of an event with rows that come before the event of their table: (EARLY, replica, rows)."""
WITH_TABLES = frozenset(("step", "evaluation"))
"""Kinds whose last two fields are the last rows of their table, and the replica."""


class LongTables:
    """Puts tables together: rows of each replica wait for the event that has the last rows of their table."""

    def __init__(self) -> None:
        self._early: dict[str, list[Any]] = defaultdict(list)

    def join_tables(self, events: Iterable[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
        """The events in order, with whole tables, and without the events and fields that were needed to split them."""
        for kind, *fields in events:
            if kind == EARLY:
                replica, rows = fields
                self._early[replica] += rows
            elif kind in WITH_TABLES:
                *before, last, replica = fields
                yield (kind, *before, [*self._early.pop(replica, ()), *last])
            else:
                yield (kind, *fields)

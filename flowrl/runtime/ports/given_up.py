"""Groups that were given up: a node has dropped one whole while members of it are under way elsewhere.

Invariants
- Work of `each` on a member is cancelled; its sample ends by the same reason, and a tombstone goes on in its place.
- A member that comes later does not reach user code; it goes on as such a tombstone.
- What user code holds, or works on in a plain loop, goes on to the next node, and ends there.

Whoever waits for the group's other members hears of each, so groups and joins behind are complete.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

REMEMBER = 1 << 14
"""Groups. Members of more than that are not under way when one is given up."""


class GivenUp:
    """The groups that one node replica has been told to give up, and its work on members of any group."""

    def __init__(self) -> None:
        self._why: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Group -> (state, reason)."""
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}

    def add(self, group_id: str, state: str, reason: str) -> None:
        """Give a group up: cancel the work on it."""
        self._why[group_id] = state, reason
        if len(self._why) > REMEMBER:
            self._why.popitem(last=False)
        for task in self._tasks.get(group_id, ()):
            task.cancel()

    def why(self, group_id: str) -> tuple[str, str] | None:
        """(state, reason) of a group that was given up."""
        return self._why.get(group_id) if self._why else None

    def begin(self, group_id: str) -> None:
        """The present task works on a member, and may be cancelled until `end`."""
        task = asyncio.current_task()
        if group_id and task is not None:
            self._tasks.setdefault(group_id, set()).add(task)

    def end(self, group_id: str) -> None:
        """The present task has let go of it."""
        tasks, task = self._tasks.get(group_id), asyncio.current_task()
        if tasks is not None and task is not None:
            tasks.discard(task)
            if not tasks:
                del self._tasks[group_id]

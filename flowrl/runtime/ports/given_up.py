"""Groups that were given up: a node dropped a whole group while other nodes still have members of it.

Invariants
- Work of `each` on a member is cancelled; its sample ends with the same reason, and a tombstone replaces it.
- A member that arrives later does not reach user code; such a tombstone also replaces this member.
- A member that user code holds, or works on in a plain loop, continues to the next node, and ends there.

Every member still produces a message or a tombstone, so groups and joins downstream become complete.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

REMEMBER = 1 << 14
"""Number of groups to remember. The members in transit at any one time belong to fewer groups than this."""


class GivenUp:
    """The groups that one node replica has to give up, and its tasks that work on members of any group."""

    def __init__(self) -> None:
        self._why: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Group -> (state, reason)."""
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}

    def add(self, group_id: str, state: str, reason: str) -> None:
        """Give up a group: cancel the work on its members."""
        self._why[group_id] = state, reason
        if len(self._why) > REMEMBER:
            self._why.popitem(last=False)
        for task in self._tasks.get(group_id, ()):
            task.cancel()

    def why(self, group_id: str) -> tuple[str, str] | None:
        """(state, reason) of a group that was given up."""
        return self._why.get(group_id) if self._why else None

    def begin(self, group_id: str) -> None:
        """The current task starts work on a member of `group_id`, and may be cancelled until `end`."""
        task = asyncio.current_task()
        if group_id and task is not None:
            self._tasks.setdefault(group_id, set()).add(task)

    def end(self, group_id: str) -> None:
        """The current task is done with the member."""
        tasks, task = self._tasks.get(group_id), asyncio.current_task()
        if tasks is not None and task is not None:
            tasks.discard(task)
            if not tasks:
                del self._tasks[group_id]

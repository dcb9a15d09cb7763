"""Groups as a node gets them from `In.groups`, and as they come to its port: member by member."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.graph.ports import Members
from flowrl.messages import Message, Scored
from flowrl.testing import lost


def members(items: Sequence[Scored], *, size: int = 4) -> Members[Scored]:
    """A complete group, of which `size - len(items)` members were lost."""
    group = items[0].group_id
    return Members(group, 0, size, tuple(items), tuple(lost(m, group=group) for m in range(len(items), size)))


def arriving(*groups: Members[Scored]) -> list[Message]:
    """The members of these groups, the lost ones as tombstones."""
    return [message for group in groups for message in (*group.items, *group.lost)]

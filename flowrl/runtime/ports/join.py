"""Matches the In ports of one node by sample: the live side of `flowrl.join`.

Invariants
- User code gets a sample when every port has delivered its part; the parts end together.
- A sample that is lost on one branch or on several is lost once: when its last part has arrived, one tombstone
  represents all of them. The loss is booked here if some part arrived as a message.
- A part that waits for the other parts is unfinished, so a crash or a checkpoint repeats it.

Waits: for the next message of any port. The wait ends with the end of all streams, or with LaneFailed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from flowrl.errors import FlowrlError
from flowrl.graph.ports import Members
from flowrl.messages import Tombstone
from flowrl.runtime.ports.inbound import Inbound
from flowrl.runtime.ports.invocation import Invocation, Invocations
from flowrl.runtime.ports.items import NOT_ROUTED, Item

Key = tuple[str, int]
"""(group, member)"""


class Joined:
    """LiveJoin of several In ports of one node replica."""

    def __init__(self, ports: Sequence[Inbound]) -> None:
        self._ports = tuple(ports)
        self._waiting: dict[Key, dict[int, Item]] = {}
        """Sample with missing parts -> port index -> part that has arrived."""
        self._takes: dict[asyncio.Task[Item | None], int] | None = None
        """Pending take -> port index; None before the first one."""

    def iterate(self) -> AsyncIterator[tuple[Any, ...]]:
        return Invocations(self._next_invocation, self._close)

    async def _next_invocation(self) -> Invocation | None:
        lead = self._ports[0]
        while (item := await self._next_whole()) is not None:
            if not isinstance(item.body, Tombstone):
                return lead.work_on(item)
            lead.forward(item)
        return None

    def groups(self, size: int) -> AsyncIterator[Members[Any]]:
        return self._ports[0].grouped(self._next_whole, size, self._close)

    async def _next_whole(self) -> Item | None:
        """One part of the next complete sample: a tombstone if it has one, else the part from the first port."""
        while (arrival := await self._arrival()) is not None:
            parts = self._met(*arrival)
            if parts is not None:
                return self._lost_here(parts) or parts[0]
        for (group, member), found in self._waiting.items():
            raise FlowrlError(
                f"{self._labels(found)} received member {member} of group {group!r}, but the streams of "
                f"{self._labels(set(range(len(self._ports))) - set(found))} ended without it; every branch of a join "
                "has to send or drop each sample that it receives"
            )
        return None

    def _lost_here(self, parts: tuple[Item, ...]) -> Item | None:
        """The part that tells why the sample is lost, or None if it is not.

        The messages that other branches delivered are lost here with it. If no branch delivered a message, the sample
        was lost before this node, or was routed elsewhere.
        """
        lost = [part for part in parts if isinstance(part.body, Tombstone)]
        if not lost:
            return None
        told = next((part for part in lost if getattr(part.body, "reason", "") != NOT_ROUTED), lost[0])
        assert isinstance(told.body, Tombstone)
        if len(lost) < len(parts):
            self._ports[0].lost_here(parts, told.body)
        return told

    def _met(self, index: int, item: Item) -> tuple[Item, ...] | None:
        """Add a part to its sample. Returns all parts, in order of ports, if it was the last; otherwise None."""
        key = self._key(index, item)
        found = self._waiting.setdefault(key, {})
        if index in found:
            raise FlowrlError(
                f"{self._labels([index])} received member {key[1]} of group {key[0]!r} twice; a branch of a join has "
                "to send one message for each sample that it receives"
            )
        found[index] = item
        if len(found) < len(self._ports):
            return None
        del self._waiting[key]
        parts = tuple(found[i] for i in sorted(found))
        for part in parts:
            part.parts = parts
        return parts

    def _key(self, index: int, item: Item) -> Key:
        envelope = item.envelope
        if not envelope.group_id or envelope.member < 0:
            raise FlowrlError(
                f"{self._labels([index])} received a {type(item.body).__name__} that belongs to no single sample; "
                "join before samples are merged into groups, and let every node before the join make each message "
                "from one item"
            )
        return envelope.group_id, envelope.member

    def _labels(self, indices: Any) -> str:
        return ", ".join(self._ports[index].port for index in sorted(indices))

    async def _arrival(self) -> tuple[int, Item] | None:
        """(port index, item) of the next arrival; None when every stream has ended. May be cancelled and repeated."""
        if self._takes is None:
            self._takes = {}
            for index in range(len(self._ports)):
                self._take(index)
        while self._takes:
            done, _ = await asyncio.wait(self._takes, return_when=asyncio.FIRST_COMPLETED)
            index = self._takes.pop(take := done.pop())
            if (item := take.result()) is not None:
                self._take(index)
                return index, item
        return None

    def _take(self, index: int) -> None:
        assert self._takes is not None
        take = asyncio.ensure_future(self._ports[index].take())
        take.add_done_callback(_heard)
        self._takes[take] = index

    def _close(self) -> None:
        """User code asks for no more samples: cancel the pending takes."""
        for take in self._takes or ():
            take.cancel()


def _heard(take: asyncio.Task[Item | None]) -> None:
    """Mark the exception of a take as retrieved: the first lane failure ends the join; later ones are consequences."""
    if not take.cancelled():
        take.exception()

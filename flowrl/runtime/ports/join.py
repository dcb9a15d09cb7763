"""In ports of one node matched by sample: the live side of `flowrl.join`.

Invariants
- A sample goes to user code when every port has brought its part; the parts end together.
- A sample lost on one branch, or on several, is lost once: when its last part has come, one tombstone stands for all
  of them. It is booked here if some part did come.
- What waits for its counterpart is unfinished, so a crash or a checkpoint repeats it.

Waits: for the next message of any port. That ends with the end of all streams, or with LaneFailed.
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
        """Samples of which some part is still to come: port index -> part."""
        self._takes: dict[asyncio.Task[Item | None], int] | None = None
        """The takes that go on, by port index; None before the first."""

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
        """One part of the next complete sample: a tombstone if there is one, else the first port's."""
        while (arrival := await self._arrival()) is not None:
            parts = self._met(*arrival)
            if parts is not None:
                return self._lost_here(parts) or parts[0]
        for (group, member), found in self._waiting.items():
            raise FlowrlError(
                f"{self._labels(found)} brought member {member} of group {group!r}, but the streams of "
                f"{self._labels(set(range(len(self._ports))) - set(found))} ended without it; every branch of a join "
                "has to send, or drop, each sample that comes to it"
            )
        return None

    def _lost_here(self, parts: tuple[Item, ...]) -> Item | None:
        """The part that says why the sample is lost, if it is.

        What came of it by another way is lost with it, here. Where nothing came, it was lost before, or went elsewhere.
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
        """Put a part with the others of its sample; all parts, in order of ports, if it was the last."""
        key = self._key(index, item)
        found = self._waiting.setdefault(key, {})
        if index in found:
            raise FlowrlError(
                f"{self._labels([index])} brought member {key[1]} of group {key[0]!r} twice; a branch of a join has "
                "to send one message for each that comes to it"
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
                f"{self._labels([index])} brought a {type(item.body).__name__} that stands for no single sample; join "
                "before samples are merged into groups, and let every node in between send from the item at hand"
            )
        return envelope.group_id, envelope.member

    def _labels(self, indices: Any) -> str:
        return ", ".join(self._ports[index].port for index in sorted(indices))

    async def _arrival(self) -> tuple[int, Item] | None:
        """(port index, item) of what comes next; None when every stream has ended. It may be cancelled and repeated."""
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
        """Nobody asks for more: end the takes that go on."""
        for take in self._takes or ():
            take.cancel()


def _heard(take: asyncio.Task[Item | None]) -> None:
    """The failure of one lane ends the join; that of another is its consequence, and nobody asks for it."""
    if not take.cancelled():
        take.exception()

"""In ports of one node matched by sample: the live side of `flowrl.join`.

Invariants
- A sample goes to user code when every port has brought its part; the parts end together.
- A sample lost on one branch, or on several, is lost once: when its last part has come, one tombstone
  stands for all of them. Where it was lost it has been booked.
- What waits for its counterpart is unfinished, so a crash or a checkpoint repeats it.

Waits: for the next message of any port. That ends with the end of all streams, or with LaneFailed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from flowrl.errors import FlowrlError, LaneFailed
from flowrl.graph.ports import Members
from flowrl.messages import Tombstone
from flowrl.runtime.inbound import Inbound
from flowrl.runtime.items import Item

Key = tuple[str, int]
"""(group, member)"""


class Joined:
    """LiveJoin of several In ports of one node replica."""

    def __init__(self, ports: Sequence[Inbound]) -> None:
        self._ports = tuple(ports)
        self._waiting: dict[Key, dict[int, Item]] = {}
        """Samples of which some part is still to come: port index -> part."""

    async def iterate(self) -> AsyncIterator[tuple[Any, ...]]:
        lead = self._ports[0]
        async with aclosing(self._wholes()) as wholes:
            async for item in wholes:
                if isinstance(item.body, Tombstone):
                    lead.pass_on(item)
                    continue
                turn = await lead.begin_turn(item)
                try:
                    yield item.given
                except GeneratorExit:  # as in Inbound.iterate: the sample stays unfinished
                    await lead.leave_turn(turn)
                    raise
                await lead.finish_turn(item, turn)

    async def groups(self, size: int) -> AsyncIterator[Members[Any]]:
        async with aclosing(self._wholes()) as wholes, aclosing(self._ports[0].grouped(wholes, size)) as groups:
            async for members in groups:
                yield members

    async def _wholes(self) -> AsyncGenerator[Item, None]:
        """One part of each complete sample: a tombstone if there is one, else the first port's."""
        async with aclosing(self._arrivals()) as arrivals:
            async for index, item in arrivals:
                parts = self._met(index, item)
                if parts is not None:
                    yield next((part for part in parts if isinstance(part.body, Tombstone)), parts[0])
        for (group, member), found in self._waiting.items():
            raise FlowrlError(
                f"{self._labels(found)} brought member {member} of group {group!r}, but the streams of "
                f"{self._labels(set(range(len(self._ports))) - set(found))} ended without it; every branch of a join "
                "has to send, or drop, each sample that comes to it"
            )

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

    async def _arrivals(self) -> AsyncGenerator[tuple[int, Item], None]:
        """(port index, item) as they come, until every stream has ended."""
        takes = {asyncio.ensure_future(port.take()): index for index, port in enumerate(self._ports)}
        try:
            while takes:
                done, _ = await asyncio.wait(takes, return_when=asyncio.FIRST_COMPLETED)
                for take in done:
                    index = takes.pop(take)
                    item = take.result()
                    if item is not None:
                        takes[asyncio.ensure_future(self._ports[index].take())] = index
                        yield index, item
        finally:
            for take in takes:
                take.cancel()
                with suppress(asyncio.CancelledError, LaneFailed):
                    await take

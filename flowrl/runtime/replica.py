"""One node replica in its host: the node, its open items and its live ports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from flowrl.channel.endpoint import Endpoint
from flowrl.channel.envelope import Envelope
from flowrl.graph.node import Node
from flowrl.messages import Prompt, Tombstone
from flowrl.runtime.activity import Activity
from flowrl.runtime.context import NodeContext, Place
from flowrl.runtime.inbound import Inbound
from flowrl.runtime.items import Desk, Item
from flowrl.runtime.lease import Lease
from flowrl.runtime.outbound import Outbound
from flowrl.runtime.requests import LiveCall
from flowrl.runtime.trace import TraceBuffer


class Replica:
    """Runs one node. Also where its in ports leave what is lost (`inbound.Losses`)."""

    def __init__(self, node: Node, place: Place, endpoint: Endpoint, trace: TraceBuffer, lease: Lease) -> None:
        self.node = node
        self.place = place
        self.activity = Activity(place.track)
        self.context = NodeContext(place, endpoint, self.activity, trace)
        self.desk = Desk(place.track)
        self.inbound: dict[str, Inbound] = {}
        self.outbound: dict[str, Outbound] = {}
        self.calls: list[LiveCall] = []
        self.lease = lease
        self._trace = trace
        self._background: set[asyncio.Task[None]] = set()
        node.context = self.context

    async def run(self) -> None:
        """The body, then the end of its out ports. Raises what the body raised."""
        await self.node.run()
        while self._background:
            await asyncio.gather(*self._background)
        self.context.ledger.flush()
        for out in self.outbound.values():
            out.close()
        for call in self.calls:
            call.close()

    def lose(self, items: list[Item], marker: Tombstone, ticket: int) -> None:
        self.context.ledger.lost(marker, ticket)
        if items:
            self.pass_on(items, marker)

    def pass_on(self, items: list[Item], marker: Tombstone) -> None:
        task = asyncio.get_running_loop().create_task(self._bury(items, marker))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _bury(self, items: list[Item], marker: Tombstone) -> None:
        for out in self.outbound.values():
            await out.bury(marker, items)
        for item in items:
            self.desk.end(item)

    async def admit(self, samples: Sequence[Prompt]) -> int | None:
        return await self.context.ledger.admit(self.place.node, samples)

    def sent(self, envelope: Envelope) -> None:
        self._trace.sent(self.place.track, envelope)

    def restore(self, edge: str, envelope: Envelope) -> None:
        """Send a checkpoint's message again, in the background: the lane may have to wait for credit."""
        for out in self.outbound.values():
            if edge.startswith(f"{out.port} -> "):
                task = asyncio.get_running_loop().create_task(out.restore(edge, envelope))
                self._background.add(task)
                task.add_done_callback(self._background.discard)

    def flow(self, item: Item, *, begins: bool) -> None:
        self._trace.item(self.place.track, item.envelope, begins=begins)

    def gate(self, *, open_: bool) -> None:
        """Let in ports take items, or not."""
        for port in self.inbound.values():
            port.gate(open_=open_)

    def report(self) -> dict[str, Any]:
        return self.activity.report() | {"open": len(self.desk)}

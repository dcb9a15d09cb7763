"""One node replica in its host: the node, its open items and its live ports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from flowrl.channel.endpoint import Endpoint
from flowrl.channel.envelope import Envelope
from flowrl.graph.node import Node
from flowrl.messages import Prompt, Tombstone
from flowrl.runtime.activity import Activity, in_turn
from flowrl.runtime.context import NodeContext, Place
from flowrl.runtime.inbound import Inbound
from flowrl.runtime.items import Desk, Item
from flowrl.runtime.lease import Lease
from flowrl.runtime.outbound import Kept, Outbound
from flowrl.runtime.requests import LiveCall
from flowrl.runtime.trace import TraceBuffer

TRACED_WAIT_NS = 1_000_000
"""Shorter waits are not worth a slice."""


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
        self._tasks = asyncio.TaskGroup()
        self._restored: list[tuple[Outbound, Kept]] = []
        self.ended = False
        node.context = self.context

    async def run(self) -> None:
        """The body, then the end of its out ports. Raises what the body, or a loss on its way, raised."""
        async with self._tasks as tasks:
            for out, kept in self._restored:
                tasks.create_task(out.restore(kept))
            self._restored = []
            tasks.create_task(self._body())
        self.ended = True
        self.context.ledger.flush()
        for out in self.outbound.values():
            out.close()
        for call in self.calls:
            call.close()

    async def _body(self) -> None:
        with self.desk.noting_failure():
            await self.node.run()

    def lose(self, items: list[Item], marker: Tombstone, ticket: int) -> None:
        self.context.ledger.lost(marker, ticket)
        if items:
            self.pass_on(items, marker)

    def pass_on(self, items: list[Item], marker: Tombstone) -> None:
        for item in items:
            item.held = True  # its turn may end before the marker is on its way
        self._tasks.create_task(self._bury(items, marker))

    async def _bury(self, items: list[Item], marker: Tombstone) -> None:
        in_turn.set(None)  # the turn that it comes from goes on, or has ended
        for out in self.outbound.values():
            await out.bury(marker, items)
        for item in items:
            self.desk.end(item)

    def sent_already(self) -> list[bytes]:
        """Ids of what was made from items, or for a group, whose turn goes on."""
        admitted = [key for out in self.outbound.values() for key in out.sent_of_open_group()]
        waiting = {key for out in self.outbound.values() for key in out.not_sent()}
        outside = [key for out in self.outbound.values() for key in out.sent_outside()]
        return [key for key in self.desk.sent_by_open_items() if key not in waiting] + admitted + outside

    async def admit(self, samples: Sequence[Prompt]) -> int | None:
        return await self.context.ledger.admit(self.place.node, samples)

    def sent(self, envelope: Envelope) -> None:
        self._trace.sent(self.place.track, envelope)

    def waited(self, what: str, since_ns: int) -> None:
        now = time.time_ns()
        if now - since_ns >= TRACED_WAIT_NS:
            self._trace.slice(self.place.track, what, since_ns, now, kind="wait")

    def restore(self, kept: Kept) -> None:
        """Send a checkpoint's message again, as soon as the node runs: the lane may have to wait for credit."""
        ports = [out for out in self.outbound.values() if kept[0].startswith(f"{out.port} -> ")]
        self._restored += [(out, kept) for out in ports]

    def flow(self, item: Item, *, begins: bool) -> None:
        self._trace.item(self.place.track, item.envelope, begins=begins)

    def gate(self, by: str, *, open_: bool) -> None:
        """Let in ports take items, or not, as far as `by` goes."""
        for port in self.inbound.values():
            port.gate(by, open_=open_)

    def hold(self, held: bool) -> None:
        """Let out ports send, or not."""
        for port in self.outbound.values():
            port.hold(held)

    def report(self) -> dict[str, Any]:
        """A node that has not ended and waits for nothing the engine knows of is inside its own code."""
        report = self.activity.report() | {"open": len(self.desk)}
        if not report["waits"] and not self.ended:
            report["working"] = max(self.activity.working, 1)
        return report

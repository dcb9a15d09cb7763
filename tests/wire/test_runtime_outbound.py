"""Sends that a checkpoint finds waiting for credit: kept with the cut, and left out by the repeated turn."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from flowrl.errors import FlowrlError
from flowrl.graph.dispatch_rules import SHARE
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Prompt, Sample
from flowrl.runtime.process.replica import Replica
from flowrl.runtime.telemetry.trace import TraceBuffer
from flowrl.testing import prompt, sample
from flowrl.wire.activity import Lease
from flowrl.wire.encoding.schema import Envelope
from flowrl.wire.in_ports import Inbound
from flowrl.wire.out_ports import Outbound
from tests.rigs.ticks import ticks_until
from tests.wire.test_runtime_join import PLACE, Branch, Ledger


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ([], "0 messages (none) of 0 groups"),
        ([sample()], "1 messages (Sample) of 0 groups"),
        ([prompt(group_id="a"), sample()], "2 messages (Prompt, Sample) of 1 groups"),
        ([prompt(group_id="a"), prompt(group_id="b")], "2 messages (Prompt) of 2 groups"),
    ],
)
def test_only_the_prompts_of_one_group_are_admitted(items: list[Any], found: str) -> None:
    """Before a ticket is asked for: the rows of the ledger are those of one group."""
    out: Out[Any] = Out(None, "prompts", (Prompt,))
    with pytest.raises(
        FlowrlError, match=re.escape(f"the port 'prompts' takes the prompts of one group; it got {found}")
    ):
        asyncio.run(out.admit(items))


class Edge:
    """An edge with credit or without, whose messages nobody finishes."""

    rule = SHARE

    def __init__(self, name: str, *, credit: bool) -> None:
        self.name = name
        self.kept: list[Envelope] = []
        self._credit = asyncio.Event()
        if credit:
            self._credit.set()

    async def send(self, envelope: Envelope) -> None:
        await self._credit.wait()
        self.kept.append(envelope)

    def ids(self, envelope: Envelope) -> list[bytes]:
        return [envelope.id]

    def addressed(self, envelope: Envelope) -> list[tuple[str, Envelope]]:
        return [("", envelope)]

    def unacked(self) -> list[tuple[str, Envelope]]:
        return [("", envelope) for envelope in self.kept]

    def close(self) -> None:
        pass


class Twice(Node):
    """Makes two messages of each: as it is, and its repetition. The first is work."""

    samples: In[Sample]
    out: Out[Sample]

    def __init__(self) -> None:
        self.worked: list[str] = []

    async def run(self) -> None:
        async for item in self.samples:
            if not self.out.was_sent():
                self.worked.append(item.sample_id)
                await self.out.send(item)
            await self.out.send(sample(item.member, group="second"))


def replica_of(node: Twice, bodies: Sequence[Sample], *edges: Edge) -> tuple[Replica, Branch]:
    endpoint: Any = Ledger()
    branch: Any = Branch("a", bodies, random.Random(0))
    outs: Any = edges
    lease = Lease("", "core", endpoint)
    replica = Replica(node, PLACE, endpoint, TraceBuffer(), lease)
    node.ports["samples"].live = replica.inbound["samples"] = Inbound(
        "twice.samples", branch, replica.open_items, replica.activity, replica, lease, sink=False
    )
    node.ports["out"].live = replica.outbound["out"] = Outbound("twice.out", outs, replica)
    return replica, branch


async def until_it_stands(replica: Replica) -> asyncio.Task[None]:
    """The running replica once it waits for credit."""
    running = asyncio.create_task(replica.run())
    await ticks_until(lambda: any(wait.kind == "credit" for wait in replica.activity.waits.values()))
    return running


async def end(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.wait((running,))


def names(kept: Iterable[tuple[str, str, Envelope]]) -> list[tuple[str, str]]:
    return [(edge, envelope.body.sample_id) for edge, _, envelope in kept]  # type: ignore[attr-defined]


def test_a_waiting_message_is_kept_for_every_edge_that_has_not_got_it() -> None:
    async def body() -> None:
        edges = [Edge("a", credit=True), Edge("b", credit=False), Edge("c", credit=True)]
        replica, branch = replica_of(Twice(), [sample(0)], *edges)
        running = await until_it_stands(replica)
        kept = replica.outbound["out"].unacked()
        assert names(kept) == [("a", "g:0"), ("b", "g:0"), ("c", "g:0")]
        assert set(replica.sent_already()) == {kept[0][2].id}
        await end(running)
        assert names(replica.outbound["out"].unacked()) == [("a", "g:0")]
        assert branch.deliveries[0].acks == 0

    asyncio.run(body())


def test_the_repeated_turn_leaves_out_what_was_kept() -> None:
    async def body() -> None:
        before = Edge("a", credit=True)
        first, _ = replica_of(Twice(), [sample(0)], before)
        await first.run()
        assert [envelope.body.sample_id for envelope in before.kept] == ["g:0", "second:0"]

        node, edge = Twice(), Edge("a", credit=True)
        again, _ = replica_of(node, [sample(0), sample(1)], edge)
        again.outbound["out"].sent_before = {before.kept[0].id}
        await again.run()
        assert node.worked == ["g:1"]
        assert [envelope.body.sample_id for envelope in edge.kept] == ["second:0", "g:1", "second:1"]
        assert edge.kept[0].id == before.kept[1].id, "what follows has the id that it had before"

    asyncio.run(body())


class Pairs(Twice):
    """One message of every two, which it holds."""

    async def run(self) -> None:
        held: list[Sample] = []
        async for item in self.samples:
            self.samples.hold(item)
            held.append(item)
            if len(held) == 2:
                await self.out.send(sample(0, group="pair"), made_from=held)
                held = []


def test_what_a_node_makes_of_items_on_hold_is_made_again() -> None:
    async def body() -> None:
        replica, _ = replica_of(Pairs(), [sample(0), sample(1)], Edge("a", credit=False))
        running = await until_it_stands(replica)
        out = replica.outbound["out"]
        assert len(out.not_sent()) == 1
        assert replica.sent_already() == [] and out.unacked() == []
        await end(running)

    asyncio.run(body())


def test_items_on_hold_are_finished_by_a_send_that_is_left_out() -> None:
    async def body() -> None:
        before = Edge("a", credit=True)
        first, _ = replica_of(Pairs(), [sample(0), sample(1)], before)
        await first.run()
        again, branch = replica_of(Pairs(), [sample(0), sample(1)], Edge("a", credit=True))
        again.outbound["out"].sent_before = {before.kept[0].id}
        await again.run()
        assert [delivery.acks for delivery in branch.deliveries] == [1, 1]

    asyncio.run(body())


def test_what_one_of_two_edges_has_got_is_kept_for_the_other() -> None:
    async def body() -> None:
        replica, _ = replica_of(Pairs(), [sample(0), sample(1)], Edge("a", credit=True), Edge("b", credit=False))
        running = await until_it_stands(replica)
        out = replica.outbound["out"]
        assert names(out.unacked()) == [("a", "pair:0"), ("b", "pair:0")]
        assert set(replica.sent_already()) == {envelope.id for *_, envelope in out.unacked()}
        await end(running)

    asyncio.run(body())

"""Which lanes a message takes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from types import SimpleNamespace

import pytest

from flowrl.errors import LaneFailed
from flowrl.graph.dispatch_rules import BROADCAST, GANG, KEY, LATEST, SHARE, DispatchRule
from flowrl.messages import Tombstone
from flowrl.wire.edges import Inbox, OutEdge, SenderLane
from flowrl.wire.encoding.schema import Envelope
from flowrl.wire.endpoint import Endpoint
from tests.rigs.ticks import ticks
from tests.wire.channel_rig import drain, every_transport, inbox_of, lane, run, thing


def edge_to(a: Endpoint, rule: DispatchRule, num_lanes: int, capacity: int = 2) -> OutEdge:
    kind = "latest" if rule is LATEST else "queue"
    return OutEdge([a.sender(lane(capacity, i, kind=kind)) for i in range(num_lanes)], rule)


def inboxes(b: Endpoint, num_lanes: int, capacity: int = 2, kind: str = "queue") -> list[Inbox]:
    return [inbox_of(b, lane(capacity, i, kind=kind)) for i in range(num_lanes)]


async def take_indices(inbox: Inbox, count: int) -> list[int]:
    return [(await inbox.take()).envelope.body.index for _ in range(count)]  # type: ignore[attr-defined]


def test_share_goes_where_most_credits_are() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, ports = edge_to(a, SHARE, 2), inboxes(b, 2)
        for index in range(4):
            await edge.send(thing(index))
        assert [lane.credits for lane in edge.lanes] == [0, 0]
        assert len(edge.ids(thing(0))) == 1
        taken = asyncio.Event()
        edge.on_taken(lambda ids: taken.set())
        slow = await take_indices(ports[1], 1)
        await taken.wait()
        await edge.send(thing(4))
        edge.close()
        assert set(slow) | set(await drain(ports[1])) | set(await drain(ports[0])) == set(range(5))
        assert a.statistics()[lane(2, 1).name].sent == 3

    run(body, "local")


def test_a_paused_edge_sends_nothing_until_it_is_resumed() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, (port,) = edge_to(a, SHARE, 1), inboxes(b, 1)
        await edge.send(thing(0))
        edge.pause(True)
        waiting = [asyncio.create_task(edge.send(thing(index))) for index in (1, 2)]
        taken = asyncio.Event()
        edge.on_taken(lambda ids: taken.set())
        assert await take_indices(port, 1) == [0]
        await taken.wait()
        await ticks(10)  # with its credit back, whoever were let go would have sent
        assert a.statistics()[lane(2, 0).name].sent == 1
        edge.pause(False)
        assert await take_indices(port, 2) == [1, 2]
        await asyncio.gather(*waiting)

    run(body, "local")


def test_sends_and_lanes_that_wait_together_are_blocked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("flowrl.wire.edges.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, ports = edge_to(a, SHARE, 4, capacity=1), inboxes(b, 4, capacity=1)

        def blocked() -> list[float]:
            return [a.statistics()[one.spec.name].blocked_s for one in edge.lanes]

        for index in range(4):
            await edge.send(thing(index))
        assert blocked() == [0.0] * 4
        waiting = [asyncio.create_task(edge.send(thing(index))) for index in (4, 5)]
        await ticks()
        now[0] = 101.0
        assert blocked() == [1.0] * 4  # while they wait
        waiting[1].cancel()
        await take_indices(ports[0], 1)
        await waiting[0]
        now[0] = 105.0
        assert blocked() == [1.0] * 4  # nobody waits any more
        waiting = [asyncio.create_task(edge.send(thing(6)))]
        await ticks()
        now[0] = 105.5
        await take_indices(ports[1], 1)
        await waiting[0]
        assert blocked() == [1.5] * 4

    run(body, "local")


def test_a_send_that_was_resumed_and_paused_at_once_stays() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, (port,) = edge_to(a, KEY, 1, capacity=1), inboxes(b, 1, capacity=1)
        await edge.send(thing(0))
        waiting = asyncio.create_task(edge.send(thing(1)))
        woken = asyncio.Event()
        edge.on_taken(lambda ids: (woken.set(), edge.gate.wake_next(), edge.pause(True)))
        assert await take_indices(port, 1) == [0]
        await woken.wait()
        await ticks(10)  # a send that had been let go would be done
        assert edge.lanes[0].credits == 1 and not waiting.done()
        edge.pause(False)
        await waiting
        assert await take_indices(port, 1) == [1]

    run(body, "local")


def test_a_paused_send_ends_when_its_lane_fails() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, _ = edge_to(a, SHARE, 1), inboxes(b, 1)
        edge.pause(True)
        waiting = asyncio.create_task(edge.send(thing(0)))
        await ticks()
        a.peer_failed("B", "it is gone")
        with pytest.raises(LaneFailed, match="it is gone"):
            await asyncio.wait_for(waiting, 1)

    run(body)


def test_key_keeps_a_group_on_one_lane_and_a_full_lane_does_not_hold_up_another() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge = edge_to(a, KEY, 2, capacity=1)
        inboxes(b, 2, capacity=1)
        groups = dict.fromkeys("abcdefgh")
        by_lane: dict[int, list[str]] = {0: [], 1: []}
        from zlib import crc32

        for name in groups:
            by_lane[crc32(name.encode()) % 2].append(name)
        await edge.send(thing(0, by_lane[0][0]))
        blocked = asyncio.ensure_future(edge.send(thing(1, by_lane[0][1])))
        await asyncio.wait([blocked], timeout=0)
        await edge.send(thing(2, by_lane[1][0]))
        assert not blocked.done()
        assert [lane.num_sent for lane in edge.lanes] == [1, 1]
        blocked.cancel()

    run(body, "local")


def test_broadcast_reaches_all_and_the_slowest_gates() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, ports = edge_to(a, BROADCAST, 2, capacity=1), inboxes(b, 2, capacity=1)
        assert len(set(edge.ids(thing(0)))) == 2
        await edge.send(thing(0))
        second = asyncio.ensure_future(edge.send(thing(1)))
        assert await take_indices(ports[0], 1) == [0]
        await asyncio.wait([second], timeout=0)
        assert not second.done()
        assert [lane.num_sent for lane in edge.lanes] == [1, 1]
        assert await take_indices(ports[1], 1) == [0]
        await second
        edge.close()
        assert await drain(ports[0]) == await drain(ports[1]) == [1]

    run(body, "local")


def test_gang_gives_each_lane_its_part_under_an_id_of_its_own() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, ports = edge_to(a, GANG, 3), inboxes(b, 3)
        await edge.send(thing(7))
        deliveries = [await port.take() for port in ports]
        assert [d.envelope.body.index for d in deliveries] == [70, 71, 72]  # type: ignore[attr-defined]
        ids = [d.envelope.id for d in deliveries]
        assert len({*ids, thing(7).id}) == 4
        assert edge.ids(thing(7)) == ids

    run(body, "local")


def test_ranks_that_share_a_part_each_get_it_under_an_id_of_their_own() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, ports = OutEdge([a.sender(lane(2, i)) for i in range(4)], GANG, lanes_per_part=2), inboxes(b, 4)
        await edge.send(thing(7))
        deliveries = [await port.take() for port in ports]
        assert [d.envelope.body.index for d in deliveries] == [70, 70, 71, 71]  # type: ignore[attr-defined]
        assert [d.envelope.id for d in deliveries] == edge.ids(thing(7)) and len(set(edge.ids(thing(7)))) == 4
        await edge.send_to(edge.lanes[2].spec.consumer, thing(8))
        assert (await ports[2].take()).envelope.body.index == 81, "a replay too"  # type: ignore[attr-defined]

    run(body, "local")


def test_what_a_gang_has_not_finished_is_kept_whole() -> None:
    """So that the same samples make the same optimizer steps, whatever the number of ranks that it is split for."""

    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, ports = edge_to(a, GANG, 2), inboxes(b, 2)
        acked = asyncio.Event()
        edge.on_acked(lambda ids: acked.set())
        whole = thing(7)
        await edge.send(whole)
        ((to, kept),) = edge.unacked()
        assert to == "" and kept is whole
        first, second = edge.lanes[0].spec.consumer, edge.lanes[1].spec.consumer
        assert edge.parts() == {thing(7).id: dict(zip((first, second), edge.ids(thing(7)), strict=True))}
        for number, port in enumerate(ports):
            (await port.take()).ack()
            await acked.wait()
            acked.clear()
            left = {} if number else {thing(7).id: {first: b"", second: edge.ids(thing(7))[1]}}
            assert edge.parts() == left and len(edge.unacked()) == len(left)

    run(body, "local")


def test_one_rank_alone_can_be_sent_its_part_again() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, ports = edge_to(a, GANG, 2), inboxes(b, 2)
        marker = Tombstone("g", 0, "failed", "r", "n")
        consumer = edge.lanes[1].spec.consumer
        await edge.send_to(consumer, thing(7))
        await edge.send_to(consumer, Envelope(thing(8).id, body=marker))
        found = [(await ports[1].take()).envelope for _ in range(2)]
        assert found[0].body.index == 71 and found[1].body == marker  # type: ignore[attr-defined]
        assert [envelope.id for envelope in found] == [edge.ids(thing(7))[1], edge.ids(thing(8))[1]]

    run(body, "local")


def test_gang_needs_a_message_that_splits() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge = edge_to(a, GANG, 2)
        with pytest.raises(TypeError, match="Tombstone, which has no `split"):
            await edge.send(Envelope(bytes(16), body=Tombstone("g", 0, "failed", "r", "n")))

    run(body, "local")


@every_transport
def test_latest_overwrites_and_never_waits(transport: str) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge = edge_to(a, LATEST, 1)
        (port,) = inboxes(b, 1, kind="latest")
        assert port.newest() is None and edge.rule.overwrites
        for index in range(100):
            await edge.send(thing(index))
        edge.close()
        found = await drain(port)
        assert found[-1] == 99 and found == sorted(found)
        assert port.newest().index == 99

    run(body, transport)


@pytest.mark.parametrize("rule", [SHARE, KEY, BROADCAST, GANG])
def test_each_of_many_waiting_sends_is_asked_for_a_few_times(
    rule: DispatchRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run sends thousands of messages at once, which wait for the credits of their lanes."""
    number, asked, can_send = 3000, itertools.count(), SenderLane.can_send

    def counted(lane: SenderLane) -> bool:
        next(asked)
        return can_send(lane)

    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, ports = edge_to(a, rule, 2), inboxes(b, 2)
        monkeypatch.setattr(SenderLane, "can_send", counted)
        sends = [asyncio.create_task(edge.send(thing(at, f"g{at}"))) for at in range(number)]
        found: list[list[int]] = [[], []]

        async def take(port: int) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                while True:
                    delivery = await ports[port].take()
                    found[port].append(delivery.envelope.body.index)  # type: ignore[attr-defined]
                    delivery.ack()

        takers = [asyncio.create_task(take(port)) for port in range(2)]
        await asyncio.gather(*sends)
        for taker in takers:
            taker.cancel()
        assert all(port == sorted(port) for port in found), "in the order in which the sends began"

    run(body, "local")
    assert next(asked) < 60 * number

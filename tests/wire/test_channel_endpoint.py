"""Lanes between endpoints over every transport, with real sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Coroutine
from threading import Thread
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError, LaneFailed
from flowrl.graph.dispatch_rules import SHARE
from flowrl.wire.connection import Address, CurveKeys, TcpTransport
from flowrl.wire.edges import EndOfStream, Inbox, OutEdge
from flowrl.wire.encoding.schema import Envelope, source_id
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.lanes import ReceiverLane
from tests.wire.channel_rig import (
    TCP,
    Thing,
    closing,
    drain,
    every_transport,
    inbox_of,
    lane,
    opened,
    play,
    run,
    thing,
    until,
    via,
)
from tests.wire.strangers import admitted_strangers, is_admitted


@every_transport
def test_everything_arrives_in_order_once_and_is_acked(transport: str) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, inbox = OutEdge([a.sender(lane())], SHARE), inbox_of(b, lane())
        taken: list[bytes] = []
        acked: list[bytes] = []
        edge.on_taken(taken.extend)
        all_acked = asyncio.Event()
        edge.on_acked(until(acked, 300, all_acked))

        async def send() -> None:
            for index in range(300):
                await edge.send(thing(index))
            edge.close()

        async with asyncio.TaskGroup() as tasks:
            found = tasks.create_task(drain(inbox))
            tasks.create_task(send())
        await all_acked.wait()
        assert found.result() == list(range(300))
        assert taken == [thing(i).id for i in range(300)]
        assert edge.unacked() == []
        mine, other = a.statistics()[lane().name], b.statistics()[lane().name]
        assert (mine.sent, mine.acked, mine.unacked, mine.depth, mine.credits) == (300, 300, 0, 0, 4)
        assert (other.received, other.acked, other.depth) == (300, 300, 0)
        assert mine.blocked_s > 0

    run(body, transport)


@every_transport
def test_arrays_of_all_sizes(transport: str) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, inbox = OutEdge([a.sender(lane())], SHARE), inbox_of(b, lane())
        for index, size in enumerate((0, 10, 3_000, 50_000, 400_000)):
            values = np.arange(size, dtype=np.int32)
            await sender.send(Envelope(source_id("t", str(index)), body=Thing(index, values)))
            delivery = await inbox.take()
            received = delivery.envelope.body.values  # type: ignore[attr-defined]
            assert np.array_equal(received, values)
            assert not received.flags.writeable and not values.flags.writeable
            delivery.ack()

    run(body, transport)


def test_credits_bound_what_is_under_way() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, inbox = OutEdge([a.sender(lane(capacity=3))], SHARE), inbox_of(b, lane(capacity=3))
        for index in range(3):
            await sender.send(thing(index))
        waiting = asyncio.ensure_future(sender.send(thing(3)))
        await a.request("B", "sync")
        assert not waiting.done() and sender.lanes[0].credits == 0
        assert [(wait.kind, wait.what) for wait in a.watch()] == [("credit", lane().name)]
        await inbox.take()
        await waiting
        assert len(sender.unacked()) == 4

    def with_sync(a: Endpoint, b: Endpoint) -> Awaitable[None]:
        b.on("sync", lambda host, body: None)
        return body(a, b)

    run(with_sync)


def test_a_cancelled_send_has_sent_nothing_and_the_next_goes_on() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, inbox = OutEdge([a.sender(lane(capacity=1))], SHARE), inbox_of(b, lane(capacity=1))
        await edge.send(thing(0))
        waits = [asyncio.ensure_future(edge.send(thing(index))) for index in (1, 2, 3)]
        await asyncio.wait(waits, timeout=0)
        waits[0].cancel()
        first = await inbox.take()
        first.ack()
        await waits[1]
        waits[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits[2]
        edge.close()
        assert await drain(inbox) == [2]

    run(body)


def test_a_take_cancelled_between_waking_and_taking_leaves_the_message_to_the_next() -> None:
    async def main() -> None:
        end, inbox = ReceiverLane(lane()), Inbox("b.in")
        inbox.add_lane(end)
        takes = [asyncio.ensure_future(inbox.take()) for _ in range(3)]
        await asyncio.wait(takes, timeout=0)
        takes[1].cancel()
        end.on_data(0, [thing(0)])
        end.on_change(end)  # wakes the first
        takes[0].cancel()
        assert (await takes[2]).envelope.id == thing(0).id
        assert takes[0].cancelled() and takes[1].cancelled()

    play(main())


def test_one_port_merges_lanes_in_turn_and_ends_with_the_last() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        specs = [lane(consumer=i) for i in range(2)]
        senders = [OutEdge([a.sender(spec)], SHARE) for spec in specs]
        inbox = inbox_of(b, *specs)
        for index in range(3):
            await senders[0].send(thing(index))
            await senders[1].send(thing(index + 10))
        senders[0].close()
        senders[1].close()
        assert await drain(inbox) == [0, 10, 1, 11, 2, 12]

    run(body, "local")


def test_a_restored_message_comes_first_and_is_acked_to_nobody() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, inbox = OutEdge([a.sender(lane())], SHARE), inbox_of(b, lane())
        inbox.restore(thing(7))
        await sender.send(thing(7))
        await sender.send(thing(8))
        sender.close()
        assert await drain(inbox) == [7, 8]

    run(body)


def test_an_inbox_without_lanes_is_at_its_end() -> None:
    with pytest.raises(EndOfStream):
        asyncio.run(Inbox("x").take())


# Addresses


def test_order_of_wiring_does_not_matter() -> None:
    async def main() -> None:
        a, b = await opened("A", "ipc"), await opened("B", "ipc")
        edge = OutEdge([a.sender(lane())], SHARE)
        for index in range(3):
            await edge.send(thing(index))
        edge.close()
        a.notify("B", "hello", 1)
        a.connect("B", via("ipc", b.address))
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        b.on("hello", lambda host, body: told.set_result(body))
        b.connect("A", via("ipc", a.address))
        assert await told == 1
        assert await drain(inbox_of(b, lane())) == [0, 1, 2]
        await a.close()
        await b.close()

    play(main())


def test_two_loops_in_one_process() -> None:
    """Each endpoint on a thread of its own: still in process, handed over safely."""

    class Elsewhere:
        def __init__(self) -> None:
            self.loop = asyncio.new_event_loop()
            self.thread = Thread(target=self.loop.run_forever)
            self.thread.start()

        def run(self, body: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(body, self.loop).result(20)

        def stop(self) -> None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()

    there = Elsewhere()
    b = Endpoint("B", run_id="test", driver_pid=os.getpid())

    async def serve(address: Address) -> list[int]:
        b.connect("A", address)
        return await drain(inbox_of(b, lane()))

    async def main() -> None:
        a = await opened("A", "local")
        a.connect("B", await asyncio.to_thread(there.run, b.open()))
        edge = OutEdge([a.sender(lane())], SHARE)
        serving = asyncio.create_task(asyncio.to_thread(there.run, serve(a.address)))
        for index in range(50):
            await edge.send(thing(index))
        edge.close()
        assert await serving == list(range(50))
        await asyncio.to_thread(there.run, b.close())

    try:
        play(main())
    finally:
        there.stop()


def test_an_endpoint_that_was_neverclosing_closes() -> None:
    asyncio.run(Endpoint("A", run_id="test", driver_pid=os.getpid()).close())


def test_lanes_with_other_schemas_fail_at_both_ends() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, inbox = OutEdge([a.sender(lane(1))], SHARE), inbox_of(b, lane(1, types=("Tombstone",)))
        with pytest.raises(LaneFailed, match="carries Thing"):
            await inbox.take()
        await sender.send(thing(0)) if sender.lanes[0].credits and not sender.lanes[0].failed else None
        with pytest.raises(LaneFailed, match="carries Thing"):
            await sender.send(thing(1))

    run(body)


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [("ipc", "tcp", "cannot reach over ipc"), ("tcp", "ipc", "does not listen on tcp")],
)
def test_an_endpoint_on_another_machine_is_reached_over_tcp_alone(mine: str, theirs: str, message: str) -> None:
    async def main() -> None:
        a, b = await opened("A", mine), await opened("B", theirs)
        with pytest.raises(ConfigError, match=f"host 'B' is on another machine.* {message}"):
            a.connect("B", via("tcp", b.address))

    play(main())


def test_strangers_are_refused_and_who_has_the_keys_is_not() -> None:
    async def body() -> tuple[list[str], bool]:
        transport = TcpTransport(ip="127.0.0.1")
        endpoint = Endpoint("B", run_id="test", driver_pid=os.getpid(), transport=transport)
        url = (await endpoint.open()).tcp
        keys = transport.keys
        found = await asyncio.to_thread(admitted_strangers, url, keys.public)
        member = await asyncio.to_thread(is_admitted, url, keys, keys.public)
        await endpoint.close()
        return found, member

    assert asyncio.run(body()) == ([], True)


def test_a_stranger_with_other_keys_is_not_heard() -> None:
    async def main() -> None:
        heard: list[Any] = []
        b, friend = await opened("B", "tcp"), await opened("A", "tcp")
        stranger = Endpoint("X", run_id="test", driver_pid=os.getpid(), transport=TcpTransport(ip="127.0.0.1"))
        closing.append(stranger)
        await stranger.open()
        for endpoint in (stranger, friend):
            endpoint.connect("B", via("tcp", b.address))
            b.connect(endpoint.host, via("tcp", endpoint.address))
        b.on("note", lambda host, body: heard.append(host))
        stranger.notify("B", "note")
        friend.notify("B", "note")
        b.on("sync", lambda host, body: None)
        await friend.request("B", "sync")
        assert heard == ["A"]
        for endpoint in (stranger, friend, b):
            await endpoint.close()

    play(main())


def test_a_key_of_the_server_alone_does_not_open_the_door() -> None:
    """Whoever knows the public key but not the secret one cannot come in either."""

    async def main() -> None:
        heard: list[Any] = []
        b, friend = await opened("B", "tcp"), await opened("A", "tcp")
        transport = TcpTransport(CurveKeys(TCP.keys.public, CurveKeys.new().secret), "127.0.0.1")
        thief = Endpoint("X", run_id="test", driver_pid=os.getpid(), transport=transport)
        closing.append(thief)
        await thief.open()
        for endpoint in (thief, friend):
            endpoint.connect("B", via("tcp", b.address))
            b.connect(endpoint.host, via("tcp", endpoint.address))
        b.on("note", lambda host, body: heard.append(host))
        b.on("sync", lambda host, body: None)
        thief.notify("B", "note")
        friend.notify("B", "note")
        await friend.request("B", "sync")
        assert heard == ["A"]
        for endpoint in (thief, friend, b):
            await endpoint.close()

    play(main())

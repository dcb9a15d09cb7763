"""Endpoints over every transport: lanes, dispatch, requests, failures, with real sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import pytest

from flowrl.channel.address import Address, CurveKeys
from flowrl.channel.dispatch import EndOfStream, Inbox, OutEdge, Rule
from flowrl.channel.endpoint import Endpoint
from flowrl.channel.ends import ReceiveLane, SendLane
from flowrl.channel.envelope import Envelope, source_id
from flowrl.channel.lane import LaneSpec, ReceiverLane
from flowrl.errors import ConfigError, FlowrlError, LaneFailed, NodeFailed, SampleFailed, WireError
from flowrl.messages import Int32, Message, Tombstone

R = TypeVar("R")
KEYS = CurveKeys.new()


@dataclass(frozen=True)
class Thing(Message):
    index: int
    values: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))

    def split(self, n: int) -> tuple[Thing, ...]:
        return tuple(Thing(self.index * 10 + i) for i in range(n))


def thing(index: int, group: str = "g") -> Envelope:
    return Envelope(source_id("t", str(index)), 0, group, 0, Thing(index))


def lane(capacity: int = 4, consumer: int = 0, to: str = "b", kind: str = "queue", types: Any = ("Thing",)) -> LaneSpec:
    name = f"a/0.out -> {to}/{consumer}.in"
    return LaneSpec(name, "a.out -> b.in", "a/0", f"{to}/{consumer}", "A", "B", capacity, kind, types)  # type: ignore[arg-type]


def via(transport: str, address: Address) -> Address:
    """The same address, as a process would see it from further away."""
    if transport == "local":
        return address
    return replace(address, pid=-1, machine=address.machine if transport == "ipc" else "elsewhere")


async def opened(host: str, transport: str, *, epoch: int = 0, errors: list[Any] | None = None) -> Endpoint:
    endpoint = Endpoint(
        host,
        run_id="test",
        driver_pid=os.getpid(),
        epoch=epoch,
        curve=KEYS if transport == "tcp" else None,
        failed=(errors if errors is not None else []).append,
    )
    _opened.append(endpoint)
    await endpoint.open(tcp="127.0.0.1" if transport == "tcp" else False)
    return endpoint


_opened: list[Endpoint] = []


def play(main: Coroutine[Any, Any, R]) -> R:
    """Run a test's coroutine and close every endpoint, whatever comes of it."""

    async def guarded() -> R:
        try:
            async with asyncio.timeout(30):
                return await main
        finally:
            while _opened:
                await _opened.pop().close()

    return asyncio.run(guarded())


@asynccontextmanager
async def pair(transport: str) -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    """Hosts A and B, connected."""
    errors: list[Any] = []
    a, b = await opened("A", transport, errors=errors), await opened("B", transport, errors=errors)
    a.connect("B", via(transport, b.address))
    b.connect("A", via(transport, a.address))
    yield a, b
    assert errors == []


def run(body: Callable[[Endpoint, Endpoint], Awaitable[None]], transport: str = "ipc") -> None:
    async def main() -> None:
        async with pair(transport) as (a, b):
            await body(a, b)

    play(main())


async def drain(inbox: Inbox) -> list[int]:
    """Take and ack until the end of stream; returns the indices."""
    found = []
    try:
        while True:
            delivery = await inbox.take()
            found.append(delivery.envelope.body.index)  # type: ignore[attr-defined]
            delivery.ack()
    except EndOfStream:
        return found


def inbox_of(endpoint: Endpoint, *lanes: LaneSpec) -> Inbox:
    inbox = Inbox("b.in")
    for spec in lanes:
        inbox.add(endpoint.receiver(spec))
    return inbox


def until(ids: list[bytes], count: int, reached: asyncio.Event) -> Callable[[Sequence[bytes]], None]:
    """A callback that collects ids and sets `reached` at `count`."""

    def collect(more: Sequence[bytes]) -> None:
        ids.extend(more)
        if len(ids) == count:
            reached.set()

    return collect


every_transport = pytest.mark.parametrize("transport", ["local", "ipc", "tcp"])


@every_transport
def test_everything_arrives_in_order_once_and_is_acked(transport: str) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, inbox = OutEdge([a.sender(lane())], "share"), inbox_of(b, lane())
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
        sender, inbox = a.sender(lane()), inbox_of(b, lane())
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
        sender, inbox = a.sender(lane(capacity=3)), inbox_of(b, lane(capacity=3))
        for index in range(3):
            await sender.send(thing(index))
        waiting = asyncio.ensure_future(sender.send(thing(3)))
        await a.request("B", "sync")
        assert not waiting.done() and sender.credits == 0
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
        edge, inbox = OutEdge([a.sender(lane(capacity=1))], "share"), inbox_of(b, lane(capacity=1))
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


class Silent:
    """An owner of lane ends that sends nothing: frames are fed by hand."""

    def sent(self, lane: SendLane) -> None:
        pass

    def owed(self, lane: ReceiveLane) -> None:
        pass

    def opened(self, lane: ReceiveLane) -> None:
        pass


def test_a_take_cancelled_between_waking_and_taking_leaves_the_message_to_the_next() -> None:
    async def main() -> None:
        machine = ReceiverLane(lane())
        end, inbox = ReceiveLane(lane(), machine, Silent()), Inbox("b.in")
        inbox.add(end)
        takes = [asyncio.ensure_future(inbox.take()) for _ in range(3)]
        await asyncio.wait(takes, timeout=0)
        takes[1].cancel()
        machine.on_data(0, thing(0))
        assert end.changed is not None
        end.changed(end)  # wakes the first
        takes[0].cancel()
        assert (await takes[2]).envelope.id == thing(0).id
        assert takes[0].cancelled() and takes[1].cancelled()

    play(main())


def test_one_port_merges_lanes_in_turn_and_ends_with_the_last() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        specs = [lane(consumer=i) for i in range(2)]
        senders = [a.sender(spec) for spec in specs]
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
        sender, inbox = a.sender(lane()), inbox_of(b, lane())
        inbox.restore(thing(7))
        await sender.send(thing(7))
        await sender.send(thing(8))
        sender.close()
        assert await drain(inbox) == [7, 8]

    run(body)


def test_an_inbox_without_lanes_is_at_its_end() -> None:
    with pytest.raises(EndOfStream):
        asyncio.run(Inbox("x").take())


# Dispatch


def edge_to(a: Endpoint, rule: Rule, num_lanes: int, capacity: int = 2) -> OutEdge:
    kind = "latest" if rule == "latest" else "queue"
    return OutEdge([a.sender(lane(capacity, i, kind=kind)) for i in range(num_lanes)], rule)


def inboxes(b: Endpoint, num_lanes: int, capacity: int = 2, kind: str = "queue") -> list[Inbox]:
    return [inbox_of(b, lane(capacity, i, kind=kind)) for i in range(num_lanes)]


async def take_indices(inbox: Inbox, count: int) -> list[int]:
    return [(await inbox.take()).envelope.body.index for _ in range(count)]  # type: ignore[attr-defined]


def test_share_goes_where_most_credits_are() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, ports = edge_to(a, "share", 2), inboxes(b, 2)
        for index in range(4):
            await edge.send(thing(index))
        assert [lane.credits for lane in edge.lanes] == [0, 0]
        assert edge.num_arrivals == 1
        taken = asyncio.Event()
        edge.on_taken(lambda ids: taken.set())
        slow = await take_indices(ports[1], 1)
        await taken.wait()
        await edge.send(thing(4))
        edge.close()
        assert set(slow) | set(await drain(ports[1])) | set(await drain(ports[0])) == set(range(5))
        assert a.statistics()[lane(2, 1).name].sent == 3

    run(body, "local")


def test_key_keeps_a_group_on_one_lane_and_a_full_lane_does_not_hold_up_another() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge = edge_to(a, "key", 2, capacity=1)
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
        assert [lane.machine.num_sent for lane in edge.lanes] == [1, 1]
        blocked.cancel()

    run(body, "local")


def test_broadcast_reaches_all_and_the_slowest_gates() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, ports = edge_to(a, "broadcast", 2, capacity=1), inboxes(b, 2, capacity=1)
        assert edge.num_arrivals == 2
        await edge.send(thing(0))
        second = asyncio.ensure_future(edge.send(thing(1)))
        assert await take_indices(ports[0], 1) == [0]
        await asyncio.wait([second], timeout=0)
        assert not second.done()
        assert [lane.machine.num_sent for lane in edge.lanes] == [1, 1]
        assert await take_indices(ports[1], 1) == [0]
        await second
        edge.close()
        assert await drain(ports[0]) == await drain(ports[1]) == [1]

    run(body, "local")


def test_gang_gives_each_lane_its_part_under_one_id() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge, ports = edge_to(a, "gang", 3), inboxes(b, 3)
        await edge.send(thing(7))
        deliveries = [await port.take() for port in ports]
        assert [d.envelope.body.index for d in deliveries] == [70, 71, 72]  # type: ignore[attr-defined]
        assert {d.envelope.id for d in deliveries} == {thing(7).id}

    run(body, "local")


def test_gang_needs_a_message_that_splits() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge = edge_to(a, "gang", 2)
        with pytest.raises(TypeError, match="Tombstone, which has no `split"):
            await edge.send(Envelope(bytes(16), body=Tombstone("g", 0, "failed", "r", "n")))

    run(body, "local")


@every_transport
def test_latest_overwrites_and_never_waits(transport: str) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        edge = edge_to(a, "latest", 1)
        (port,) = inboxes(b, 1, kind="latest")
        assert port.newest() is None and edge.num_arrivals == 0
        for index in range(100):
            await edge.send(thing(index))
        edge.close()
        found = await drain(port)
        assert found[-1] == 99 and found == sorted(found)
        assert port.newest().index == 99

    run(body, transport)


# Failing


@every_transport
def test_a_failed_lane_raises_at_the_other_end_and_is_no_end_of_stream(transport: str) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, inbox = a.sender(lane(1)), inbox_of(b, lane(1))
        take = asyncio.ensure_future(inbox.take())
        await asyncio.wait([take], timeout=0)
        sender.fail("node 'a' raised ValueError")
        with pytest.raises(LaneFailed, match=r"a/0.out -> b/0.in.*ValueError"):
            await take
        with pytest.raises(LaneFailed):
            await sender.send(thing(0))

    run(body, transport)


def test_a_consumer_that_fails_ends_waiting_sends() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, receiver = a.sender(lane(1)), b.receiver(lane(1))
        Inbox("b.in").add(receiver)
        await sender.send(thing(0))
        waits = [asyncio.ensure_future(sender.send(thing(i))) for i in (1, 2)]
        await asyncio.wait(waits, timeout=0)
        receiver.fail("node 'b' raised")
        for wait in waits:
            with pytest.raises(LaneFailed, match="node 'b' raised"):
                await wait

    run(body)


def test_the_supervisors_word_fails_sends_takes_and_requests() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender = a.sender(lane(1))
        back = replace(lane(1, to="c"), producer_host="B", consumer_host="A")
        inbox = inbox_of(a, back)
        await sender.send(thing(0))
        b.on("never", forever)
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(sender.send(thing(1))),
            asyncio.ensure_future(inbox.take()),
            asyncio.ensure_future(a.request("B", "never")),
        ]
        await asyncio.wait(waits, timeout=0)
        assert {wait.kind for wait in a.watch()} == {"credit", "item", "reply"}
        a.peer_failed("B", "killed by signal 9")
        for wait in waits:
            with pytest.raises(LaneFailed, match="signal 9"):
                await wait
        with pytest.raises(LaneFailed, match="signal 9"):
            await a.request("B", "never")
        assert len(sender.unacked()) == 1

    run(body)


async def forever(host: str, body: Any) -> None:
    await asyncio.get_running_loop().create_future()


@every_transport
def test_what_cannot_travel_raises_where_it_is_sent(transport: str) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender = a.sender(lane())
        with pytest.raises(WireError, match=r"lane 'a/0.out -> b/0.in'.*type builtins.object cannot travel"):
            await sender.send(Envelope(bytes(16), body=Thing(object())))  # type: ignore[arg-type]
        with pytest.raises(LaneFailed):
            await sender.send(thing(0))

    run(body, transport)


def test_closing_an_endpoint_ends_every_wait() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, inbox = a.sender(lane(1)), inbox_of(b, lane(1))
        b.on("never", forever)
        await sender.send(thing(0))
        await inbox.take()
        await sender.send(thing(1))
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(sender.send(thing(2))),
            asyncio.ensure_future(a.request("B", "never")),
        ]
        await asyncio.wait(waits, timeout=0)
        await a.close()
        for wait in waits:
            with pytest.raises(LaneFailed):
                await wait

    run(body)


def test_a_peer_that_leaves_before_the_end_of_the_stream_is_a_failure() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, inbox = b_to_a(b, a)
        a.on("never", forever)
        take, request = asyncio.ensure_future(inbox.take()), asyncio.ensure_future(b.request("A", "never"))
        await sender.send(thing(0))
        await take
        take = asyncio.ensure_future(inbox.take())
        await b.close()
        for wait in (take, request):
            with pytest.raises(LaneFailed, match="closed"):
                await wait

    run(body)


def test_a_peer_that_leaves_after_the_end_of_the_stream_is_none() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, inbox = b_to_a(b, a)
        await sender.send(thing(0))
        sender.close()
        await b.close()
        assert await drain(inbox) == [0]

    run(body)


def b_to_a(b: Endpoint, a: Endpoint) -> tuple[SendLane, Inbox]:
    spec = replace(lane(2, to="c"), producer_host="B", consumer_host="A")
    return b.sender(spec), inbox_of(a, spec)


# Requests and notes


@every_transport
def test_requests_carry_values_arrays_and_messages(transport: str) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        async def double(host: str, body: dict[str, Any]) -> dict[str, Any]:
            return {"host": host, "values": body["thing"].values * 2, "thing": body["thing"]}

        b.on("double", double)
        values = np.arange(200_000, dtype=np.int32)
        reply = await a.request("B", "double", {"thing": Thing(3, values)})
        assert reply["host"] == "A" and reply["thing"].index == 3
        assert np.array_equal(reply["values"], values * 2)

    run(body, transport)


def test_notes_come_in_order_and_before_a_later_request() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        notes: list[int] = []
        b.on("note", lambda host, body: notes.append(body))
        b.on("read", lambda host, body: list(notes))
        for index in range(50):
            a.notify("B", "note", index)
        assert list(await a.request("B", "read")) == list(range(50))

    run(body)


def test_an_endpoint_may_ask_itself() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        a.on("echo", lambda host, body: (host, body))
        assert await a.request("A", "echo", 5) == ("A", 5)

    run(body)


def test_errors_of_handlers_reach_the_asker() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        async def fail(host: str, body: str) -> None:
            raise {
                "sample": SampleFailed("bad sample"),
                "node": NodeFailed("n", 2, "why", remote_traceback="tb", ticket=4),
                "bug": ZeroDivisionError("oops"),
            }[body]

        b.on("fail", fail)
        with pytest.raises(SampleFailed, match=r"^bad sample$"):
            await a.request("B", "fail", "sample")
        with pytest.raises(NodeFailed) as raised:
            await a.request("B", "fail", "node")
        assert (raised.value.node, raised.value.replica, raised.value.ticket) == ("n", 2, 4)
        with pytest.raises(FlowrlError, match=r"'B' failed to answer 'fail': ZeroDivisionError: oops\n(?s:.*)in fail"):
            await a.request("B", "fail", "bug")
        with pytest.raises(WireError, match="'nothing', which nobody answers"):
            await a.request("B", "nothing")

    run(body)


def test_an_answer_that_cannot_travel_is_an_error_at_the_asker() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        b.on("object", lambda host, body: object())
        with pytest.raises(WireError, match="answer to 'object'"):
            await a.request("B", "object")

    run(body)


def test_cancelling_a_request_cancels_its_handler() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def work(host: str, body: Any) -> None:
            began.set()
            try:
                await forever(host, body)
            finally:
                ended.set()

        b.on("work", work)
        request = asyncio.ensure_future(a.request("B", "work"))
        await began.wait()
        request.cancel()
        await ended.wait()

    run(body)


def test_a_note_whose_handler_raises_is_told_to_the_owner() -> None:
    async def main() -> None:
        errors: list[BaseException] = []
        a, b = await opened("A", "ipc"), await opened("B", "ipc", errors=errors)
        a.connect("B", via("ipc", b.address))
        b.connect("A", via("ipc", a.address))
        b.on("note", lambda host, body: 1 / body)
        b.on("sync", lambda host, body: None)
        a.notify("B", "note", 0)
        await a.request("B", "sync")
        assert [type(error) for error in errors] == [ZeroDivisionError]
        await a.close()
        await b.close()

    play(main())


# Addresses


def test_order_of_wiring_does_not_matter() -> None:
    async def main() -> None:
        a, b = await opened("A", "ipc"), await opened("B", "ipc")
        edge = OutEdge([a.sender(lane())], "share")
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

        def run(self, body: Coroutine[Any, Any, R]) -> R:
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
        edge = OutEdge([a.sender(lane())], "share")
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


def test_an_endpoint_that_was_never_opened_closes() -> None:
    asyncio.run(Endpoint("A", run_id="test", driver_pid=os.getpid()).close())


def test_lanes_with_other_schemas_fail_at_both_ends() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, inbox = a.sender(lane(1)), inbox_of(b, lane(1, types=("Tombstone",)))
        with pytest.raises(LaneFailed, match="carries Thing"):
            await inbox.take()
        await sender.send(thing(0)) if sender.credits and not sender.machine.failed else None
        with pytest.raises(LaneFailed, match="carries Thing"):
            await sender.send(thing(1))

    run(body)


def test_tcp_needs_keys() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="CURVE keys"):
            await Endpoint("A", run_id="test", driver_pid=os.getpid()).open(tcp=True)

    play(main())


def test_a_stranger_with_other_keys_is_not_heard() -> None:
    async def main() -> None:
        heard: list[Any] = []
        b, friend = await opened("B", "tcp"), await opened("A", "tcp")
        stranger = Endpoint("X", run_id="test", driver_pid=os.getpid(), curve=CurveKeys.new())
        _opened.append(stranger)
        await stranger.open(tcp="127.0.0.1")
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
        thief = Endpoint(
            "X", run_id="test", driver_pid=os.getpid(), curve=CurveKeys(KEYS.public, CurveKeys.new().secret)
        )
        _opened.append(thief)
        await thief.open(tcp="127.0.0.1")
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


# Restarts, in one process; with real processes in test_channel_replay.py


def test_a_restarted_consumer_gets_what_was_not_acked() -> None:
    async def main() -> None:
        a, b = await opened("A", "ipc"), await opened("B", "ipc")
        a.connect("B", via("ipc", b.address))
        b.connect("A", via("ipc", a.address))
        edge, inbox = OutEdge([a.sender(lane(8))], "share"), inbox_of(b, lane(8))
        acked = asyncio.Event()
        edge.on_acked(lambda ids: acked.set())
        for index in range(6):
            await edge.send(thing(index))
        for _ in range(3):
            delivery = await inbox.take()
        delivery.ack()
        await acked.wait()
        a.peer_failed("B", "killed")
        await b.close()
        again = await opened("B", "ipc", epoch=1)
        again.connect("A", via("ipc", a.address))
        second = inbox_of(again, lane(8))
        a.peer_restarted("B", via("ipc", again.address), 1)
        edge.close()
        assert await drain(second) == [0, 1, 3, 4, 5]
        await a.close()
        await again.close()

    play(main())


def test_a_restarted_producer_repeats_itself_unnoticed() -> None:
    async def main() -> None:
        a, b = await opened("A", "ipc"), await opened("B", "ipc")
        a.connect("B", via("ipc", b.address))
        b.connect("A", via("ipc", a.address))
        sender, inbox = a.sender(lane(8)), inbox_of(b, lane(8))
        for index in range(4):
            await sender.send(thing(index))
        deliveries = [await inbox.take() for _ in range(3)]
        deliveries[0].ack()
        await a.close()
        again = await opened("A", "ipc", epoch=1)
        again.connect("B", via("ipc", b.address))
        edge = OutEdge([again.sender(lane(8))], "share")
        acked: list[bytes] = []
        done = asyncio.Event()
        edge.on_acked(until(acked, 6, done))
        # Frames of the new epoch wait for the supervisor's word.
        for index in range(6):
            await edge.send(thing(index))
        edge.close()
        b.peer_failed("A", "killed")
        b.peer_restarted("A", via("ipc", again.address), 1)
        for delivery in deliveries[1:]:
            delivery.ack()
        assert await drain(inbox) == [3, 4, 5]
        await done.wait()
        assert sorted(acked) == sorted(thing(i).id for i in range(6))
        await again.close()
        await b.close()

    play(main())


def test_nothing_is_left_on_the_machine() -> None:
    async def main() -> str:
        a = await opened("A", "ipc")
        await a.close()
        return a.address.ipc

    path = play(main())
    assert not os.path.exists(path) and not os.path.exists(os.path.dirname(path))

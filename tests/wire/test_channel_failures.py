"""Failures reach everybody who waits; broken connections and restarts lose and repeat nothing."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from flowrl.errors import LaneFailed, WireError
from flowrl.graph.dispatch_rules import SHARE
from flowrl.wire import connection as links
from flowrl.wire.edges import Inbox, OutEdge
from flowrl.wire.encoding.schema import Envelope
from flowrl.wire.endpoint import Endpoint
from tests.wire.channel_rig import (
    Thing,
    b_to_a,
    drain,
    every_transport,
    forever,
    inbox_of,
    lane,
    opened,
    pair,
    play,
    run,
    thing,
    until,
    via,
)


@every_transport
def test_a_failed_lane_raises_at_the_other_end_and_is_no_end_of_stream(transport: str) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, inbox = OutEdge([a.sender(lane(1))], SHARE), inbox_of(b, lane(1))
        take = asyncio.ensure_future(inbox.take())
        await asyncio.wait([take], timeout=0)
        sender.lanes[0].fail("node 'a' raised ValueError")
        with pytest.raises(LaneFailed, match=r"a/0.out -> b/0.in.*ValueError"):
            await take
        with pytest.raises(LaneFailed):
            await sender.send(thing(0))

    run(body, transport)


def test_a_consumer_that_fails_ends_waiting_sends() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, receiver = OutEdge([a.sender(lane(1))], SHARE), b.receiver(lane(1))
        Inbox("b.in").add_lane(receiver)
        await sender.send(thing(0))
        waits = [asyncio.ensure_future(sender.send(thing(i))) for i in (1, 2)]
        await asyncio.wait(waits, timeout=0)
        receiver.refuse("node 'b' raised")
        for wait in waits:
            with pytest.raises(LaneFailed, match="node 'b' raised"):
                await wait

    run(body)


def test_the_supervisors_word_fails_sends_takes_and_requests() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender = OutEdge([a.sender(lane(1))], SHARE)
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


@every_transport
def test_what_cannot_travel_raises_where_it_is_sent(transport: str) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender = OutEdge([a.sender(lane())], SHARE)
        with pytest.raises(WireError, match=r"lane 'a/0.out -> b/0.in'.*type builtins.object cannot be sent"):
            await sender.send(Envelope(bytes(16), body=Thing(object())))  # type: ignore[arg-type]
        with pytest.raises(LaneFailed):
            await sender.send(thing(0))

    run(body, transport)


def test_closing_an_endpoint_ends_every_wait() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        sender, inbox = OutEdge([a.sender(lane(1))], SHARE), inbox_of(b, lane(1))
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


class Proxy:
    """A tcp proxy that can cut its connections."""

    def __init__(self, target: str) -> None:
        self._host, self._port = target.removeprefix("tcp://").split(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._vanished: set[asyncio.StreamWriter] = set()
        self.num_connections = 0
        self._to_lose = 0
        self._lost: asyncio.Future[None] | None = None
        self._tried = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self.passed = 0
        self.delay_s = 0.0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tried.set()
        await self._open.wait()
        back_reader, back_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, back_writer]
        self.num_connections += 1
        with suppress(ConnectionError):
            await asyncio.gather(self._pass(reader, back_writer), self._pass(back_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await asyncio.sleep(self.delay_s)  # the delay of a slow network
            if writer in self._vanished:
                continue
            if self._lost is None:
                self.passed += len(data)
                writer.write(data)
            elif not self._lost.done():
                self._to_lose -= len(data)
                if self._to_lose <= 0:
                    self._lost.set_result(None)
        writer.close()

    def lose(self, num_bytes: int) -> asyncio.Future[None]:
        """From now until `cut` nothing passes. Done when so many bytes are lost."""
        self._to_lose, self._lost = num_bytes, asyncio.get_running_loop().create_future()
        return self._lost

    def vanish(self) -> None:
        """The present connections stay, and nothing passes on them any more: as when a firewall forgets them."""
        self._vanished |= {*self._writers}

    def cut(self) -> None:
        """Break every connection, with whatever is under way on it."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self._lost = None

    async def cut_until_tried_again(self) -> None:
        """Break every connection. Returns when the next is asked for, which is made at `let_in`."""
        self._tried.clear()
        self._open.clear()
        self.cut()
        await self._tried.wait()

    def let_in(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.cut()
        self._server.close()


def test_a_connection_that_breaks_loses_and_repeats_nothing() -> None:
    async def main() -> None:
        a, b = await opened("A", "tcp"), await opened("B", "tcp")
        proxies = [Proxy(a.address.tcp), Proxy(b.address.tcp)]
        there, back = [await proxy.start() for proxy in proxies]
        a.connect("B", replace(via("tcp", b.address), tcp=back))
        b.connect("A", replace(via("tcp", a.address), tcp=there))
        edge, inbox = OutEdge([a.sender(lane(8))], SHARE), inbox_of(b, lane(8))
        acked: list[bytes] = []
        done = asyncio.Event()
        edge.on_acked(until(acked, 400, done))

        async def send() -> None:
            for index in range(400):
                await edge.send(thing(index))
                if index % 100 == 50:
                    proxies[index // 100 % 2].cut()
            edge.close()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            found = tasks.create_task(drain(inbox))
        await done.wait()
        assert found.result() == list(range(400))
        assert edge.unacked() == []
        for proxy in proxies:
            proxy.close()

    play(main())


def over_proxies(body: Callable[[Endpoint, Endpoint, Proxy, Proxy], Awaitable[None]]) -> None:
    """Hosts A and B on two machines, with a proxy on the way there and one on the way back."""

    async def main() -> None:
        a, b = await opened("A", "tcp"), await opened("B", "tcp")
        there, back = Proxy(b.address.tcp), Proxy(a.address.tcp)
        a.connect("B", replace(via("tcp", b.address), tcp=await there.start()))
        b.connect("A", replace(via("tcp", a.address), tcp=await back.start()))
        await body(a, b, there, back)
        there.close()
        back.close()

    play(main())


@pytest.fixture
def beating_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BEAT_EVERY_S", 0.1)
    monkeypatch.setattr(links, "SILENT_S", 0.4)


def test_a_connection_that_says_nothing_any_more_is_replaced_and_loses_nothing(beating_fast: None) -> None:
    """Messages, acks, requests and answers, each way; an idle connection is noticed, too."""

    async def body(a: Endpoint, b: Endpoint, there: Proxy, back: Proxy) -> None:
        async def ask(host: str, number: int) -> int:
            return -number

        b.on("ask", ask)
        a.on("ask", ask)
        edge, inbox = OutEdge([a.sender(lane(8))], SHARE), inbox_of(b, lane(8))
        found = asyncio.ensure_future(drain(inbox))
        for index in range(60):
            await edge.send(thing(index))
            if index % 20 == 10:
                assert await a.request("B", "ask", index) == await b.request("A", "ask", index) == -index
                there.vanish()
                if index > 20:
                    back.vanish()
        edge.close()
        assert await found == list(range(60))
        assert there.num_connections == 4 and back.num_connections in (3, 4)

    over_proxies(body)


def test_a_process_that_holds_the_gil_is_not_taken_for_one_that_has_vanished(beating_fast: None) -> None:
    async def main() -> None:
        async with pair("tcp") as (a, b):
            b.on("sleep", lambda host, body: ctypes.PyDLL(None).usleep(1_500_000))

            async def ask(host: str, body: Any) -> int:
                return 1

            b.on("ask", ask)
            assert await a.request("B", "ask") == 1
            a.notify("B", "sleep")
            assert await a.request("B", "ask") == 1
            monitors = [connection._monitor for connection in a._connections.values()]
            assert [monitor._connections for monitor in monitors if monitor] == [1]

    play(main())


LARGE = bytes(100_000)


def test_requests_and_notes_survive_a_connection_that_breaks_once_each_and_in_order() -> None:
    async def body(a: Endpoint, b: Endpoint, there: Proxy, back: Proxy) -> None:
        heard: list[int] = []
        asked: list[int] = []

        async def ask(host: str, number: int) -> int:
            asked.append(number)
            return -number

        b.on("note", lambda host, body: heard.append(body[0]))
        b.on("ask", ask)
        await a.request("B", "ask", 0)
        lost, requests = there.lose(3 * len(LARGE)), []
        for number in (1, 2, 3):
            a.notify("B", "note", (2 * number, LARGE))
            requests.append(asyncio.ensure_future(a.request("B", "ask", number)))
            await asyncio.wait(requests, timeout=0)
            a.notify("B", "note", (2 * number + 1, b""))
        await lost
        there.cut()
        assert await asyncio.gather(*requests) == [-1, -2, -3]
        await a.request("B", "ask", 4)
        assert (heard, asked) == ([2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4])

    over_proxies(body)


def test_an_answer_that_is_lost_on_its_way_comes_again_and_the_handler_works_once() -> None:
    async def body(a: Endpoint, b: Endpoint, there: Proxy, back: Proxy) -> None:
        calls: list[Any] = []

        async def ask(host: str, body: Any) -> bytes:
            calls.append(body)
            return LARGE

        b.on("ask", ask)
        await a.request("B", "ask", 0)
        lost = back.lose(len(LARGE))
        asked = asyncio.ensure_future(a.request("B", "ask", 1))
        await lost
        there.cut()  # what A says is said again: it is not worked on again
        back.cut()
        assert await asked == LARGE
        assert calls == [0, 1]

    over_proxies(body)


def test_a_cancel_that_is_lost_on_its_way_comes_again() -> None:
    async def body(a: Endpoint, b: Endpoint, there: Proxy, back: Proxy) -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def work(host: str, body: Any) -> None:
            began.set()
            try:
                await forever(host, body)
            finally:
                ended.set()

        b.on("work", work)
        b.on("note", lambda host, body: None)
        request = asyncio.ensure_future(a.request("B", "work"))
        await began.wait()
        lost = there.lose(len(LARGE))
        request.cancel()
        a.notify("B", "note", LARGE)
        await lost
        there.cut()
        await ended.wait()

    over_proxies(body)


@pytest.mark.parametrize("when", ["before the break is noticed", "after it"])
def test_what_was_lost_with_a_connection_has_arrived_when_arrived_returns(when: str) -> None:
    """A snapshot relies on it. What is asked while no connection is open overtakes what was lost with the last one."""

    async def body(a: Endpoint, b: Endpoint, there: Proxy, back: Proxy) -> None:
        b.on("ping", lambda host, body: None)
        sender, inbox = OutEdge([a.sender(lane(8))], SHARE), inbox_of(b, lane(8))
        to_a, from_b = b_to_a(b, a)
        for edge, port in ((sender, inbox), (to_a, from_b)):
            await edge.send(thing(0))
            delivery = await port.take()
        await a.arrived(["B"])
        lost = there.lose(2)
        await sender.send(thing(1))
        delivery.ack()
        await lost
        moves = a.moves()
        if when == "after it":
            await there.cut_until_tried_again()
        else:
            there.cut()
        there.delay_s = 0.02  # what B asks for comes after the answer to what A asked before
        asked = asyncio.ensure_future(a.arrived(["B"]))
        await asyncio.wait([asked], timeout=0)
        there.let_in()
        await asked
        assert inbox.lanes[0].num_received == 2
        assert to_a.unacked() == []
        assert a.moves() > moves

    over_proxies(body)


# Restarts, in one process; with real processes in test_channel_replay.py


def test_a_restarted_consumer_gets_what_was_not_acked() -> None:
    async def main() -> None:
        a, b = await opened("A", "ipc"), await opened("B", "ipc")
        a.connect("B", via("ipc", b.address))
        b.connect("A", via("ipc", a.address))
        edge, inbox = OutEdge([a.sender(lane(8))], SHARE), inbox_of(b, lane(8))
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
        again = await opened("B", "ipc", incarnation=1)
        again.connect("A", via("ipc", a.address))
        second = inbox_of(again, lane(8))
        a.connect("B", via("ipc", again.address))
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
        sender, inbox = OutEdge([a.sender(lane(8))], SHARE), inbox_of(b, lane(8))
        for index in range(4):
            await sender.send(thing(index))
        deliveries = [await inbox.take() for _ in range(3)]
        deliveries[0].ack()
        await a.close()
        again = await opened("A", "ipc", incarnation=1)
        again.connect("B", via("ipc", b.address))
        edge = OutEdge([again.sender(lane(8))], SHARE)
        acked: list[bytes] = []
        done = asyncio.Event()
        edge.on_acked(until(acked, 6, done))
        # Frames of the new incarnation wait for the supervisor's word.
        for index in range(6):
            await edge.send(thing(index))
        edge.close()
        b.peer_failed("A", "killed")
        b.connect("A", via("ipc", again.address))
        for delivery in deliveries[1:]:
            delivery.ack()
        assert await drain(inbox) == [3, 4, 5]
        await done.wait()
        assert sorted(acked) == sorted(thing(i).id for i in range(6))
        await again.close()
        await b.close()

    play(main())


def test_a_request_to_a_process_that_was_restarted_fails() -> None:
    async def main() -> None:
        a, b = await opened("A", "ipc"), await opened("B", "ipc")
        a.connect("B", via("ipc", b.address))
        b.connect("A", via("ipc", a.address))
        begun = asyncio.Event()

        async def never(host: str, body: Any) -> None:
            begun.set()
            await forever(host, body)

        b.on("wait", never)
        asking = asyncio.create_task(a.request("B", "wait"))
        await begun.wait()
        again = await opened("B", "ipc", incarnation=1)
        again.on("answer", echo)
        again.connect("A", via("ipc", a.address))
        a.connect("B", via("ipc", again.address))
        with pytest.raises(LaneFailed, match="request 'wait' to 'B': its process was restarted"):
            await asking
        assert await a.request("B", "answer", 7) == 7

    play(main())


async def echo(host: str, body: Any) -> Any:
    return body


LEFT_OPEN = """
import asyncio, gc, os
from flowrl.wire.endpoint import Endpoint

async def main():
    a, b = (Endpoint(host, run_id="left", driver_pid=os.getpid()) for host in "AB")
    await a.open()
    await b.open()
    a.connect("B", b.address)

asyncio.run(main())
gc.collect()
print("collected")
"""


def test_an_endpoint_that_nobody_closed_does_not_stop_the_process_when_it_is_garbage() -> None:
    """In a process of its own: a collection that waits for ever holds everything."""
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=60)
    assert done.stdout == "collected\n"


def test_nothing_is_left_on_the_machine() -> None:
    async def main() -> str:
        a = await opened("A", "ipc")
        await a.close()
        return a.address.ipc

    path = play(main())
    assert not os.path.exists(path) and not os.path.exists(os.path.dirname(path))

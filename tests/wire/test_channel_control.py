"""Requests and notes between endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import numpy as np
import pytest

from flowrl.errors import FlowrlError, LaneFailed, NodeFailed, SampleFailed, WireError
from flowrl.wire.control import Control
from flowrl.wire.encoding.multiparts import (
    ABORT,
    CREDIT,
    REPLY,
    REQUEST,
    Frame,
    MessageDecoder,
    MessageEncoder,
    Refused,
)
from flowrl.wire.endpoint import Endpoint
from tests.rigs.ticks import ticks
from tests.wire.channel_rig import Thing, every_transport, forever, opened, play, run, via


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
        with pytest.raises(WireError, match="'nothing', for which this host has no handler"):
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


class Ended(BaseException):
    """Neither an Exception nor one of Python's own ends."""


def test_a_handler_that_ends_in_any_other_way_than_by_returning_is_an_error_at_the_asker() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        async def library() -> None:
            inner = asyncio.get_running_loop().create_future()
            inner.cancel()
            await inner

        async def end(host: str, how: str) -> None:
            if how == "library":
                await library()
            elif how == "itself":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await forever(host, how)
            elif how == "exit":
                sys.exit(3)
            raise {"keyboard": KeyboardInterrupt, "other": Ended}[how]

        b.on("end", end)
        b.on("end at once", lambda host, body: sys.exit(3))
        for kind, how, name in (
            ("end", "library", "CancelledError"),
            ("end", "itself", "CancelledError"),
            ("end", "exit", "SystemExit"),
            ("end", "keyboard", "KeyboardInterrupt"),
            ("end", "other", "Ended"),
            ("end at once", "", "SystemExit"),
        ):
            with pytest.raises(
                FlowrlError, match=rf"handler of '{kind}' ended with {name}, although nobody cancelled it"
            ):
                await a.request("B", kind, how)

    run(body)


def test_a_note_whose_handler_ends_otherwise_is_told_to_the_owner() -> None:
    async def main() -> None:
        errors: list[BaseException] = []
        a, b = await opened("A", "ipc"), await opened("B", "ipc", errors=errors)
        a.connect("B", via("ipc", b.address))
        b.connect("A", via("ipc", a.address))

        async def later(host: str, body: Any) -> None:
            raise asyncio.CancelledError

        b.on("now", lambda host, body: sys.exit(3))
        b.on("later", later)
        b.on("sync", lambda host, body: None)
        for kind in ("now", "later"):
            a.notify("B", kind)
        for _ in range(2):
            await a.request("B", "sync")
        assert [str(error).split(",")[0] for error in errors] == [
            "the handler of 'now' ended with SystemExit",
            "the handler of 'later' ended with CancelledError",
        ]

    play(main())


def test_an_error_whose_text_cannot_travel_reaches_the_asker() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        async def fail(host: str, body: Any) -> None:
            raise SampleFailed("half of a pair: \ud800")

        b.on("fail", fail)
        with pytest.raises(FlowrlError, match=r"half of a pair: .ud800"):
            await a.request("B", "fail")

    run(body)


class Wire:
    """A Control with nobody at the other end."""

    def __init__(self) -> None:
        self.posted: list[Frame] = []
        self.reported: list[BaseException] = []
        self.control = Control(lambda host, frame: self.posted.append(frame), self.reported.append)


def test_nobody_hears_of_a_handler_that_was_cancelled_whatever_it_does_then() -> None:
    async def main() -> None:
        wire = Wire()

        async def stubborn(host: str, body: str) -> str:
            try:
                await forever(host, body)
            except asyncio.CancelledError:
                if body == "raise":
                    raise ValueError("while it was cancelled") from None
            return "an answer for nobody"

        wire.control.on("ask", stubborn)
        for number, body in ((1, "raise"), (2, "return")):
            wire.control.receive_frame("A", (REQUEST, 0, 0, number, ("ask", body)))
        await ticks(1)
        wire.control.receive_frame("A", (ABORT, 0, 0, 1, None))
        wire.control.peer_failed("A", "killed")
        await ticks(3)
        assert (wire.posted, wire.reported) == ([], [])
        await wire.control.close()

    play(main())


def test_a_new_incarnation_may_use_the_number_of_a_request_that_is_still_ending() -> None:
    async def main() -> None:
        wire = Wire()
        slow = asyncio.Event()

        async def ask(host: str, body: str) -> str:
            try:
                await forever(host, body)
            finally:
                if body == "old":
                    await slow.wait()
            return body

        wire.control.on("ask", ask)
        wire.control.receive_frame("A", (REQUEST, 0, 0, 1, ("ask", "old")))
        await ticks(1)
        wire.control.peer_failed("A", "its process was restarted")
        await ticks(1)
        wire.control.receive_frame("A", (REQUEST, 0, 0, 1, ("ask", "new")))
        await ticks(1)
        slow.set()
        await ticks(3)
        [new] = wire.control._works.values()
        wire.control.receive_frame("A", (ABORT, 0, 0, 1, None))
        await ticks(3)
        assert new.task.done() and not wire.control._works and not wire.posted

    play(main())


def test_an_answer_of_another_host_is_none() -> None:
    async def main() -> None:
        wire = Wire()
        request = asyncio.ensure_future(wire.control.request("B", "ask", None))
        await ticks(1)
        number = wire.posted[0][3]
        wire.control.receive_frame("C", (REPLY, 0, 0, number, (True, "of C")))
        wire.control.receive_frame("B", (REPLY, 0, 0, number, (True, "of B")))
        assert await request == "of B"
        await wire.control.close()
        with pytest.raises(LaneFailed, match="closed"):
            await wire.control.request("B", "ask", None)

    play(main())


def test_what_waits_for_a_connection_and_cannot_travel_fails_at_who_said_it() -> None:
    async def main() -> None:
        errors: list[BaseException] = []
        a, b = await opened("A", "ipc", errors=errors), await opened("B", "ipc")
        b.on("echo", lambda host, body: body)
        a.notify("B", "note", object())
        bad, good = (asyncio.ensure_future(a.request("B", "echo", body)) for body in (object(), 5))
        await ticks(1)
        a.connect("B", via("ipc", b.address))
        b.connect("A", via("ipc", a.address))
        assert await good == 5
        with pytest.raises(WireError, match="object cannot be sent"):
            await bad
        assert [type(error) for error in errors] == [WireError]

    play(main())


ERROR = {"type": "FlowrlError", "text": "x"}


@pytest.mark.parametrize(
    "answer",
    [
        (False, {"type": 1, "text": "x"}),
        (False, {"type": "FlowrlError"}),
        (False, {**ERROR, "traceback": None}),
        (False, {**ERROR, "node": 5}),
        (False, {**ERROR, "node": ("n", 0, "why", "tb")}),
        (False, {**ERROR, "node": ("n", "0", "why", "tb", None)}),
        (False, {**ERROR, "node": ("n", 0, "why", "tb", "4")}),
        (False, "text"),
        (2, None),
    ],
)
def test_a_malformed_answer_fails_the_request_it_is_to(answer: Any) -> None:
    frames = MessageDecoder().decode(encoded((REPLY, 0, 9, 7, answer), (CREDIT, 1, 0, 5, None)))
    assert [frame[:4] for frame in frames if not isinstance(frame, Refused)] == [(REPLY, 0, 9, 7), (CREDIT, 1, 0, 5)]

    async def body(a: Endpoint, b: Endpoint) -> None:
        b.on("forever", forever)
        request = asyncio.ensure_future(a.request("B", "forever"))
        await ticks()
        a._receive_parts(encoded((REPLY, 0, 0, 1, answer), host="B"))
        with pytest.raises(WireError, match="the answer is a frame of kind 21 with an invalid payload"):
            await request

    run(body)


@pytest.mark.parametrize("kind", ["NodeFailed", "GraphError", "FlowrlError", "Sequence", "nothing of ours"])
def test_an_error_of_any_name_is_one_of_flowrls(kind: str) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        b.on("forever", forever)
        request = asyncio.ensure_future(a.request("B", "forever"))
        await ticks()
        a._receive_parts(encoded((REPLY, 0, 0, 1, (False, {"type": kind, "text": "what was said"})), host="B"))
        with pytest.raises(FlowrlError, match=r"^what was said$"):
            await request

    run(body)


def test_a_request_that_is_refused_fails_where_it_was_made_and_what_follows_comes_in() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        b.on("echo", lambda host, body: body)
        peer = a.connection("B")
        assert peer.linked
        request = asyncio.ensure_future(a.request("B", "echo", 1))
        await ticks()  # its number is 1
        peer._add([peer.numbers.number_frame((REQUEST, 0, 0, 1, "no kind and body"))])
        peer.numbers.keep_frame((REQUEST, 0, 0, 1, None))
        peer._flush_link()
        with contextlib.suppress(WireError):
            assert await request == 1
        assert await a.request("B", "echo", 2) == 2

    run(body, "tcp")


def test_a_refused_request_is_answered() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        b.on("forever", forever)
        request = asyncio.ensure_future(a.request("B", "forever"))
        await ticks()
        b._receive_parts(encoded((REQUEST, 0, 0, 1, "no kind and body"), host="A"))
        with pytest.raises(
            WireError,
            match=r"'A' sent .a frame of kind 20 with an invalid payload.*for which this host has no",
        ):
            await request

    run(body)


def test_messages_in_requests_are_frozen_within_a_process_too() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        a.on("echo", lambda host, body: body)
        values = np.arange(3, dtype=np.int32)
        await a.request("A", "echo", {"request": Thing(1, values)})
        assert not values.flags.writeable
        with pytest.raises(WireError, match=r"Thing.index: the integer 18446744073709551616"):
            await a.request("A", "echo", {"request": Thing(2**64)})

    run(body)


def encoded(*frames: Frame, host: str = "A") -> list[bytes]:
    encoder = MessageEncoder(host, 0)
    encoder.add(frames)
    return [bytes(part) for part in encoder.take()]

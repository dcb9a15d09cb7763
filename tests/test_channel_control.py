"""Requests and notes between endpoints."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from flowrl.channel.endpoint import Endpoint
from flowrl.errors import FlowrlError, NodeFailed, SampleFailed, WireError
from tests.channel_rig import (
    Thing,
    every_transport,
    forever,
    opened,
    play,
    run,
    via,
)


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

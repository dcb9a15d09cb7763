"""Calls to a Serve port between two hosts: how a body may end, and whom a cancel concerns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.errors import FlowrlError, LaneFailed, SampleFailed
from flowrl.graph.analysis.plan import CallPlan
from flowrl.graph.node import Node
from flowrl.wire.activity import Activity, Lease
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.requests import LiveCall, LiveServe
from tests.wire.channel_rig import Thing, pair, play

EDGE = "asker.judge -> judge.requests"
WAY = CallPlan(EDGE, EDGE, "asker/0", "judge/0", "A", "B", 4, None, ("Thing", "Thing"), "ipc")


def unread(name: str, value: float) -> None:
    """A metric that these tests have no use for."""


class Sides:
    """An asking node in host A and the serving one in host B, both with what runs them."""

    def __init__(self, a: Endpoint, b: Endpoint, lease: Lease) -> None:
        self.activity = Activity("judge/0")
        b.on("sync", lambda host, body: None)
        self.sync = lambda: a.request("B", "sync")
        self._call = LiveCall("asker.judge", [WAY], a, Activity("asker/0"), unread)
        self.serving = LiveServe("judge.requests", [WAY], b, self.activity, lease, unread)

    def ask(self, index: int) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._call.call(Thing(index), session="", group="", priority=0, timeout_s=None))

    def serve(self, body: Callable[[Any], Awaitable[Any]]) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.serving.serve(body, 4))

    def close(self) -> None:
        self._call.close()


def between_hosts(body: Callable[[Sides], Awaitable[None]], lease: Callable[[Endpoint], Lease] | None = None) -> None:
    async def main() -> None:
        async with pair("ipc") as (a, b):
            await body(Sides(a, b, lease(b) if lease else Lease("", "judge/0", b)))

    play(main())


async def echo(request: Thing) -> Thing:
    return request


class Ended(BaseException):
    """Neither an Exception nor one of Python's own ends."""


def test_a_body_that_ends_in_any_other_way_than_by_returning_fails_its_node_and_the_caller() -> None:
    async def library() -> None:
        inner = asyncio.get_running_loop().create_future()
        inner.cancel()
        await inner

    async def leave() -> None:
        sys.exit(3)

    async def other() -> None:
        raise Ended

    for end, name in ((library, "CancelledError"), (leave, "SystemExit"), (other, "Ended")):

        async def body(sides: Sides, end: Callable[[], Awaitable[None]] = end, name: str = name) -> None:
            serving = sides.serve(lambda request: end())
            with pytest.raises(LaneFailed, match=r"judge.requests failed"):
                await sides.ask(0)
            with pytest.raises(
                RuntimeError, match=f"a request to judge.requests ended with {name}, although nobody"
            ) as told:
                await serving
            assert type(told.value.__cause__).__name__ == name
            assert sides.activity.working == 0

        between_hosts(body)


def test_a_call_that_is_cancelled_cancels_its_body_and_nothing_else() -> None:
    async def body(sides: Sides) -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def answer(request: Thing) -> Thing:
            if request.index:
                return request
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return request

        serving = sides.serve(answer)
        given_up = sides.ask(0)
        await began.wait()
        given_up.cancel()
        await ended.wait()
        assert (await sides.ask(1)).index == 1
        sides.close()
        await serving

    between_hosts(body)


def test_a_call_that_is_cancelled_before_its_server_serves_leaves_the_others_alone() -> None:
    async def body(sides: Sides) -> None:
        given_up, kept = sides.ask(0), sides.ask(1)
        await asyncio.wait([given_up, kept], timeout=0)
        await sides.sync()  # both wait in the server's host
        given_up.cancel()
        await sides.sync()
        late = sides.ask(2)
        serving = sides.serve(echo)
        assert (await kept).index == 1 and (await late).index == 2
        sides.close()
        await serving

    between_hosts(body)


def test_a_sample_that_fails_in_a_body_fails_at_the_caller_alone() -> None:
    async def body(sides: Sides) -> None:
        async def answer(request: Thing) -> Thing:
            if not request.index:
                raise SampleFailed("no answer")
            return request

        serving = sides.serve(answer)
        with pytest.raises(SampleFailed, match="no answer"):
            await sides.ask(0)
        assert (await sides.ask(1)).index == 1
        sides.close()
        await serving

    between_hosts(body)


class Link:
    """A driver that grants every turn."""

    async def request(self, host: str, kind: str, body: dict[str, Any]) -> None:
        pass

    def notify(self, host: str, kind: str, body: dict[str, Any]) -> None:
        pass


class Failing(Node):
    async def on_acquire(self) -> None:
        raise ValueError("no memory")


def test_a_hook_of_a_shared_device_that_fails_under_a_request_fails_the_server() -> None:
    def lease(endpoint: Endpoint) -> Lease:
        lease, node = Lease("gpu", "judge/0", Link()), Failing()
        node.name, node.context = "judge", SimpleNamespace(replica=0)  # type: ignore[assignment]
        lease.nodes = [node]
        return lease

    async def body(sides: Sides) -> None:
        serving = sides.serve(echo)
        with pytest.raises(LaneFailed, match=r"judge.requests failed"):
            await sides.ask(0)
        with pytest.raises(FlowrlError, match="`on_acquire` of judge/0 raised ValueError: no memory"):
            await serving

    between_hosts(body, lease)

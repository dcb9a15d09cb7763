"""Endpoints, lanes and messages for the channel tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pytest

from flowrl.graph.dispatch_rules import SHARE
from flowrl.messages import Int32, Message
from flowrl.wire.connection import Address, IpcTransport, TcpTransport
from flowrl.wire.edges import EndOfStream, Inbox, OutEdge
from flowrl.wire.encoding.schema import Envelope, source_id
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.lanes import LaneSpec

R = TypeVar("R")
TCP = TcpTransport(ip="127.0.0.1")


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


async def opened(host: str, transport: str, *, incarnation: int = 0, errors: list[Any] | None = None) -> Endpoint:
    endpoint = Endpoint(
        host,
        run_id="test",
        driver_pid=os.getpid(),
        incarnation=incarnation,
        transport=TCP if transport == "tcp" else IpcTransport(),
        failed=(errors if errors is not None else []).append,
    )
    closing.append(endpoint)
    await endpoint.open()
    return endpoint


closing: list[Endpoint] = []


def play(main: Coroutine[Any, Any, R]) -> R:
    """Run a test's coroutine and close every endpoint, whatever comes of it."""

    async def guarded() -> R:
        try:
            async with asyncio.timeout(30):
                return await main
        finally:
            while closing:
                await closing.pop().close()

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
        inbox.add_lane(endpoint.receiver(spec))
    return inbox


def until(ids: list[bytes], count: int, reached: asyncio.Event) -> Callable[[Sequence[bytes]], None]:
    """A callback that collects ids and sets `reached` at `count`."""

    def collect(more: Sequence[bytes]) -> None:
        ids.extend(more)
        if len(ids) == count:
            reached.set()

    return collect


every_transport = pytest.mark.parametrize("transport", ["local", "ipc", "tcp"])


async def forever(host: str, body: Any) -> None:
    await asyncio.get_running_loop().create_future()


def b_to_a(b: Endpoint, a: Endpoint) -> tuple[OutEdge, Inbox]:
    spec = replace(lane(2, to="c"), producer_host="B", consumer_host="A")
    return OutEdge([b.sender(spec)], SHARE), inbox_of(a, spec)

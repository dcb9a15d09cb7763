"""Callers and servers of requests, each in a host of its own within one process, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.graph.analysis.plan import CallPlan
from flowrl.graph.ports import Call
from flowrl.testing import VirtualClock
from flowrl.wire.activity import Activity, Lease
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.requests import LiveCall, LiveServe
from tests.wire.channel_rig import Thing, closing, opened, via

EDGE = "asker.ask -> server.turns"


def way(caller: int, server: int, capacity: int, margin: int | None) -> CallPlan:
    ends = (f"asker/{caller}", f"server/{server}", f"A{caller}", f"B{server}")
    name = f"{ends[0]}.ask -> {ends[1]}.turns"
    return CallPlan(name, EDGE, *ends, capacity, margin, ("Thing", "Thing"), "ipc")


@dataclass
class Metrics:
    counters: Counter[str] = field(default_factory=Counter)
    observed: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, value: float) -> None:
        self.counters[name] += int(value)

    def observe(self, name: str, value: float) -> None:
        self.observed[name].append(value)


@dataclass
class Asker:
    """A Call port and what it reports."""

    port: Call[Thing, Thing]
    metrics: Metrics

    async def __call__(
        self, index: int, session: str = "", group: str = "", priority: int = 0, timeout_s: float | None = None
    ) -> Thing:
        return await self.port(Thing(index), session=session, group=group, priority=priority, timeout_s=timeout_s)


class Server:
    """Serves `concurrency` requests at a time; each takes `service_s`, or ends by `answer` if a test sets that."""

    def __init__(self, number: int, ways: Sequence[CallPlan], endpoint: Endpoint, service_s: float) -> None:
        self.number = number
        self.metrics = Metrics()
        self.activity = Activity(f"server/{number}")
        lease = Lease("", f"server/{number}", endpoint)
        self.live = LiveServe("server.turns", ways, endpoint, self.activity, lease, self.metrics.observe)
        self.order: list[int] = []
        """Requests in the order in which their bodies began."""
        self.answer: Callable[[Thing], Awaitable[Thing]] = self._answer
        self._service_s = service_s

    async def serve(self, concurrency: int) -> None:
        await self.live.serve(self._begin, concurrency)

    async def _begin(self, request: Thing) -> Thing:
        self.order.append(request.index)
        return await self.answer(request)

    async def _answer(self, request: Thing) -> Thing:
        await asyncio.sleep(self._service_s)  # the time that the server takes, in virtual time
        return Thing(self.number)


class Traffic:
    """All requests that the callers have sent: what is open where, exactly and at once."""

    def __init__(self, num_servers: int) -> None:
        self._open = {f"B{index}": 0 for index in range(num_servers)}
        self.excesses: list[int] = []
        """For each request: how many more were open at its server than at the one with the fewest, when it was sent."""

    async def send(self, endpoint: Endpoint, host: str, kind: str, body: Any) -> Any:
        self.excesses.append(self._open[host] - min(self._open.values()))
        self._open[host] += 1
        try:
            return await endpoint.request(host, kind, body)
        finally:
            self._open[host] -= 1

    def within(self, margin: int) -> float:
        """Share of the requests that went where no more than `margin` above the fewest were open."""
        return sum(excess <= margin for excess in self.excesses) / len(self.excesses)


@dataclass
class Watched:
    """The endpoint of a caller, whose requests `traffic` counts."""

    endpoint: Endpoint
    traffic: Traffic

    async def request(self, host: str, kind: str, body: Any = None) -> Any:
        return await self.traffic.send(self.endpoint, host, kind, body)

    def notify(self, host: str, kind: str, body: Any = None) -> None:
        self.endpoint.notify(host, kind, body)


class Mesh:
    """Callers and servers, each in a host of its own, all connected."""

    def __init__(self, callers: Sequence[Asker], servers: Sequence[Server], traffic: Traffic) -> None:
        self.callers = callers
        self.servers = servers
        self.traffic = traffic
        self._serving: list[asyncio.Task[None]] = []

    def serve(self, concurrency: int = 4) -> None:
        self._serving = [asyncio.create_task(server.serve(concurrency)) for server in self.servers]

    async def close(self) -> None:
        """Every caller has closed, so that every server ends."""
        for caller in self.callers:
            caller.port.live.close()
        await asyncio.gather(*self._serving)


async def mesh(
    *, callers: int = 1, service_s: Sequence[float] = (1.0,), margin: int | None = None, capacity: int = 64
) -> Mesh:
    asking = [await opened(f"A{index}", "local") for index in range(callers)]
    serving = [await opened(f"B{index}", "local") for index in range(len(service_s))]
    for one in (*asking, *serving):
        for other in (*asking, *serving):
            if one is not other:
                one.connect(other.host, via("local", other.address))
    ways = [[way(a, b, capacity, margin) for b in range(len(serving))] for a in range(callers)]
    servers = [
        Server(b, [ways[a][b] for a in range(callers)], endpoint, service_s[b]) for b, endpoint in enumerate(serving)
    ]
    traffic = Traffic(len(serving))
    return Mesh([_asker(ways[a], Watched(endpoint, traffic)) for a, endpoint in enumerate(asking)], servers, traffic)


def _asker(ways: Sequence[CallPlan], endpoint: Any) -> Asker:
    metrics = Metrics()
    port: Call[Thing, Thing] = Call(None, "ask", (Thing, Thing))
    port.live = LiveCall("asker.ask", ways, endpoint, Activity(ways[0].caller), metrics.add)
    return Asker(port, metrics)


def in_virtual_time(body: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        try:
            await body
        finally:
            while closing:
                await closing.pop().close()

    VirtualClock().run(main())

"""Several callers and several servers: where requests go, in which order they are answered, and what is reported."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from flowrl.channel.endpoint import Endpoint
from flowrl.errors import SampleFailed
from flowrl.graph.analysis.plan import CallPlan
from flowrl.runtime.activity.activity import Activity
from flowrl.runtime.activity.lease import Lease
from flowrl.runtime.ports.requests import LiveCall, LiveServe
from flowrl.testing import VirtualClock
from tests.channel_rig import Thing, closing, opened, via
from tests.ticks import ticks_until

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
    live: LiveCall
    metrics: Metrics

    async def __call__(
        self, index: int, session: str = "", group: str = "", priority: int = 0, timeout_s: float | None = None
    ) -> Any:
        return await self.live.call(Thing(index), session=session, group=group, priority=priority, timeout_s=timeout_s)


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
            caller.live.close()
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
    return Asker(LiveCall("asker.ask", ways, endpoint, Activity(ways[0].caller), metrics.add), metrics)


def in_virtual_time(body: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        try:
            await body
        finally:
            while closing:
                await closing.pop().close()

    VirtualClock().run(main())


async def session(asker: Asker, name: str, num_turns: int, group: str = "") -> list[int]:
    """The servers of a session's requests, one after another."""
    served = [(await asker(turn, name, group)).index for turn in range(num_turns)]
    asker.live.forget(name)
    return served


async def sessions(net: Mesh, number: int, num_turns: int) -> list[list[int]]:
    """The servers of the requests of `number` sessions of each caller, all at once."""
    names = [(asker, f"s{index}") for asker in net.callers for index in range(number)]
    return await asyncio.gather(*(session(asker, name, num_turns) for asker, name in names))


def num_moved(served: Sequence[Sequence[int]]) -> int:
    """Requests that went elsewhere than the one before of their session."""
    return sum(one != other for one_session in served for one, other in itertools.pairwise(one_session))


def stayed(served: Sequence[Sequence[int]]) -> float:
    """Share of the requests that went where their session was."""
    return 1 - num_moved(served) / sum(len(one_session) - 1 for one_session in served)


@pytest.mark.parametrize("margin", [0, 2, 5])
def test_beside_a_slow_server_every_request_of_a_caller_goes_within_the_margin(margin: int) -> None:
    async def main() -> None:
        net = await mesh(service_s=(1.0, 0.1), margin=margin)
        net.serve()
        served = await sessions(net, 32, 20)
        await net.close()
        assert max(net.traffic.excesses) == margin, "the margin is used, and kept"
        assert net.callers[0].metrics.counters["requests_moved"] == num_moved(served) > 0
        assert stayed(served) > 0.9

    in_virtual_time(main())


@pytest.mark.parametrize("callers", [1, 2])
def test_without_a_bound_the_slow_server_keeps_its_sessions(callers: int) -> None:
    async def main() -> None:
        net = await mesh(callers=callers, service_s=(1.0, 0.1), margin=1000)
        net.serve()
        served = await sessions(net, 32 // callers, 20)
        await net.close()
        assert stayed(served) == 1.0 and net.traffic.within(5) < 0.8
        assert not any(caller.metrics.counters for caller in net.callers)

    in_virtual_time(main())


@pytest.mark.parametrize("callers", [2, 4])
@pytest.mark.parametrize("margin", [0, 2, 5])
def test_several_callers_beside_a_slow_server_keep_the_margin_together(callers: int, margin: int) -> None:
    """Each knows of the others what the last reply said; so some requests exceed the margin, by what is new since."""

    async def main() -> None:
        net = await mesh(callers=callers, service_s=(1.0, 0.1), margin=margin)
        net.serve()
        served = await sessions(net, 32 // callers, 20)
        await net.close()
        assert net.traffic.within(margin) > 0.95
        assert stayed(served) > 0.9
        assert sum(caller.metrics.counters["requests_moved"] for caller in net.callers) == num_moved(served)

    in_virtual_time(main())


def test_sessions_return_to_their_replica_and_groups_go_together() -> None:
    async def main() -> None:
        net = await mesh(service_s=(0.1, 0.1, 0.1), margin=2)
        net.serve()
        asker = net.callers[0]
        groups = []
        for group in ("a", "b", "c"):
            members = [session(asker, f"{group}{index}", 5, group) for index in range(3)]
            groups.append(await asyncio.gather(*members))
            assert len({server for served in groups[-1] for server in served}) == 1, "three fit within the margin"
        await net.close()
        assert {group[0][0] for group in groups} == {0, 1, 2}, "the next group begins elsewhere"
        assert not asker.metrics.counters

    in_virtual_time(main())


def test_without_a_margin_requests_go_where_least_is_open_whatever_their_session() -> None:
    async def main() -> None:
        net = await mesh(service_s=(0.1, 0.1))
        net.serve()
        served = await session(net.callers[0], "s", 6)
        await net.close()
        assert served in ([0, 1] * 3, [1, 0] * 3)
        assert max(net.traffic.excesses) == 0 and not net.callers[0].metrics.counters

    in_virtual_time(main())


def test_callers_learn_from_replies_what_others_have_open() -> None:
    async def main() -> None:
        net = await mesh(callers=2, service_s=(1.0, 1.0))
        net.serve(concurrency=64)
        first, second = net.callers
        for server in net.servers:
            server.answer = failing
        for asker in (first, second):  # a reply that fails reports as well
            for _ in range(2):
                with pytest.raises(SampleFailed, match="no answer"):
                    await asker(0)
        release = asyncio.Event()
        for server in net.servers:
            server.answer = held_until(release)
        held = [asyncio.create_task(second(index)) for index in range(8)]
        await ticks_until(lambda: sum(server.live.num_open for server in net.servers) == 8)
        for task in [task for task in held if task not in held[::2]]:
            task.cancel()
        await ticks_until(lambda: sum(server.live.num_open for server in net.servers) == 4)
        busy, idle = sorted(net.servers, key=lambda server: -server.live.num_open)
        assert (busy.live.num_open, idle.live.num_open) == (4, 0)
        for server in net.servers:
            server.answer = echo
        for index in range(2):  # one to each
            await first(index)
        for server in net.servers:
            server.answer = held_until(release)
        mine = [asyncio.create_task(first(index)) for index in range(3)]
        await ticks_until(lambda: idle.live.num_open == 3)
        assert busy.live.num_open == 4
        release.set()
        await asyncio.gather(*mine, *held, return_exceptions=True)
        await net.close()

    in_virtual_time(main())


def held_until(release: asyncio.Event) -> Callable[[Thing], Awaitable[Thing]]:
    async def answer(request: Thing) -> Thing:
        await release.wait()
        return request

    return answer


async def failing(request: Thing) -> Thing:
    raise SampleFailed("no answer")


async def echo(request: Thing) -> Thing:
    return request


ASKED = ((0, 9), (1, 2), (2, 1), (3, 1), (4, -1))
"""(index, priority) of requests in order of arrival."""


def test_waiting_requests_are_served_by_priority_then_in_order_of_arrival() -> None:
    async def main() -> None:
        net = await mesh(callers=2)
        net.serve(concurrency=1)
        asked = [net.callers[index % 2](index, priority=priority) for index, priority in ASKED]
        await asyncio.gather(*asked)
        await net.close()
        assert net.servers[0].order == [0, 4, 2, 3, 1], "the first ran when the others came"

    in_virtual_time(main())


def test_what_came_before_the_server_serves_is_served_by_priority_too() -> None:
    async def main() -> None:
        net = await mesh()
        asked = [asyncio.create_task(net.callers[0](index, priority=priority)) for index, priority in ASKED]
        await ticks_until(lambda: net.servers[0].live.num_open == len(ASKED))
        net.serve(concurrency=1)
        await asyncio.gather(*asked)
        await net.close()
        assert net.servers[0].order == [4, 2, 3, 1, 0]

    in_virtual_time(main())


def test_requests_that_wait_for_a_place_on_the_edge_go_by_priority() -> None:
    async def main() -> None:
        net = await mesh(capacity=1)
        net.serve(concurrency=4)
        await asyncio.gather(*(net.callers[0](index, priority=priority) for index, priority in ASKED))
        await net.close()
        assert net.servers[0].order == [0, 4, 2, 3, 1]

    in_virtual_time(main())


def test_a_waiting_request_that_is_cancelled_leaves_its_server_and_its_place_to_others() -> None:
    async def main() -> None:
        net = await mesh()
        net.serve(concurrency=1)
        asked = [asyncio.create_task(net.callers[0](index, priority=index)) for index in range(4)]
        server = net.servers[0]
        await ticks_until(lambda: server.live.num_open == 4 and server.order == [0])
        asked[1].cancel()
        await ticks_until(lambda: server.live.num_open == 3)
        asked[0].cancel()  # its body is cancelled, which makes place for the next
        await ticks_until(lambda: server.order == [0, 2])
        assert server.live.num_open == 2
        await asyncio.gather(*asked, return_exceptions=True)
        await net.close()
        assert server.order == [0, 2, 3] and server.live.num_open == 0

    in_virtual_time(main())


def test_a_call_that_is_cancelled_or_late_is_open_nowhere() -> None:
    async def main() -> None:
        net = await mesh(service_s=(1.0, 1.0))
        net.serve()
        asker = net.callers[0]
        with pytest.raises(TimeoutError):
            await asker(0, timeout_s=0.5)
        given_up = asyncio.create_task(asker(1))
        await ticks_until(lambda: all(server.order for server in net.servers))
        given_up.cancel()
        await ticks_until(lambda: not any(server.live.num_open for server in net.servers))
        replies = await asyncio.gather(*(asker(index) for index in range(2, 8)))
        await net.close()
        assert Counter(reply.index for reply in replies) == {0: 3, 1: 3}

    in_virtual_time(main())


def test_a_server_reports_its_open_requests_with_each_that_arrives() -> None:
    async def main() -> None:
        net = await mesh()
        net.serve(concurrency=2)
        await asyncio.gather(*(net.callers[0](index) for index in range(5)))
        await net.callers[0](5)
        await net.close()
        assert net.servers[0].metrics.observed == {"open_turns": [1, 2, 3, 4, 5, 1]}

    in_virtual_time(main())


def test_a_port_is_served_once() -> None:
    async def main() -> None:
        net = await mesh()
        net.serve()
        await net.callers[0](0)
        with pytest.raises(RuntimeError, match=r"server\.turns is served already; call `each` once"):
            await net.servers[0].serve(1)
        await net.close()

    in_virtual_time(main())

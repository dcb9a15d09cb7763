"""Several callers and several servers: where requests go, in which order they are answered, and what is reported."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import pytest

from flowrl.errors import OutOfService, SampleFailed
from tests.rigs.ticks import ticks_until
from tests.wire.channel_rig import Thing
from tests.wire.requests_rig import Asker, Mesh, in_virtual_time, mesh


async def session(asker: Asker, name: str, num_turns: int, group: str = "") -> list[int]:
    """The servers of a session's requests, one after another."""
    served = [(await asker(turn, name, group)).index for turn in range(num_turns)]
    asker.port.forget(name)
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


def test_a_session_that_is_forgotten_begins_anew() -> None:
    async def main() -> None:
        net = await mesh(service_s=(0.1, 0.1), margin=2)
        net.serve()
        asker = net.callers[0]
        first, second = [await session(asker, "s", 3) for _ in range(2)]  # each forgets itself at its end
        assert first == [first[0]] * 3 and second == [1 - first[0]] * 3, "it is the other's turn"
        kept = [(await asker(0, "t")).index for _ in range(3)]
        asker.port.forget("unknown")
        assert [*kept, (await asker(0, "t")).index] == [first[0]] * 4
        await net.close()
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


def test_the_requests_of_a_server_out_of_service_are_asked_of_the_others() -> None:
    """Those under way, those that wait for a place at it, and later ones; with their sessions."""

    async def main() -> None:
        net = await mesh(callers=2, service_s=(1.0, 1.0), margin=2, capacity=4)
        net.serve(concurrency=2)

        async def leaves(request: Thing) -> Thing:
            await asyncio.sleep(0.5)  # the engine dies while requests are under way, in virtual time
            raise OutOfService("its engine died")

        net.servers[0].answer = leaves
        served = await sessions(net, 6, 3)
        assert [set(replicas) for replicas in served] == [{1}] * 12
        begun = len(net.servers[0].order)
        assert await session(net.callers[0], "later", 2) == [1, 1]
        assert 0 < begun == len(net.servers[0].order), "nobody asks it again"
        await net.close()

    in_virtual_time(main())


def test_a_caller_with_no_server_left_says_why() -> None:
    async def main() -> None:
        net = await mesh(service_s=(1.0, 1.0))
        net.serve()

        async def leaves(request: Thing) -> Thing:
            raise OutOfService(f"engine {request.index} died")

        for server in net.servers:
            server.answer = leaves
        for _ in range(2):
            with pytest.raises(OutOfService, match=r"asker.ask has no replica left to ask: engine 7 died"):
                await net.callers[0](7)
        await net.close()

    in_virtual_time(main())

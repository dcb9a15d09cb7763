"""Locks and the batch-end barrier, without a process."""

from __future__ import annotations

import asyncio

import pytest

from flowrl.runtime.driver.locks import BatchEnd, Locks
from flowrl.wire.activity import Lease
from tests.rigs.ticks import ticks


def ask(node: str) -> dict[str, str]:
    return {"name": "weights", "claimant": node}


def test_turns_go_in_order_of_asking() -> None:
    async def main() -> list[str]:
        locks, order = Locks(), []

        async def take(node: str) -> None:
            await locks.take_lock("h", ask(node))
            order.append(node)
            locks.release_lock("h", ask(node))

        await locks.take_lock("h", ask("first"))
        async with asyncio.TaskGroup() as tasks:
            for node in "abc":
                tasks.create_task(take(node))
            await ticks()
            assert order == []
            locks.release_lock("h", ask("first"))
        return order

    assert asyncio.run(main()) == ["a", "b", "c"]


def test_a_cancelled_wait_leaves_the_queue() -> None:
    async def main() -> None:
        locks = Locks()
        await locks.take_lock("h", ask("a"))
        waiting = asyncio.ensure_future(locks.take_lock("h", ask("b")))
        await ticks()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        locks.release_lock("h", ask("a"))
        await locks.take_lock("h", ask("c"))

    asyncio.run(asyncio.wait_for(main(), 5))


@pytest.mark.parametrize("cancel_first", [True, False])
def test_a_wait_that_is_cancelled_as_its_turn_comes_passes_it_on(cancel_first: bool) -> None:
    async def main() -> None:
        locks = Locks()
        await locks.take_lock("h", ask("a"))
        given_up, next_one = (asyncio.ensure_future(locks.take_lock("h", ask(node))) for node in "bc")
        await ticks()
        if cancel_first:
            given_up.cancel()
        locks.release_lock("h", ask("a"))
        given_up.cancel()
        await next_one
        assert given_up.cancelled()

    asyncio.run(asyncio.wait_for(main(), 5))


def test_giving_up_a_wait_does_not_end_another_turn_of_the_same_node() -> None:
    async def main() -> None:
        locks = Locks()
        await locks.take_lock("h", ask("a") | {"claim": 1})
        locks.release_lock("h", ask("a") | {"claim": 2})  # its request was cancelled before it was read
        waiting = asyncio.ensure_future(locks.take_lock("h", ask("b")))
        await ticks()
        assert not waiting.done()
        locks.release_lock("h", ask("a") | {"claim": 1})
        await waiting

    asyncio.run(asyncio.wait_for(main(), 5))


def test_the_ranks_of_a_gang_hold_a_turn_together() -> None:
    def asks(node: str) -> dict[str, str]:
        return {"name": "gpu", "claimant": node, "party": node.split("/")[0]}

    async def main() -> list[bool]:
        locks = Locks()
        await locks.take_lock("h", asks("trainer/0"))
        reference = asyncio.ensure_future(locks.take_lock("h", asks("reference/0")))
        await ticks()
        await locks.take_lock("h", asks("trainer/1"))
        locks.release_lock("h", asks("trainer/0"))
        await ticks()
        early = reference.done()
        locks.release_lock("h", asks("trainer/1"))
        await reference
        return [early, reference.done()]

    assert asyncio.run(main()) == [False, True]


def test_what_a_dead_process_holds_goes_to_the_next() -> None:
    async def body() -> None:
        locks, order = Locks(), []

        async def take(host: str) -> None:
            await locks.take_lock(host, {"name": "weights", "claimant": host, "claim": 1})
            order.append(host)

        await take("generator/1")
        first, second = (asyncio.create_task(take(host)) for host in ("generator/0", "generator/2"))
        await asyncio.sleep(0)  # until both wait
        locks.claimants_died({"generator/1"})
        await first
        assert order == ["generator/1", "generator/0"]
        locks.claimants_died({"generator/1"})
        locks.claimants_died({"generator/0"})
        await second

    asyncio.run(body())


def test_only_the_holder_ends_a_turn() -> None:
    async def main() -> bool:
        locks = Locks()
        await locks.take_lock("h", ask("a"))
        locks.release_lock("h", ask("b"))
        waiting = asyncio.ensure_future(locks.take_lock("h", ask("c")))
        await ticks()
        taken = waiting.done()
        waiting.cancel()
        return taken

    assert not asyncio.run(main())


def test_the_checkpoint_is_written_once_when_all_trainers_stand() -> None:
    async def main() -> list[str]:
        events: list[str] = []

        async def write(version: int) -> None:
            events.append(f"write {version}")

        end = BatchEnd(2, lambda version: version == 4, write)

        async def trainer(name: str) -> None:
            await end.arrive("h", {"version": 3})
            events.append(f"{name} passed 3")
            await end.arrive("h", {"version": 4})
            events.append(f"{name} passed 4")

        first = asyncio.ensure_future(trainer("a"))
        await ticks()
        assert events == ["a passed 3"]
        await asyncio.gather(first, trainer("b"))
        return events

    events = asyncio.run(main())
    assert events[:3] == ["a passed 3", "b passed 3", "write 4"]
    assert sorted(events[3:]) == ["a passed 4", "b passed 4"]


def test_what_was_due_for_the_first_rank_is_due_for_all() -> None:
    """An interrupt between two arrivals cancels an evaluation: the first rank must not wait alone."""

    async def main() -> list[int]:
        written, due = list[int](), [True]

        async def write(version: int) -> None:
            written.append(version)

        end = BatchEnd(2, lambda version: due[0], write)
        first = asyncio.ensure_future(end.arrive("h", {"version": 1}))
        await ticks()
        due[0] = False
        await end.arrive("h", {"version": 1})
        await first
        await end.arrive("h", {"version": 2})
        return written

    assert asyncio.run(asyncio.wait_for(main(), 5)) == [1]


def test_a_rank_that_gives_up_waiting_at_the_barrier_does_not_count() -> None:
    async def main() -> list[int]:
        written: list[int] = []

        async def write(version: int) -> None:
            written.append(version)

        end = BatchEnd(2, lambda version: True, write)
        given_up = asyncio.ensure_future(end.arrive("h", {"version": 1}))
        await ticks()
        given_up.cancel()
        await asyncio.wait([given_up])
        again = asyncio.ensure_future(end.arrive("h", {"version": 1}))
        await ticks()
        assert not again.done() and written == []
        await end.arrive("h", {"version": 1})
        await again
        return written

    assert asyncio.run(asyncio.wait_for(main(), 5)) == [1]


class Link:
    """A driver with one turn, in memory."""

    def __init__(self, locks: Locks, log: list[str]) -> None:
        self.locks, self.log = locks, log

    async def request(self, host: str, kind: str, body: dict[str, str]) -> None:
        await self.locks.take_lock(host, body)
        self.log.append(f"{body['claimant']} has it")

    def notify(self, host: str, kind: str, body: dict[str, str]) -> None:
        self.log.append(f"{body['claimant']} gives it back")
        self.locks.release_lock(host, body)


def test_a_lease_is_held_while_any_turn_is_open() -> None:
    async def main() -> list[str]:
        log: list[str] = []
        locks = Locks()
        one, two = (Lease("gpu", host, Link(locks, log)) for host in ("one", "two"))
        await one.begin()
        await one.begin()
        other = asyncio.ensure_future(two.begin())
        await one.end()
        await ticks()
        assert not other.done()
        await one.end()
        await other
        return log

    assert asyncio.run(main()) == ["one has it", "one gives it back", "two has it"]

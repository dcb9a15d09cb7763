"""Tasks that wait for outside workers: their order, and that none is lost or handed out twice."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from flowrl.agents.endpoint import RunEnded, SessionTask, Unavailable
from flowrl.nodes.episodes.agent_calls import TaskOffers
from flowrl.testing import VirtualClock


def run(work: Coroutine[Any, Any, None]) -> None:
    """In virtual time."""
    VirtualClock().run(work)


async def begun(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that waits by now."""
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)  # a round of the event loop
    return task


def test_the_lowest_place_goes_first_and_of_equal_ones_the_first() -> None:
    async def work() -> None:
        offers = TaskOffers()
        waits = [
            await begun(offers.wait_taken(SessionTask(name), place)) for name, place in [("b", 2), ("c", 2), ("a", 1)]
        ]
        assert [(await offers.next_task()).session_id for _ in range(3)] == ["a", "b", "c"]
        await asyncio.gather(*waits)

    run(work())


def test_workers_are_served_in_the_order_of_their_asking() -> None:
    async def work() -> None:
        offers = TaskOffers()
        workers = [await begun(offers.next_task()) for _ in range(3)]
        waits = [await begun(offers.wait_taken(SessionTask(name), 0)) for name in "abc"]
        assert [(await worker).session_id for worker in workers] == ["a", "b", "c"]
        await asyncio.gather(*waits)

    run(work())


def test_a_worker_that_asks_when_a_task_comes_does_not_go_before_one_that_waits() -> None:
    async def work() -> None:
        offers = TaskOffers()
        waits = await begun(offers.next_task())
        first = asyncio.create_task(offers.wait_taken(SessionTask("a"), 0))
        asks = asyncio.create_task(offers.next_task())  # runs after the offer, and before the worker that it has woken
        await begun(offers.wait_taken(SessionTask("b"), 0))
        assert ((await waits).session_id, (await asks).session_id) == ("a", "b")
        await first

    run(work())


def test_a_worker_that_leaves_takes_no_task_even_if_one_comes_at_that_moment() -> None:
    async def work() -> None:
        offers = TaskOffers()
        leaves, stays = await begun(offers.next_task()), await begun(offers.next_task())
        offer = asyncio.create_task(offers.wait_taken(SessionTask("a"), 0))
        await asyncio.sleep(0)  # the offer has woken both
        leaves.cancel()
        assert (await stays).session_id == "a"
        await offer
        assert leaves.cancelled()

    run(work())


def test_a_task_that_was_withdrawn_is_not_handed_out() -> None:
    async def work() -> None:
        offers = TaskOffers()
        first, second = [await begun(offers.wait_taken(SessionTask(name), 0)) for name in "ab"]
        first.cancel()
        await asyncio.wait({first})
        assert (await offers.next_task()).session_id == "b"
        await second

    run(work())


def test_a_worker_waits_for_a_while_and_the_end_is_told_at_once() -> None:
    async def work() -> None:
        offers, loop = TaskOffers(wait_s=3.0), asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(Unavailable, match="no task is waiting now") as absent:
            await offers.next_task()
        assert loop.time() - began_s == 3.0 and absent.value.retry_after_s == 0
        waits = await begun(offers.next_task())
        offers.end_offers()
        for asked in (waits, offers.next_task()):
            with pytest.raises(RunEnded, match="the run has ended"):
                await asked
        assert loop.time() - began_s == 3.0

    run(work())

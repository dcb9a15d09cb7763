"""Slots by priority: who gets them, and what a cancelled wait leaves."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.wire.activity import PrioritySlots
from tests.rigs.ticks import ticks, ticks_until


def test_the_smallest_priority_is_first_then_the_order_of_arrival() -> None:
    async def main() -> list[str]:
        slots, order = PrioritySlots(1), []

        async def hold(name: str, priority: int) -> None:
            async with slots.hold_slot(priority):
                order.append(name)
                await ticks()

        asked = [("begins", 9), ("late", 2), ("early a", 1), ("early b", 1), ("first", -1)]
        await asyncio.gather(*(hold(name, priority) for name, priority in asked))
        return order

    assert asyncio.run(main()) == ["begins", "first", "early a", "early b", "late"]


def test_what_waits_before_there_are_slots_is_granted_by_priority_too() -> None:
    async def main() -> list[int]:
        slots, order = PrioritySlots(0), []

        async def take(priority: int) -> None:
            await slots.take_slot(priority)
            order.append(priority)

        tasks = [asyncio.create_task(take(priority)) for priority in (5, 3, 4, 1)]
        await ticks()
        slots.add_slots(2)
        await ticks(2)
        begun = list(order)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return begun

    assert asyncio.run(main()) == [1, 3]


def test_a_slot_that_is_granted_and_cancelled_in_one_tick_goes_to_the_next() -> None:
    async def main() -> None:
        slots = PrioritySlots(1)
        await slots.take_slot(0)
        first, second = (asyncio.create_task(slots.take_slot(priority)) for priority in (1, 2))
        await ticks()
        slots.add_slots(1)  # granted to the first, which has not run since
        first.cancel()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first
        assert len(slots) == 0

    asyncio.run(main())


def test_waits_that_were_cancelled_leave_nothing() -> None:
    async def main() -> None:
        slots = PrioritySlots(1)
        await slots.take_slot(0)
        for index in range(100):  # they come and go while two others wait for the whole time
            if index in (30, 60):
                kept = asyncio.create_task(slots.take_slot(1000))
            given_up = [asyncio.create_task(slots.take_slot(priority)) for priority in range(100)]
            await ticks()
            for task in given_up:
                task.cancel()
            await asyncio.wait(given_up)
            assert len(slots) <= 2 * ((index >= 30) + (index >= 60))
        slots.add_slots(2)
        await kept
        assert len(slots) == 0

    asyncio.run(main())


class Waiter:
    def __init__(self, slots: PrioritySlots, priority: int, number: int) -> None:
        self.rank = (priority, number)
        self.task = asyncio.create_task(slots.take_slot(priority))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(-2, 2)),
        st.tuples(st.just("give back"), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("grant and cancel"), st.just(0)),
    ),
    max_size=60,
)


@given(st.integers(0, 3), OPERATIONS)
def test_slots_go_to_those_who_are_next_and_none_is_lost(num_slots: int, operations: list[tuple[str, int]]) -> None:
    async def main() -> None:
        slots = PrioritySlots(num_slots)
        free, held, waiting = num_slots, 0, list[Waiter]()
        for number, (what, value) in enumerate(operations):
            if what == "take":
                waiting.append(Waiter(slots, value, number))
            elif what == "cancel" and waiting:
                await cancelled(waiting.pop(value % len(waiting)))
            elif held:
                held, free = held - 1, free + 1
                slots.add_slots(1)
                if what == "grant and cancel" and waiting:
                    waiting.sort(key=lambda waiter: waiter.rank)
                    await cancelled(waiting.pop(0))
            await ticks(3)
            waiting.sort(key=lambda waiter: waiter.rank)
            while free and waiting:
                free, held = free - 1, held + 1
                assert waiting.pop(0).task.done()
            assert not any(waiter.task.done() for waiter in waiting)
            assert len(waiting) <= len(slots) <= 2 * len(waiting) + 1
        for waiter in waiting:
            await cancelled(waiter)
        assert len(slots) == 0

    asyncio.run(main())


async def cancelled(waiter: Waiter) -> None:
    waiter.task.cancel()
    await ticks_until(waiter.task.done)
    assert waiter.task.cancelled()

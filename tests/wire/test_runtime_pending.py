"""What moves a node by itself: every way to wait is told from a wait that only another node ends."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from flowrl.wire.activity import Activity, HostLoop, PrioritySlots, apart, find_inside, reasons_alive
from tests.rigs.ticks import ticks

Body = Callable[[Activity], Coroutine[Any, Any, None]]


def reasons_of(*bodies: Body, between: Callable[[Activity], None] = lambda activity: None) -> list[str]:
    """Why a node is alive whose tasks run `bodies`, when all of them stand."""

    async def main() -> list[str]:
        activity = Activity("node/0")
        with activity.pending.named():
            tasks = [asyncio.create_task(body(activity)) for body in bodies]
        await ticks(5)  # rounds of the loop, until every task has come to its wait
        between(activity)
        found = reasons_alive(activity, asyncio.get_running_loop().time())
        for task in (*tasks, *activity.pending.tasks):
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        return found

    with asyncio.Runner(loop_factory=HostLoop) as runner:
        return runner.run(main())


async def item(activity: Activity) -> None:
    """Stands in the engine's wait for an item."""
    with activity.waiting("item", "node.port", inside=None):
        await forever()


def forever() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


def beside(awaiting: Callable[[asyncio.Task[None]], Awaitable[Any]]) -> Body:
    """Starts a task that waits for an item, and awaits what `awaiting` makes of it."""

    async def body(activity: Activity) -> None:
        await awaiting(asyncio.create_task(item(activity)))

    return body


async def grouped(activity: Activity) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(item(activity))


async def iterated(activity: Activity) -> None:
    async def items() -> AsyncIterator[None]:
        await asyncio.wait([asyncio.create_task(item(activity))])
        yield

    async for _ in items():
        pass


async def locked(activity: Activity) -> None:
    lock, slots = asyncio.Lock(), asyncio.Semaphore(1)

    async def holder() -> None:
        async with lock, slots:
            await item(activity)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(holder())
        await ticks()
        tasks.create_task(lock.acquire())
        tasks.create_task(slots.acquire())


async def queued_for_a_slot(activity: Activity) -> None:
    slots = PrioritySlots(1)

    async def hold(wait: Callable[[Activity], Awaitable[None]]) -> None:
        async with slots.hold_slot(0):
            await wait(activity)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold(item))
        await ticks()
        tasks.create_task(hold(evented))


@pytest.mark.parametrize(
    "body",
    [
        item,
        grouped,
        iterated,
        locked,
        queued_for_a_slot,
        beside(lambda task: task),
        beside(lambda task: asyncio.gather(task)),
        beside(lambda task: asyncio.wait([task])),
        beside(lambda task: asyncio.wait_for(task, None)),
    ],
    ids=["item", "group", "async for", "lock", "slot", "task", "gather", "wait", "wait_for"],
)
def test_a_node_that_stands_in_the_engines_waits_is_moved_by_another_alone(body: Body) -> None:
    assert reasons_of(item, body) == []


async def asleep(activity: Activity) -> None:
    await asyncio.sleep(60)  # under test: its timer says that it lives


async def evented(activity: Activity) -> None:
    await asyncio.Event().wait()


async def queued(activity: Activity) -> None:
    await asyncio.Queue[None]().get()


async def impatient(activity: Activity) -> None:
    async with asyncio.timeout(60):
        await item(activity)


async def promised(activity: Activity) -> None:
    await forever()


async def conditioned(activity: Activity) -> None:
    condition = asyncio.Condition()
    async with condition:
        await condition.wait()


async def half_grouped(activity: Activity) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(item(activity))
        tasks.create_task(asleep(activity))


async def outside(activity: Activity) -> None:
    with activity.waiting("outside", "the game", inside=None):
        await forever()


async def child(activity: Activity) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        await process.wait()
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (asleep, "asleep (test_runtime_pending.py:"),
        (half_grouped, "asleep ("),
        (child, "child ("),
        (beside(lambda task: asyncio.wait([task, forever()])), "beside.<locals>.body ("),
        (beside(lambda task: asyncio.gather(task, forever())), "beside.<locals>.body ("),
        (outside, "the game"),
        (impatient, "a timer"),
    ],
    ids=["sleep", "group", "child", "wait", "gather", "outside", "timeout"],
)
def test_a_node_that_waits_for_anything_else_is_alive_and_the_place_is_told(body: Body, place: str) -> None:
    found = reasons_of(item, body)
    assert found and found[0].startswith(place), found


INSIDE = (evented, queued, promised, conditioned)


@pytest.mark.parametrize("body", INSIDE)
def test_a_node_that_waits_for_something_of_its_own_is_moved_by_another_alone_and_its_line_is_told(body: Body) -> None:
    places: list[str] = []
    assert reasons_of(item, body, between=lambda activity: places.extend(find_inside(activity))) == []
    assert len(places) == 1
    assert places[0].startswith(f"{body.__name__} (test_runtime_pending.py:"), places


@pytest.mark.parametrize("body", INSIDE)
def test_a_connection_or_a_thread_of_its_own_may_end_what_a_node_waits_for(body: Body) -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="mine")

    def start(activity: Activity) -> None:
        thread.start()

    def connect(activity: Activity) -> None:
        activity.pending.connected = True

    try:
        for between in (start, connect):
            found = reasons_of(item, body, between=between)
            assert found and found[0].startswith(f"{body.__name__} ("), found
            if thread.is_alive():
                go_on.set()
                thread.join()
    finally:
        go_on.set()


def test_what_a_node_connects_to_is_noted() -> None:
    near, far = socket.socketpair()

    async def connects(activity: Activity) -> None:
        _, writer = await asyncio.open_connection(sock=near)
        try:
            await promised(activity)
        finally:
            writer.close()

    with far:
        assert reasons_of(item, connects)[0].startswith("promised (")


def test_a_call_in_a_thread_a_server_and_a_descriptor_keep_their_node_alive_without_a_task() -> None:
    go_on = threading.Event()
    reading, writing = os.pipe()

    async def calls(activity: Activity) -> None:
        asyncio.get_running_loop().run_in_executor(None, go_on.wait)
        await item(activity)

    async def serves(activity: Activity) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        async with await asyncio.start_server(lambda reader, writer: None, sock=listening):
            await item(activity)

    async def reads(activity: Activity) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(reading, lambda: None)
        try:
            await item(activity)
        finally:
            loop.remove_reader(reading)

    async def has_read(activity: Activity) -> None:
        asyncio.get_running_loop().add_reader(reading, lambda: None)
        asyncio.get_running_loop().remove_reader(reading)
        await item(activity)

    assert reasons_of(calls, between=lambda _: go_on.set()) == ["a call in a thread"]
    assert reasons_of(serves) == ["a connection"]
    assert reasons_of(reads) == ["a connection"]
    assert reasons_of(has_read) == []
    os.close(reading)
    os.close(writing)


def test_what_a_library_starts_apart_belongs_to_no_node_but_the_wait_for_it_does() -> None:
    async def idle(activity: Activity) -> None:
        with apart():
            asyncio.create_task(evented(activity))  # noqa: RUF006
        await item(activity)

    async def asks(activity: Activity) -> None:
        with apart():
            await asyncio.create_task(evented(activity))

    assert reasons_of(idle) == []
    assert len(reasons_of(asks)) == 1


@pytest.mark.parametrize("delay_s", [0.0, 0.0001])
def test_a_call_that_is_due_at_once_is_no_timer(delay_s: float) -> None:
    kept = []

    async def body(activity: Activity) -> None:
        kept.append(asyncio.get_running_loop().call_later(delay_s, int))
        await item(activity)

    assert reasons_of(body) == []


def test_a_task_that_was_woken_has_moved_already() -> None:
    woken: list[asyncio.Future[None]] = []

    async def body(activity: Activity) -> None:
        with activity.waiting("item", "node.port", inside=None):
            future = forever()
            woken.append(future)
            await future

    assert reasons_of(body) == []
    assert len(reasons_of(body, between=lambda _: woken[-1].set_result(None))) == 1


def test_a_node_without_a_task_has_not_begun() -> None:
    async def main() -> list[str]:
        return reasons_alive(Activity("node/0"), 0.0)

    assert asyncio.run(main()) == ["its code has not started"]


def test_a_node_in_its_set_up_says_so() -> None:
    async def main() -> list[str]:
        activity = Activity("node/0")
        with activity.waiting("outside", "its set-up", inside=None):
            return reasons_alive(activity, 0.0)

    assert asyncio.run(main()) == ["its set-up"]

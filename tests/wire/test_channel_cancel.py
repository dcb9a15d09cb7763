"""Takes, sends and requests that are cancelled in any tick of the loop lose nothing and end as cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowrl.graph.dispatch_rules import SHARE
from flowrl.wire.edges import Inbox, OutEdge
from flowrl.wire.encoding.multiparts import CREDIT, DATA
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.lanes import ReceiverLane, SenderLane
from tests.rigs.ticks import ticks
from tests.wire.channel_rig import inbox_of, lane, play, run, thing


def test_a_take_waits_on_when_what_waited_for_it_is_cancelled() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        b.on("sync", lambda host, body: None)
        edge, inbox = OutEdge([a.sender(lane(4))], SHARE), inbox_of(b, lane(4))
        acked: list[bytes] = []
        edge.on_acked(acked.extend)
        await edge.send(thing(0))
        await edge.send(thing(1))
        await a.request("B", "sync")
        edge.cancel([thing(0).id, thing(1).id])
        await a.request("B", "sync")
        take = asyncio.ensure_future(inbox.take())
        await edge.send(thing(2))
        assert (await take).envelope.id == thing(2).id
        await b.request("A", "sync")
        assert acked == [thing(0).id, thing(1).id]

    def with_sync(a: Endpoint, b: Endpoint) -> Awaitable[None]:
        a.on("sync", lambda host, body: None)
        return body(a, b)

    run(with_sync)


BEGIN, CANCEL, GRANT, TURN = "begin", "cancel", "grant", "turn"
"""A wait begins; one of them is cancelled; what one of them waits for comes; the loop turns once."""
steps = st.lists(st.tuples(st.sampled_from([BEGIN, CANCEL, GRANT, TURN]), st.integers(0, 7)), max_size=40)
AT_ONCE = [(BEGIN, 0), (TURN, 0), (CANCEL, 0), (GRANT, 0)]
"""The wait is cancelled and granted within one tick of the loop."""


async def play_out(
    script: list[tuple[str, int]], begin: Callable[[int], Coroutine[Any, Any, Any]], grant: Callable[[], None]
) -> list[asyncio.Task[Any]]:
    """Runs the script and lets the loop turn until nothing moves; returns the tasks in order of beginning."""
    tasks: list[asyncio.Task[Any]] = []
    for step, index in script:
        if step == BEGIN:
            tasks.append(asyncio.ensure_future(begin(len(tasks))))
        elif step == CANCEL and tasks:
            tasks[index % len(tasks)].cancel()
        elif step == GRANT:
            grant()
        else:
            await ticks()
    await ticks(3 * len(tasks) + 3)
    return tasks


async def end(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """The results of those that have one; the others are cancelled and must end as that."""
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() or task.exception() is None for task in tasks)
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


@given(script=steps)
@example(script=AT_ONCE)
@example(script=[(BEGIN, 0), (BEGIN, 0), (TURN, 0), (GRANT, 0), (CANCEL, 0)])
@settings(max_examples=300, deadline=None)
def test_every_message_goes_to_one_take_whatever_is_cancelled(script: list[tuple[str, int]]) -> None:
    async def main() -> None:
        receive, inbox, came = ReceiverLane(lane(100)), Inbox("b.in"), 0
        inbox.add_lane(receive)

        def message() -> None:
            nonlocal came
            receive.on_data(came, [thing(came)])
            came += 1
            receive.on_change(receive)

        tasks = await play_out(script, lambda _: inbox.take(), message)
        waiting = sum(not task.done() for task in tasks)
        assert waiting == 0 or receive.depth == 0, "a message and a take wait for each other"
        taken = [delivery.envelope.body.index for delivery in await end(tasks)]
        taken += [(await inbox.take()).envelope.body.index for _ in range(receive.depth)]
        assert sorted(taken) == list(range(came))

    play(main())


@given(script=steps)
@example(script=AT_ONCE)
@example(script=[(BEGIN, 0), (BEGIN, 0), (TURN, 0), (GRANT, 0), (CANCEL, 0)])
@settings(max_examples=300, deadline=None)
def test_sends_go_once_and_in_order_whatever_is_cancelled(script: list[tuple[str, int]]) -> None:
    async def main() -> None:
        sender = SenderLane(lane(1))
        edge = OutEdge([sender], SHARE)
        await edge.send(thing(-1))  # takes the only credit: those that follow wait

        def credit() -> None:
            if sender.num_taken < sender.num_sent:
                sender.take_frame((CREDIT, sender.spec.number, sender.session, sender.num_taken + 1, None))

        async def one(index: int) -> int:
            await edge.send(thing(index))
            return index

        tasks = await play_out(script, one, credit)
        waiting = sum(not task.done() for task in tasks)
        assert waiting == 0 or sender.credits == 0, "a credit and a send wait for each other"
        sent = await end(tasks)
        frames = [envelope.body.index for frame in sender.flush() if frame[0] == DATA for envelope in frame[4]]
        assert frames == [-1, *sent] == sorted(frames)

    play(main())

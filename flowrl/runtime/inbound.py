"""The live side of an In port: turns, holds, groups, and tombstones passed on unseen.

Waits: taking an item ends with a message, end of stream, or LaneFailed when a producer's process died.
A closed gate is opened again by the checkpoint that closed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from flowrl.channel.dispatch import Delivery, EndOfStream, Inbox
from flowrl.errors import SampleFailed
from flowrl.graph.ports import Members
from flowrl.messages import Message, Tombstone
from flowrl.runtime.activity import Activity, Turn, in_turn
from flowrl.runtime.items import Desk, Item, OpenGroup, at_hand, current, tombstone
from flowrl.runtime.lease import Lease


class Losses(Protocol):
    """Where losses go: the ledger, and the node's out ports."""

    def lose(self, items: list[Item], marker: Tombstone, ticket: int) -> None:
        """Book `marker`, pass it on on every out port, and end `items` once it has arrived."""

    def pass_on(self, items: list[Item], marker: Tombstone) -> None:
        """The same without booking: the loss was booked where it happened."""

    def flow(self, item: Item, *, begins: bool) -> None:
        """A turn began or ended: for the trace."""


class Inbound:
    """LiveIn of one In port of one node replica."""

    def __init__(
        self, port: str, inbox: Inbox, desk: Desk, activity: Activity, losses: Losses, lease: Lease, *, sink: bool
    ) -> None:
        self.port = port
        self._inbox = inbox
        self._desk = desk
        self._activity = activity
        self._losses = losses
        self._lease = lease
        self._sink = sink
        self._gate = asyncio.Event()
        self._gate.set()
        self._closed_by: set[str] = set()
        self._groups: dict[str, OpenGroup] = {}

    def gate(self, by: str, *, open_: bool) -> None:
        """Lets no further item in until each that closed it has opened it: a checkpoint, an evaluation."""
        if open_:
            self._closed_by.discard(by)
        else:
            self._closed_by.add(by)
        if self._closed_by:
            self._gate.clear()
        else:
            self._gate.set()

    async def take(self) -> Item | None:
        """The next item, tombstones included; None at end of stream."""
        with self._activity.waiting("item", self.port, inside=None):
            try:
                delivery: Delivery = await self._inbox.take()
            except EndOfStream:
                return None
            await self._gate.wait()
        return self._desk.take(delivery, self.port)

    async def _next(self) -> Item | None:
        """The next item that is for user code; tombstones go on by themselves."""
        while (item := await self.take()) is not None:
            if not isinstance(item.body, Tombstone):
                return item
            self.pass_on(item)
        return None

    async def _begin(self, item: Item) -> Turn:
        if self._lease.name:
            with self._activity.waiting("turn", self._lease.name, inside=None):
                await self._lease.begin()
        self._losses.flow(item, begins=True)
        return self._activity.begin()

    async def _finish(self, item: Item, turn: Turn) -> None:
        turn.end()
        self._losses.flow(item, begins=False)
        for part in item.whole:
            self._desk.end_turn(part, sink=self._sink)
        await self._lease.end()

    async def iterate(self) -> AsyncIterator[Any]:
        while (item := await self._next()) is not None:
            turn = await self.begin_turn(item)
            try:
                yield item.body
            except GeneratorExit:  # the loop was left or cancelled inside this turn; its item stays unfinished
                await self.leave_turn(turn)
                raise
            await self.finish_turn(item, turn)

    async def begin_turn(self, item: Item) -> Turn:
        """What follows in this task works on `item`, and on the other parts of its sample."""
        turn = await self._begin(item)
        current.set(item.whole)
        self._enter(item, turn)
        return turn

    async def finish_turn(self, item: Item, turn: Turn) -> None:
        current.set(())
        await self._finish(item, turn)
        self._leave()

    async def leave_turn(self, turn: Turn) -> None:
        """The turn ends, its item does not."""
        turn.end()
        await self._lease.end()

    def pass_on(self, item: Item) -> None:
        """Forward the tombstone `item`, which user code must not see."""
        assert isinstance(item.body, Tombstone)
        self._losses.pass_on(list(item.whole), item.body)

    @staticmethod
    def _enter(item: Item, turn: Turn) -> None:
        in_turn.set(turn)
        at_hand.set(item.envelope.ticket)

    @staticmethod
    def _leave() -> None:
        in_turn.set(None)
        at_hand.set(-1)

    async def each(self, body: Callable[[Any], Awaitable[None]], concurrency: int) -> None:
        slots = asyncio.Semaphore(concurrency)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await slots.acquire()
                item = await self._next()
                if item is None:
                    return
                tasks.create_task(self._turn(body, item, slots))

    async def _turn(self, body: Callable[[Any], Awaitable[None]], item: Item, slots: asyncio.Semaphore) -> None:
        current.set((item,))
        at_hand.set(item.envelope.ticket)
        with self._desk.noting_failure():
            turn = await self._begin(item)
            self._enter(item, turn)
            try:
                await body(item.body)
            except SampleFailed as failure:
                self.drop(item.body, str(failure), "failed")
            await self._finish(item, turn)
        slots.release()

    def groups(self, size: int) -> AsyncIterator[Members[Any]]:
        return self.grouped(self._taken(), size)

    def join(self, others: Sequence[Any]) -> Any:
        from flowrl.runtime.join import Joined

        return Joined((self, *others))

    async def _taken(self) -> AsyncIterator[Item]:
        while (item := await self.take()) is not None:
            yield item

    async def grouped(self, items: AsyncIterator[Item], size: int) -> AsyncGenerator[Members[Any], None]:
        """The groups that `items` make up; a joined sample stands there as one of its parts."""
        async for item in items:
            group = self._join(item, size)
            if not group.complete:
                continue
            if not group.items:
                self._lose_group(group, next(iter(group.lost.values())).body)
                continue
            members = list(group.items.values())
            self._flow(members, begins=True)
            turn = self._activity.begin()
            self._enter(item, turn)
            yield self._members(group)
            self._leave()
            self._flow(members, begins=False)
            turn.end()

    def _flow(self, items: list[Item], *, begins: bool) -> None:
        for item in items:
            self._losses.flow(item, begins=begins)

    def _join(self, item: Item, size: int) -> OpenGroup:
        """Put a member on hold with its group."""
        envelope = item.envelope
        group = self._groups.get(envelope.group_id)
        if group is None:
            group = self._groups[envelope.group_id] = OpenGroup(envelope.group_id, envelope.ticket, size)
        for part in item.whole:
            part.held, part.group = True, group
        lost = isinstance(item.body, Tombstone)
        (group.lost if lost else group.items)[envelope.member] = item
        if group.complete:
            del self._groups[envelope.group_id]
        return group

    def _members(self, group: OpenGroup) -> Members[Any]:
        return Members(
            group.group_id,
            group.ticket,
            group.size,
            tuple(group.items[m].given for m in sorted(group.items)),
            tuple(group.lost[m].body for m in sorted(group.lost)),  # type: ignore[misc]
        )

    def _lose_group(self, group: OpenGroup, last: Message) -> None:
        """Nothing of the group is left: one marker for the whole group travels on, at its ticket."""
        assert isinstance(last, Tombstone)
        items = [*group.items.values(), *group.lost.values()]
        ids = tuple(sid for item in items for sid in tombstone(item, self._desk.node, "", "").sample_ids)
        marker = Tombstone(group.group_id, -1, last.state, last.reason, self._desk.node, ids, group.size)
        self._losses.pass_on([part for item in items for part in item.whole], marker)

    async def ordered(self) -> AsyncIterator[tuple[int, Any]]:
        while (item := await self.take()) is not None:
            ticket = item.envelope.ticket
            if isinstance(item.body, Tombstone):
                self._desk.end(item)
                yield ticket, None
                continue
            item.held = True
            self._losses.flow(item, begins=True)
            turn = self._activity.begin()
            self._enter(item, turn)
            yield ticket, item.body
            self._leave()
            self._losses.flow(item, begins=False)
            turn.end()

    def hold(self, item: Message) -> None:
        for part in self._desk.of(item).whole:
            part.held = part.accounted = True

    def drop(self, item: Message, reason: str, state: str) -> None:
        dropped = self._desk.of(item)
        for part in dropped.whole:
            part.accounted = True
        marker = tombstone(dropped, self._desk.node, reason, state)
        for part in dropped.whole:
            part.lost = marker
        group = dropped.group
        if group is None:
            self._losses.lose(list(dropped.whole), marker, dropped.envelope.ticket)
            return
        self._losses.lose([], marker, dropped.envelope.ticket)
        if group.sent:
            for part in dropped.whole:
                self._desk.end(part)
            return
        group.dropped.append(dropped)
        if len(group.dropped) == len(group.items):
            self._lose_group(group, marker)

    def finish(self, item: Message) -> None:
        finished = self._desk.of(item)
        for part in finished.whole:
            part.held = part.accounted = True
            self._desk.end(part)
        group = finished.group
        if group is not None and not any(self._desk.holds(member) for member in group.present):
            for rest in (*group.lost.values(), *group.dropped):
                for part in rest.whole:
                    self._desk.end(part)

    def newest(self) -> Any:
        return self._inbox.newest()

    def ticket(self, item: Message) -> int:
        return self._desk.of(item).envelope.ticket

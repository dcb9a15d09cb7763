"""The live side of an In port: it makes invocations, holds and groups, and forwards tombstones unseen by user code.

Waits: taking an item ends with a message, with end of stream, or with LaneFailed when a producer's process has died.
The checkpoint or evaluation that closed a gate opens it again. A take may be cancelled: a delivery that has already
arrived stays for the next take.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from flowrl.errors import FlowrlError, SampleFailed
from flowrl.graph.ports import Members
from flowrl.messages import Message, Record, Tombstone
from flowrl.wire.activity import ActiveInvocation, Activity, Lease, as_failure, in_invocation
from flowrl.wire.edges import Delivery, EndOfStream, Inbox
from flowrl.wire.items import (
    NOT_DERIVED,
    NOT_ROUTED,
    Item,
    OpenGroup,
    OpenItems,
    PortOwner,
    asking,
    at_hand,
    current,
    make_tombstone,
)


class Merge:
    """Branches that meet again in one In port of a node that counts samples. Each branch delivers one arrival for each
    sample: the message, or a tombstone if the sample took another branch or was lost.

    Invariants
    - A message passes at once. A tombstone waits for the arrivals of all branches: it ends here if one of them was a
      message; otherwise one tombstone of the sample passes and represents all of them.
    - Waiting tombstones are unfinished, so a crash or a checkpoint repeats them. If the message of their sample was
      finished before that, they wait until the end of the stream.
    """

    def __init__(self, port: str, arrivals: int) -> None:
        self._port = port
        self._arrivals = arrivals
        self._came: dict[tuple[str, int], list[Item | None]] = {}
        """Sample -> its arrivals so far: tombstones, and None for the message, which has passed."""

    def add_arrival(self, item: Item) -> tuple[Item | None, Sequence[Item]]:
        """(item that passes now, if any; items that end now)."""
        envelope = item.envelope
        if not envelope.group_id:
            return item, ()
        key = envelope.group_id, envelope.member
        came = self._came.setdefault(key, [])
        lost = isinstance(item.body, Tombstone)
        if not lost and None in came:
            raise FlowrlError(
                f"{self._port} received member {key[1]} of group {key[0]!r} over two paths; a node whose Out ports "
                "lead to one In port has to send each sample on only one of them, or the paths have to be joined "
                "(`join`, with an In port for each)"
            )
        came.append(item if lost else None)
        message = None if lost else item
        if len(came) < self._arrivals:
            return message, ()
        del self._came[key]
        tombstones = [one for one in came if one is not None]
        for one in tombstones:
            one.is_ending = True  # what may be derived from the sample has its place with the one that passes
        if None in came:
            return message, tombstones
        # One for a real loss represents all, if there is any, rather than one for a branch not taken.
        reasons = [getattr(one.body, "reason", "") for one in tombstones]
        first = next((one for one, why in zip(tombstones, reasons, strict=True) if why != NOT_ROUTED), tombstones[0])
        first.others, first.is_ending = tuple(one for one in tombstones if one is not first), False
        return first, ()

    def take_rest(self) -> list[Item]:
        """The tombstones that still wait at the end of the stream; the caller ends them."""
        waiting = [one for came in self._came.values() for one in came if one is not None]
        for one in waiting:
            one.is_ending = True
        self._came.clear()
        return waiting


class Invocation:
    """One piece of work (an item, a joined sample, a group): user code gets `value`, which is made from `items`.

    It begins under the lease of its host's devices, and counts as working until user code asks for the next one.
    Taking, beginning and finishing may be cancelled at any point (`asyncio.timeout` around the next item): nothing is
    lost, and the next call continues where the cancelled one stopped.

    With `whole`, the engine ends the invocation: messages that the body's task sends after `enter` are made from
    `whole` and the other items of its sample, and the engine calls `end` when the body is done. Without `whole`, the
    items are held. The methods are called in the order below; those that wait may be called again after a cancellation.
    """

    def __init__(
        self,
        value: Any,
        items: list[Item],
        *,
        lease: Lease,
        activity: Activity,
        owner: PortOwner,
        whole: Item | None = None,
        end: Callable[[Item], Awaitable[None]] | None = None,
    ) -> None:
        self.value = value
        self._items = items
        self._whole = whole
        self._end = end
        self._lease = lease
        self._activity = activity
        self._owner = owner
        self._active: ActiveInvocation | None = None
        self._leased = False

    async def begin(self) -> None:
        """Wait for the devices."""
        if self._lease.name and not self._leased:
            with self._activity.waiting("lock", self._lease.name, inside=None):
                await self._lease.begin()
            self._leased = True
        if self._active is None:
            for item in self._items:
                self._owner.trace_invocation(item, begins=True)
            self._active = self._activity.begin()

    def enter(self) -> None:
        """Mark this task as working on the items from now on."""
        current.set(self._whole.whole if self._whole is not None else ())
        in_invocation.set(self._active)
        at_hand.set(self._items[0].envelope.ticket)
        asking.set(self._items[0])

    def leave(self) -> None:
        """The body is done with the work. Call it once."""
        current.set(())
        in_invocation.set(None)
        at_hand.set(-1)
        asking.set(None)
        assert self._active is not None
        self._active.end()
        for item in self._items:
            self._owner.trace_invocation(item, begins=False)

    async def finish(self) -> None:
        """End the items if the engine ends them, and release the devices."""
        if self._whole is not None and self._end is not None:
            await self._end(self._whole)
            self._whole = None
        if self._leased:
            self._leased = False
            await self._lease.end()

    def abandon(self) -> None:
        """User code left the loop during the work: its items stay unfinished."""
        if self._active is not None:
            self._active.end()
        if self._leased:
            self._leased = False
            task = asyncio.get_running_loop().create_task(self._lease.end())
            _ending.add(task)
            task.add_done_callback(_ending.discard)


_ending: set[asyncio.Task[None]] = set()
"""Tasks that release the leases of abandoned invocations; the event loop itself holds tasks only weakly."""


class Invocations:
    """Iterates over the pieces of work that `pull` returns; `pull` returns None at the end of the stream."""

    def __init__(
        self, pull: Callable[[], Awaitable[Invocation | None]], close: Callable[[], None] = lambda: None
    ) -> None:
        self._pull = pull
        self._close = close
        self._next: Invocation | None = None
        self._given: Invocation | None = None
        self._left = False
        """Whether `leave` was called on `_given`, and `finish` has not completed."""

    def __aiter__(self) -> Invocations:
        return self

    async def __anext__(self) -> Any:
        await self._finish_given()
        if self._next is None:
            self._next = await self._pull()
        if self._next is None:
            self._close()
            raise StopAsyncIteration
        await self._next.begin()
        self._given, self._next = self._next, None
        self._given.enter()
        return self._given.value

    async def _finish_given(self) -> None:
        if self._given is None:
            return
        if not self._left:
            self._left = True
            self._given.leave()
        await self._given.finish()
        self._given, self._left = None, False

    def __del__(self) -> None:
        """Abandon the current work: user code left its loop by `break` or by an exception."""
        if self._given is not None and not self._left:
            self._given.abandon()
        self._close()


Take = Callable[[], Awaitable[Item | None]]


class Inbound:
    """LiveIn of one In port of one node replica.

    `arrivals` is the number of messages and tombstones that arrive for each sample at a node that counts them. A node
    that does not count them (`counts`) forwards each one separately. `members` is the number of members that a group
    has here for each one that was admitted.
    """

    def __init__(
        self,
        port: str,
        inbox: Inbox,
        open_items: OpenItems,
        activity: Activity,
        owner: PortOwner,
        lease: Lease,
        *,
        sink: bool,
        arrivals: int = 1,
        members: int = 1,
    ) -> None:
        self.port = port
        self._inbox = inbox
        self._open_items = open_items
        self._activity = activity
        self.owner = owner
        self._lease = lease
        self._sink = sink
        self._merge = Merge(port, arrivals) if arrivals > 1 else None
        self._members = members
        self._gate = asyncio.Event()
        self._gate.set()
        self._closed_by: set[str] = set()
        self._ahead: deque[Delivery] = deque()
        """Deliveries taken from the inbox that wait here because a gate is closed."""
        self._groups: dict[str, OpenGroup] = {}
        self.num_taken = 0
        """Number of deliveries that the node has taken."""
        self._wanted = 0
        """The node takes deliveries up to this number even while a gate is closed."""
        self._reached: list[tuple[int, asyncio.Future[None]]] = []

    def gate(self, by: str, *, open_: bool) -> None:
        """Open or close the gate for `by`, a checkpoint or an evaluation. Items enter while nobody keeps it closed."""
        if open_:
            self._closed_by.discard(by)
        else:
            self._closed_by.add(by)
        self._set_gate()

    def _set_gate(self) -> None:
        if self._closed_by and self.num_taken >= self._wanted:
            self._gate.clear()
        else:
            self._gate.set()

    async def reach(self, num_taken: int) -> None:
        """Let deliveries in until the node has taken `num_taken`, whatever the gates say, and wait for that."""
        self._wanted = max(self._wanted, num_taken)
        self._set_gate()
        if self.num_taken < num_taken:
            reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._reached.append((num_taken, reached))
            await reached

    async def take(self) -> Item | None:
        """The next item, tombstones included; None at end of stream."""
        while (delivery := await self._next_delivery()) is not None:
            item = self._open_items.take_delivery(delivery, self.port)
            if isinstance(lost := item.body, Tombstone) and lost.whole_group:
                self._open_items.given_up.give_up_group(lost.group_id, lost.state, lost.reason)
            if self._merge is None:
                return item
            going, over = self._merge.add_arrival(item)
            self._end_items(over)
            if going is not None:
                return going
        if self._merge is not None:
            self._end_items(self._merge.take_rest())
        return None

    def _end_items(self, items: Sequence[Item]) -> None:
        for item in items:
            self._open_items.end_item(item)

    async def _next_delivery(self) -> Delivery | None:
        with self._activity.waiting("item", self.port, inside=None):
            while True:
                if not self._ahead:  # a take that was cancelled at the gate has left its delivery there
                    try:
                        self._ahead.append(await self._inbox.take())
                    except EndOfStream:
                        return None
                await self._gate.wait()
                if self._ahead:  # a concurrent take may have removed it during the wait for the gate
                    self.num_taken += 1
                    if self._wanted:
                        self._set_gate()
                        for number, reached in self._reached:
                            if number <= self.num_taken and not reached.done():
                                reached.set_result(None)
                        self._reached = [entry for entry in self._reached if not entry[1].done()]
                    return self._ahead.popleft()

    async def _next_item(self) -> Item | None:
        """The next item for user code; tombstones on the way are forwarded here."""
        while (item := await self.take()) is not None:
            if isinstance(item.body, Tombstone):
                self.owner.forward(item.whole, item.body)
            elif (why := self._open_items.given_up.reason_of(item.envelope.group_id)) is not None:
                self._drop_item(item, *why)
            else:
                return item
        return None

    def work_on(self, item: Item) -> Invocation:
        """The invocation of one item, or of the joined sample that `item` is a part of. The engine ends it."""
        return self._make_invocation(item.given, [item], whole=item, end=self._finish_item)

    def _make_invocation(self, value: Any, items: list[Item], **ends: Any) -> Invocation:
        return Invocation(value, items, lease=self._lease, activity=self._activity, owner=self.owner, **ends)

    async def _finish_item(self, item: Item) -> None:
        await self.owner.leave(item.whole)
        for part in item.whole:
            self._open_items.end_invocation(part, sink=self._sink)

    def iterate(self) -> AsyncIterator[Any]:
        async def pull() -> Invocation | None:
            item = await self._next_item()
            return None if item is None else self.work_on(item)

        return Invocations(pull)

    async def each(self, body: Callable[[Any], Awaitable[None]], concurrency: int) -> None:
        slots, task, failed = asyncio.Semaphore(concurrency), asyncio.current_task(), False

        def is_ending() -> bool:
            """Whether the invocations are being cancelled: one of them has failed, or the enclosing task is."""
            return failed or task is None or bool(task.cancelling())

        async def work(item: Item) -> None:
            invocation = self.work_on(item)
            await invocation.begin()
            invocation.enter()
            with self._open_items.noting_failure():
                await self._run_body(body, item, is_ending)
                invocation.leave()
                await invocation.finish()
            slots.release()

        async with asyncio.TaskGroup() as tasks:
            try:
                while True:
                    await slots.acquire()  # slot first: items without one stay in the inbox, which snapshots save
                    item = await self._next_item()
                    if item is None:
                        return
                    tasks.create_task(work(item))
            except BaseException:  # the tasks that still run must know that the loop has ended
                failed = True
                raise

    async def _run_body(
        self, body: Callable[[Any], Awaitable[None]], item: Item, is_ending: Callable[[], bool]
    ) -> None:
        given_up, group_id = self._open_items.given_up, item.envelope.group_id
        given_up.begin_work(group_id)
        try:
            await body(item.body)
        except SampleFailed as failure:
            self._drop_item(item, "failed", str(failure))
        except BaseException as error:  # the boundary to the node's body, which may raise anything
            why = given_up.reason_of(group_id)
            if why is None or is_ending() or not isinstance(error, asyncio.CancelledError):
                raised = as_failure(error, cancelled=is_ending())
                raise raised from raised.__cause__
            self._drop_item(item, *why)
        finally:
            given_up.end_work(group_id)

    def groups(self, size: int) -> AsyncIterator[Members[Any]]:
        return self.group_items(self.take, size)

    def join(self, others: Sequence[Any]) -> Any:
        return Joined((self, *others))

    def group_items(self, take: Take, size: int, close: Callable[[], None] = lambda: None) -> Invocations:
        """The groups formed from the items of `take`; a joined sample is represented by one of its parts."""

        async def pull() -> Invocation | None:
            while (item := await take()) is not None:
                group = self._add_member(item, size * self._members)
                if not group.complete:
                    continue
                why = self._open_items.given_up.reason_of(group.group_id)
                if group.items and why is None:
                    given = tuple(group.items[member].given for member in sorted(group.items))
                    lost: Any = tuple(group.lost[member].body for member in sorted(group.lost))
                    number = group.size
                    if self._members > 1:  # a place for each that could have come, and only some go this way
                        lost = tuple(one for one in lost if one.reason not in (NOT_ROUTED, NOT_DERIVED))
                        number = len(given) + len(lost)
                    members = Members(group.group_id, group.ticket, number, given, lost)
                    return self._make_invocation(members, [group.items[member] for member in sorted(group.items)])
                last: Any = next(iter(group.lost.values())).body if group.lost else None
                state, reason = why or (last.state, last.reason)
                self._lose_group(group, state, reason)
            return None

        return Invocations(pull, close)

    def _add_member(self, item: Item, size: int) -> OpenGroup:
        """Add a member to its group, and hold the member until the group ends."""
        envelope = item.envelope
        if not envelope.group_id or envelope.member < 0:
            raise FlowrlError(
                f"{self.port} received a {type(item.body).__name__} that belongs to no single sample and cannot be "
                "grouped; messages need the fields group_id and member, or have to be made from one that has them"
            )
        group = self._groups.get(envelope.group_id)
        if group is None:
            group = self._groups[envelope.group_id] = OpenGroup(envelope.group_id, envelope.ticket, size)
        if envelope.member in group.items or envelope.member in group.lost:
            raise FlowrlError(
                f"{self.port} received member {envelope.member} of group {envelope.group_id!r} twice before the "
                f"group's {size} members were complete; give every member its own number, and send one message for it"
            )
        for part in item.whole:
            part.held, part.group = True, group
        lost = isinstance(item.body, Tombstone)
        (group.lost if lost else group.items)[envelope.member] = item
        if group.complete:
            del self._groups[envelope.group_id]
        return group

    def _lose_group(self, group: OpenGroup, state: str, reason: str) -> None:
        """No member of the group is left: forward one marker for the whole group, under its ticket."""
        items = [part for item in (*group.items.values(), *group.lost.values()) for part in item.whole]
        ids = dict.fromkeys(i for item in items for i in make_tombstone(item, self._open_items.node, "", "").sample_ids)
        marker = Tombstone(group.group_id, -1, state, reason, self._open_items.node, tuple(ids), group.size)
        self.owner.forward(items, marker)

    def ordered(self) -> AsyncIterator[tuple[int, Any]]:
        async def pull() -> Invocation | None:
            item = await self.take()
            if item is None:
                return None
            ticket = item.envelope.ticket
            if isinstance(item.body, Tombstone):
                self._end_items(item.whole)
                return self._make_invocation((ticket, None), [item])
            item.held = True
            return self._make_invocation((ticket, item.body), [item])

        return Invocations(pull)

    def hold(self, item: Message) -> None:
        for part in self._open_items.item_of(item).whole:
            part.held = part.accounted = True

    def drop(self, item: Message, reason: str, state: str, *, group: bool = False) -> None:
        dropped = self._open_items.item_of(item)
        if not group and any(self._open_items.is_open(one) and not one.accounted for one in dropped.derived):
            raise FlowrlError(
                f"node {self._open_items.node!r} dropped a {type(item).__name__} before the samples that it "
                "derived from it; send or drop these first"
            )
        if group:
            self.owner.give_up(dropped, state, reason)
        self._drop_item(dropped, state, reason, whole_group=group)

    def _drop_item(self, dropped: Item, state: str, reason: str, *, whole_group: bool = False) -> None:
        for part in dropped.whole:
            part.accounted = True
        marker = make_tombstone(dropped, self._open_items.node, reason, state)
        if whole_group:
            marker = replace(marker, whole_group=True)
        for part in dropped.whole:
            part.lost = marker
        group = dropped.group
        if group is None:
            self.owner.lose(dropped.whole, marker)
            return
        self.owner.book(dropped.whole, marker)
        if group.sent:
            self._end_items(dropped.whole)
            return
        group.dropped.append(dropped)
        if len(group.dropped) == len(group.items):
            self._lose_group(group, state, reason)

    def finish(self, item: Message) -> None:
        finished = self._open_items.item_of(item)
        for part in finished.whole:
            part.held = part.accounted = True
            self._open_items.end_item(part)
        group = finished.group
        if group is not None and not any(self._open_items.is_open(member) for member in group.present):
            for rest in (*group.lost.values(), *group.dropped):
                self._end_items(rest.whole)

    def keep(self, item: Message, record: Callable[[], Record]) -> None:
        if not hasattr(item, "record"):
            raise ValueError(
                f"{self.port}: a {type(item).__name__} cannot be kept with a record; give the class a field "
                "`record: Record | None = None`"
            )
        kept = self._open_items.item_of(item)
        if kept.derived_from is not None:
            raise ValueError(f"{self.port}: a derived sample cannot be kept; keep the record with its parent")
        kept.record = record

    def newest(self) -> Any:
        return self._inbox.newest()

    def ticket(self, item: Message) -> int:
        return self._open_items.item_of(item).envelope.ticket


class Joined:
    """LiveJoin of several In ports of one node replica: matches their messages by sample (`flowrl.join`).

    Invariants
    - User code gets a sample when every port has delivered its part; the parts end together.
    - A sample that is lost on one branch or on several is lost once: when its last part has arrived, one tombstone
      represents all of them. The loss is booked here if some part arrived as a message.
    - A part that waits for the other parts is unfinished, so a crash or a checkpoint repeats it.

    Waits: for the next message of any port. The wait ends with the end of all streams, or with LaneFailed.
    """

    def __init__(self, ports: Sequence[Inbound]) -> None:
        self._ports = tuple(ports)
        self._waiting: dict[tuple[str, int], dict[int, Item]] = {}
        """(group, member) of a sample with missing parts -> port index -> part that has arrived."""
        self._takes: dict[asyncio.Task[Item | None], int] | None = None
        """Pending take -> port index; None before the first one."""

    def iterate(self) -> AsyncIterator[tuple[Any, ...]]:
        lead = self._ports[0]

        async def pull() -> Invocation | None:
            while (item := await self._next_whole()) is not None:
                if not isinstance(item.body, Tombstone):
                    return lead.work_on(item)
                lead.owner.forward(item.whole, item.body)
            return None

        return Invocations(pull, self._cancel_takes)

    def groups(self, size: int) -> AsyncIterator[Members[Any]]:
        return self._ports[0].group_items(self._next_whole, size, self._cancel_takes)

    async def _next_whole(self) -> Item | None:
        """One part of the next complete sample: a tombstone that tells why it is lost, else the part from the first
        port."""
        while (arrival := await self._next_arrival()) is not None:
            parts = self._add_part(*arrival)
            if parts is None:
                continue
            lost = [part for part in parts if isinstance(part.body, Tombstone)]
            if not lost:
                return parts[0]
            told = next((part for part in lost if getattr(part.body, "reason", "") != NOT_ROUTED), lost[0])
            # The messages that other branches delivered are lost here with it. If no branch delivered a message, the
            # sample was lost before this node, or was routed elsewhere.
            if len(lost) < len(parts) and isinstance(told.body, Tombstone):
                self._ports[0].owner.book(parts, told.body)
            return told
        for (group, member), found in self._waiting.items():
            raise FlowrlError(
                f"{self._port_names(found)} received member {member} of group {group!r}, but the streams of "
                f"{self._port_names(set(range(len(self._ports))) - set(found))} ended without it; every branch of a "
                "join has to send or drop each sample that it receives"
            )
        return None

    def _add_part(self, index: int, item: Item) -> tuple[Item, ...] | None:
        """Add a part to its sample. Returns all parts, in order of ports, if it was the last; otherwise None."""
        envelope = item.envelope
        if not envelope.group_id or envelope.member < 0:
            raise FlowrlError(
                f"{self._port_names([index])} received a {type(item.body).__name__} that belongs to no single sample; "
                "join before samples are merged into groups, and let every node before the join make each message "
                "from one item"
            )
        found = self._waiting.setdefault((envelope.group_id, envelope.member), {})
        if index in found:
            raise FlowrlError(
                f"{self._port_names([index])} received member {envelope.member} of group {envelope.group_id!r} twice; "
                "a branch of a join has to send one message for each sample that it receives"
            )
        found[index] = item
        if len(found) < len(self._ports):
            return None
        del self._waiting[envelope.group_id, envelope.member]
        parts = tuple(found[i] for i in sorted(found))
        for part in parts:
            part.parts = parts
        return parts

    def _port_names(self, indices: Any) -> str:
        return ", ".join(self._ports[index].port for index in sorted(indices))

    async def _next_arrival(self) -> tuple[int, Item] | None:
        """(port index, item) of the next arrival; None when every stream has ended. May be cancelled and repeated."""
        if self._takes is None:
            self._takes = {}
            for index in range(len(self._ports)):
                self._begin_take(self._takes, index)
        while self._takes:
            done, _ = await asyncio.wait(self._takes, return_when=asyncio.FIRST_COMPLETED)
            index = self._takes.pop(take := done.pop())
            if (item := take.result()) is not None:
                self._begin_take(self._takes, index)
                return index, item
        return None

    def _begin_take(self, takes: dict[asyncio.Task[Item | None], int], index: int) -> None:
        take = asyncio.ensure_future(self._ports[index].take())
        # Mark its exception as retrieved: the first lane failure ends the join; later ones are consequences.
        take.add_done_callback(lambda take: take.cancelled() or take.exception())
        takes[take] = index

    def _cancel_takes(self) -> None:
        """User code asks for no more samples: cancel the pending takes."""
        for take in self._takes or ():
            take.cancel()

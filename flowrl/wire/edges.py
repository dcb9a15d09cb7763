"""The two ends of a lane as its host uses them: they add waiting to the machines of `lane` and `latest`.

Invariants
- A send is atomic: it waits until its message may be sent, and then sends it in the same step. A send that is
  cancelled while it waits sends nothing.
- Waiting sends resume in the order in which they began to wait.

What ends a wait: a send waits for credit; a credit frame, a failure of the lane, its restart or the
closing of the endpoint wakes it. While a checkpoint has paused sending, it waits until the checkpoint resumes it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from flowrl.errors import LaneFailed
from flowrl.graph.dispatch_rules import DispatchRule
from flowrl.messages import Tombstone
from flowrl.wire.encoding.schema import Envelope, message_id
from flowrl.wire.lanes import LaneSpec, LaneStatistics, LatestReceiver, LatestSender, ReceiverLane, Seen, SenderLane

FRAMES_AT_ONCE = 128
Ids = Callable[[Sequence[bytes]], None]
Ready = Callable[[], bool]


class SendGate:
    """The queue in which sends wait for credit, first come first served. Lanes of one edge share a gate.

    Sends that need the same credit wait for the same `ready`, so a wake-up calls each `ready` once, however many sends
    wait for it.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[asyncio.Future[None], float]] = {}
        """Number of a waiting send -> (the future that wakes it, when its wait began), in the order of the sends."""
        self.paused = False
        """True during the snapshot of a checkpoint: no send may proceed, whatever its credit."""
        self._needs: dict[Ready, dict[int, None]] = {}
        """`ready` of some sends -> the numbers of the sends that wait for it, in order."""
        self._next = 0
        self._woken: int | None = None
        """The send that was woken and has not resumed yet; the next send is woken only after it."""
        self._blocked_s = 0.0
        """Total time in which at least one send waited, up to the last moment at which the queue became empty."""
        self._blocked_since = 0.0
        """When the queue was empty for the last time (time.monotonic); valid only while a send waits."""

    def since(self) -> float | None:
        """When the longest wait began (time.monotonic), None if no send waits."""
        return next((began for _, began in self.waiting.values()), None)

    def blocked_s(self) -> float:
        """Seconds in which at least one send has waited; sends that wait at the same time count once."""
        return self._blocked_s + (time.monotonic() - self._blocked_since if self.waiting else 0.0)

    async def wait(self, ready: Ready) -> None:
        """Wait until `ready()` is true; the caller must send before it awaits again.

        An exception that `ready` raises ends the wait. Sends that need the same credit pass an equal `ready`.
        """
        began, me = time.monotonic(), self._next
        self._next += 1
        if not self.waiting:
            self._blocked_since = began
        same = self._needs.setdefault(ready, {})
        loop = asyncio.get_running_loop()
        try:
            while True:
                woken: asyncio.Future[None] = loop.create_future()
                self.waiting[me] = woken, began  # assigning the key again keeps this send's place in the order
                same[me] = None
                self.wake()
                await woken
                self._woken = None
                if ready() and not self.paused:
                    return
        finally:
            self._leave(me, ready)
            if self.waiting:
                loop.call_soon(self.wake)  # not now: the caller must use its credit first
            else:
                self._blocked_s += time.monotonic() - self._blocked_since

    def _leave(self, me: int, ready: Ready) -> None:
        del self.waiting[me], self._needs[ready][me]
        if not self._needs[ready]:
            del self._needs[ready]
        if self._woken == me:
            self._woken = None

    def wake(self) -> None:
        """Wake the first send that may proceed. After it has sent, or was cancelled, it wakes the next."""
        if self._woken is not None:
            return
        first = min((next(iter(same)) for ready, same in self._needs.items() if self._possible(ready)), default=None)
        if first is not None:
            self._woken = first
            if not (woken := self.waiting[first][0]).done():  # done if the send was cancelled in this tick
                woken.set_result(None)

    def _possible(self, ready: Ready) -> bool:
        """Whether a send that waits for `ready` may proceed, or has to raise."""
        try:
            return ready() and not self.paused
        except LaneFailed:
            return True


class LaneOwner(Protocol):
    """The functions that the ends of lanes call on their endpoint."""

    def sent(self, lane: SendLane) -> None:
        """Send the frames of the lane's machine. Raises WireError for a value that cannot be sent."""

    def flush_soon(self, lane: ReceiveLane) -> None:
        """The lane's machine has credits, acks or other frames to flush soon."""

    def opened(self, lane: ReceiveLane) -> None:
        """The lane has a taker now: deliver the frames that arrived before."""


class SendLane:
    """The producer's end, created by `Endpoint.sender`."""

    def __init__(self, spec: LaneSpec, machine: SenderLane | LatestSender, owner: LaneOwner) -> None:
        self.spec = spec
        self.machine = machine
        self.gate = SendGate()
        self.burst = max(1, min(FRAMES_AT_ONCE, spec.capacity // 2))
        """When this many frames are pending, they leave before the loop's tick ends: the consumer can begin earlier."""
        self._owner = owner
        self._taken: list[Ids] = []
        self._acked: list[Ids] = []

    @property
    def credits(self) -> int:
        """Number of messages that can be sent now without waiting."""
        return self.machine.credits

    def can_send(self) -> bool:
        """True if the lane has a credit. Raises LaneFailed on a failed lane."""
        machine = self.machine
        if machine.failed:
            raise LaneFailed(f"lane {self.spec.name!r}: {machine.failed}")
        return machine.credits > 0

    def put(self, envelope: Envelope) -> None:
        """Send now. Only after `can_send`."""
        self.machine.send(envelope)
        self._owner.sent(self)

    async def send(self, envelope: Envelope) -> None:
        """Wait for a credit and send. Sends nothing if cancelled while waiting. Raises LaneFailed."""
        if self.gate.paused or self.gate.waiting or not self.can_send():
            await self.gate.wait(self.can_send)
        self.put(envelope)

    def on_taken(self, callback: Ids) -> None:
        """Call `callback(ids)` when the next process has taken messages."""
        self._taken.append(callback)

    def on_acked(self, callback: Ids) -> None:
        """Call `callback(ids)` when messages have been finished and are no longer kept."""
        self._acked.append(callback)

    def unacked(self) -> list[Envelope]:
        """All messages kept for a replay, oldest first."""
        return self.machine.unacked()

    def cancel(self, ids: Sequence[bytes]) -> None:
        """Ask the consumer to drop these messages. It acks those it has not taken without delivering them."""
        self.machine.cancel(ids)
        self._owner.sent(self)

    def close(self) -> None:
        """Signal end of stream. The consumer sees it after it has taken everything sent."""
        self.machine.close()
        self._owner.sent(self)

    def fail(self, reason: str) -> None:
        """Fail the lane: `take` raises LaneFailed at the other end, and `send` raises it here."""
        self.machine.fail(reason)
        self._owner.sent(self)
        self.gate.wake()

    def statistics(self) -> LaneStatistics:
        return self.machine.statistics(self.gate.blocked_s())

    # Called by the endpoint

    def taken(self, ids: Sequence[bytes]) -> None:
        if ids:
            for callback in self._taken:
                callback(ids)
            if self.gate.waiting:
                self.gate.wake()

    def acked(self, ids: Sequence[bytes]) -> None:
        if ids:
            for callback in self._acked:
                callback(ids)


class Taker(Protocol):
    """The object that takes a lane's messages: `flowrl.wire.edges.Inbox`."""

    name: str

    def waiting_since(self) -> float | None: ...


class ReceiveLane:
    """The consumer's end, created by `Endpoint.receiver` and read through the `Inbox` it is added to."""

    def __init__(self, spec: LaneSpec, machine: ReceiverLane | LatestReceiver, owner: LaneOwner) -> None:
        self.spec = spec
        self.machine = machine
        self.listed = False
        """Whether the lane is in its inbox's list of lanes with a message to take."""
        self.changed: Callable[[ReceiveLane], None] | None = None
        """Called after the machine has changed. The inbox sets it; frames that arrive before that are parked."""
        self.taker: Taker | None = None
        self.finish: Callable[[bytes], None] = (
            machine.finish if isinstance(machine, LatestReceiver) else machine.seen.finish
        )
        """Acks a message by its id."""
        self._owner = owner
        self._cancelled: list[Ids] = []
        machine.on_unflushed = self._unflushed

    def _unflushed(self, machine: ReceiverLane | LatestReceiver) -> None:
        self._owner.flush_soon(self)

    def open(self, taker: Taker, changed: Callable[[ReceiveLane], None]) -> None:
        """Let `taker` take the lane's messages from now on."""
        self.taker, self.changed = taker, changed
        self._owner.opened(self)

    def on_cancel(self, callback: Ids) -> None:
        """Call `callback(ids)` when the producer cancels messages that are taken and not finished."""
        self._cancelled.append(callback)

    def cancelled(self, ids: Sequence[bytes]) -> None:
        if ids:
            for callback in self._cancelled:
                callback(ids)

    def fail(self, reason: str) -> None:
        """Fail the lane from this end: the producer's sends raise LaneFailed."""
        self.machine.refuse(reason)
        self._owner.flush_soon(self)

    def statistics(self) -> LaneStatistics:
        return self.machine.statistics()


class EndOfStream(Exception):
    """Every producer has closed and everything it sent has been taken."""


_new = object.__new__


class Delivery:
    """One taken message; call `ack` when it is finished."""

    __slots__ = ("_finish", "envelope")

    def __init__(self, envelope: Envelope, finish: Callable[[bytes], None]) -> None:
        self.envelope = envelope
        self._finish = finish

    def ack(self) -> None:
        """Mark the message as finished: the next process has taken everything made from it. Call once."""
        self._finish(self.envelope.id)


class Inbox:
    """The receiving side of one In port of one node replica."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.lanes: list[ReceiveLane] = []
        self._seen = Seen()
        self._ready: deque[ReceiveLane] = deque()
        self._restored: deque[Envelope] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._waiting_since = 0.0

    def add(self, lane: ReceiveLane) -> None:
        """Also deliver the messages of `lane`."""
        self.lanes.append(lane)
        if isinstance(lane.machine, ReceiverLane):
            lane.machine.seen = self._seen
            lane.finish = self._seen.finish
        lane.open(self, self._changed)

    def restore(self, envelope: Envelope) -> None:
        """Deliver a message from a checkpoint: after those restored before it, and before any message that arrives."""
        self._seen.restore(envelope.id)
        self._restored.append(envelope)
        self._wake()

    async def take(self) -> Delivery:
        """Return the next message and give its credit back; the caller has to ack it.

        Raises EndOfStream when every lane has closed, LaneFailed when one has failed.
        """
        if self._ready and not self._waiting and not self._restored:
            return self._next()
        while True:
            self._check_failed()
            if self._restored:
                return Delivery(self._restored.popleft(), self._seen.finish)
            if self._ready:
                return self._next()
            if all(lane.machine.ended for lane in self.lanes):
                self._wake()
                raise EndOfStream
            await self._wait()

    def newest(self) -> Any:
        """For latest edges: the newest message of all lanes, None before the first."""
        found = [lane.machine.newest for lane in self.lanes if not isinstance(lane.machine, ReceiverLane)]
        bodies = [envelope.body for envelope in found if envelope is not None]
        return max(bodies, key=lambda body: getattr(body, "version", 0), default=None)

    def waiting_since(self) -> float | None:
        """When the current wait of `take` began (time.monotonic), None if nobody waits."""
        return self._waiting_since if self._waiting else None

    def _next(self) -> Delivery:
        ready = self._ready
        lane = ready[0]
        machine = lane.machine
        envelope = machine.take()
        if not machine.ready:
            ready.popleft()
            lane.listed = False
        elif len(ready) > 1:
            ready.rotate(-1)  # round-robin: the next lane is first at the next `take`
        if self._waiting:
            self._wake()
        delivery = _new(Delivery)  # a hot path: its `__init__` would take twice as long
        delivery.envelope, delivery._finish = envelope, lane.finish
        return delivery

    def _check_failed(self) -> None:
        for lane in self.lanes:
            if lane.machine.failed:
                self._wake()
                raise LaneFailed(f"lane {lane.spec.name!r}: {lane.machine.failed}")

    async def _wait(self) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting.append(woken)
        try:
            await woken
        except asyncio.CancelledError:
            if not woken.cancelled():
                self._wake()  # woken and cancelled in one tick: pass the message on to the next taker
            elif woken in self._waiting:  # else `_wake` has removed this future in the same tick, and woken the next
                self._waiting.remove(woken)
            raise

    def _wake(self) -> None:
        while self._waiting:
            woken = self._waiting.popleft()
            if not woken.done():
                woken.set_result(None)
                return

    def _changed(self, lane: ReceiveLane) -> None:
        machine = lane.machine
        if machine.ready and not lane.listed:
            lane.listed = True
            self._ready.append(lane)
        elif lane.listed and not machine.ready:  # the producer has cancelled the waiting messages
            lane.listed = False
            self._ready.remove(lane)
        if self._waiting and (machine.ready or machine.ended or machine.failed):
            self._wake()


__all__ = ["Delivery", "EndOfStream", "Inbox", "OutEdge"]


class OutEdge:
    """The lanes of one edge that start at one producing node replica."""

    def __init__(self, lanes: Sequence[SendLane], rule: DispatchRule, *, lanes_per_part: int = 1) -> None:
        """`lanes_per_part`: for a rule that splits, the number of consecutive lanes that carry the same part."""
        assert lanes, "an edge has at least one lane"
        assert len(lanes) % lanes_per_part == 0, f"{len(lanes)} lanes in groups of {lanes_per_part}"
        self._lanes_per_part = lanes_per_part
        self.name = lanes[0].spec.edge
        self.lanes = tuple(lanes)
        self.rule = rule
        self.gate = SendGate()
        """The queue of the sends that wait, shared by all lanes of the edge."""
        self._first = 0
        """Index of the lane that is preferred among lanes with equally many credits; it advances with every send."""
        self._wholes: dict[bytes, Envelope] = {}
        """Id -> whole message that the gang has not finished: ranks may still need parts of it."""
        self._part_of: dict[bytes, bytes] = {}
        """Id of a part that its rank has not finished -> id of the whole message."""
        self._ready: dict[tuple[int, ...], Ready] = {}
        """Indices of lanes -> function whether all of these can send; all sends that need these lanes share it."""
        self._only = self.lanes[0] if rule.any_one and len(lanes) == 1 else None
        """The lane, if the edge has only this one to choose from."""
        for lane in lanes:
            lane.gate = self.gate
            if rule.splits:
                lane.on_acked(self._finished)

    def ids(self, envelope: Envelope) -> list[bytes]:
        """Ids of the messages sent for `envelope`: each consumer of a broadcast, and each rank of a gang, gets one."""
        if self.rule.to_each:
            return [_own_id(envelope, lane) for lane in self.lanes]
        return [envelope.id]

    def arrivals(self, envelope: Envelope) -> list[tuple[bytes, int]]:
        """(id, number of lanes on which it must be taken) for `Custody.child`; none for a latest edge."""
        return [] if self.rule.overwrites else [(own, 1) for own in self.ids(envelope)]

    def addressed(self, envelope: Envelope) -> list[tuple[str, Envelope]]:
        """(consumer, its message) for each consumer of a broadcast. Other rules choose the consumer later: one entry,
        with the consumer ""."""
        if not self.rule.copies:
            return [("", envelope)]
        return [(lane.spec.consumer, replace(envelope, id=_own_id(envelope, lane))) for lane in self.lanes]

    async def send(self, envelope: Envelope) -> None:
        """Send by the edge's rule, and wait for the credits it needs. Sends nothing if cancelled while waiting.

        Raises LaneFailed when a lane it needs has failed, WireError for a body that cannot be sent.
        """
        only, rule = self._only, self.rule
        queued = self.gate.paused or self.gate.waiting  # a send may not overtake those that wait
        if only is not None and not queued and only.machine.credits > 0 and not only.machine.failed:
            only.put(envelope)  # most sends: one lane, with credit. This path avoids function calls
        elif rule.any_one:
            if queued or not self._any_ready():
                await self.gate.wait(self._any_ready)
            self._freest().put(envelope)
        else:
            indices = tuple(rule.replicas(envelope.group_id, len(self.lanes)))
            lanes = [self.lanes[index] for index in indices]
            if not rule.overwrites:
                await self._until_all(indices)
            for lane, message in zip(lanes, self._messages(envelope, len(lanes)), strict=True):
                lane.put(message)

    async def send_to(self, consumer: str, envelope: Envelope) -> None:
        """Send one consumer's message of `addressed`, or one rank's part. Does nothing if no lane has this consumer."""
        if not consumer:
            await self.send(envelope)
            return
        for index, lane in enumerate(self.lanes):
            if lane.spec.consumer == consumer:
                await lane.send(self._part(envelope, index) if self.rule.splits else envelope)

    def _any_ready(self) -> bool:
        """Whether some lane has a credit. Raises LaneFailed if one has failed."""
        # A list, so that a failed lane raises even if an earlier one has credit; a generator stops at the first True.
        return any([lane.can_send() for lane in self.lanes])  # noqa: C419

    def _freest(self) -> SendLane:
        """The lane with the most credits, round-robin among equals."""
        lanes = self.lanes
        self._first = first = (self._first + 1) % len(lanes)
        return max((*lanes[first:], *lanes[:first]), key=lambda lane: lane.machine.credits)

    async def _until_all(self, indices: tuple[int, ...]) -> None:
        """Wait until every one of these lanes can send."""
        ready = self._ready.get(indices)
        if ready is None:
            lanes = [self.lanes[index] for index in indices]
            ready = self._ready[indices] = lambda: all([lane.can_send() for lane in lanes])  # noqa: C419
        if self.gate.paused or self.gate.waiting or not ready():
            await self.gate.wait(ready)

    def _messages(self, envelope: Envelope, count: int) -> list[Envelope]:
        """The messages for `count` lanes, in the order of the lanes."""
        if self.rule.splits:
            return self._parts(envelope)
        if self.rule.copies:
            return [copy for _, copy in self.addressed(envelope)]
        return [envelope] * count

    def _parts(self, envelope: Envelope) -> list[Envelope]:
        parts = self._split(envelope.body)
        return [self._part_with(envelope, lane, part) for lane, part in zip(self.lanes, parts, strict=True)]

    def _part(self, envelope: Envelope, index: int) -> Envelope:
        """One rank's part; a tombstone is not split, it replaces the part."""
        body = envelope.body if isinstance(envelope.body, Tombstone) else self._split(envelope.body)[index]
        return self._part_with(envelope, self.lanes[index], body)

    def _part_with(self, envelope: Envelope, lane: SendLane, body: Any) -> Envelope:
        part = replace(envelope, id=_own_id(envelope, lane), body=body)
        self._wholes[envelope.id] = envelope
        self._part_of[part.id] = envelope.id
        return part

    def _split(self, body: Any) -> Sequence[Any]:
        """The part of each lane."""
        split = getattr(body, "split", None)
        if split is None:
            raise TypeError(
                f"edge {self.name!r} has dispatch='gang' and carries a {type(body).__name__}, which has no `split(n)`; "
                "give the message one, or use another dispatch"
            )
        count = len(self.lanes) // self._lanes_per_part
        parts: Sequence[Any] = split(count)
        assert len(parts) == count, f"{type(body).__name__}.split({count}) gave {len(parts)} parts"
        return [part for part in parts for _ in range(self._lanes_per_part)]

    def _finished(self, ids: Sequence[bytes]) -> None:
        """Ranks have finished these parts: forget each message that has no unfinished part left."""
        for part in ids:
            whole = self._part_of.pop(part, None)
            if whole is not None and whole not in self._part_of.values():
                del self._wholes[whole]

    def pause(self, paused: bool) -> None:
        """Pause or resume sending, for a checkpoint's snapshot: while paused, sends wait, whatever their credits.

        Sends on a latest edge continue: they never wait, and a checkpoint stores none of their messages.
        """
        self.gate.paused = paused
        self.gate.wake()

    def on_taken(self, callback: Ids) -> None:
        """Like `SendLane.on_taken`; a message on several lanes is reported once for each lane."""
        for lane in self.lanes:
            lane.on_taken(callback)

    def on_acked(self, callback: Ids) -> None:
        """Like `SendLane.on_acked`; a message on several lanes is reported once for each lane."""
        for lane in self.lanes:
            lane.on_acked(callback)

    def unacked(self) -> list[tuple[str, Envelope]]:
        """All messages kept for a replay, in the form of `addressed`. A gang's messages are whole; `parts` names their
        unfinished parts."""
        if self.rule.splits:
            return [("", whole) for whole in self._wholes.values()]
        named = self.rule.copies
        return [(lane.spec.consumer if named else "", kept) for lane in self.lanes for kept in lane.unacked()]

    def parts(self) -> dict[bytes, dict[str, bytes]]:
        """For each of a gang's `unacked` messages: rank -> id of its part, b"" if the rank has finished it."""
        found: dict[bytes, dict[str, bytes]] = {}
        for key, whole in self._wholes.items():
            own = {lane.spec.consumer: _own_id(whole, lane) for lane in self.lanes}
            found[key] = {rank: part if part in self._part_of else b"" for rank, part in own.items()}
        return found

    @property
    def num_untaken(self) -> int:
        """Number of messages sent and not taken yet, on the lane that has the most; 0 on a latest edge."""
        return 0 if self.rule.overwrites else max(lane.machine.depth for lane in self.lanes)

    @property
    def num_unfinished(self) -> int:
        """Number of messages sent and not finished yet, on the lane that has the most; 0 on a latest edge."""
        return 0 if self.rule.overwrites else max(len(lane.unacked()) for lane in self.lanes)

    def cancel(self, ids: Sequence[bytes]) -> None:
        """Ask the consumers to drop these messages; for a broadcast or a gang, `ids` name the copies or parts."""
        for lane in self.lanes:
            lane.cancel(ids)

    def close(self) -> None:
        """Signal end of stream on every lane."""
        for lane in self.lanes:
            lane.close()


def _own_id(envelope: Envelope, lane: SendLane) -> bytes:
    return message_id((envelope.id,), lane.spec.consumer, 0)

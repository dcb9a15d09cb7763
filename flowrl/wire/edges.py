"""Edges as one process sees them: `OutEdge`, the lanes that start at a node, and `Inbox`, the lanes that enter a port.

Invariants
- A message is sent in one step on all the lanes that its edge's rule names (`flowrl.graph.dispatch_rules`), or on none.
  A send that is cancelled while it waits sends nothing. Waiting sends resume in the order in which they began to wait.
- Lanes with a message to take are served round-robin; each lane keeps its order. A message leaves its lane in the same
  step in which `take` returns it, so a cancelled `take` has taken nothing.
- Each message id is delivered once (the lanes of a port share one `Seen`), and acked once.

What ends a wait: a send waits for the credits that its rule needs; a credit frame, a failure of a lane, its restart or
the closing of the endpoint wakes it. While a checkpoint has paused sending, it waits until the checkpoint resumes it.
`take` waits for a message, the end of all lanes, or the failure of one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flowrl.errors import LaneFailed
from flowrl.graph.dispatch_rules import DispatchRule
from flowrl.messages import Tombstone
from flowrl.wire.encoding.schema import Envelope, message_id
from flowrl.wire.lanes import Ids, ReceiverLane, Seen, SenderLane

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

    def waiting_since(self) -> float | None:
        """When the longest wait began (time.monotonic), None if no send waits."""
        return next((began for _, began in self.waiting.values()), None)

    def blocked_s(self) -> float:
        """Seconds in which at least one send has waited; sends that wait at the same time count once."""
        return self._blocked_s + (time.monotonic() - self._blocked_since if self.waiting else 0.0)

    async def wait_turn(self, ready: Ready) -> None:
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
                self.wake_next()
                await woken
                self._woken = None
                if ready() and not self.paused:
                    return
        finally:
            del self.waiting[me], same[me]
            if not same:
                del self._needs[ready]
            if self._woken == me:
                self._woken = None
            if self.waiting:
                loop.call_soon(self.wake_next)  # not now: the caller must use its credit first
            else:
                self._blocked_s += time.monotonic() - self._blocked_since

    def wake_next(self) -> None:
        """Wake the first send that may proceed. After it has sent, or was cancelled, it wakes the next."""
        if self._woken is not None:
            return
        first = min((next(iter(same)) for ready, same in self._needs.items() if self._may_proceed(ready)), default=None)
        if first is not None:
            self._woken = first
            if not (woken := self.waiting[first][0]).done():  # done if the send was cancelled in this tick
                woken.set_result(None)

    def _may_proceed(self, ready: Ready) -> bool:
        """Whether a send that waits for `ready` may proceed, or has to raise."""
        try:
            return ready() and not self.paused
        except LaneFailed:
            return True


class OutEdge:
    """The lanes of one edge that start at one producing node replica."""

    def __init__(self, lanes: Sequence[SenderLane], rule: DispatchRule, *, lanes_per_part: int = 1) -> None:
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
            lane.edge, lane.on_change = self, self._wake_sends
            if rule.splits:
                lane.on_acked.append(self._forget_parts)

    def _wake_sends(self) -> None:
        if self.gate.waiting:
            self.gate.wake_next()

    def ids(self, envelope: Envelope) -> list[bytes]:
        """Ids of the messages sent for `envelope`: each consumer of a broadcast, and each rank of a gang, gets one."""
        if self.rule.to_each:
            return [_own_id(envelope, lane) for lane in self.lanes]
        return [envelope.id]

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
        if only is not None and not queued and only.credits > 0 and not only.failed:
            only.send(envelope)  # most sends: one lane, with credit. This path avoids function calls
        elif rule.any_one:
            if queued or not self._any_ready():
                await self.gate.wait_turn(self._any_ready)
            # The lane with the most credits, round-robin among equals.
            self._first = first = (self._first + 1) % len(self.lanes)
            max((*self.lanes[first:], *self.lanes[:first]), key=lambda lane: lane.credits).send(envelope)
        else:
            indices = tuple(rule.replicas(envelope.group_id, len(self.lanes)))
            lanes = [self.lanes[index] for index in indices]
            if not rule.overwrites:
                if (ready := self._ready.get(indices)) is None:
                    ready = self._ready[indices] = lambda: all([lane.can_send() for lane in lanes])  # noqa: C419
                if queued or not ready():
                    await self.gate.wait_turn(ready)
            if rule.splits:
                parts = self._split_body(envelope.body)
                messages = [self._part_with(envelope, *one) for one in zip(self.lanes, parts, strict=True)]
            else:
                messages = [copy for _, copy in self.addressed(envelope)] if rule.copies else [envelope] * len(lanes)
            for lane, message in zip(lanes, messages, strict=True):
                lane.send(message)

    async def send_to(self, consumer: str, envelope: Envelope) -> None:
        """Send one consumer's message of `addressed`, or one rank's part. Does nothing if no lane has this consumer."""
        if not consumer:
            await self.send(envelope)
        for index, lane in enumerate(self.lanes if consumer else ()):
            if lane.spec.consumer == consumer:
                message = envelope
                if self.rule.splits:  # a tombstone is not split, it replaces the part
                    lost = isinstance(envelope.body, Tombstone)
                    body = envelope.body if lost else self._split_body(envelope.body)[index]
                    message = self._part_with(envelope, lane, body)
                if self.gate.paused or self.gate.waiting or not lane.can_send():
                    await self.gate.wait_turn(lane.can_send)
                lane.send(message)

    def _any_ready(self) -> bool:
        """Whether some lane has a credit. Raises LaneFailed if one has failed."""
        # A list, so that a failed lane raises even if an earlier one has credit; a generator stops at the first True.
        return any([lane.can_send() for lane in self.lanes])  # noqa: C419

    def _part_with(self, envelope: Envelope, lane: SenderLane, body: Any) -> Envelope:
        part = replace(envelope, id=_own_id(envelope, lane), body=body)
        self._wholes[envelope.id] = envelope
        self._part_of[part.id] = envelope.id
        return part

    def _split_body(self, body: Any) -> Sequence[Any]:
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

    def _forget_parts(self, ids: Sequence[bytes]) -> None:
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
        self.gate.wake_next()

    def on_taken(self, callback: Ids) -> None:
        """As `SenderLane.on_taken`; a message on several lanes is reported once for each lane."""
        for lane in self.lanes:
            lane.on_taken.append(callback)

    def on_acked(self, callback: Ids) -> None:
        """As `SenderLane.on_acked`; a message on several lanes is reported once for each lane."""
        for lane in self.lanes:
            lane.on_acked.append(callback)

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
        return 0 if self.rule.overwrites else max(lane.depth for lane in self.lanes)

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


def _own_id(envelope: Envelope, lane: SenderLane) -> bytes:
    return message_id((envelope.id,), lane.spec.consumer, 0)


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
        self.lanes: list[ReceiverLane] = []
        self._seen = Seen()
        self._ready: deque[ReceiverLane] = deque()
        self._restored: deque[Envelope] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._waiting_since = 0.0

    def add_lane(self, lane: ReceiverLane) -> None:
        """Also deliver the messages of `lane`."""
        self.lanes.append(lane)
        lane.share_seen(self._seen)
        lane.open_to(self, self._note_change)

    def restore(self, envelope: Envelope) -> None:
        """Deliver a message from a checkpoint: after those restored before it, and before any message that arrives."""
        self._seen.restore(envelope.id)
        self._restored.append(envelope)
        self._wake_next()

    async def take(self) -> Delivery:
        """Return the next message and give its credit back; the caller has to ack it.

        Raises EndOfStream when every lane has closed, LaneFailed when one has failed.
        """
        if self._ready and not self._waiting and not self._restored:
            return self._take_next()
        while True:
            for lane in self.lanes:
                if lane.failed:
                    self._wake_next()
                    raise LaneFailed(f"lane {lane.spec.name!r}: {lane.failed}")
            if self._restored:
                return Delivery(self._restored.popleft(), self._seen.finish_message)
            if self._ready:
                return self._take_next()
            if all(lane.ended for lane in self.lanes):
                self._wake_next()
                raise EndOfStream
            await self._wait_woken()

    def newest(self) -> Any:
        """For latest edges: the newest message of all lanes, None before the first."""
        bodies = [lane.newest.body for lane in self.lanes if lane.newest is not None]
        return max(bodies, key=lambda body: getattr(body, "version", 0), default=None)

    def waiting_since(self) -> float | None:
        """When the current wait of `take` began (time.monotonic), None if nobody waits."""
        return self._waiting_since if self._waiting else None

    def _take_next(self) -> Delivery:
        ready = self._ready
        lane = ready[0]
        envelope = lane.take()
        if not lane.ready:
            ready.popleft()
            lane.listed = False
        elif len(ready) > 1:
            ready.rotate(-1)  # round-robin: the next lane is first at the next `take`
        if self._waiting:
            self._wake_next()
        delivery = _new(Delivery)  # a hot path: its `__init__` would take twice as long
        delivery.envelope, delivery._finish = envelope, lane.finish
        return delivery

    async def _wait_woken(self) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting.append(woken)
        try:
            await woken
        except asyncio.CancelledError:
            if not woken.cancelled():
                self._wake_next()  # woken and cancelled in one tick: pass the message on to the next taker
            elif (
                woken in self._waiting
            ):  # else `_wake_next` has removed this future in the same tick, and woken the next
                self._waiting.remove(woken)
            raise

    def _wake_next(self) -> None:
        while self._waiting:
            woken = self._waiting.popleft()
            if not woken.done():
                woken.set_result(None)
                return

    def _note_change(self, lane: ReceiverLane) -> None:
        if lane.ready and not lane.listed:
            lane.listed = True
            self._ready.append(lane)
        elif lane.listed and not lane.ready:  # the producer has cancelled the waiting messages
            lane.listed = False
            self._ready.remove(lane)
        if self._waiting and (lane.ready or lane.ended or lane.failed):
            self._wake_next()

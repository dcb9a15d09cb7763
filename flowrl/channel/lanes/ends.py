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
from collections.abc import Callable, Sequence
from typing import Protocol

from flowrl.channel.encoding.schema import Envelope
from flowrl.channel.lanes.lane import ReceiverLane, SenderLane
from flowrl.channel.lanes.lane_spec import LaneSpec, LaneStatistics
from flowrl.channel.lanes.latest import LatestReceiver, LatestSender
from flowrl.errors import LaneFailed

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
    """The object that takes a lane's messages: `flowrl.channel.lanes.inbox.Inbox`."""

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

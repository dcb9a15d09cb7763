"""The two ends of a lane as its host uses them: the machines of `lane` and `latest`, with waiting.

Invariants
- A send is atomic: it waits until its message may go, and then goes at once. Cancelled while waiting it
  sends nothing.
- Waiting sends go in the order in which they began to wait.

Ends of waits: a send waits for credit; a credit frame, a failure of the lane, its restart or the
closing of the endpoint wakes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from flowrl.channel.envelope import Envelope
from flowrl.channel.lane import ReceiverLane, SenderLane
from flowrl.channel.lane_spec import LaneSpec, LaneStatistics
from flowrl.channel.latest import LatestReceiver, LatestSender
from flowrl.errors import LaneFailed

FRAMES_AT_ONCE = 128
Ids = Callable[[Sequence[bytes]], None]


class SendGate:
    """Where sends wait for credit, first come first served. Lanes of one edge share a gate."""

    def __init__(self) -> None:
        self.waiting: dict[object, tuple[asyncio.Future[None], Callable[[], bool], float]] = {}
        """The sends that wait, in their order: (what wakes one, may it go, since when)."""
        self.held = False
        """Nothing goes, credit or not: for the snapshot of a checkpoint."""

    def since(self) -> float | None:
        """When the longest wait began (time.monotonic), None if nothing waits."""
        return next((began for _, _, began in self.waiting.values()), None)

    async def wait(self, ready: Callable[[], bool]) -> float:
        """Return when `ready()` holds, with the seconds waited; the caller must act on it at once.

        `ready` may raise what is to end the wait.
        """
        began, me = time.monotonic(), object()
        loop = asyncio.get_running_loop()
        try:
            while True:
                woken: asyncio.Future[None] = loop.create_future()
                self.waiting[me] = woken, ready, began
                self.wake()
                await woken
                if ready() and not self.held:
                    return time.monotonic() - began
        finally:
            del self.waiting[me]
            if self.waiting:
                loop.call_soon(self.wake)

    def wake(self) -> None:
        """Let the first wait go on that can. It wakes the next when it has acted, or was cancelled."""
        for woken, ready, _ in self.waiting.values():
            if woken.done():
                return
            try:
                possible = ready() and not self.held
            except LaneFailed:
                possible = True
            if possible:
                woken.set_result(None)
                return


class LaneOwner(Protocol):
    """What the ends need from their endpoint."""

    def sent(self, lane: SendLane) -> None:
        """Send what the lane's machine has to say. Raises WireError for what cannot travel."""

    def owed(self, lane: ReceiveLane) -> None:
        """The lane's machine has credits, acks or other things to flush, soon."""

    def opened(self, lane: ReceiveLane) -> None:
        """Somebody will take what arrives on `lane`: deliver what came before."""


class SendLane:
    """The producer's end. Made by `Endpoint.sender`."""

    def __init__(self, spec: LaneSpec, machine: SenderLane | LatestSender, owner: LaneOwner) -> None:
        self.spec = spec
        self.machine = machine
        self.gate = SendGate()
        self.blocked_s = 0.0
        self.burst = max(1, min(FRAMES_AT_ONCE, spec.capacity // 2))
        """So many frames leave before the loop's tick ends, that the consumer may begin."""
        self._owner = owner
        self._taken: list[Ids] = []
        self._acked: list[Ids] = []

    @property
    def credits(self) -> int:
        """How many messages could be sent now without waiting."""
        return self.machine.credits

    def can_send(self) -> bool:
        """True with a credit. Raises LaneFailed on a failed lane."""
        machine = self.machine
        if machine.failed:
            raise LaneFailed(f"lane {self.spec.name!r}: {machine.failed}")
        return machine.credits > 0

    def put(self, envelope: Envelope) -> None:
        """Send now. Only after `can_send`."""
        self.machine.send(envelope)
        self._owner.sent(self)

    async def send(self, envelope: Envelope) -> None:
        """Wait for a credit and send. Cancelled while waiting it sends nothing. Raises LaneFailed."""
        if self.gate.held or self.gate.waiting or not self.can_send():
            self.blocked_s += await self.gate.wait(self.can_send)
        self.put(envelope)

    def on_taken(self, callback: Ids) -> None:
        """Call `callback(ids)` when the next process has taken messages in."""
        self._taken.append(callback)

    def on_acked(self, callback: Ids) -> None:
        """Call `callback(ids)` when messages have been finished and are no longer kept."""
        self._acked.append(callback)

    def unacked(self) -> list[Envelope]:
        """Everything kept for a replay, oldest first."""
        return self.machine.unacked()

    def cancel(self, ids: Sequence[bytes]) -> None:
        """Ask the consumer to give these messages up. Those it has not taken in are acked unseen."""
        self.machine.cancel(ids)
        self._owner.sent(self)

    def close(self) -> None:
        """End of stream, once everything sent has been taken in."""
        self.machine.close()
        self._owner.sent(self)

    def fail(self, reason: str) -> None:
        """Fail the lane: at the other end `take` raises LaneFailed, here `send` does."""
        self.machine.fail(reason)
        self._owner.sent(self)
        self.gate.wake()

    def statistics(self) -> LaneStatistics:
        since = self.gate.since()
        blocked_s = self.blocked_s + (time.monotonic() - since if since is not None else 0.0)
        return self.machine.statistics(blocked_s)

    # What the endpoint tells

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
    """Who takes a lane's messages: `flowrl.channel.inbox.Inbox`."""

    name: str

    def waiting_since(self) -> float | None: ...


class ReceiveLane:
    """The consumer's end. Made by `Endpoint.receiver`, and read through the `Inbox` it is added to."""

    def __init__(self, spec: LaneSpec, machine: ReceiverLane | LatestReceiver, owner: LaneOwner) -> None:
        self.spec = spec
        self.machine = machine
        self.listed = False
        """In its inbox's list of lanes with something to take."""
        self.changed: Callable[[ReceiveLane], None] | None = None
        """Told after the machine has changed. Set by the inbox; frames wait until it is."""
        self.taker: Taker | None = None
        self.finish: Callable[[bytes], None] = (
            machine.finish if isinstance(machine, LatestReceiver) else machine.seen.finish
        )
        """Acks a message by its id."""
        self._owner = owner
        self._cancelled: list[Ids] = []
        machine.on_unflushed = self._unflushed

    def _unflushed(self, machine: ReceiverLane | LatestReceiver) -> None:
        self._owner.owed(self)

    def open(self, taker: Taker, changed: Callable[[ReceiveLane], None]) -> None:
        """From now on `taker` takes the lane's messages."""
        self.taker, self.changed = taker, changed
        self._owner.opened(self)

    def on_cancel(self, callback: Ids) -> None:
        """Call `callback(ids)` when the producer gives up messages taken in and unfinished."""
        self._cancelled.append(callback)

    def cancelled(self, ids: Sequence[bytes]) -> None:
        if ids:
            for callback in self._cancelled:
                callback(ids)

    def fail(self, reason: str) -> None:
        """Fail the lane from this end: the producer's sends raise LaneFailed."""
        self.machine.refuse(reason)
        self._owner.owed(self)

    def statistics(self) -> LaneStatistics:
        return self.machine.statistics()

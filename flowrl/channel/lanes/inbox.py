"""Inbox: merges the lanes that enter one In port.

Invariants
- Lanes with a message to take are served round-robin; each lane keeps its order.
- A message leaves its lane in the same step in which `take` returns it, so a cancelled `take` has taken
  nothing.
- Each message id is delivered once (the lanes share one `Seen`), and acked once.

What ends a wait: `take` waits for a message, the end of all lanes, or the failure of one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from flowrl.channel.encoding.schema import Envelope
from flowrl.channel.lanes.arrived_messages import Seen
from flowrl.channel.lanes.ends import ReceiveLane
from flowrl.channel.lanes.lane import ReceiverLane
from flowrl.errors import LaneFailed


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

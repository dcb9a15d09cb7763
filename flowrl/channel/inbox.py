"""Inbox: the lanes that enter one In port, merged.

Invariants
- Lanes with something to take are served in turn; within a lane order is kept.
- A message leaves its lane in the same step in which `take` returns it, so a cancelled `take` has taken
  nothing.
- Each message id is delivered once (the lanes share one `Seen`), and acked once.

Ends of waits: `take` waits for a message, the end of all lanes, or the failure of one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from flowrl.channel.ends import ReceiveLane
from flowrl.channel.envelope import Envelope
from flowrl.channel.lane import ReceiverLane
from flowrl.channel.seen import Seen
from flowrl.errors import LaneFailed


class EndOfStream(Exception):
    """Every producer has closed and everything it sent has been taken in."""


class Delivery:
    """One message taken in, to be finished with `ack`."""

    __slots__ = ("_finish", "envelope")

    def __init__(self, envelope: Envelope, finish: Callable[[bytes], None]) -> None:
        self.envelope = envelope
        self._finish = finish

    def ack(self) -> None:
        """The message is finished: everything made from it is with the next process. Once."""
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
        """Let the messages of `lane` in."""
        self.lanes.append(lane)
        if isinstance(lane.machine, ReceiverLane):
            lane.machine.seen = self._seen
            lane.finish = self._seen.finish
        lane.open(self, self._changed)

    def restore(self, envelope: Envelope) -> None:
        """Deliver a message that a checkpoint kept before anything that arrives; in order of calls."""
        self._seen.restore(envelope.id)
        self._restored.append(envelope)
        self._wake()

    async def take(self) -> Delivery:
        """The next message; its credit goes back, its ack is owed.

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
        """Latest edges: the newest message that any lane brought, None before the first."""
        found = [lane.machine.newest for lane in self.lanes if not isinstance(lane.machine, ReceiverLane)]
        bodies = [envelope.body for envelope in found if envelope is not None]
        return max(bodies, key=lambda body: getattr(body, "version", 0), default=None)

    def waiting_since(self) -> float | None:
        """When the present wait of `take` began (time.monotonic), None if nothing waits."""
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
            ready.rotate(-1)
        if self._waiting:
            self._wake()
        return Delivery(envelope, lane.finish)

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
                self._wake()  # woken and cancelled at once: the message is for the next
            elif woken in self._waiting:  # else a message came in the same tick of the loop, and went to the next
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
        elif lane.listed and not machine.ready:  # its producer has cancelled what waited
            lane.listed = False
            self._ready.remove(lane)
        if self._waiting and (machine.ready or machine.ended or machine.failed):
            self._wake()

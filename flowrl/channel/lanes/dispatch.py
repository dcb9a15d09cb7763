"""Dispatch: sends a message on the lanes of an edge that its rule chooses; see `flowrl.graph.dispatch_rules`.

Invariant: a message is sent in one step on all the lanes that its rule names, or on none.
What ends a wait: a send waits for the credits that its rule needs, and as long as a checkpoint has paused sending.
`flowrl.channel.lanes.ends` describes what ends both waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flowrl.channel.encoding.schema import Envelope, message_id
from flowrl.channel.lanes.ends import Ids, Ready, SendGate, SendLane
from flowrl.channel.lanes.inbox import Delivery, EndOfStream, Inbox
from flowrl.graph.dispatch_rules import DispatchRule
from flowrl.messages import Tombstone

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

"""The live side of an Out port: ids from lineage, custody of what is sent, admission.

Waits: a send waits for credit on its lane, an admission for a ticket. Both end when the run stops.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from flowrl.channel.dispatch import OutEdge
from flowrl.channel.envelope import Envelope, message_id, source_id
from flowrl.messages import Message, Prompt, Tombstone
from flowrl.runtime.activity import Activity
from flowrl.runtime.inbound import in_turn
from flowrl.runtime.items import Desk, Item, current


class Owner(Protocol):
    """The node replica of the port."""

    desk: Desk
    activity: Activity

    async def admit(self, samples: Sequence[Prompt]) -> int | None:
        """A ticket for one group, committed; None when no further group is wanted."""

    def sent(self, envelope: Envelope) -> None:
        """For the trace."""

    def waited(self, what: str, since_ns: int) -> None:
        """For the trace: a wait that ends now."""


class Outbound:
    """LiveOut of one Out port of one node replica."""

    def __init__(self, port: str, edges: Sequence[OutEdge], owner: Owner) -> None:
        self.port = port
        self.edges = tuple(edges)
        self._owner = owner
        self._desk = owner.desk
        self._activity = owner.activity
        self._cursor = 0
        self._admitted: list[bytes] = []
        """What is already sent of a group whose other members still wait for credit."""
        self._restoring: list[tuple[str, Envelope]] = []
        """A checkpoint's messages that still wait for credit."""
        self.already_sent: set[bytes] = set()
        """Ids that a turn cut off by a checkpoint had sent: its repetition leaves them out."""

    @property
    def carries_tombstones(self) -> bool:
        """Gangs and latest edges take whole batches and weights: a lost sample means nothing to them."""
        return any(edge.rule in ("share", "key", "broadcast") for edge in self.edges)

    async def send(self, item: Message, made_from: Sequence[Message] | None) -> None:
        parents = self._parents(made_from)
        await self._send(self._envelope(item, parents), parents)

    async def admit(self, items: Sequence[Message]) -> bool:
        prompts = [item for item in items if isinstance(item, Prompt)]
        began = time.time_ns()
        with self._activity.waiting("ticket", self.port, inside=in_turn.get()):
            ticket = await self._owner.admit(prompts)
        self._owner.waited("ticket", began)
        if ticket is None:
            return False
        for prompt in prompts:
            key = source_id(self._desk.node.split("/")[0], prompt.sample_id)
            await self._send(Envelope(key, ticket, prompt.group_id, prompt.member, prompt), ())
            self._admitted.append(key)
        self._admitted.clear()
        return True

    async def bury(self, marker: Tombstone, items: Sequence[Item]) -> None:
        """Pass a tombstone on in the place of what would have been made from `items`."""
        if self.carries_tombstones:
            envelope = self._envelope(marker, items)
            envelope.group_id, envelope.member = marker.group_id, marker.member
            await self._send(envelope, items, uses_up=False)

    async def restore(self, edge: str, envelope: Envelope) -> None:
        """Send a message that a checkpoint kept, on the edge where it was under way."""
        waiting = (edge, envelope)
        self._restoring.append(waiting)
        for candidate in self.edges:
            if candidate.name == edge:
                await candidate.send(envelope)
        self._restoring.remove(waiting)

    def unacked(self) -> list[tuple[str, Envelope]]:
        """(edge, message) of all that no consumer has finished."""
        kept = [(edge.name, envelope) for edge in self.edges if edge.rule != "latest" for envelope in edge.unacked()]
        return kept + self._restoring

    def sent_of_open_group(self) -> list[bytes]:
        """Ids of the members that are sent of a group whose admission has not returned yet."""
        return list(self._admitted)

    def close(self) -> None:
        for edge in self.edges:
            edge.close()

    def _parents(self, made_from: Sequence[Message] | None) -> list[Item]:
        if made_from is None:
            return list(current.get())
        items = [self._desk.of(parent) for parent in made_from]
        for group in {id(i.group): i.group for i in items if i.group is not None}.values():
            group.sent = True
            items.extend(group.lost.values())
            items.extend(group.dropped)
            group.lost, group.dropped = {}, []
        return list(dict.fromkeys(part for item in items for part in item.whole))

    def _envelope(self, body: Message, parents: Sequence[Item]) -> Envelope:
        port = self.port
        if not parents:
            self._cursor += 1
            return Envelope(source_id(port, str(self._cursor)), -1, "", -1, body)
        ordinal = parents[0].ordinals.get(port, 0)
        parents[0].ordinals[port] = ordinal + 1
        heads = [parent.envelope for parent in parents]
        first = heads[0]
        return Envelope(
            message_id([head.id for head in heads], port, ordinal),
            first.ticket if all(head.ticket == first.ticket for head in heads) else -1,
            first.group_id if all(head.group_id == first.group_id for head in heads) else "",
            first.member if all(head.member == first.member for head in heads) else -1,
            body,
        )

    async def _send(self, envelope: Envelope, parents: Sequence[Item], *, uses_up: bool = True) -> None:
        for item in parents:
            item.accounted = True
        if envelope.id in self.already_sent:
            self.already_sent.discard(envelope.id)
            return
        for edge in self.edges:
            if parents and edge.rule != "latest":
                self._desk.child(parents, envelope.id, edge.num_arrivals)
            began = time.time_ns()
            with self._activity.waiting("credit", edge.name, inside=in_turn.get()):
                await edge.send(envelope)
            self._owner.waited(f"credit {edge.name}", began)
        self._owner.sent(envelope)
        for item in parents:
            if item.held and uses_up:
                self._desk.end(item)

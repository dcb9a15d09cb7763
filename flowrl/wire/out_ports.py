"""The live side of an Out port: it derives ids from lineage, keeps custody of sent messages, and admits groups.

Waits: a send waits for credit on its lane, an admission waits for a ticket. Both waits end when the run stops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from flowrl.errors import FlowrlError
from flowrl.messages import Message, Prompt, Sample, Tombstone
from flowrl.wire.activity import in_invocation
from flowrl.wire.edges import OutEdge
from flowrl.wire.encoding.schema import Envelope, message_id, source_id
from flowrl.wire.items import Item, PortOwner, current, samples_of

Kept = tuple[str, str, Envelope]
"""A message that a checkpoint stores for an edge: (edge, consumer as in `OutEdge.addressed`, message)."""


@dataclass(frozen=True)
class GroupOffer(Message):
    """A group that a source admits; see `flowrl.graph.ports.Out.admit`."""

    prompts: tuple[Prompt, ...]
    asks: int = 0
    asked_by: str | None = None


@dataclass(frozen=True)
class WaitingSend:
    """A message that waits for credit."""

    envelope: Envelope
    first: int
    """Index of the first edge on which the message is not sent yet."""
    again: bool
    """Whether a resumed run makes the message again (see `_send_on_all`); otherwise the checkpoint stores it."""
    outside: bool
    """Whether the message was made outside of invocations."""


class Outbound:
    """LiveOut of one Out port of one node replica."""

    def __init__(
        self,
        port: str,
        edges: Sequence[OutEdge],
        owner: PortOwner,
        trainers: Sequence[str] = (),
        *,
        counted: bool = False,
    ) -> None:
        self.port = port
        self.edges = tuple(edges)
        self.trainers = frozenset(trainers)
        """The trainers that messages from this port can reach."""
        self.counted = counted
        """Whether a node downstream counts samples: such a node needs a message or a tombstone for each sample."""
        self._owner = owner
        self._open_items = owner.open_items
        self._activity = owner.activity
        self._cursor = 0
        self._outside = 0
        """Number of sends outside of invocations that wait now. A resumed run repeats these sends with the same ids."""
        self._admitted: dict[int, list[bytes]] = {}
        """Ticket -> ids of the members already sent, for groups whose other members still wait for credit."""
        self.offers: dict[str, GroupOffer] = {}
        """Group -> its offer, from the call of `admit` until all members are sent. A group that nobody wanted stays:
        a later run that wants more groups begins with it."""
        self.offered_again: dict[str, asyncio.Task[bool]] = {}
        """Group offered in a checkpoint -> the task that admits it, until its source asks for it again."""
        self._restoring: list[Kept] = []
        """Messages from a checkpoint that still wait for credit."""
        self._waiting: dict[bytes, WaitingSend] = {}
        self._num_leaving = 0
        """Number of tombstones and restored messages still being sent; the stream ends after them."""
        self._ending = False
        self.sent_before: set[bytes] = set()
        """Ids of messages sent by invocations that a checkpoint interrupted; repeated invocations skip these."""
        self.left_out: set[bytes] = set()
        """Ids moved here from `sent_before` when their message was skipped."""

    @property
    def carries_tombstones(self) -> bool:
        """Whether tombstones are sent here, on at least one edge."""
        return any(edge.rule.carries_tombstones for edge in self.edges)

    async def send(self, item: Message, made_from: Sequence[Message] | None) -> None:
        """Send on all edges.

        With `made_from` None, `item` is made from the invocation's item, or, outside of invocations, from nothing.
        """
        if self._ending:
            raise FlowrlError(f"a {type(item).__name__} was sent on {self.port} after {self.port} was closed")
        parents = self._parents_of(made_from)
        if (child := self._open_items.find_derived(item)) is not None:
            parents = self._parents_of([child.body]) if made_from is None else parents
            self._owner.book_replies(child, item)
        envelope = self._make_envelope(item, parents)
        if parents:
            self._book_left_out(item, parents)
            await self._send_once(envelope, parents)
            return
        self._outside += 1
        try:
            await self._send_once(envelope, ())
        finally:
            self._outside -= 1

    async def admit(self, items: Sequence[Message], asks: int, asked_by: str | None) -> bool:
        """Wait for a ticket and send one group's prompts under it. False if no further group is wanted."""
        prompts = cast(Sequence[Prompt], items)  # `Out.admit` has checked that they are
        if (admitting := self.offered_again.pop(prompts[0].group_id, None)) is not None:
            return await asyncio.shield(admitting)
        return await self.admit_offer(GroupOffer(tuple(prompts), asks, asked_by))

    async def admit_offer(self, offer: GroupOffer) -> bool:
        """`admit` for a group that this run has not offered before."""
        group_id = offer.prompts[0].group_id
        self.offers[group_id] = offer
        began = time.time_ns()
        try:
            with self._activity.waiting("ticket", self.port, inside=in_invocation.get()):
                ticket = await self._owner.admit(offer.prompts, sorted(self.trainers), offer.asks, offer.asked_by)
        except asyncio.CancelledError:  # the source takes its offer back
            del self.offers[group_id]
            raise
        self._owner.trace_wait("ticket", began)
        if ticket is None:
            return False
        for prompt in offer.prompts:
            key = source_id(self._open_items.node.split("/")[0], prompt.sample_id)
            await self._send_once(Envelope(key, ticket, prompt.group_id, prompt.member, prompt), ())
            self._admitted.setdefault(ticket, []).append(key)
        self._admitted.pop(ticket, None)
        del self.offers[group_id]
        return True

    def was_sent(self, made_from: Sequence[Message] | None) -> bool:
        """Whether the next message made from these was sent before the checkpoint; if so, count it as sent now."""
        parents = self._parents_of(made_from)
        return bool(parents) and self.skip_sent(parents)

    def skip_sent(self, parents: Sequence[Item]) -> bool:
        """Whether a checkpoint has the next message made from `parents`; if so, count it as sent now."""
        if not self._left_out(self._next_id(parents), parents):
            return False
        self._advance_ordinal(parents)
        return True

    @property
    def num_untaken(self) -> int:
        """Number of messages that wait for credit, or were sent and not taken yet.

        Of the sent messages, only those to the consumer with the most of them count.
        """
        return self._num_waiting + max((edge.num_untaken for edge in self.edges), default=0)

    @property
    def num_unfinished(self) -> int:
        """As `num_untaken`, but messages that were taken and are not finished also count."""
        return self._num_waiting + max((edge.num_unfinished for edge in self.edges), default=0)

    @property
    def _num_waiting(self) -> int:
        return len(self._waiting) + len(self._restoring)

    async def send_tombstone(self, marker: Tombstone, items: Sequence[Item]) -> None:
        """Send a tombstone in place of the message that would have been made from `items`."""
        if self.carries_tombstones:
            # The id differs from all ids of the invocations, whatever they had sent before their item was lost.
            key = message_id(sorted(item.envelope.id for item in items), f"{self.port} lost", 0)
            ticket = items[0].envelope.ticket
            alike = all(item.envelope.ticket == ticket for item in items)
            envelope = Envelope(key, ticket if alike else -1, marker.group_id, marker.member, marker)
            await self._send_once(envelope, items, uses_up=False)

    def count_leaving(self, change: int) -> None:
        """Count a message that the engine itself sends: its send begins (+1), or has ended (-1)."""
        self._num_leaving += change
        if self._ending and not self._num_leaving:
            for edge in self.edges:
                edge.close()

    async def restore(self, kept: Kept) -> None:
        """Send a message from a checkpoint again, on the edge where it was in transit."""
        self._restoring.append(kept)
        name, consumer, envelope = kept
        for edge in self.edges:
            if edge.name == name:
                await edge.send_to(consumer, envelope)
        self._restoring.remove(kept)
        self.count_leaving(-1)

    def unacked(self) -> list[Kept]:
        """All messages that no consumer has finished."""
        queues = [edge for edge in self.edges if not edge.rule.overwrites]
        kept = [(edge.name, *one) for edge in queues for one in edge.unacked()]
        for waiting in self._waiting.values():
            if not waiting.again:
                later = [edge for edge in self.edges[waiting.first :] if edge in queues]
                kept += [(edge.name, *one) for edge in later for one in edge.addressed(waiting.envelope)]
        return kept + self._restoring

    def parts(self) -> list[tuple[str, bytes, dict[str, bytes]]]:
        """For each message to a gang among `unacked`: (edge, message id, `OutEdge.parts`)."""
        return [(edge.name, key, parts) for edge in self.edges for key, parts in edge.parts().items()]

    def not_sent(self) -> list[bytes]:
        """Ids of messages that wait for credit and are not among `unacked`."""
        return [key for key, waiting in self._waiting.items() if waiting.again]

    def sent_outside(self) -> list[bytes]:
        """Ids of messages that wait for credit, were made outside of invocations, and are among `unacked`."""
        return [key for key, waiting in self._waiting.items() if waiting.outside and not waiting.again]

    @property
    def cursor(self) -> int:
        """Number of messages sent outside of invocations, without waiting sends: the resumed run repeats those."""
        return self._cursor - self._outside

    @cursor.setter
    def cursor(self, value: int) -> None:
        self._cursor = value

    def pause(self, paused: bool) -> None:
        """Pause or resume sending on all edges, for a checkpoint's snapshot."""
        for edge in self.edges:
            edge.pause(paused)

    def sent_of_open_group(self) -> list[bytes]:
        """Ids of the members already sent of groups whose admission has not returned yet."""
        return [key for keys in self._admitted.values() for key in keys]

    def close(self) -> None:
        """End the stream after the messages counted by `count_leaving` are sent."""
        if not self._ending:
            self._ending = True
            self.count_leaving(0)

    def _book_left_out(self, body: Message, parents: Sequence[Item]) -> None:
        """Book the samples of `parents` that are not in `body` as lost for the trainers behind this port."""
        if not self.trainers or (len(parents) == 1 and isinstance(parents[0].body, Sample | Prompt)):
            return
        kept = {sample.sample_id for sample in samples_of(body)}
        for parent in parents if kept else ():
            gone = [s.sample_id for s in samples_of(parent.body) if s.sample_id not in kept]
            if gone and parent.lost is None:
                head, node = parent.envelope, self._open_items.node
                marker = Tombstone(head.group_id, -1, "filtered", "left_out", node, tuple(gone))
                self._owner.book([parent], marker, behind=self.trainers)

    def _parents_of(self, made_from: Sequence[Message] | None) -> list[Item]:
        """The items that the next message is made from, without repetition; with None, those of the invocation.

        The first send that names a member of a group also takes the group's tombstones and its dropped members. They
        are finished with this message, because nothing else will be made from them.
        """
        if made_from is None:
            return list(current.get())
        items = [self._open_items.item_of(parent) for parent in made_from]
        for group in {id(i.group): i.group for i in items if i.group is not None}.values():  # each group once
            group.sent = True
            items.extend(group.lost.values())
            items.extend(group.dropped)
            group.lost, group.dropped = {}, []
        return list(dict.fromkeys(part for item in items for part in item.whole))

    def _make_envelope(self, body: Message, parents: Sequence[Item]) -> Envelope:
        """The next message: with the ticket, group and member that all its parents share."""
        if not parents:
            self._cursor += 1
            key = source_id(f"{self._open_items.node} {self.port}", str(self._cursor))
            group_id, member = getattr(body, "group_id", ""), getattr(body, "member", -1)
            known = isinstance(group_id, str) and isinstance(member, int)
            return Envelope(key, -1, group_id if known else "", member if known else -1, body)
        key = self._next_id(parents)
        self._advance_ordinal(parents)
        heads = [parent.envelope for parent in parents]
        first = heads[0]
        return Envelope(
            key,
            first.ticket if all(head.ticket == first.ticket for head in heads) else -1,
            first.group_id if all(head.group_id == first.group_id for head in heads) else "",
            first.member if all(head.member == first.member for head in heads) else -1,
            body,
        )

    def _next_id(self, parents: Sequence[Item]) -> bytes:
        """The id of the next message made from `parents`."""
        return message_id([item.envelope.id for item in parents], self.port, parents[0].ordinals.get(self.port, 0))

    def _advance_ordinal(self, parents: Sequence[Item]) -> None:
        """Advance the ordinal, because the id from `_next_id` is used now."""
        parents[0].ordinals[self.port] = parents[0].ordinals.get(self.port, 0) + 1

    def _left_out(self, key: bytes, parents: Sequence[Item]) -> bool:
        """Whether a checkpoint already holds the message; if so, count it as sent by its invocation."""
        if key not in self.sent_before:
            return False
        self.sent_before.discard(key)
        self.left_out.add(key)
        self._mark_parents(parents, key)
        return True

    def _mark_parents(self, parents: Sequence[Item], key: bytes) -> None:
        """Record with the parents that the message `key` was made from them and leaves here."""
        self._open_items.note_child(parents, key)
        for item in parents:
            item.sent_on.add(self.port)

    async def _send_once(self, envelope: Envelope, parents: Sequence[Item], *, uses_up: bool = True) -> None:
        """Send, unless a checkpoint already holds the message; with `uses_up`, end the parents that were held."""
        if not self._left_out(envelope.id, parents):
            await self._send_on_all(envelope, parents)
        if uses_up and (held := [item for item in parents if item.held]):
            self._owner.use_up(held)

    async def _send_on_all(self, envelope: Envelope, parents: Sequence[Item]) -> None:
        """Send on one edge after the other. Until every consumer has taken the message, the parents are not acked."""
        for item in parents:
            item.accounted = True
        if any(not edge.rule.overwrites for edge in self.edges):
            self._mark_parents(parents, envelope.id)
        # A resumed run lets the node make messages again that have no parents or are made from held items: the node's
        # state tells what it still has to send. A message that an invocation made from its one item is stored in the
        # checkpoint, because making it may have been expensive.
        makes_again = not parents or any(item.held for item in parents)
        try:
            for number, edge in enumerate(self.edges):
                again = not number and makes_again  # later edges need the same message as the first one
                self._waiting[envelope.id] = WaitingSend(envelope, number, again, not parents)
                awaited = edge.ids(envelope) if parents and not edge.rule.overwrites else []
                for key in awaited:  # before the send, so that no ack can arrive first
                    self._open_items.expect_taker(parents, key)
                began = time.time_ns()
                try:
                    with self._activity.waiting("credit", edge.name, inside=in_invocation.get()):
                        await edge.send(envelope)
                except BaseException:  # a send is all or nothing: no consumer will ack a message that was not sent
                    self._open_items.note_arrivals(awaited)
                    raise
                self._owner.trace_wait(f"credit {edge.name}", began)
                for key in edge.ids(envelope) if edge.rule.to_each else ():
                    self._owner.trace_sent(replace(envelope, id=key))
        finally:
            self._waiting.pop(envelope.id, None)
        self._owner.trace_sent(envelope)

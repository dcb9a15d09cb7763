"""Derived samples: further samples that a node makes from one that it works on, under the same ticket.

A derived sample is a further member of its parent's group. So that nodes downstream know when a group is complete, each
sample that a deriving node takes leaves it as 1 + W members, where W is the number of samples that the graph may derive
there from one (`Facts.derives`): what is not derived leaves as a tombstone, and so does everything that a lost sample
would have had derived from it. Ids and numbers depend on the parent alone: `PARENT/LABEL.ORDINAL`, and the number
K + MEMBER * D + SLOT, where K is the group size, and SLOT counts through all D samples that the graph may derive from
one under any label. These numbers differ for all members of a group, also for what is derived from derived samples.

Invariants
- A derived sample is committed in the ledger before `derive` returns, so before anything of it leaves the node.
- It is an item of the node like the one that it was made from, and that item ends after it. Until then a checkpoint
  holds the parent, whose repeated invocation gets the same samples again.
- An item ends only when each of its derived samples was sent, held or dropped. What was derived from an item that is
  lost meanwhile is lost for the same reason, unless it was sent before.

Waits: `derive` for the ledger's commit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from flowrl.errors import FlowrlError
from flowrl.messages import Prompt, Sample, Tombstone
from flowrl.wire.edges import Delivery
from flowrl.wire.encoding.schema import Envelope, message_id
from flowrl.wire.items import NOT_DERIVED, DerivedAs, Item, PortOwner, make_tombstone

CommitDerived = Callable[[str, str, Sequence[Prompt]], Awaitable[None]]
"""(parent's id, label, derived samples): returns when the ledger has them."""


@dataclass(frozen=True)
class DerivedNumbers:
    """What the numbers of derived samples depend on."""

    group_size: int | None
    """None: that of the sample's own group."""
    derives: Mapping[str, int]
    """Label -> the most samples derived under it from one, in the whole graph."""

    def member_of(self, parent: Prompt | Sample | Tombstone, label: str, ordinal: int) -> int:
        """The number of a derived sample in its group."""
        labels = [*self.derives]
        slot = sum(self.derives[name] for name in labels[: labels.index(label)]) + ordinal
        return (self.group_size or parent.group_size) + parent.member * sum(self.derives.values()) + slot


class DerivedSamples:
    """The derived samples of one node replica, which declares `own` labels; `port` is where their parents arrive."""

    def __init__(
        self,
        owner: PortOwner,
        port: str,
        own: Mapping[str, int],
        numbers: DerivedNumbers,
        *,
        seed: int,
        commit: CommitDerived,
    ) -> None:
        self._owner = owner
        self._open_items = owner.open_items
        self._port = port
        self._own = own
        self._numbers = numbers
        self._seed = seed
        self._commit = commit

    async def derive(self, sample: Prompt | Sample, number: int, label: str, where: str) -> list[Prompt]:
        """See `flowrl.graph.node.Context.derive`; `where` is the line that asks."""
        if not label and len(self._own) == 1:
            (label,) = self._own
        item = self._require_parent(sample, number, label)
        made = [self._make_prompt(sample, label, ordinal) for ordinal in range(number)]
        known = _derived_under(item, label)
        if not known:
            await self._commit(sample.sample_id, label, made)
            if not self._open_items.is_open(item):
                raise FlowrlError(f"{sample.sample_id!r} was finished while samples were derived from it ({where})")
            known = [self._open_child(item, one, DerivedAs(one.sample_id, label, where)) for one in made]
        if len(known) != number:
            raise FlowrlError(
                f"{number} samples were derived from {sample.sample_id!r} under {label!r}, but {len(known)} before"
                f"{_place_of(known[0])}; derive them at once, or under another label"
            )
        return [child.body for child in known]  # type: ignore[misc]

    def _require_parent(self, sample: Prompt | Sample, number: int, label: str) -> Item:
        """The item of the sample. Raises FlowrlError if nothing, or not so many, can be derived from it."""
        if label not in self._own:
            raise FlowrlError(
                f"samples are derived under {label!r}, but the node declares {', '.join(self._own)}; add it to "
                "derives= in its facts()"
            )
        if not 1 <= number <= self._own[label]:
            raise FlowrlError(
                f"{number} samples are derived from {sample.sample_id!r} under {label!r}, but the node declares 1 to "
                f"{self._own[label]}; raise derives= in its facts(), or derive none by not calling this"
            )
        try:
            item = self._open_items.item_of(sample)
        except ValueError as error:
            raise FlowrlError(f"nothing can be derived from {sample.sample_id!r}: {error}") from None
        what = ""
        if item.derived_from is not None:
            what = "it is derived itself; derive from it in a node that it is sent to"
        elif item.lost is not None:
            what = f"it is {item.lost.state} ({item.lost.reason}); derive before you drop it"
        elif item.sent_on and not item.derived:
            what = f"something made from it was sent on {', '.join(sorted(item.sent_on))}; derive before you send"
        elif item.envelope.member < 0 or item.port != self._port:
            what = f"it came by {item.port} as no single sample of an admitted group"
        if what:
            raise FlowrlError(f"nothing can be derived from {sample.sample_id!r}: {what}")
        return item

    def _make_prompt(self, parent: Prompt | Sample, label: str, ordinal: int) -> Prompt:
        sample_id = f"{parent.sample_id}/{label}.{ordinal}"
        seed = blake2b(f"{self._seed}/{sample_id}".encode(), digest_size=4).digest()
        member = self._numbers.member_of(parent, label, ordinal)
        return Prompt.derived_from(parent, sample_id, member, int.from_bytes(seed, "big") & 0x7FFFFFFF)

    def _open_child(self, parent: Item, body: Prompt | Tombstone, derived_as: DerivedAs) -> Item:
        """Make a derived sample, or the tombstone of one that will never be, an open item."""
        head = parent.envelope
        key = message_id([head.id], f"derived {derived_as.sample_id}", 0)
        envelope = Envelope(key, head.ticket, head.group_id, body.member, body)
        delivery = Delivery(envelope, lambda key: self._open_items.note_arrivals([key]))
        child = self._open_items.take_delivery(delivery, f"{parent.port} derived")
        child.derived_from, child.derived_as = parent, derived_as
        parent.derived = (*parent.derived, child)
        self._open_items.derived[derived_as.sample_id] = child
        self._open_items.expect_taker([parent], key)
        return child

    # The end of a parent

    def finish_derived(self, parent: Item) -> bool:
        """Let all that was derived from `parent`, whose work is over, end. False if some of it ends later.

        Raises FlowrlError if a derived sample was neither sent, held nor dropped, and the parent is not lost either.
        """
        if parent.port != self._port or parent.envelope.member < 0:
            return True
        if not parent.is_ending:
            for child in parent.derived:
                self._finish_child(parent, child)
            for label, most in self._own.items():
                for ordinal in range(most):
                    self._leave_out(parent, label, ordinal)
            parent.is_ending = True
        return not any(self._open_items.is_open(child) for child in parent.derived)

    def _finish_child(self, parent: Item, child: Item) -> None:
        if not self._open_items.is_open(child) or child.held:
            return
        if child.accounted:
            if child.lost is None:
                self._owner.use_up([child])
            return
        lost = parent.lost or (parent.body if isinstance(parent.body, Tombstone) else None)
        if lost is None:
            assert isinstance(child.body, Prompt)
            raise FlowrlError(
                f"it finished {child.body.parent_id!r} without a send, hold or drop of {child.body.sample_id!r}, which "
                f"it derived from it{_place_of(child)}; send something made from each derived sample, or end it "
                "with `self.PORT.drop(child, reason)`"
            )
        child.lost = make_tombstone(child, self._open_items.node, lost.reason, lost.state)
        self._owner.lose([child], child.lost)

    def _leave_out(self, parent: Item, label: str, ordinal: int) -> None:
        """Send a tombstone in place of this sample, unless it was derived."""
        body: Any = parent.body
        names = [body.sample_id] if isinstance(body, Prompt | Sample) else body.sample_ids[:1]
        head = parent.envelope
        sample_id = f"{names[0] if names else head.group_id}/{label}.{ordinal}"
        if sample_id in self._open_items.derived:
            return
        member = self._numbers.member_of(body, label, ordinal)
        node, size = self._open_items.node, body.group_size
        marker = Tombstone(head.group_id, member, "dropped", NOT_DERIVED, node, (sample_id,), size)
        child = self._open_child(parent, marker, DerivedAs(sample_id, label, ""))
        if self._owner.skip_sent([child]):  # derived before a checkpoint; the repeated invocation returned early
            self._owner.use_up([child])
        else:
            self._owner.forward([child], marker)


def _derived_under(parent: Item, label: str) -> list[Item]:
    return [child for child in parent.derived if child.derived_as is not None and child.derived_as.label == label]


def _place_of(child: Item) -> str:
    return f" ({child.derived_as.where})" if child.derived_as is not None and child.derived_as.where else ""

"""Items: the messages that one host works on, and when each of them is finished.

Invariants
- Every delivery that the node takes becomes one `Item`, and every item is acked exactly once: when its invocation has
  ended and the next processes have taken everything made from it (`Custody` counts that).
- An invocation is ended by the engine (when user code asks for the next item, or the body returns), by a send that
  names the item, or by a drop. It is an error of the node if an invocation ends without a send, hold or drop of its
  item.
- The parts of a joined sample (`Item.whole`) share one fate: messages are made from all of them, and they are held,
  dropped and ended together.
- Tombstones are items too, but user code never sees them.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from flowrl.errors import FlowrlError
from flowrl.messages import Message, Prompt, Record, Sample, Tombstone
from flowrl.messages.episode import AskRecord, Reply
from flowrl.wire.activity import Activity
from flowrl.wire.edges import Delivery
from flowrl.wire.encoding.schema import Envelope

REMEMBER = 1 << 14
"""Number of groups to remember. The members in transit at any one time belong to fewer groups than this."""


class GivenUp:
    """The groups that one node replica has to give up, and its tasks that work on members of any group.

    A group is given up when a node drops the whole of it while other nodes still have members of it.

    Invariants
    - Work of `each` on a member is cancelled; its sample ends with the same reason, and a tombstone replaces it.
    - A member that arrives later does not reach user code; such a tombstone also replaces this member.
    - A member that user code holds, or works on in a plain loop, continues to the next node, and ends there.

    Every member still produces a message or a tombstone, so groups and joins downstream become complete.
    """

    def __init__(self) -> None:
        self._why: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Group -> (state, reason)."""
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}

    def give_up_group(self, group_id: str, state: str, reason: str) -> None:
        """Give up a group: cancel the work on its members."""
        self._why[group_id] = state, reason
        if len(self._why) > REMEMBER:
            self._why.popitem(last=False)
        for task in self._tasks.get(group_id, ()):
            task.cancel()

    def reason_of(self, group_id: str) -> tuple[str, str] | None:
        """(state, reason) of a group that was given up."""
        return self._why.get(group_id) if self._why else None

    def begin_work(self, group_id: str) -> None:
        """The current task starts work on a member of `group_id`, and may be cancelled until `end_work`."""
        task = asyncio.current_task()
        if group_id and task is not None:
            self._tasks.setdefault(group_id, set()).add(task)

    def end_work(self, group_id: str) -> None:
        """The current task is done with the member."""
        tasks, task = self._tasks.get(group_id), asyncio.current_task()
        if tasks is not None and task is not None:
            tasks.discard(task)
            if not tasks:
                del self._tasks[group_id]


K = TypeVar("K", bound=Hashable)


class Custody(Generic[K]):
    """Decides when a node may ack an item that it took. Each method returns the items whose acks are due now.

    An item is due for its ack when its invocation has ended and the next process has taken every message made from
    it (its children), on every lane on which the child was sent. From then on the child's own producer keeps the
    copy that a crash would need.

    Pure. Invariants
    - Each item counts what it still waits for: its open invocation, and one for each lane on which a child has not
      arrived. The item is due exactly when the count reaches 0, and is then forgotten.
    - A child is counted at all of its parents, and is forgotten when it has arrived on all of its lanes.
    - Arrivals of unknown children (replays of children whose parents were acked earlier) change nothing.
    """

    def __init__(self) -> None:
        self._counts: dict[K, int] = {}
        self._parents: dict[K, Sequence[K]] = {}
        self._lanes: dict[K, int] = {}

    def __len__(self) -> int:
        """Number of items taken and not yet due."""
        return len(self._counts)

    def begin(self, item: K) -> None:
        """The node took `item`: its invocation is open."""
        assert item not in self._counts, "an item is taken in once; receivers drop repetitions"
        self._counts[item] = 1

    def child(self, parents: Sequence[K], child: K, num_lanes: int = 1) -> None:
        """`child` is made from `parents` and will be sent on `num_lanes` more lanes.

        Call this before the send. Calls for several edges add up. All parents must still be open here.
        """
        if num_lanes == 0:
            return
        known = self._parents.get(child)
        if known is None:
            self._parents[child] = parents
            if num_lanes > 1:
                self._lanes[child] = num_lanes
            for parent in parents:
                self._counts[parent] += 1
        else:
            assert tuple(known) == tuple(parents), "a child has one set of parents"
            self._lanes[child] = self._lanes.get(child, 1) + num_lanes

    def arrived(self, child: K) -> Sequence[K]:
        """The next process took `child` on one of its lanes."""
        lanes = self._lanes.pop(child, 1)
        if lanes > 1:
            self._lanes[child] = lanes - 1
            return ()
        parents = self._parents.pop(child, ())
        return [parent for parent in parents if self._count_down(parent)]

    def end(self, item: K) -> Sequence[K]:
        """The invocation of `item` has ended."""
        return (item,) if self._count_down(item) else ()

    def _count_down(self, item: K) -> bool:
        count = self._counts[item] - 1
        if count:
            self._counts[item] = count
            return False
        del self._counts[item]
        return True


class ItemAsks:
    """The asks of one item, each known by a digest of what it asked and by its number among equal asks.

    A reply that a checkpoint has is found by what it answers, so the order of asks may differ in a resumed run. Equal
    asks get their replies in the order of asking, whichever reply was first.
    """

    def __init__(self, record: AskRecord | None = None) -> None:
        self.began_s = time.monotonic()
        self.replies: list[tuple[bytes, Reply]] = []
        """All replies so far, each with the name of its call."""
        self._kept: dict[bytes, Reply] = {}
        """Replies from the checkpoint that were not asked for again."""
        self._times: Counter[bytes] = Counter()
        self._turns: defaultdict[str, set[int]] = defaultdict(set)
        """Sample -> turns that its trained asks have."""
        self.unsampled: dict[str, dict[str, Reply | None]] = {}
        """Sample that is not made yet -> ids of its trained asks, with their replies."""
        self.sampled: dict[str, tuple[str, ...]] = {}
        """Sample that is made -> ids of the asks whose replies are in it."""
        self.sampled_before = {} if record is None else record.sampled
        """Those that were made before the checkpoint."""
        for call, reply in () if record is None else zip(record.calls, record.replies, strict=True):
            self.replies.append((call, reply))
            self._kept[call] = reply
            if reply.sample_id:
                self._turns[reply.sample_id].add(int(reply.request_id.rpartition(".")[2]))
                self.unsampled.setdefault(reply.sample_id, {})[reply.request_id] = reply

    def make_record(self) -> AskRecord:
        """What a checkpoint keeps."""
        calls, replies = zip(*self.replies, strict=True)
        booked = tuple(reply.request_id for reply in replies if reply.sample_id)
        return AskRecord(booked, replies=replies, calls=calls, sampled={**self.sampled_before, **self.sampled})

    def name_call(self, digest: bytes) -> bytes:
        """The name of the next call with this digest: the digest, and the number of equal calls so far, it included."""
        self._times[digest] += 1
        return digest + self._times[digest].to_bytes(4, "big")

    def take_known(self, call: bytes) -> Reply | None:
        """The checkpoint's reply to this call; None if it has to be asked."""
        return self._kept.pop(call, None)

    def next_turn(self, sample_id: str) -> int:
        """The smallest number that no trained ask for the sample has: turns leave none out."""
        turns = self._turns[sample_id]
        turn = next(number for number in itertools.count() if number not in turns)
        turns.add(turn)
        return turn

    def note_reply(self, call: bytes, reply: Reply) -> None:
        """A reply has come."""
        self.replies.append((call, reply))
        if reply.sample_id:
            self.unsampled.setdefault(reply.sample_id, {})[reply.request_id] = reply


NOT_ROUTED = "not_routed"
"""Reason of a tombstone for a sample that its node sent on other ports only."""
NOT_DERIVED = "not_derived"
"""Reason of a tombstone for a sample that a node may derive, and did not: the ledger has no such sample."""


class DerivedAs(NamedTuple):
    """How a sample was derived."""

    sample_id: str
    label: str
    where: str
    """The line that derived it."""


ItemKey = tuple[str, bytes]
"""(in port as "node.port", message id)"""


@dataclass(slots=True, eq=False)
class Item:
    """One message that a node has taken."""

    delivery: Delivery
    port: str = ""
    """The in port at which it arrived."""
    ordinals: dict[str, int] = field(default_factory=dict)
    """Out port -> number of messages made from it so far."""
    accounted: bool = False
    """Whether a send, hold or drop has named this item."""
    held: bool = False
    """Whether the item stays open after its invocation, until a send that names it, a drop or `finish` ends it."""
    lost: Tombstone | None = None
    """Set when the item's loss is booked: the marker that replaces the item from then on, also in a checkpoint."""
    record: Callable[[], Record] | None = None
    """Returns what a checkpoint stores with the item (`In.keep`)."""
    asks: ItemAsks | None = None
    """What was asked for it (`Ask`); None before the first ask."""
    group: OpenGroup | None = None
    """The group to which `port.groups` added the item."""
    children: list[bytes] = field(default_factory=list)
    """Ids of the messages made from it."""
    sent_on: set[str] = field(default_factory=set)
    """Out ports on which something was made from it."""
    parts: tuple[Item, ...] = ()
    """For a joined sample: the item from each port, this one included."""
    others: tuple[Item, ...] = ()
    """For a tombstone that represents several tombstones: the other ones."""
    derived_from: Item | None = None
    """For a derived sample: the item that it was made from."""
    derived_as: DerivedAs | None = None
    derived: tuple[Item, ...] = ()
    """What was derived from it."""
    is_ending: bool = False
    """Whether the work on it is over, and only derived samples are still open."""

    @property
    def whole(self) -> tuple[Item, ...]:
        """The items that share this one's fate."""
        if not self.parts and not self.others:
            return (self,)
        return tuple(item for part in self.parts or (self,) for item in (part, *part.others))

    @property
    def given(self) -> Any:
        """The value for user code: the message, or the messages of all parts."""
        return tuple(part.body for part in self.parts) if self.parts else self.body

    @property
    def place(self) -> ItemKey:
        """Its identity within the node: a message that arrives at two ports is two items."""
        return self.port, self.envelope.id

    @property
    def envelope(self) -> Envelope:
        return self.delivery.envelope

    @property
    def body(self) -> Message:
        return self.delivery.envelope.body


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group whose members are held until a send names the group, or all of them are dropped."""

    group_id: str
    ticket: int
    size: int
    """Number of members, lost ones included."""
    items: dict[int, Item] = field(default_factory=dict)
    """Member number -> a member that arrived as a message."""
    lost: dict[int, Item] = field(default_factory=dict)
    """Member number -> a member that arrived as a tombstone."""
    dropped: list[Item] = field(default_factory=list)
    """Those of `items` that this node has dropped."""
    sent: bool = False
    """Whether a send has named the group. It also finished `lost` and `dropped`; members dropped later end at once."""

    @property
    def present(self) -> list[Item]:
        """The members that are neither lost nor dropped."""
        return [item for item in self.items.values() if item not in self.dropped]

    @property
    def complete(self) -> bool:
        return len(self.items) + len(self.lost) >= self.size


current: ContextVar[tuple[Item, ...]] = ContextVar("flowrl_current_items", default=())
"""The items that the current invocation works on: none, one, or all parts of a joined sample."""
asking: ContextVar[Item | None] = ContextVar("flowrl_asking_item", default=None)
"""The item for which the current invocation asks: its own, or its group's first member."""
at_hand: ContextVar[int] = ContextVar("flowrl_ticket_at_hand", default=-1)
"""The ticket of the current invocation, -1 outside of invocations."""


class OpenItems:
    """All items of one node replica, looked up by the identity of their bodies."""

    def __init__(self, node: str, ended: Callable[[Item], None] = lambda item: None) -> None:
        self.node = node
        self.ended = ended
        """Called with every item whose invocation has ended."""
        self._custody: Custody[Hashable] = Custody()
        """Tracks items by their place, and messages made from them by their id."""
        self._open: dict[int, Item] = {}
        self._by_place: dict[Hashable, Item] = {}
        self.asked_before: dict[ItemKey, AskRecord] = {}
        """What a checkpoint has of the asks of items that were not taken yet."""
        self.given_up = GivenUp()
        self.derived: dict[str, Item] = {}
        """Id of a derived sample -> its item, until the item that it was derived from has ended."""
        self.finish_derived: Callable[[Item], bool] | None = None
        """In a node that derives samples: lets those end that were derived from an item; see `DerivedSamples`."""
        self.failed_ticket: int | None = None
        """The ticket that the node worked on when it raised its first exception; None if it raised none."""

    def __len__(self) -> int:
        return len(self._open)

    def take_delivery(self, delivery: Delivery, port: str) -> Item:
        """Make a taken message an open item."""
        item = Item(delivery, port)
        if id(item.body) in self._open:  # two branches of one process sent the same object
            delivery.envelope = dataclasses.replace(item.envelope, body=copy.copy(item.body))
        self._open[id(item.body)] = item
        self._by_place[item.place] = item
        self._custody.begin(item.place)
        return item

    def item_of(self, body: Message) -> Item:
        """The open item of a message object. Raises ValueError if there is none."""
        item = self._open.get(id(body))
        if item is None:
            raise ValueError(
                f"node {self.node!r}: this {type(body).__name__} is not open here (already finished, or not received "
                "by this node); use it before its invocation ends, or `hold` it"
            )
        return item

    def find_item(self, body: Message) -> Item | None:
        """The open item of a message object; None if there is none."""
        return self._open.get(id(body))

    def is_open(self, item: Item) -> bool:
        """Whether the item's invocation has not ended."""
        return id(item.body) in self._open

    def note_child(self, parents: Iterable[Item], child_id: bytes) -> None:
        """`child_id` was made from `parents`."""
        for item in parents:
            item.accounted = True
            item.children.append(child_id)
            if item.derived_from is not None:  # which a resumed run begins again
                item.derived_from.children.append(child_id)

    def expect_taker(self, parents: Iterable[Item], child_id: bytes) -> None:
        """`child_id`, made from `parents`, is being sent on one lane more: a consumer has to take it."""
        self._custody.child([item.place for item in parents], child_id)

    def note_arrivals(self, child_ids: Iterable[bytes]) -> None:
        """Consumers have taken these messages (each id appears once for each lane): ack the items that are finished."""
        for child_id in child_ids:
            self._ack_items(self._custody.arrived(child_id))

    def end_item(self, item: Item) -> None:
        """End the item's invocation. Does nothing if it has ended already.

        An item from which samples were derived ends after them.
        """
        if self.finish_derived is not None and self.is_open(item) and not self.finish_derived(item):
            return
        if self._open.pop(id(item.body), None) is None:
            return
        self.ended(item)
        self._ack_items(self._custody.end(item.place))
        for child in item.derived:
            if child.derived_as is not None:
                del self.derived[child.derived_as.sample_id]
        if (parent := item.derived_from) is not None and parent.is_ending:
            self.end_item(parent)

    def find_derived(self, body: Message) -> Item | None:
        """The item of the derived sample that `body` is a message of; None if it is of another sample."""
        if not self.derived or not isinstance(body, Prompt | Sample):
            return None
        return self.derived.get(body.sample_id)

    def waiting_for_children(self) -> list[ItemKey]:
        """Items whose invocation has ended, but that are not acked yet: a checkpoint stores their children instead."""
        return [item.place for item in self._by_place.values() if id(item.body) not in self._open]

    def lost_items(self) -> list[tuple[ItemKey, Tombstone]]:
        """Items whose loss is booked and whose marker is not sent yet: a checkpoint stores the marker instead."""
        return [(item.place, item.lost) for item in self._open.values() if item.lost is not None]

    def kept_records(self) -> list[tuple[ItemKey, Record]]:
        """What a checkpoint stores with items in progress."""
        kept = [(item, item.record) for item in self._open.values() if item.lost is None]
        return [(item.place, record()) for item, record in kept if record is not None]

    def asks_of(self, item: Item) -> ItemAsks:
        """What was asked for an open item, before a resume too."""
        if item.asks is None:
            item.asks = ItemAsks(self.asked_before.pop(item.place, None))
        return item.asks

    def kept_asks(self) -> list[tuple[ItemKey, AskRecord]]:
        """The replies that a checkpoint stores for items in progress, and for those not taken again yet."""
        asked = [(item.place, item.asks) for item in self._open.values() if item.asks is not None and item.lost is None]
        return [*self.asked_before.items(), *((place, asks.make_record()) for place, asks in asked if asks.replies)]

    def sent_by_open_items(self) -> list[bytes]:
        """Ids of the messages made from items whose invocation has not ended."""
        return [child for item in self._open.values() for child in item.children]

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Record the ticket of the first invocation that raises; the exception propagates."""
        try:
            yield
        except Exception:  # noted and raised again: the body may raise anything
            ticket = at_hand.get()
            if self.failed_ticket is None and ticket >= 0:
                self.failed_ticket = ticket
            raise

    def _ack_items(self, places: Iterable[Hashable]) -> None:
        for place in places:
            self._by_place.pop(place).delivery.ack()

    def end_invocation(self, item: Item, *, sink: bool) -> None:
        """The body is done with the item: end it, unless it is held. A `sink` node need not send, hold or drop it."""
        if item.held:
            return
        if not item.accounted and not sink:
            raise FlowrlError(
                f"it finished a {type(item.body).__name__} (ticket {item.envelope.ticket}) without a "
                "send, hold or drop; end it with `self.PORT.drop(item, reason)` if nothing is made from it"
            )
        self.end_item(item)


class PortOwner(Protocol):
    """The node replica whose ports these are: it books what is lost, and passes it on."""

    open_items: OpenItems
    activity: Activity

    async def admit(
        self, samples: Sequence[Prompt], trainers: Sequence[str], asks: int, asked_by: str | None
    ) -> int | None:
        """Wait for a committed ticket for one group that can reach `trainers`; None when no further group is wanted.

        `asks` and `asked_by` are those of `flowrl.graph.ports.Out.admit`.
        """

    def lose(self, items: Sequence[Item], marker: Tombstone) -> None:
        """Book `marker` for the trainers that get nothing made from `items`, and forward it as `forward` does."""

    def book(self, items: Sequence[Item], marker: Tombstone, *, behind: Collection[str] | None = None) -> None:
        """Book `marker` for the trainers (of `behind`, if given) that get nothing made from `items`."""

    def book_replies(self, item: Item, body: Message) -> None:
        """If `body` is the rollout of a derived sample from replies that this node asked for, report it, once."""

    def skip_sent(self, items: Sequence[Item]) -> bool:
        """Whether a checkpoint has messages made from `items`; these count as sent now."""

    def forward(self, items: Sequence[Item], marker: Tombstone) -> None:
        """Send `marker` on every out port that sent nothing made from `items`, and end the items after that."""

    async def leave(self, items: Sequence[Item]) -> None:
        """The work on `items` is over: send tombstones where samples are counted and nothing was sent."""

    def use_up(self, items: Sequence[Item]) -> None:
        """End held `items`: the message made from them has been sent."""

    def give_up(self, item: Item, state: str, reason: str) -> None:
        """The whole group of `item` is lost: end its other members in whichever node they are."""

    def trace_invocation(self, item: Item, *, begins: bool) -> None:
        """Trace that an invocation of `item` began or ended."""

    def trace_sent(self, envelope: Envelope) -> None:
        """Trace that `envelope` was sent."""

    def trace_wait(self, what: str, since_ns: int) -> None:
        """Trace a wait for `what` ("ticket" or "credit EDGE") that ends now and began at `time.time_ns()` since_ns."""


def make_tombstone(item: Item, node: str, reason: str, state: str) -> Tombstone:
    """The marker that replaces `item` from here on."""
    body, envelope = item.body, item.envelope
    if isinstance(body, Tombstone):
        return body
    samples = samples_of(body)
    return Tombstone(
        group_id=envelope.group_id,
        member=envelope.member,
        state=state,
        reason=reason,
        node=node,
        sample_ids=tuple(sample.sample_id for sample in samples),
        group_size=getattr(body, "group_size", 0),
        response_tokens=sum(sample.response_tokens for sample in samples if isinstance(sample, Sample)),
    )


def samples_of(body: Any) -> tuple[Prompt | Sample, ...]:
    """The samples in a message: the message itself, or those in its fields at any depth."""
    if isinstance(body, Prompt | Sample):
        return (body,)
    if isinstance(body, Tombstone):
        return ()
    if isinstance(body, Message):
        return tuple(s for f in dataclasses.fields(body) for s in samples_of(getattr(body, f.name)))  # type: ignore[arg-type]
    if isinstance(body, Mapping):
        return tuple(sample for value in body.values() for sample in samples_of(value))
    if isinstance(body, tuple | list):
        return tuple(sample for value in body for sample in samples_of(value))
    return ()

"""The lane protocol: two pure machines, one at each end of a lane.

A lane connects one producer process to one consumer replica on one edge. The owner of a machine passes the
received frames to `on_*`, and sends the frames that the machine collects in `out`.

Invariants
- At most `capacity` messages are sent and not yet taken by the consumer, replays included.
- Messages are numbered from 0 within a session, and the consumer takes them in that order. A session is the pair of
  the two processes' incarnations: when either process is replaced, both ends begin a new session, and ignore frames
  of any other session.
- The sender keeps every message until its ack. In a new session it first sends all kept messages again, in the old
  order, and only then new ones. Otherwise it repeats a message only if the receiver, after a gap, asks for it.
- Messages that a replaced producer sent and that nobody has taken stay in the queue, outside the new session: the
  receiver returns no credit for them, whether they are taken or cancelled.
- A cancel is in force until the ack: the sender repeats it after every replay of its message.
- A message id enters the node once, even if copies arrive on several lanes or in several sessions (`Seen`). The
  receiver returns the credit of a repetition, and sends its ack when the first copy is finished.
- `close` follows everything that was sent. A failure of the other process is never an end of stream.

What ends a wait: a sender without credit waits for a credit frame, a failure or a new session; a receiver
without a message waits for data, `close` or a failure. The owner wakes them after each `on_*`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from flowrl.messages.base import message_type
from flowrl.wire.encoding.multiparts import (
    ACK,
    CANCEL,
    CLOSE,
    CREDIT,
    DATA,
    ERROR,
    HELLO,
    REFUSE,
    RESEND,
    SYNC,
    Frame,
    lane_number,
)
from flowrl.wire.encoding.schema import Envelope, payload_bytes, schema_of


class RetainedBytes:
    """Sums the bytes of kept messages. Measures each message only once: to measure ten thousand messages every second
    would be expensive."""

    def __init__(self) -> None:
        self._sizes: dict[bytes, int] = {}
        """Message id -> bytes, for the messages of the last call of `of`."""

    def of(self, kept: Iterable[Envelope]) -> int:
        """The bytes of `kept`."""
        before = self._sizes
        self._sizes = {
            envelope.id: before[envelope.id] if envelope.id in before else payload_bytes(envelope.body)
            for envelope in kept
        }
        return sum(self._sizes.values())


REMEMBER = 1 << 16


class Acks(Protocol):
    """The part of a lane's receiving end that deals with acks."""

    @property
    def session(self) -> int: ...
    def finish(self, seq: int, session: int) -> None: ...


SeenClaim = tuple[Acks, int, int]
"""One copy of a message: its lane, seq and session."""


class Seen:
    """The ids that have entered one port."""

    def __init__(self, remember: int = REMEMBER) -> None:
        self._remember = remember
        self._open: dict[bytes, SeenClaim | list[SeenClaim]] = {}
        self._recent: set[bytes] = set()
        self._older: set[bytes] = set()

    def enter(self, id: bytes, lane: Acks, seq: int) -> bool:
        """Record a copy. Returns True if it is the first. A copy of a finished message is acked at once."""
        claims = self._open.get(id)
        if claims is None:
            if id in self._recent or id in self._older:
                lane.finish(seq, lane.session)
                return False
            self._open[id] = (lane, seq, lane.session)
            return True
        self._open[id] = [*_each(claims), (lane, seq, lane.session)]
        return False

    def restore(self, id: bytes) -> None:
        """Record a message that came from a checkpoint and not over a lane."""
        assert id not in self._open
        self._open[id] = []

    def is_open(self, id: bytes) -> bool:
        """Whether the message has arrived and is not finished."""
        return id in self._open

    def open_of(self, lane: Acks) -> list[int]:
        """The seqs of the copies that arrived on `lane` in its current session and are not finished."""
        claims = [claim for copies in self._open.values() for claim in _each(copies)]
        return [seq for at, seq, session in claims if at is lane and session == lane.session]

    def finish(self, id: bytes) -> None:
        """The message is finished: ack every copy. Call once per id."""
        claims = self._open.pop(id)
        recent = self._recent
        if len(recent) >= self._remember:  # two sets: forgetting many ids is one assignment
            self._older = recent
            self._recent = recent = set()
        recent.add(id)
        if isinstance(claims, tuple):
            lane, seq, session = claims
            lane.finish(seq, session)
        else:
            for lane, seq, session in claims:
                lane.finish(seq, session)


def _each(claims: SeenClaim | list[SeenClaim]) -> list[SeenClaim]:
    """The claims as a list. Most ids have one copy, which is stored without a list."""
    return claims if isinstance(claims, list) else [claims]


@dataclass(frozen=True)
class LaneSpec:
    """The specification of a lane. Both ends are made from equal specs."""

    name: str
    edge: str
    producer: str
    """Name of the node replica, for example "generator/0"."""
    consumer: str
    producer_host: str
    consumer_host: str
    capacity: int
    kind: Literal["queue", "latest"] = "queue"
    types: tuple[str, ...] = ()
    """Names of the message classes; both ends must have them with the same fields."""

    @property
    def number(self) -> int:
        """The 32-bit number that identifies the lane on the wire."""
        return lane_number(self.name)

    def schemas(self) -> tuple[tuple[str, int], ...]:
        """(name, schema hash) of every type, as this process knows them."""
        return tuple((name, schema_of(message_type(name)).hash) for name in self.types)


def schema_problem(spec: LaneSpec, schemas: Iterable[tuple[str, int]]) -> str:
    """Why the sender's schemas do not match those of this process, "" if they do."""
    here = dict(spec.schemas())
    for name, number in schemas:
        if here.get(name) != number:
            return (
                f"lane {spec.name!r} carries {name} of schema {number:#010x} at {spec.producer}, but "
                f"{here.get(name, 0):#010x} at {spec.consumer}; run the same code in both processes"
            )
    return ""


def session_number(producer_incarnation: int, consumer_incarnation: int) -> int:
    """The session of these two incarnations."""
    return producer_incarnation << 16 | consumer_incarnation


@dataclass(frozen=True)
class LaneStatistics:
    """Statistics of one end of a lane at one moment. The counts of the other end are 0."""

    depth: int = 0
    """Messages between the nodes: sent, or waiting at this end, and not yet taken."""
    sent: int = 0
    received: int = 0
    acked: int = 0
    unacked: int = 0
    """Messages kept until their ack."""
    unacked_bytes: int = 0
    blocked_s: float = 0.0
    """Seconds in which sends on the edge waited at this producer; all its lanes of the edge report the same value."""
    credits: int = 0
    capacity: int = 0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


__all__ = ["LaneSpec", "LaneStatistics", "ReceiverLane", "SenderLane", "schema_problem", "session_number"]


class SenderLane:
    """The producer's end of a queue lane."""

    def __init__(self, spec: LaneSpec, session: int = 0) -> None:
        self.spec = spec
        self.session = session
        self.out: list[Frame] = []
        self.failed = ""
        """Why the lane can send no more messages, "" if it has not failed."""
        self.closed = False
        self.num_sent = 0
        self.num_taken = 0
        self.num_acked = 0
        self.credits = spec.capacity
        """Number of new messages that may be sent now. Negative while a replay is longer than the capacity."""
        self._number = spec.number
        self._capacity = spec.capacity
        self._next = 0  # number of the session's next message; those below `_taken` were taken
        self._taken = 0
        self._kept: dict[int, Envelope] = {}
        self._untaken: deque[bytes] = deque()
        self._backlog: deque[Envelope] = deque()  # to be replayed when there is capacity, before new messages
        self._taken_before: set[bytes] = set()
        """Messages replayed to a new consumer that an earlier one had taken: `on_credit` has already reported them."""
        self._cancelled: set[bytes] = set()
        """Messages that the consumer was asked to drop and has not acked."""
        self._retained = RetainedBytes()
        self.say_hello()

    @property
    def depth(self) -> int:
        return self._next - self._taken + len(self._backlog)

    def send(self, envelope: Envelope) -> None:
        """Send a new message. Call only with a credit and before `close`."""
        assert not self.closed and self.credits > 0, f"{self.spec.name}: sent without a credit, or after close"
        self.num_sent += 1
        self.credits -= 1
        # A copy of `_transmit`: every message passes here, and a call would cost too much.
        seq = self._next
        self._kept[seq] = envelope
        self._untaken.append(envelope.id)
        self._next = seq + 1
        self.out.append((DATA, self._number, self.session, seq, [envelope]))

    def _transmit(self, envelope: Envelope) -> None:
        seq = self._next
        self._kept[seq] = envelope
        self._untaken.append(envelope.id)
        self._next = seq + 1
        self.out.append((DATA, self._number, self.session, seq, [envelope]))

    def unacked(self) -> list[Envelope]:
        """All kept messages, oldest first."""
        return [*self._kept.values(), *self._backlog]

    def close(self) -> None:
        """Allow no more new messages. Replays are still sent."""
        if not self.closed:
            self.closed = True
            self._say_close()

    def _say_close(self) -> None:
        if self.closed and not self._backlog:
            self.out.append((CLOSE, self._number, self.session, self._next, None))

    def cancel(self, ids: Sequence[bytes]) -> None:
        """Ask the consumer to drop these messages: it skips, and thereby acks, those it has not taken.

        This includes messages that an earlier incarnation of this process sent.
        """
        self._cancelled |= {envelope.id for envelope in self.unacked()}.intersection(ids)
        self._say_cancel(ids)

    def _say_cancel(self, ids: Collection[bytes]) -> None:
        if ids:
            self.out.append((CANCEL, self._number, self.session, 0, tuple(ids)))

    def fail(self, reason: str) -> None:
        """Tell the consumer that this end has failed."""
        self.failed = reason
        self.out.append((ERROR, self._number, self.session, 0, reason))

    def say_hello(self) -> None:
        """Report what was sent and is kept: the receiver repeats frames that may be lost and asks for what it lacks."""
        # Called at the start of a session, and when the transport may have lost frames.
        kept = tuple(self._kept)
        self.out.append((HELLO, self._number, self.session, self._next, (self.spec.schemas(), kept)))
        self._say_cancel(self._cancelled)
        self._say_close()

    def on_credit(self, taken: int) -> list[bytes]:
        """The consumer has taken all messages below `taken`. Returns the ids that no consumer had taken before.

        A credit for messages that were never sent fails the lane; senders that wait for credit wake up even then.
        """
        if taken > self._next:
            self.fail(f"received a credit for {taken} messages, but only {self._next} were sent")
            taken = self._next
        if taken <= self._taken:
            return []
        untaken = self._untaken
        ids = [untaken.popleft() for _ in range(self._taken, taken)]
        self.credits += taken - self._taken
        self.num_taken += taken - self._taken
        self._taken = taken
        if self._backlog:
            self._replay()
        if self._taken_before:
            ids = self._first_time(ids)
        return ids

    def _replay(self) -> None:
        while self._backlog and self._next - self._taken < self._capacity:
            self._transmit(self._backlog.popleft())
        self._say_cancel(self._cancelled)
        self._say_close()

    def _first_time(self, ids: list[bytes]) -> list[bytes]:
        new = [id for id in ids if id not in self._taken_before]
        self._taken_before.difference_update(ids)
        return new

    def on_ack(self, seqs: Iterable[int]) -> list[bytes]:
        """The consumer has finished these messages. Returns the ids of those not acked before."""
        kept = self._kept
        ids = [kept.pop(seq).id for seq in seqs if seq in kept]
        self.num_acked += len(ids)
        if self._cancelled:
            self._cancelled.difference_update(ids)
        return ids

    def on_resend(self, first: int) -> None:
        """Message `first` and those after it have not reached the receiver: send them again."""
        for seq in range(max(first, self._taken), self._next):
            if seq in self._kept:
                self.out.append((DATA, self._number, self.session, seq, [self._kept[seq]]))
        self._say_cancel(self._cancelled)
        self._say_close()

    def on_error(self, reason: str) -> None:
        """The consumer's end has failed."""
        self.failed = self.failed or reason

    def flush(self) -> list[Frame]:
        """Return, and remove, all frames to be sent now."""
        frames, self.out = self.out, []
        return frames

    def restart(self, session: int) -> None:
        """The consumer was replaced: begin a new session, and replay all kept messages."""
        self.session = session
        self.failed = ""
        self.out.clear()
        self._taken_before |= {envelope.id for seq, envelope in self._kept.items() if seq < self._taken}
        self._backlog = deque(self.unacked())
        self._kept = {}
        self._untaken.clear()
        self._next = self._taken = 0
        self.credits = self._capacity - len(self._backlog)
        self.say_hello()
        self._replay()

    def statistics(self, blocked_s: float = 0.0) -> LaneStatistics:
        return LaneStatistics(
            depth=self.depth,
            sent=self.num_sent,
            acked=self.num_acked,
            unacked=len(self._kept) + len(self._backlog),
            unacked_bytes=self._retained.of(self.unacked()),
            blocked_s=blocked_s,
            credits=self.credits,
            capacity=self.spec.capacity,
        )


class ReceiverLane:
    """The consumer's end of a queue lane. Lanes into one port share their `Seen`."""

    def __init__(self, spec: LaneSpec, session: int = 0, seen: Seen | None = None) -> None:
        self.spec = spec
        self.session = session
        self.seen = seen if seen is not None else Seen()
        self.out: list[Frame] = []
        self.failed = ""
        self.ready = False
        """Whether a message can be taken."""
        self.num_received = 0
        self.num_finished = 0
        self.on_unflushed: Callable[[ReceiverLane], None] = lambda lane: None
        """Called when the lane begins to have something to flush, and when `urgent` becomes true."""
        self._urgent_at = max(1, spec.capacity // 4)
        self._unflushed = False
        self._number = spec.number
        self._queue: deque[tuple[int, Envelope | None]] = deque()
        self._reset()

    def _reset(self) -> None:
        self._expected = 0
        self._taken = 0
        self._reported = 0
        self._asked = -1
        self._last: int | None = None
        self._acks: list[int] = []

    @property
    def ended(self) -> bool:
        """The producer has closed and everything it sent has been taken."""
        return self._last is not None and self._expected == self._last and not self._queue

    @property
    def depth(self) -> int:
        return len(self._queue)

    @property
    def closed(self) -> bool:
        """The producer has closed. Some of its messages may not have arrived yet."""
        return self._last is not None

    @property
    def urgent(self) -> bool:
        """The lane must be flushed now: without these credits the sender would soon be blocked."""
        return self._taken - self._reported >= self._urgent_at or bool(self.out)

    @property
    def has_unflushed(self) -> bool:
        """The lane has credits or acks to flush and has not yet called `on_unflushed` for them."""
        return not self._unflushed and (self._reported != self._taken or bool(self._acks))

    def on_data(self, seq: int, envelopes: Sequence[Envelope]) -> None:
        """Receive consecutive messages, the first of them numbered `seq`."""
        if seq != self._expected:
            self._out_of_order(seq)
            envelopes = envelopes[self._expected - seq :] if seq < self._expected else ()
            seq = self._expected
        self._expected += len(envelopes)
        self.num_received += len(envelopes)
        enter, queue = self.seen.enter, self._queue
        for envelope in envelopes:
            if enter(envelope.id, self, seq):
                queue.append((seq, envelope))
                self.ready = True
            else:
                queue.append((seq, None))  # keeps its place, so that credits return in the order of the messages
                self._skip()
            seq += 1

    def _out_of_order(self, seq: int) -> None:
        if seq > self._expected and self._asked != self._expected:
            self._asked = self._expected  # ask once for each gap: the sender repeats everything from there on
            self.out.append((RESEND, self._number, self.session, self._expected, None))

    def _skip(self) -> None:
        """Take the repetitions at the head of the queue, which returns their credits."""
        queue = self._queue
        while queue and queue[0][1] is None:
            queue.popleft()
            self._taken += 1
            self._note_unflushed()
        self.ready = bool(queue)

    def take(self) -> Envelope:
        """Return the next message, and give its credit back. Only when `ready`."""
        queue = self._queue
        seq, envelope = queue.popleft()
        assert envelope is not None
        if seq >= 0:
            self._taken += 1
            # Notify the owner of the first credit or ack to flush and when the lane becomes urgent, not every time.
            if not self._unflushed or self._taken - self._reported == self._urgent_at:
                self._unflushed = True
                self.on_unflushed(self)
        if not queue:
            self.ready = False
        elif queue[0][1] is None:
            self._skip()
        return envelope

    def finish(self, seq: int, session: int) -> None:
        """Ack a message. `Seen` calls this in any order, once for each seq of a session."""
        if session == self.session:
            self._acks.append(seq)
            self.num_finished += 1
            if not self._unflushed:
                self._note_unflushed()

    def _note_unflushed(self) -> None:
        if not self._unflushed:
            self._unflushed = True
            self.on_unflushed(self)

    def on_close(self, last: int) -> None:
        self._last = last
        if last > self._expected:
            self._out_of_order(last)

    def on_cancel(self, ids: Iterable[bytes]) -> list[bytes]:
        """Skip the given messages that still wait in the queue. Returns the ids of those taken and not finished."""
        wanted = set(ids)
        queue, self._queue = self._queue, deque()
        for seq, envelope in queue:
            if envelope is not None and envelope.id in wanted:
                wanted.discard(envelope.id)
                self.seen.finish(envelope.id)
                if seq >= 0:
                    self._queue.append((seq, None))
            else:
                self._queue.append((seq, envelope))
        self._skip()
        return [id for id in wanted if self.seen.is_open(id)]

    def on_hello(self, sent: int, schemas: Iterable[tuple[str, int]], kept: Iterable[int]) -> None:
        """Compare schemas, repeat all credits and acks that may be lost, and ask for messages that are missing."""
        problem = schema_problem(self.spec, schemas)
        if problem:
            self.refuse(problem)
            return
        self._reported = -1
        known = {*self._acks, *self.seen.open_of(self)}
        self._acks += [seq for seq in kept if seq < self._expected and seq not in known]
        self._asked = -1
        if sent > self._expected:
            self._out_of_order(sent)

    def on_error(self, reason: str) -> None:
        """The producer's end has failed."""
        self.failed = self.failed or reason

    def refuse(self, reason: str) -> None:
        """Fail this end, and report the reason to the producer."""
        self.failed = reason
        self.out.append((REFUSE, self._number, self.session, 0, reason))

    def say_hello(self) -> None:
        """The transport may have lost frames: ask the sender for its `say_hello`."""
        self._reported = -1
        self.out.append((SYNC, self._number, self.session, 0, None))

    def flush(self) -> list[Frame]:
        """Return, and remove, all frames to be sent now: `out`, then credit, then acks."""
        self._unflushed = False
        frames, self.out = self.out, []
        if self._reported != self._taken:  # before the acks: a blocked sender waits only for credit
            self._reported = self._taken
            frames.append((CREDIT, self._number, self.session, self._taken, None))
        if self._acks:
            frames.append((ACK, self._number, self.session, 0, self._acks))
            self._acks = []
        return frames

    def restart(self, session: int) -> None:
        """The producer was replaced. Messages of the old one stay in the queue; their repetitions are dropped."""
        self._queue = deque((-1, envelope) for _, envelope in self._queue if envelope is not None)
        self.ready = bool(self._queue)
        self.session = session
        self.failed = ""
        self.out.clear()
        self._reset()

    def statistics(self) -> LaneStatistics:
        return LaneStatistics(
            depth=len(self._queue), received=self.num_received, acked=self.num_finished, capacity=self.spec.capacity
        )


class LatestSender:
    """The producer's end."""

    def __init__(self, spec: LaneSpec, session: int = 0) -> None:
        self.spec = spec
        self.session = session
        self.out: list[Frame] = []
        self.failed = ""
        self.closed = False
        self.num_sent = 0
        self.num_acked = 0
        self._number = spec.number
        self._next = 0
        self._arrived = 0
        self._newest: Envelope | None = None
        self._pending = False
        self._on_way: dict[int, bytes] = {}
        self.say_hello()

    @property
    def credits(self) -> int:
        return 1

    @property
    def depth(self) -> int:
        return self._next - self._arrived + self._pending

    def send(self, envelope: Envelope) -> None:
        """Make `envelope` the newest message; it leaves now, or once the message before it has arrived."""
        assert not self.closed, f"{self.spec.name}: sent after close"
        self.num_sent += 1
        self._newest = envelope
        self._pending = True
        self._advance()

    def _advance(self) -> None:
        if self._pending and self._newest is not None and self._next == self._arrived:
            self._pending = False
            self._on_way[self._next] = self._newest.id
            self.out.append((DATA, self._number, self.session, self._next, [self._newest]))
            self._next += 1
            self._say_close()

    def _say_close(self) -> None:
        if self.closed and not self._pending:
            self.out.append((CLOSE, self._number, self.session, self._next, None))

    def unacked(self) -> list[Envelope]:
        """The newest message, even after its ack."""
        return [] if self._newest is None else [self._newest]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._say_close()

    def cancel(self, ids: Sequence[bytes]) -> None:
        """Does nothing: on a latest edge a newer message replaces an older one."""

    def fail(self, reason: str) -> None:
        self.failed = reason
        self.out.append((ERROR, self._number, self.session, 0, reason))

    def say_hello(self) -> None:
        self.out.append((HELLO, self._number, self.session, self._next, (self.spec.schemas(), ())))
        self._say_close()

    def on_credit(self, arrived: int) -> list[bytes]:
        if arrived > self._next:
            self.fail(f"received a credit for {arrived} messages, but only {self._next} were sent")
            arrived = self._next
        if arrived <= self._arrived:
            return []
        ids = [id for seq, id in self._on_way.items() if self._arrived <= seq < arrived]
        self._arrived = arrived
        self._advance()
        return ids

    def on_ack(self, seqs: Iterable[int]) -> list[bytes]:
        ids = [self._on_way.pop(seq) for seq in seqs if seq in self._on_way]
        self.num_acked += len(ids)
        return ids

    def on_resend(self, first: int) -> None:
        if self._newest is not None and first < self._next:
            self.out.append((DATA, self._number, self.session, self._next - 1, [self._newest]))
        self._say_close()

    def on_error(self, reason: str) -> None:
        self.failed = self.failed or reason

    def flush(self) -> list[Frame]:
        frames, self.out = self.out, []
        return frames

    def restart(self, session: int) -> None:
        self.session = session
        self.failed = ""
        self.out.clear()
        self._on_way.clear()
        self._next = self._arrived = 0
        self._pending = self._newest is not None
        self.say_hello()
        self._advance()
        self._say_close()

    def statistics(self, blocked_s: float = 0.0) -> LaneStatistics:
        kept = self.unacked()
        return LaneStatistics(
            depth=self.depth,
            sent=self.num_sent,
            acked=self.num_acked,
            unacked=len(kept),
            unacked_bytes=sum(payload_bytes(envelope.body) for envelope in kept),
            credits=1,
            capacity=1,
        )


class LatestReceiver:
    """The consumer's end. `newest` can still be read after it was taken."""

    def __init__(self, spec: LaneSpec, session: int = 0) -> None:
        self.spec = spec
        self.session = session
        self.out: list[Frame] = []
        self.failed = ""
        self.newest: Envelope | None = None
        self.num_received = 0
        self.num_finished = 0
        self.on_unflushed: Callable[[LatestReceiver], None] = lambda lane: None
        self._number = spec.number
        self._fresh = False
        self._seq = -1
        self._expected = 0
        self._reported = 0
        self._last: int | None = None
        self._open: dict[bytes, list[tuple[int, int]]] = {}
        """Id -> (seq, session) of each copy that is waiting or taken, and not finished; oldest first."""
        self._acks: list[int] = []

    @property
    def ready(self) -> bool:
        return self._fresh

    @property
    def ended(self) -> bool:
        return self._last is not None and self._expected >= self._last and not self._fresh

    @property
    def depth(self) -> int:
        return int(self._fresh)

    @property
    def closed(self) -> bool:
        """The producer has closed. Some of its messages may not have arrived yet."""
        return self._last is not None

    @property
    def urgent(self) -> bool:
        return True

    @property
    def has_unflushed(self) -> bool:
        return self._reported != self._expected or bool(self._acks)

    def on_data(self, seq: int, envelopes: Sequence[Envelope]) -> None:
        for at, envelope in enumerate(envelopes, seq):
            self._arrive(at, envelope)

    def _arrive(self, seq: int, envelope: Envelope) -> None:
        if seq < self._expected:
            self._reported = -1
            return
        self._expected = seq + 1
        self.num_received += 1
        if self.newest is not None and self.newest.id == envelope.id:
            self._acks.append(seq)
            return
        if self._fresh and self.newest is not None:
            self._ack(self.newest.id, -1)
        self.newest, self._fresh = envelope, True
        self._open.setdefault(envelope.id, []).append((seq, self.session))

    def take(self) -> Envelope:
        """Return the newest message, once. Only when `ready`."""
        assert self.newest is not None and self._fresh
        self._fresh = False
        return self.newest

    def finish(self, id: bytes) -> None:
        """Ack a taken message; if several copies are taken and unfinished, ack the one taken first."""
        self._ack(id, 0)

    def _ack(self, id: bytes, copy: int) -> None:
        seq, session = self._open[id].pop(copy)
        if not self._open[id]:
            del self._open[id]
        if session == self.session:
            self._acks.append(seq)
            self.num_finished += 1
            self.on_unflushed(self)

    def on_close(self, last: int) -> None:
        self._last = last
        if last > self._expected:
            self.out.append((RESEND, self._number, self.session, self._expected, None))

    def on_cancel(self, ids: Iterable[bytes]) -> list[bytes]:
        return []

    def on_hello(self, sent: int, schemas: Iterable[tuple[str, int]], kept: Iterable[int]) -> None:
        problem = schema_problem(self.spec, schemas)
        if problem:
            self.refuse(problem)
            return
        self._reported = -1
        if sent > self._expected:
            self.out.append((RESEND, self._number, self.session, self._expected, None))

    def on_error(self, reason: str) -> None:
        self.failed = self.failed or reason

    def refuse(self, reason: str) -> None:
        self.failed = reason
        self.out.append((REFUSE, self._number, self.session, 0, reason))

    def say_hello(self) -> None:
        self._reported = -1
        self.out.append((SYNC, self._number, self.session, 0, None))

    def flush(self) -> list[Frame]:
        frames, self.out = self.out, []
        if self._reported != self._expected:
            self._reported = self._expected
            frames.append((CREDIT, self._number, self.session, self._expected, None))
        if self._acks:
            frames.append((ACK, self._number, self.session, 0, self._acks))
            self._acks = []
        return frames

    def restart(self, session: int) -> None:
        self.session = session
        self.failed = ""
        self.out.clear()
        self._expected = self._reported = 0
        self._last = None
        self._acks = []

    def statistics(self) -> LaneStatistics:
        return LaneStatistics(depth=self.depth, received=self.num_received, acked=self.num_finished, capacity=1)


Ids = Sequence[bytes]


def to_receiver(machine: ReceiverLane | LatestReceiver, frame: Frame) -> Ids:
    """Pass a frame to the consumer's end. Returns the ids of messages that it cancels and that are being worked on."""
    kind, _, session, seq, payload = frame
    if session != machine.session:
        return ()
    if kind == DATA:
        machine.on_data(seq, payload)
    elif kind == CLOSE:
        machine.on_close(seq)
    elif kind == HELLO:
        machine.on_hello(seq, *payload)
    elif kind == CANCEL:
        return machine.on_cancel(payload)
    elif kind == ERROR:
        machine.on_error(payload)
    return ()


def to_sender(machine: SenderLane | LatestSender, frame: Frame) -> tuple[Ids, Ids]:
    """Pass a frame to the producer's end. Returns the ids of messages now taken, and of those now acked."""
    kind, _, session, seq, payload = frame
    if session != machine.session:
        return (), ()
    if kind == CREDIT:
        return machine.on_credit(seq), ()
    if kind == ACK:
        return (), machine.on_ack(payload)
    if kind == RESEND:
        machine.on_resend(seq)
    elif kind == SYNC:
        machine.say_hello()
    elif kind == REFUSE:
        machine.on_error(payload)
    return (), ()

"""Lanes: two pure machines, one at each end of a lane. They send nothing, wait for nothing and read no clock.

A lane connects one producer process to one consumer replica on one edge. Its endpoint passes the frames that arrive
to `take_frame`, and sends those that the end collects in `out` (`flush`). `SenderLane` and `ReceiverLane` are the ends
of a queue; `LatestSender` and `LatestReceiver` those of a latest edge, where a newer message replaces an older one.

Invariants
- At most `capacity` messages are sent and not yet taken by the consumer, replays included.
- Messages are numbered from 0 within a session, and the consumer takes them in that order. A session is the pair of
  the two processes' incarnations: when either process is replaced, both ends begin a new session (`restart`), and
  ignore frames of any other session. `flowrl.wire.endpoint` says how a process is replaced.
- The sender keeps every message until its ack. In a new session it first sends all kept messages again, in the old
  order, and only then new ones. Otherwise it repeats a message only if the receiver, after a gap, asks for it.
- Messages that a replaced producer sent and that nobody has taken stay in the queue, outside the new session: the
  receiver returns no credit for them, whether they are taken or cancelled.
- A cancel is in force until the ack: the sender repeats it after every replay of its message.
- A message id enters the node once, even if copies arrive on several lanes or in several sessions (`Seen`). The
  receiver returns the credit of a repetition, and sends its ack when the first copy is finished.
- `close` follows everything that was sent. A failure of the other process is never an end of stream.

What ends a wait: a sender without credit waits for a credit frame, a failure or a new session; a receiver without a
message waits for data, `close` or a failure. `on_change` tells those who wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flowrl.errors import LaneFailed
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

Ids = Callable[[Sequence[bytes]], None]
FRAMES_AT_ONCE = 128
REMEMBER = 1 << 16
"""Number of finished messages that a port remembers at least."""


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


SeenClaim = tuple["ReceiverLane", int, int]
"""One copy of a message: its lane, seq and session."""


class Seen:
    """Admits every message id to a port once.

    Invariants
    - An id is open from its first arrival until its message is finished; each further copy adds a claim.
    - When the message is finished, every claim is acked, on the lane and in the session of its copy.
    - A finished id is remembered until at least `remember` further ids are finished, and then forgotten. A copy can
      only arrive while the item it was made from is unacked at its producer, so only while that item's ticket is
      open; far fewer than `remember` messages pass one port in that time.
    """

    def __init__(self, remember: int = REMEMBER) -> None:
        self._remember = remember
        self._open: dict[bytes, list[SeenClaim] | SeenClaim] = {}
        """Id -> its copies. Most ids have one copy, which is stored without a list."""
        self._recent: set[bytes] = set()
        self._older: set[bytes] = set()

    def admit_copy(self, id: bytes, lane: ReceiverLane, seq: int) -> bool:
        """Record a copy. Returns True if it is the first. A copy of a finished message is acked at once."""
        claims = self._open.get(id)
        if claims is None:
            if id in self._recent or id in self._older:
                lane.ack_seq(seq, lane.session)
                return False
            self._open[id] = (lane, seq, lane.session)
            return True
        copies = claims if isinstance(claims, list) else [claims]
        self._open[id] = [*copies, (lane, seq, lane.session)]
        return False

    def restore(self, id: bytes) -> None:
        """Record a message that came from a checkpoint and not over a lane."""
        assert id not in self._open
        self._open[id] = []

    def is_open(self, id: bytes) -> bool:
        """Whether the message has arrived and is not finished."""
        return id in self._open

    def open_seqs(self, lane: ReceiverLane) -> list[int]:
        """The seqs of the copies that arrived on `lane` in its current session and are not finished."""
        copies = [claims if isinstance(claims, list) else [claims] for claims in self._open.values()]
        claims = [claim for one in copies for claim in one]
        return [seq for at, seq, session in claims if at is lane and session == lane.session]

    def finish_message(self, id: bytes) -> None:
        """The message is finished: ack every copy. Call once per id."""
        claims = self._open.pop(id)
        recent = self._recent
        if len(recent) >= self._remember:  # two sets: forgetting many ids is one assignment
            self._older = recent
            self._recent = recent = set()
        recent.add(id)
        if isinstance(claims, tuple):
            lane, seq, session = claims
            lane.ack_seq(seq, session)
        else:
            for lane, seq, session in claims:
                lane.ack_seq(seq, session)


class LaneEnd:
    """What all ends of lanes have in common: the session, the frames to send, and why the end has failed."""

    def __init__(self, spec: LaneSpec, session: int) -> None:
        self.spec = spec
        self.session = session
        self.out: list[Frame] = []
        self.failed = ""
        """Why nothing more passes this end, "" if it has not failed."""
        self._number = spec.number

    def _add_frame(self, kind: int, seq: int, payload: Any = None) -> None:
        self.out.append((kind, self._number, self.session, seq, payload))

    def on_error(self, reason: str) -> None:
        """The other end has failed."""
        self.failed = self.failed or reason

    def _begin_anew(self, session: int) -> None:
        """The process at the other end, or this one, was replaced."""
        self.session = session
        self.failed = ""
        self.out.clear()


class SenderLane(LaneEnd):
    """The producer's end of a queue lane. Its `OutEdge` decides when it may send."""

    def __init__(self, spec: LaneSpec, session: int = 0) -> None:
        super().__init__(spec, session)
        self.closed = False
        self.num_sent = 0
        self.num_taken = 0
        self.num_acked = 0
        self.credits = spec.capacity
        """Number of new messages that may be sent now. Negative while a replay is longer than the capacity."""
        self.on_out: Callable[[SenderLane], None] = lambda lane: None
        """Called when a caller (not a frame) has added frames to `out`."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when there are more credits, and when the lane has failed: a waiting send may go on."""
        self.burst = max(1, min(FRAMES_AT_ONCE, spec.capacity // 2))
        """When this many frames are pending, they leave before the loop's tick ends: the consumer can begin earlier."""
        self.edge: Any = None
        """The `OutEdge` that sends here, if there is one."""
        self.on_taken: list[Ids] = []
        """Called with ids when the next process has taken messages."""
        self.on_acked: list[Ids] = []
        """Called with ids when messages have been finished and are no longer kept."""
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
        self._sizes: dict[bytes, int] = {}
        """Id -> bytes of the messages kept when `statistics` was last called: it measures each of them only once."""
        self.say_hello()

    @property
    def depth(self) -> int:
        """Number of messages sent and not taken."""
        return self._next - self._taken + len(self._backlog)

    def can_send(self) -> bool:
        """Whether there is a credit. Raises LaneFailed on a failed lane."""
        if self.failed:
            raise LaneFailed(f"lane {self.spec.name!r}: {self.failed}")
        return self.credits > 0

    def send(self, envelope: Envelope) -> None:
        """Send a new message. Call only with a credit and before `close`."""
        assert not self.closed and self.credits > 0, f"{self.spec.name}: sent without a credit, or after close"
        self.num_sent += 1
        self.credits -= 1
        # A copy of `_transmit_again`: every message passes here, and a call would cost too much.
        seq = self._next
        self._kept[seq] = envelope
        self._untaken.append(envelope.id)
        self._next = seq + 1
        self.out.append((DATA, self._number, self.session, seq, [envelope]))
        self.on_out(self)

    def _transmit_again(self, envelope: Envelope) -> None:
        seq = self._next
        self._kept[seq] = envelope
        self._untaken.append(envelope.id)
        self._next = seq + 1
        self._add_frame(DATA, seq, [envelope])

    def unacked(self) -> list[Envelope]:
        """All messages kept for a replay, oldest first."""
        return [*self._kept.values(), *self._backlog]

    def close(self) -> None:
        """Signal end of stream: the consumer sees it after it has taken everything sent. Replays are still sent."""
        if not self.closed:
            self.closed = True
            self._say_close()
        self.on_out(self)

    def _say_close(self) -> None:
        if self.closed and not self._backlog:
            self._add_frame(CLOSE, self._next)

    def cancel(self, ids: Sequence[bytes]) -> None:
        """Ask the consumer to drop these messages: it skips, and thereby acks, those it has not taken.

        This includes messages that an earlier incarnation of this process sent.
        """
        self._cancelled |= {envelope.id for envelope in self.unacked()}.intersection(ids)
        self._say_cancel(ids)
        self.on_out(self)

    def _say_cancel(self, ids: Collection[bytes]) -> None:
        if ids:
            self._add_frame(CANCEL, 0, tuple(ids))

    def fail(self, reason: str) -> None:
        """Fail the lane: `take` raises LaneFailed at the other end, and sends raise it here."""
        self.failed = reason
        self._add_frame(ERROR, 0, reason)
        self.on_out(self)
        self.on_change()

    def say_hello(self) -> None:
        """Report what was sent and is kept: the receiver repeats frames that may be lost and asks for what it lacks."""
        # Called at the start of a session, and when the transport may have lost frames.
        self._add_frame(HELLO, self._next, (self.spec.schemas(), tuple(self._kept)))
        self._say_cancel(self._cancelled)
        self._say_close()

    def take_frame(self, frame: Frame) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Process a frame of the consumer's end. Returns the ids of messages now taken, and of those now acked.

        A frame of another session changes nothing: it belongs to an earlier incarnation of one of the two processes.
        """
        kind, _, session, seq, payload = frame
        taken: Sequence[bytes] = ()
        acked: Sequence[bytes] = ()
        if session != self.session:
            return taken, acked
        if kind == CREDIT:
            taken = self.on_credit(seq)
            for callback in self.on_taken if taken else ():
                callback(taken)
            self.on_change()
        elif kind == ACK:
            acked = self.on_ack(payload)
            for callback in self.on_acked if acked else ():
                callback(acked)
        elif kind == RESEND:
            self.on_resend(seq)
        elif kind == SYNC:
            self.say_hello()
        elif kind == REFUSE:
            self.on_error(payload)
            self.on_change()
        return taken, acked

    def on_credit(self, taken: int) -> list[bytes]:
        """The consumer has taken all messages below `taken`. Returns the ids that no consumer had taken before.

        A credit for messages that were never sent fails the lane; senders that wait for credit wake up even then.
        """
        taken = self._check_credit(taken)
        if taken <= self._taken:
            return []
        untaken = self._untaken
        ids = [untaken.popleft() for _ in range(self._taken, taken)]
        self.credits += taken - self._taken
        self.num_taken += taken - self._taken
        self._taken = taken
        if self._backlog:
            self._replay_backlog()
        if self._taken_before:
            new = [id for id in ids if id not in self._taken_before]
            self._taken_before.difference_update(ids)
            return new
        return ids

    def _check_credit(self, taken: int) -> int:
        """The number of a credit frame; the lane fails if it exceeds what was sent."""
        if taken > self._next:
            self.failed = f"received a credit for {taken} messages, but only {self._next} were sent"
            self._add_frame(ERROR, 0, self.failed)
        return min(taken, self._next)

    def _replay_backlog(self) -> None:
        while self._backlog and self._next - self._taken < self._capacity:
            self._transmit_again(self._backlog.popleft())
        self._say_cancel(self._cancelled)
        self._say_close()

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
                self._add_frame(DATA, seq, [self._kept[seq]])
        self._say_cancel(self._cancelled)
        self._say_close()

    def flush(self) -> list[Frame]:
        """Return, and remove, all frames to be sent now."""
        frames, self.out = self.out, []
        return frames

    def restart(self, session: int) -> None:
        """One of the two processes was replaced: begin a new session, and replay all kept messages."""
        self._begin_anew(session)
        self._taken_before |= {envelope.id for seq, envelope in self._kept.items() if seq < self._taken}
        self._backlog = deque(self.unacked())
        self._kept = {}
        self._untaken.clear()
        self._next = self._taken = 0
        self.credits = self._capacity - len(self._backlog)
        self.say_hello()
        self._replay_backlog()

    def statistics(self, blocked_s: float = 0.0) -> LaneStatistics:
        """The lane's counts; `blocked_s` is how long sends on its edge have waited."""
        kept, before = self.unacked(), self._sizes
        self._sizes = {
            envelope.id: before[envelope.id] if envelope.id in before else payload_bytes(envelope.body)
            for envelope in kept
        }
        return LaneStatistics(
            depth=self.depth,
            sent=self.num_sent,
            acked=self.num_acked,
            unacked=len(kept),
            unacked_bytes=sum(self._sizes.values()),
            blocked_s=blocked_s,
            credits=self.credits,
            capacity=self._capacity,
        )


class LatestSender(SenderLane):
    """The producer's end of a latest edge: one slot, overwriting, never blocking its sender.

    Invariants
    - At most one message is in flight; meanwhile the sender holds back only the newest other message.
    - The sender keeps its newest message even after the ack: a replacement of the consumer gets it first.
    - `close` comes after the newest message.
    """

    def __init__(self, spec: LaneSpec, session: int = 0) -> None:
        self._newest: Envelope | None = None
        self._pending = False
        """Whether the newest message is held back."""
        self._on_way: dict[int, bytes] = {}
        super().__init__(spec, session)
        self.credits = self._capacity = 1

    @property
    def depth(self) -> int:
        return self._next - self._taken + self._pending

    def send(self, envelope: Envelope) -> None:
        """Make `envelope` the newest message; it leaves now, or once the message before it has arrived."""
        assert not self.closed, f"{self.spec.name}: sent after close"
        self.num_sent += 1
        self._newest = envelope
        self._pending = True
        self._send_pending()
        self.on_out(self)

    def _send_pending(self) -> None:
        if self._pending and self._newest is not None and self._next == self._taken:
            self._pending = False
            self._on_way[self._next] = self._newest.id
            self._add_frame(DATA, self._next, [self._newest])
            self._next += 1
            self._say_close()

    def _say_close(self) -> None:
        if self.closed and not self._pending:
            self._add_frame(CLOSE, self._next)

    def unacked(self) -> list[Envelope]:
        """The newest message, even after its ack."""
        return [] if self._newest is None else [self._newest]

    def cancel(self, ids: Sequence[bytes]) -> None:
        """Does nothing: a newer message replaces an older one."""

    def on_credit(self, taken: int) -> list[bytes]:
        arrived = self._check_credit(taken)
        if arrived <= self._taken:
            return []
        ids = [id for seq, id in self._on_way.items() if self._taken <= seq < arrived]
        self._taken = arrived
        self._send_pending()
        return ids

    def on_ack(self, seqs: Iterable[int]) -> list[bytes]:
        ids = [self._on_way.pop(seq) for seq in seqs if seq in self._on_way]
        self.num_acked += len(ids)
        return ids

    def on_resend(self, first: int) -> None:
        if self._newest is not None and first < self._next:
            self._add_frame(DATA, self._next - 1, [self._newest])
        self._say_close()

    def restart(self, session: int) -> None:
        self._begin_anew(session)
        self._on_way.clear()
        self._next = self._taken = 0
        self._pending = self._newest is not None
        self.say_hello()
        self._send_pending()
        self._say_close()


class ReceiverLane(LaneEnd):
    """The consumer's end of a queue lane, read through its `Inbox`. Lanes into one port share their `Seen`."""

    def __init__(self, spec: LaneSpec, session: int = 0, seen: Seen | None = None) -> None:
        super().__init__(spec, session)
        self.num_received = 0
        self.num_finished = 0
        self.ready = False
        """Whether a message can be taken."""
        self.closed = False
        """The producer has closed. Some of its messages may not have arrived yet."""
        self.listed = False
        """Whether the lane is in its inbox's list of lanes with a message to take."""
        self.newest: Envelope | None = None
        """On a latest edge: the newest message, whether taken or not."""
        self.inbox: Any = None
        """The `Inbox` that takes the lane's messages; frames that arrive before it is set are parked."""
        self.on_change: Callable[[ReceiverLane], None] = lambda lane: None
        """Called when frames have arrived, and when the lane has failed: a waiting `take` may go on."""
        self.on_open: Callable[[ReceiverLane], None] = lambda lane: None
        """Called when the inbox is set: the frames that were parked can be delivered."""
        self.on_unflushed: Callable[[ReceiverLane], None] = lambda lane: None
        """Called when the lane begins to have something to flush, and when `urgent` becomes true."""
        self.on_cancelled: list[Ids] = []
        """Called with the ids of messages that the producer cancels, and that are taken and not finished."""
        self.share_seen(seen if seen is not None else Seen())
        self._capacity = spec.capacity
        self._urgent_at = max(1, spec.capacity // 4)
        self._unflushed = False
        self._queue: deque[tuple[int, Envelope | None]] = deque()
        self._reset_counts()

    def share_seen(self, seen: Seen) -> None:
        """Admit messages by `seen`."""
        self.seen = seen
        self.finish: Callable[[bytes], None] = seen.finish_message
        """Acks a message by its id."""

    def open_to(self, inbox: Any, on_change: Callable[[ReceiverLane], None]) -> None:
        """Let `inbox` take the lane's messages from now on."""
        self.inbox, self.on_change = inbox, on_change
        self.on_open(self)

    def _reset_counts(self) -> None:
        self._expected = 0
        self._taken = 0
        self._reported = 0
        self._asked = -1
        self._last: int | None = None
        self.closed = False
        self._acks: list[int] = []

    @property
    def ended(self) -> bool:
        """The producer has closed and everything it sent has been taken."""
        return self._last is not None and self._expected == self._last and not self._queue

    @property
    def depth(self) -> int:
        """Number of messages that have arrived and are not taken."""
        return len(self._queue)

    @property
    def urgent(self) -> bool:
        """The lane must be flushed now: without these credits the sender would soon be blocked."""
        return self._taken - self._reported >= self._urgent_at or bool(self.out)

    @property
    def has_unflushed(self) -> bool:
        """The lane has credits or acks to flush and has not yet called `on_unflushed` for them."""
        return not self._unflushed and (self._reported != self._taken or bool(self._acks))

    def take_frame(self, frame: Frame) -> Sequence[bytes]:
        """Process a frame of the producer's end. Returns the ids of messages that it cancels and that are being worked
        on. A frame of another session changes nothing, as in `SenderLane.take_frame`."""
        kind, _, session, seq, payload = frame
        cancelled: Sequence[bytes] = ()
        if session != self.session:
            return cancelled
        if kind == DATA:
            self.on_data(seq, payload)
        elif kind == CLOSE:
            self.on_close(seq)
        elif kind == HELLO:
            self.on_hello(seq, *payload)
        elif kind == CANCEL:
            cancelled = self.on_cancel(payload)
            for callback in self.on_cancelled if cancelled else ():
                callback(cancelled)
        elif kind == ERROR:
            self.on_error(payload)
        return cancelled

    def on_data(self, seq: int, envelopes: Sequence[Envelope]) -> None:
        """Receive consecutive messages, the first of them numbered `seq`."""
        if seq != self._expected:
            self._ask_from(seq)
            envelopes = envelopes[self._expected - seq :] if seq < self._expected else ()
            seq = self._expected
        self._expected += len(envelopes)
        self.num_received += len(envelopes)
        enter, queue = self.seen.admit_copy, self._queue
        for envelope in envelopes:
            if enter(envelope.id, self, seq):
                queue.append((seq, envelope))
                self.ready = True
            else:
                queue.append((seq, None))  # keeps its place, so that credits return in the order of the messages
                self._skip_repetitions()
            seq += 1

    def _ask_from(self, seq: int) -> None:
        """Ask for the messages before `seq` that are missing, if any are."""
        if seq > self._expected and self._asked != self._expected:
            self._asked = self._expected  # ask once for each gap: the sender repeats everything from there on
            self._add_frame(RESEND, self._expected)

    def _skip_repetitions(self) -> None:
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
            self._skip_repetitions()
        return envelope

    def ack_seq(self, seq: int, session: int) -> None:
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
        """The producer has sent the messages below `last`, and sends no more."""
        self._last = last
        self.closed = True
        self._ask_from(last)

    def on_cancel(self, ids: Iterable[bytes]) -> list[bytes]:
        """Skip the given messages that still wait in the queue. Returns the ids of those taken and not finished."""
        wanted = set(ids)
        queue, self._queue = self._queue, deque()
        for seq, envelope in queue:
            if envelope is not None and envelope.id in wanted:
                wanted.discard(envelope.id)
                self.seen.finish_message(envelope.id)
                if seq >= 0:
                    self._queue.append((seq, None))
            else:
                self._queue.append((seq, envelope))
        self._skip_repetitions()
        return [id for id in wanted if self.seen.is_open(id)]

    def on_hello(self, sent: int, schemas: Iterable[tuple[str, int]], kept: Iterable[int]) -> None:
        """Compare schemas, repeat all credits and acks that may be lost, and ask for messages that are missing."""
        here = dict(self.spec.schemas())
        for name, number in schemas:
            if here.get(name) != number:
                self.refuse(
                    f"lane {self.spec.name!r} carries {name} of schema {number:#010x} at {self.spec.producer}, but "
                    f"{here.get(name, 0):#010x} at {self.spec.consumer}; run the same code in both processes"
                )
                return
        self._reported = -1
        self._repeat_acks(kept)
        self._asked = -1
        self._ask_from(sent)

    def _repeat_acks(self, kept: Iterable[int]) -> None:
        """Ack the messages that the sender still keeps although they are finished."""
        known = {*self._acks, *self.seen.open_seqs(self)}
        self._acks += [seq for seq in kept if seq < self._expected and seq not in known]

    def refuse(self, reason: str) -> None:
        """Fail this end, and report the reason to the producer, whose sends raise LaneFailed then."""
        self.failed = reason
        self._add_frame(REFUSE, 0, reason)
        self.on_unflushed(self)

    def say_hello(self) -> None:
        """The transport may have lost frames: ask the sender for its `say_hello`."""
        self._reported = -1
        self._add_frame(SYNC, 0)

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
        """One of the two processes was replaced. Messages of the old producer stay in the queue; their repetitions are
        dropped."""
        self._begin_anew(session)
        self._queue = deque((-1, envelope) for _, envelope in self._queue if envelope is not None)
        self.ready = bool(self._queue)
        self._reset_counts()

    def statistics(self) -> LaneStatistics:
        return LaneStatistics(
            depth=self.depth, received=self.num_received, acked=self.num_finished, capacity=self._capacity
        )


class LatestReceiver(ReceiverLane):
    """The consumer's end of a latest edge. `newest` can still be read after it was taken.

    Invariants
    - It keeps the newest message. It acks a message that is overwritten before it was taken.
    - Ids may repeat: a producer that was replaced may return to an older message. Each copy has its own claim, and the
      taken, unfinished copies of one id are acked in the order in which they were taken.
    - A message counts as taken when it has arrived: its credit goes back at once.
    """

    def __init__(self, spec: LaneSpec, session: int = 0) -> None:
        super().__init__(spec, session)
        self._capacity = 1
        self._open: dict[bytes, list[tuple[int, int]]] = {}
        """Id -> (seq, session) of each copy that is waiting or taken, and not finished; oldest first."""

    def share_seen(self, seen: Seen) -> None:
        """Each lane of a latest edge admits its messages, and acks them, by itself."""
        self.seen = seen
        self.finish = self._finish_oldest

    @property
    def ended(self) -> bool:
        return self._last is not None and self._expected >= self._last and not self.ready

    @property
    def depth(self) -> int:
        return int(self.ready)

    @property
    def urgent(self) -> bool:
        return True

    @property
    def has_unflushed(self) -> bool:
        return self._reported != self._expected or bool(self._acks)

    def on_data(self, seq: int, envelopes: Sequence[Envelope]) -> None:
        for at, envelope in enumerate(envelopes, seq):
            if at < self._expected:
                self._reported = -1
                continue
            self._expected = self._taken = at + 1
            self.num_received += 1
            if self.newest is not None and self.newest.id == envelope.id:
                self._acks.append(at)
                continue
            if self.ready and self.newest is not None:
                self._ack_copy(self.newest.id, -1)
            self.newest, self.ready = envelope, True
            self._open.setdefault(envelope.id, []).append((at, self.session))

    def take(self) -> Envelope:
        """Return the newest message, once. Only when `ready`."""
        assert self.newest is not None and self.ready
        self.ready = False
        return self.newest

    def _finish_oldest(self, id: bytes) -> None:
        """Ack a taken message; if several copies are taken and unfinished, ack the one taken first."""
        self._ack_copy(id, 0)

    def _ack_copy(self, id: bytes, copy: int) -> None:
        seq, session = self._open[id].pop(copy)
        if not self._open[id]:
            del self._open[id]
        if session == self.session:
            self._acks.append(seq)
            self.num_finished += 1
            self.on_unflushed(self)

    def _ask_from(self, seq: int) -> None:
        if seq > self._expected:
            self._add_frame(RESEND, self._expected)

    def on_cancel(self, ids: Iterable[bytes]) -> list[bytes]:
        """Does nothing: a newer message replaces an older one."""
        return []

    def _repeat_acks(self, kept: Iterable[int]) -> None:
        """Nothing to repeat: the sender of a latest edge keeps no message for its ack."""

    def restart(self, session: int) -> None:
        self._begin_anew(session)
        self._reset_counts()

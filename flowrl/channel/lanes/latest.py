"""The protocol of a latest edge: one slot, overwriting, never blocking its sender.

Invariants
- At most one message is in flight; meanwhile the sender holds back only the newest other message.
- The receiver keeps the newest message. It acks a message that is overwritten before it was taken.
- Ids may repeat: a producer that was replaced may return to an older message. Each copy has its own claim, and the
  taken, unfinished copies of one id are acked in the order in which they were taken.
- The sender keeps its newest message even after the ack: a replacement of the consumer gets it first.
- `close` comes after the newest message.

What ends a wait: a send never waits; a receiver waits for a message newer than the last one that it took, for
`close` or for a failure. Sessions are as in `flowrl.channel.lanes.lane`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flowrl.channel.encoding.multiparts import ACK, CLOSE, CREDIT, DATA, ERROR, HELLO, REFUSE, RESEND, SYNC, Frame
from flowrl.channel.encoding.schema import Envelope, payload_bytes
from flowrl.channel.lanes.lane_spec import LaneSpec, LaneStatistics, schema_problem


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

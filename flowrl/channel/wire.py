"""Frames: what two processes say to each other, as bytes.

Everything pending for one peer leaves as one multipart:

    part 0    preamble (magic, wire version, whether parts follow, sender's epoch and host), then records
    part 1…   raw array buffers, which bodies refer to by index

A record is a header (kind, lane, session, seq, schema, number of messages, body length) and a body
(msgpack, empty for None). Messages of one class that follow each other on a lane share a record, for one by
one their headers and parsing would cost more than they do: before its body, an array of their bodies, stand
the id, ticket and member of each. `seq` is the first one's.

Whatever does not parse, holds what no frame of its kind holds, or costs more than its bytes allow (`cost`) is
refused with WireError, a record at a time; nothing is ever unpickled.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from struct import Struct
from struct import error as StructError
from typing import Any

from flowrl.channel.codec import Buffer, Decoder, Encoder, Place
from flowrl.channel.cost import (
    ENVELOPE,
    FLOOR_BYTES,
    FRAME,
    MOST_BYTES,
    PER_BYTE,
    SHORT,
    SMALL_BYTES,
    Allowance,
    Costly,
    of_short,
    of_tuple,
    too_costly,
)
from flowrl.channel.envelope import Envelope
from flowrl.channel.schema import UNSENDABLE, Schema, schema_named, schema_of, unsendable
from flowrl.channel.stored import dump, load
from flowrl.errors import WireError
from flowrl.messages import Tombstone

__all__ = ["Frame", "MessageDecoder", "MessageEncoder", "Refused", "dump", "lane_number", "load"]

MAGIC = b"flow"
WIRE_VERSION = 5
MAX_BODY_BYTES = 72 << 20
"""Of one message or other frame, without the arrays beside it: copied in some 50 ms."""
RECORD_BYTES = SMALL_BYTES
"""The bodies of messages that share a record take no more than this together."""
MAX_FRAMES = 1024
"""Messages and other frames in one multipart."""
MAX_PARTS = 16384
"""Arrays beside the bodies of one multipart."""

# Kinds of frames. A lane's own, to its receiver (hello, data, cancel, tombstone, close, error) and to its
# sender (credit, ack, resend, sync, refuse); and those of a pair of processes, from REQUEST on.
HELLO, CREDIT, DATA, ACK, CANCEL, TOMBSTONE, CLOSE, ERROR, RESEND, SYNC, REFUSE = range(1, 12)
TO_RECEIVER = frozenset((HELLO, DATA, CANCEL, TOMBSTONE, CLOSE, ERROR))
MESSAGES = frozenset((DATA, TOMBSTONE))
TO_SENDER = frozenset((CREDIT, ACK, RESEND, SYNC, REFUSE))
REQUEST, REPLY, ABORT, NOTIFY, RELEASE, BYE, CONFIRM = range(20, 27)
KINDS = frozenset((*TO_RECEIVER, *TO_SENDER, REQUEST, REPLY, ABORT, NOTIFY, RELEASE, BYE, CONFIRM))
BARE = frozenset((CLOSE, CREDIT, RESEND, SYNC, ABORT, BYE, CONFIRM))
"""Kinds without a body."""

Frame = tuple[int, int, int, int, Any]
"""(kind, lane, session, seq, payload): payload is a list of Envelopes for DATA, numbered from `seq`, else a
msgpack-able value."""

_preamble = Struct("<4sHHIH")
_FOLLOWED = 6  # offset of "whether parts follow"
_header = Struct("<BIIQIII")
_head = Struct("<16sqi")
_array = Struct(">BI")
_ARRAY_32 = 0xDD  # msgpack's mark of an array with 32 bits of length
_MESSAGE_COST = FRAME + ENVELOPE + of_tuple(1)
"""Of a message beside its body, in a record of its own."""


def lane_number(name: str) -> int:
    """32 bits that stand for a lane's name on the wire."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big")


class _Record:
    """Messages on their way into one record."""

    __slots__ = ("bodies", "first", "heads", "key", "next", "num_bytes")

    def __init__(self, key: tuple[int, int, Schema], seq: int) -> None:
        self.key = key
        """(lane, session, schema), the same for all."""
        self.first = self.next = seq
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.num_bytes = 0


class MessageEncoder:
    """Collects frames for one peer into multiparts. `place` puts large arrays into shared memory.

    A multipart ends before what would pass its receiver's allowance.
    """

    def __init__(self, host: str, epoch: int, place: Place | None = None) -> None:
        name = host.encode()
        self._starts = tuple(
            _preamble.pack(MAGIC, WIRE_VERSION, followed, epoch, len(name)) + name for followed in (0, 1)
        )
        self._encoder = Encoder(place)
        self._carried = self._encoder.carried
        self.pending = 0
        """Number of messages and other frames added since `multiparts`."""
        self._full: list[list[Buffer]] = []
        self._begin_multipart()

    def _begin_multipart(self) -> None:
        self._records: list[bytes] = [b""]
        self._encoder.frames = []
        self._open: _Record | None = None
        """Takes what follows on its lane; the last of the multipart so far."""
        self._frames = self._num_bytes = self._cost = 0

    def add(self, frames: Iterable[Frame]) -> int:
        """Encode `frames` behind those before. Returns `pending`.

        Raises WireError for a value that cannot travel; what came before it does.
        """
        message, envelope = self._message, None
        try:
            for kind, lane, session, seq, payload in frames:
                if kind == DATA:
                    for envelope in payload:
                        message(lane, session, seq, envelope)
                        seq += 1
                else:
                    envelope = None
                    self._frame(kind, lane, session, seq, payload)
        except UNSENDABLE as error:
            self._encoder.undo()
            raise unsendable(error, message=envelope.body if envelope is not None else None) from error
        return self.pending

    def _message(self, lane: int, session: int, seq: int, envelope: Envelope) -> None:
        encoder, message = self._encoder, envelope.body
        schema = schema_of(type(message))
        head = _head.pack(envelope.id, envelope.ticket, envelope.member)
        encoder.cost = encoder.beside_bytes = 0
        body = encoder.pack(schema.take_apart(envelope.group_id, message, self._carried))
        num_bytes = len(body)
        if not self._takes(schema.cost + encoder.cost + _MESSAGE_COST, num_bytes + _head.size):
            if self._frames:
                self._cut()
                self._message(lane, session, seq, envelope)
                return
            self._check_alone(body, _MESSAGE_COST)
        record, key = self._open, (lane, session, schema)
        if (
            not record
            or seq != record.next
            or key != record.key
            or record.num_bytes + num_bytes > RECORD_BYTES
            or seq - record.first == SHORT
        ):
            record = self._begin(_Record(key, seq))
        record.heads.append(head)
        record.bodies.append(body)
        record.num_bytes += num_bytes
        record.next = seq + 1
        self._frames += 1
        self.pending += 1
        if encoder.steps:
            encoder.keep()

    def _frame(self, kind: int, lane: int, session: int, seq: int, payload: Any) -> None:
        encoder = self._encoder
        encoder.cost = encoder.beside_bytes = 0
        body = b"" if payload is None else encoder.pack(payload)
        short = of_short(body)
        if short is None or not self._takes(short + FRAME, len(body)):
            if self._frames:
                self._cut()
                self._frame(kind, lane, session, seq, payload)
                return
            self._check_alone(body, FRAME)
        self._close()
        self._records += (_header.pack(kind, lane, session, seq, 0, 0, len(body)), body)
        self._frames += 1
        self.pending += 1
        encoder.keep()
        if short is None:
            self._cut()

    def _takes(self, cost: int, num_bytes: int) -> bool:
        """Whether the multipart at hand takes what costs so much; if so, it is counted."""
        cost += self._cost
        num_bytes += self._num_bytes
        if (
            cost > MOST_BYTES
            or cost > FLOOR_BYTES + PER_BYTE * (num_bytes + self._encoder.beside_bytes)
            or num_bytes > MAX_BODY_BYTES
            or self._frames == MAX_FRAMES
            or len(self._encoder.frames) > MAX_PARTS
        ):
            return False
        self._cost, self._num_bytes = cost, num_bytes + self._encoder.beside_bytes
        return True

    def _check_alone(self, body: bytes, cost: int) -> None:
        """Raises WireError unless `body` may have a multipart for itself; that is then full."""
        if len(body) > MAX_BODY_BYTES:
            raise WireError(
                f"a body of {len(body)} bytes; at most {MAX_BODY_BYTES} can be. "
                "Keep large data in arrays: they do not count"
            )
        if len(self._encoder.frames) > MAX_PARTS:
            raise WireError(f"{len(self._encoder.frames)} large arrays; at most {MAX_PARTS} can be. Join some of them")
        allowance = Allowance(len(body) + self._encoder.beside_bytes)
        try:
            allowance.pay(cost)
            allowance.weigh(body, deep=True)
        except Costly:
            raise too_costly() from None
        self._cost = MOST_BYTES

    def _begin(self, record: _Record) -> _Record:
        self._close()
        self._open = record
        return record

    def _close(self) -> None:
        """Nothing more goes into the open record."""
        record, self._open = self._open, None
        if record is not None:
            lane, session, schema = record.key
            kind = TOMBSTONE if schema.cls is Tombstone else DATA
            count, length = len(record.bodies), _array.size + record.num_bytes
            self._records.append(_header.pack(kind, lane, session, record.first, schema.hash, count, length))
            self._records += record.heads
            self._records.append(_array.pack(_ARRAY_32, count))
            self._records += record.bodies

    def _cut(self) -> None:
        """The multipart at hand is full: the value at hand, if there is one, is encoded again for the next."""
        self._encoder.undo()
        self._close()
        records, arrays = self._records, self._encoder.frames
        records[0] = self._starts[bool(arrays)]
        self._full.append([b"".join(records), *arrays])
        self._begin_multipart()

    def multiparts(self) -> list[list[Buffer]]:
        """Everything added since the last call, as few multiparts."""
        if self._frames:
            self._cut()
        full, self._full, self.pending = self._full, [], 0
        return full

    def take(self) -> list[Buffer]:
        """The one multipart of what was added since the last call, which is little."""
        (multipart,) = self.multiparts()
        return multipart


def followed(first: bytes) -> bool:
    """Whether parts follow this first part of a multipart."""
    return len(first) > _FOLLOWED and first[_FOLLOWED] != 0


class MessageDecoder:
    """Turns multiparts into frames. `attach` opens an array in shared memory."""

    def __init__(
        self, attach: Callable[[bytes, int], Any] | None = None, *, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self._decoder = Decoder(attach)
        self._max_body_bytes = max_body_bytes
        self._senders: dict[bytes, tuple[str, int]] = {}

    def sender(self, first: bytes) -> tuple[str, int]:
        """Host and epoch of the process that sent the multipart starting with `first`."""
        if len(first) < _preamble.size:
            raise WireError(f"a frame of {len(first)} bytes: too short for any")
        end = _preamble.size + _preamble.unpack_from(first)[4]
        known = self._senders.get(first[:end])
        if known is None:
            known = self._senders[first[:end]] = _sender(first[:end])
        return known

    def decode(self, parts: Sequence[Any]) -> list[Frame | Refused]:
        """The frames of one multipart whose `sender` is known, in order. In place of one whose body is wrong
        stands what fails its lane: Refused, or REFUSE when it was for the lane's sender.

        Raises WireError when the records themselves do not parse.
        """
        first: bytes = parts[0]
        view = memoryview(first)
        decoder = self._decoder
        decoder.frames = parts[1:]
        decoder.allowance = allowance = Allowance(len(first) + sum(map(len, decoder.frames)))
        at, end = _preamble.size + _preamble.unpack_from(first)[4], len(first)
        frames: list[Frame | Refused] = []
        room = MAX_FRAMES if len(parts) <= MAX_PARTS + 1 else -1
        while at < end:
            try:
                kind, lane, session, seq, schema, count, length = _header.unpack_from(first, at)
            except StructError as error:
                raise WireError(f"a truncated header ({error})") from error
            heads = at + _header.size
            start = heads + count * _head.size
            at = start + length
            room -= count or 1
            try:
                self._check(count, length, end - start)
                allowance.pay(FRAME + ENVELOPE * count)
                if room < 0:
                    raise _too_many(len(parts) - 1)
                if kind in MESSAGES:
                    marks = [*_head.iter_unpack(view[heads:start])]
                    envelopes = decoder.bodies(schema_named(schema), marks, view[start:at])
                    frames.append((DATA, lane, session, seq, envelopes))
                else:
                    frames.append((kind, lane, session, seq, self._payload(kind, view[start:at])))
            except (WireError, Costly) as error:
                frames.append(_instead(kind, lane, session, seq, str(error) or str(too_costly())))
                if len(frames) > 2 * MAX_FRAMES:
                    raise _too_many(len(parts) - 1) from error
        return frames

    def _check(self, count: int, length: int, there: int) -> None:
        """Raises WireError if a record's messages and its body cannot be as many, and as long, as the header says.

        Several messages that share a record may have RECORD_BYTES together, whatever the limit of one.
        """
        if there < 0:
            raise WireError(f"a record of {count} messages that ends within their ids")
        most = self._max_body_bytes if count < 2 else max(RECORD_BYTES, self._max_body_bytes)
        if length > most + _array.size:
            raise WireError(f"a body of {length} bytes; at most {most} can be")
        if length > there:
            raise WireError(f"a body of {length} bytes of which {there} are here")

    def _payload(self, kind: int, body: memoryview) -> Any:
        if kind not in KINDS:
            raise WireError(f"a frame of unknown kind {kind}")
        payload = self._decoder.unpack(body) if body else None
        if not _fits(kind, payload):
            raise WireError(f"a frame of kind {kind} with what none of its kind holds: {reprlib.repr(payload)}")
        return payload


def _sender(preamble: bytes) -> tuple[str, int]:
    magic, version, _, epoch, length = _preamble.unpack_from(preamble)
    if magic != MAGIC:
        raise WireError(f"a frame that starts with {magic!r}, not {MAGIC!r}: the peer is no flowrl process")
    if version != WIRE_VERSION:
        raise WireError(f"wire version {version}, this process speaks {WIRE_VERSION}; run one flowrl everywhere")
    name = preamble[_preamble.size :]
    if len(name) < length:
        raise WireError(f"a frame whose sender's name has {length} bytes, of which {len(name)} are here")
    try:
        return name.decode(), epoch
    except UnicodeDecodeError as error:
        raise WireError(f"a frame whose sender's name is no text ({error})") from error


class Refused:
    """A frame that was not taken, and why. Fails its lane."""

    __slots__ = ("lane", "reason", "session")

    def __init__(self, lane: int, session: int, reason: str) -> None:
        self.lane = lane
        self.session = session
        self.reason = reason


def _too_many(num_parts: int) -> WireError:
    return WireError(
        f"one of more than {MAX_FRAMES} frames, or beside {num_parts} arrays, in one multipart; at most {MAX_FRAMES} "
        f"and {MAX_PARTS} can be"
    )


def _instead(kind: int, lane: int, session: int, seq: int, reason: str) -> Frame | Refused:
    """What stands for a refused frame: what ends the wait of whoever it was for."""
    if kind in TO_SENDER:
        return REFUSE, lane, session, 0, f"the consumer's process sent {reason}"
    if kind == REPLY:
        return REPLY, lane, session, seq, (False, {"type": "WireError", "text": f"the answer is {reason}"})
    return Refused(lane, session, reason)


def _fits(kind: int, payload: Any) -> bool:
    """Whether frames of this kind hold such a payload. Whoever takes them in relies on it."""
    match payload:
        case None:
            return kind in BARE
        case str():
            return kind in (ERROR, REFUSE) and payload != ""
        case (tuple() as schemas, tuple() as kept) if kind == HELLO:
            return all(_pair(schema, str, int) for schema in schemas) and {*map(type, kept)} <= {int}
        case (str(), _) if kind in (REQUEST, NOTIFY):
            return True
        case (True, _) if kind == REPLY:
            return True
        case (False, dict() as error) if kind == REPLY:
            return _is_error(error)
        case tuple() if kind == RELEASE:
            return all(_pair(block, int, int) for block in payload)
        case tuple() if kind == CANCEL:
            return {*map(type, payload)} <= {bytes}
        case tuple() if kind == ACK:
            return {*map(type, payload)} <= {int}
    return False


def _pair(value: Any, first: type, second: type) -> bool:
    return type(value) is tuple and [*map(type, value)] == [first, second]


def _is_error(error: dict[Any, Any]) -> bool:
    """Whether `control` can make an error of it again."""
    texts = [error.get(name, "") for name in ("type", "text", "traceback")]
    node = error.get("node", ("", 0, "", "", None))
    return (
        error.keys() >= {"type", "text"}
        and all(type(text) is str for text in texts)
        and type(node) is tuple
        and [*map(type, node[:4])] == [str, int, str, str]
        and [*map(type, node[4:])] in ([int], [type(None)])
    )

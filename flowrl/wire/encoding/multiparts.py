"""Multiparts: the frames that two processes exchange, as bytes, within what the receiver may spend on them.

Everything pending for one peer leaves as one multipart, or as several if it is large:

    part 0    preamble (magic, wire version, whether parts follow, sender's incarnation and host), then records
    part 1…   raw array buffers, which bodies refer to by index

A record is a header (kind, lane, session, seq, schema, number of messages, body length) and a body
(msgpack, empty for None). Consecutive messages of one class on a lane share a record, because separate headers
and separate parsing would cost more than the messages themselves. The body of such a record is an array of the
messages' bodies; the id, ticket and member of each message precede it. `seq` is that of the first message.

A record is refused with WireError if it does not parse, if its payload is not valid for its kind, or if it costs
more than its bytes allow (`cost`). Records are refused one at a time; nothing is ever unpickled.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from struct import Struct
from struct import error as StructError
from typing import Any

from flowrl.errors import WireError
from flowrl.messages import Tombstone
from flowrl.wire.encoding.codec import ArrayPlace, Buffer, Decoder, Encoder
from flowrl.wire.encoding.cost import (
    ENVELOPE,
    FEW_BYTES,
    FLOOR_BYTES,
    FRAME,
    MOST_BYTES,
    MOST_TEXT_BYTES,
    PER_BYTE,
    SHORT,
    SMALL_BYTES,
    WORST,
    Allowance,
    Costly,
    too_costly,
)
from flowrl.wire.encoding.schema import (
    KNOWN,
    UNSENDABLE,
    Envelope,
    Schema,
    explain_unsendable,
    schema_named,
    schema_of,
)

MAGIC = b"flow"
WIRE_VERSION = 6
MAX_BODY_BYTES = 72 << 20
"""Largest body of one message or other frame, without the arrays outside it; copying it takes about 50 ms."""
RECORD_BYTES = SMALL_BYTES
"""Largest total size of the bodies of messages that share a record."""
MAX_FRAMES = SHORT
"""The most messages and other frames in one multipart."""
MAX_PARTS = 16384
"""The most arrays outside the bodies of one multipart."""

PREAMBLE = Struct("<4sHHIH")
FOLLOWED = 6  # offset of the field "whether parts follow"
NAME_LENGTH, NAME_LENGTH_AT = Struct("<H"), 12  # the preamble's last field
HEADER = Struct("<BIIQIII")
HEAD = Struct("<16sqi")
PREAMBLE_BYTES, HEADER_BYTES, HEAD_BYTES = PREAMBLE.size, HEADER.size, HEAD.size
ARRAY = Struct(">BI")
ARRAY_32 = 0xDD  # msgpack's mark of an array with a 32-bit length

# Kinds of frames. Frames of a lane go to its receiver (hello, data, cancel, tombstone, close, error) or to its
# sender (credit, ack, resend, sync, refuse); frames from REQUEST on belong to a pair of processes.
HELLO, CREDIT, DATA, ACK, CANCEL, TOMBSTONE, CLOSE, ERROR, RESEND, SYNC, REFUSE = range(1, 12)
TO_RECEIVER = frozenset((HELLO, DATA, CANCEL, TOMBSTONE, CLOSE, ERROR))
MESSAGES = frozenset((DATA, TOMBSTONE))
TO_SENDER = frozenset((CREDIT, ACK, RESEND, SYNC, REFUSE))
REQUEST, REPLY, ABORT, NOTIFY, RELEASE, BYE, CONFIRM = range(20, 27)
KINDS = frozenset((*TO_RECEIVER, *TO_SENDER, REQUEST, REPLY, ABORT, NOTIFY, RELEASE, BYE, CONFIRM))
BARE = frozenset((CLOSE, CREDIT, RESEND, SYNC, ABORT, BYE, CONFIRM))
"""Kinds without a body."""

Frame = tuple[int, int, int, int, Any]
"""(kind, lane, session, seq, payload). For DATA the payload is a list of Envelopes, numbered from `seq`; for other
kinds it is a value that msgpack can encode."""


def lane_number(name: str) -> int:
    """The 32-bit number that identifies a lane on the wire, made from its name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big")


def payload_fits(kind: int, payload: Any) -> bool:
    """Whether `payload` is valid for frames of this kind. The code that processes frames relies on it."""
    match payload:
        case None:
            return kind in BARE
        case str():
            return kind in (ERROR, REFUSE) and payload != ""
        case (tuple() as schemas, tuple() as kept) if kind == HELLO:
            return all(_is_tuple_of(schema, str, int) for schema in schemas) and {*map(type, kept)} <= {int}
        case (str(), _) if kind in (REQUEST, NOTIFY):
            return True
        case (True, _) if kind == REPLY:
            return True
        case (False, {"type": str(), "text": str()} as error) if kind == REPLY:  # what `control` makes an error of
            node = error.get("node", ("", 0, "", "", None))
            return type(error.get("traceback", "")) is str and (
                _is_tuple_of(node, str, int, str, str, int) or _is_tuple_of(node, str, int, str, str, type(None))
            )
        case tuple() if kind == RELEASE:
            return all(_is_tuple_of(block, int, int) for block in payload)
        case tuple() if kind == CANCEL:
            return {*map(type, payload)} <= {bytes}
        case tuple() if kind == ACK:
            return {*map(type, payload)} <= {int}
    return False


def _is_tuple_of(value: Any, *types: type) -> bool:
    return type(value) is tuple and (*map(type, value),) == types


_FRAME_COST = FLOOR_BYTES // MAX_FRAMES
"""Upper bound of what an Allowance counts for one more frame, or for a message in its own record, without the body.
Frames that together cost less than FLOOR_BYTES are within the allowance and within MAX_FRAMES."""

_MOST_SHARED = 12 << 20
"""The most that a multipart may cost by estimate; a frame that exceeds it is weighed exactly and sent in its own
multipart. Tuples that cost less than this hold fewer than MOST_VALUES values."""


class _Record:
    """Messages that are collected for one record."""

    __slots__ = ("bodies", "first", "heads", "lane", "next", "num_bytes", "schema", "session")

    def __init__(self, lane: int, session: int, schema: Schema, seq: int) -> None:
        self.lane = lane
        self.session = session
        self.schema = schema
        self.first = self.next = seq
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.num_bytes = 0


class MessageEncoder:
    """Collects frames for one peer into multiparts. `place` puts large arrays into shared memory.

    A multipart ends before the frame that would exceed its receiver's allowance.
    """

    def __init__(self, host: str, incarnation: int, place: ArrayPlace | None = None) -> None:
        name = host.encode()
        self._starts = tuple(
            PREAMBLE.pack(MAGIC, WIRE_VERSION, followed, incarnation, len(name)) + name for followed in (0, 1)
        )
        self._encoder = Encoder(place)
        self._carried = self._encoder.carry_value
        self._before = 0
        """Number of frames in the full multiparts."""
        self._full: list[list[Buffer]] = []
        self._until = 0
        """Messages below this seq can join the open record without a check of the multipart's cost."""
        self._begin_multipart()

    def _begin_multipart(self) -> None:
        self._records: list[bytes] = [b""]
        self._encoder.frames = []
        self._open: _Record | None = None
        """The last record of the current multipart, if the next messages of its lane can still join it."""
        self._frames = 0
        self._num_bytes = self._beside_bytes = self._cost = 0
        """The current multipart: bytes of its bodies, bytes of the arrays outside the bodies, and its cost. Messages of
        the open record are added when the record is closed."""

    @property
    def pending(self) -> int:
        """Number of messages and other frames added since `multiparts`."""
        return self._before + self._frames

    def add(self, frames: Iterable[Frame]) -> int:
        """Encode `frames` after those added before. Returns `pending`.

        Raises WireError for a value that cannot be sent; the frames before it are still sent.
        """
        message, envelope = self._add_message, None
        try:
            for kind, lane, session, seq, payload in frames:
                if kind == DATA:
                    for envelope in payload:
                        message(lane, session, seq, envelope)
                        seq += 1
                else:
                    envelope = None
                    self._add_frame(kind, lane, session, seq, payload)
        except UNSENDABLE as error:
            self._encoder.undo()
            raise explain_unsendable(error, message=envelope.body if envelope is not None else None) from error
        return self._before + self._frames

    def _add_message(self, lane: int, session: int, seq: int, envelope: Envelope) -> None:
        encoder, message = self._encoder, envelope.body
        schema = KNOWN.get(type(message)) or schema_of(type(message))  # a hot path: the lookup saves a call
        body = encoder.pack(schema.take_apart(envelope.group_id, message, self._carried))
        num_bytes = len(body)
        record = self._open
        if (
            record is None
            or seq != record.next
            or seq >= self._until
            or schema is not record.schema
            or lane != record.lane
            or session != record.session
            or record.num_bytes + num_bytes > RECORD_BYTES
            or encoder.cost
        ):  # rare on a busy lane, where nearly all messages join the open record
            record = self._record_for(lane, session, seq, schema, body)
            if record is None:
                self._cut_multipart()
                self._add_message(lane, session, seq, envelope)
                return
        record.heads.append(HEAD.pack(envelope.id, envelope.ticket, envelope.member))
        record.bodies.append(body)
        record.num_bytes += num_bytes
        record.next = seq + 1
        self._frames += 1

    def _record_for(self, lane: int, session: int, seq: int, schema: Schema, body: bytes) -> _Record | None:
        """The record that the message goes into. None if the multipart is too full for it."""
        encoder, record, num_bytes = self._encoder, self._open, len(body)
        if record is not None and (
            (seq, lane, session, schema) != (record.next, record.lane, record.session, record.schema)
            or record.num_bytes + num_bytes > RECORD_BYTES
        ):
            self._close_record(record)
            record = None
        each, num_more = schema.cost + _FRAME_COST, 0
        cost = self._cost + encoder.cost + (each if record is None else each * (record.next - record.first + 1))
        if cost <= FLOOR_BYTES and num_bytes <= RECORD_BYTES:  # no exact check is needed
            num_more = (FLOOR_BYTES - cost) // each
        elif not self._has_room(cost, num_bytes):
            if self._frames:
                return None
            self._check_alone(body, _FRAME_COST)
            self._cost = MOST_BYTES  # the multipart takes nothing more
        if record is None:
            self._open = record = _Record(lane, session, schema, seq)
        self._until = seq + 1 + num_more
        if encoder.cost:
            self._cost += encoder.cost
            self._beside_bytes += encoder.beside_bytes
            encoder.keep()
        return record

    def _add_frame(self, kind: int, lane: int, session: int, seq: int, payload: Any) -> None:
        encoder = self._encoder
        body = b"" if payload is None else encoder.pack(payload)
        num_bytes = len(body)
        if self._open is not None:
            self._close_record(self._open)
        cost = self._cost + _FRAME_COST + WORST * num_bytes + encoder.tables_cost + encoder.tables_bulk
        if num_bytes > FEW_BYTES or (cost > FLOOR_BYTES and not self._has_room(cost, num_bytes)):
            if self._frames:
                self._cut_multipart()
                self._add_frame(kind, lane, session, seq, payload)
                return
            self._check_alone(body, _FRAME_COST)
        self._cost = cost
        self._num_bytes += num_bytes
        self._records += (HEADER.pack(kind, lane, session, seq, 0, 0, num_bytes), body)
        self._frames += 1
        if encoder.cost:
            self._beside_bytes += encoder.beside_bytes
            encoder.keep()
        if num_bytes > FEW_BYTES:
            self._cut_multipart()

    def _has_room(self, cost: int, num_bytes: int) -> bool:
        """Whether the current multipart, which would cost `cost` in total, can take a body of `num_bytes` bytes."""
        body_bytes = self._num_bytes + num_bytes
        if self._open is not None:
            body_bytes += self._open.num_bytes
        beside_bytes = self._beside_bytes + self._encoder.beside_bytes
        return (
            cost <= _MOST_SHARED
            and cost <= FLOOR_BYTES + PER_BYTE * (body_bytes + beside_bytes)
            and body_bytes <= MAX_BODY_BYTES
            and num_bytes <= MOST_TEXT_BYTES  # a longer body may hold more text than allowed, so it is weighed
            and self._frames < MAX_FRAMES
            and len(self._encoder.frames) <= MAX_PARTS
        )

    def _check_alone(self, body: bytes, cost: int) -> None:
        """Raises WireError if `body` does not fit even into its own multipart."""
        if len(body) > MAX_BODY_BYTES:
            raise WireError(
                f"a body of {len(body)} bytes; at most {MAX_BODY_BYTES} can be. "
                "Keep large data in arrays: they do not count"
            )
        if len(self._encoder.frames) > MAX_PARTS:
            raise WireError(
                f"{len(self._encoder.frames)} large arrays; at most {MAX_PARTS} are allowed. Concatenate some of them"
            )
        allowance = Allowance(len(body) + self._encoder.beside_bytes)
        try:
            allowance.pay(cost)
            allowance.weigh(body, deep=True)
            # The arrays of a table are attached before the table is paid for, unlike other arrays in shared memory.
            allowance.earn(self._encoder.tables_shared)
            allowance.pay_table(self._encoder.tables_cost, self._encoder.tables_bulk)
        except Costly:
            raise too_costly() from None

    def _close_record(self, record: _Record) -> None:
        """Add the open record, as bytes, to the current multipart and to its totals: it takes no more messages."""
        schema, count = record.schema, len(record.bodies)
        self._cost += count * (schema.cost + _FRAME_COST)
        self._num_bytes += record.num_bytes
        kind = TOMBSTONE if schema.cls is Tombstone else DATA
        length = ARRAY.size + record.num_bytes
        self._records.append(HEADER.pack(kind, record.lane, record.session, record.first, schema.hash, count, length))
        self._records += record.heads
        self._records.append(ARRAY.pack(ARRAY_32, count))
        self._records += record.bodies
        self._open = None

    def _cut_multipart(self) -> None:
        """Finish the current multipart, which is full. The current value, if any, is encoded again for the next one."""
        self._encoder.undo()
        self._before += self._frames
        self._full.append(self._finish_multipart())

    def _finish_multipart(self) -> list[Buffer]:
        """Return the current multipart, and begin the next one."""
        if self._open is not None:
            self._close_record(self._open)
        records, arrays = self._records, self._encoder.frames
        records[0] = self._starts[1 if arrays else 0]
        self._begin_multipart()
        return [b"".join(records), *arrays]

    def multiparts(self) -> list[list[Buffer]]:
        """Everything added since the last call, in as few multiparts as the allowance permits."""
        full: list[list[Buffer]] = []
        if self._before:
            full, self._full, self._before = self._full, full, 0
        if self._frames:
            full.append(self._finish_multipart())
        return full

    def take(self) -> list[Buffer]:
        """The multipart of everything added since the last call, which has to fit into one."""
        (multipart,) = self.multiparts()
        return multipart


def parts_follow(first: bytes) -> bool:
    """Whether more parts follow `first`, the first part of a multipart."""
    return len(first) > FOLLOWED and first[FOLLOWED] != 0


class MessageDecoder:
    """Decodes multiparts into frames. `attach` opens an array in shared memory."""

    def __init__(
        self, attach: Callable[[bytes, int], Any] | None = None, *, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self._decoder = Decoder(attach)
        self._max_body_bytes = max_body_bytes
        self._senders: dict[bytes, tuple[str, int]] = {}

    def sender(self, first: bytes) -> tuple[str, int]:
        """Host and incarnation of the process that sent the multipart starting with `first`."""
        if len(first) < PREAMBLE_BYTES:
            raise WireError(f"a frame of {len(first)} bytes, which is shorter than its preamble")
        end = PREAMBLE_BYTES + NAME_LENGTH.unpack_from(first, NAME_LENGTH_AT)[0]
        known = self._senders.get(first[:end])
        if known is not None:
            return known

        magic, version, _, incarnation, length = PREAMBLE.unpack_from(first)
        if magic != MAGIC:
            raise WireError(
                f"a frame that starts with {magic!r} instead of {MAGIC!r}: the peer is not a flowrl process"
            )
        if version != WIRE_VERSION:
            raise WireError(
                f"wire version {version}, but this process uses {WIRE_VERSION}; run the same flowrl everywhere"
            )
        name = first[PREAMBLE_BYTES:end]
        if len(name) < length:
            raise WireError(f"a truncated sender's name: expected {length} bytes, got {len(name)}")
        try:
            known = self._senders[first[:end]] = name.decode(), incarnation
        except UnicodeDecodeError as error:
            raise WireError(f"a sender's name that is not valid UTF-8 ({error})") from error
        return known

    def decode(self, parts: Sequence[Any]) -> list[Frame | Refused]:
        """The frames of one multipart whose `sender` is known, in order. A frame whose body is invalid is replaced by
        one that fails its lane (Refused, or REFUSE if the frame was for the lane's sender), or, on the control link,
        by one that reports the error (`_replace_refused`).

        Raises WireError if the records themselves do not parse.
        """
        first: bytes = parts[0]
        view = memoryview(first)
        decoder = self._decoder
        arrays = parts[1:]
        decoder.begin_multipart(len(first) + sum(map(len, arrays)) if arrays else len(first), arrays)
        at, end = PREAMBLE_BYTES + NAME_LENGTH.unpack_from(first, NAME_LENGTH_AT)[0], len(first)
        frames: list[Frame | Refused] = []
        room = MAX_FRAMES if len(parts) <= MAX_PARTS + 1 else -1
        while at < end:
            try:
                kind, lane, session, seq, schema, count, length = HEADER.unpack_from(first, at)
            except StructError as error:
                raise WireError(f"a truncated header ({error})") from error
            heads = at + HEADER_BYTES
            start = heads + count * HEAD_BYTES
            at = start + length
            room -= count or 1
            try:
                if not length <= end - start <= self._max_body_bytes:  # rare: nearly all records pass at once
                    self._check_lengths(count, length, end - start)
                if decoder.counting:
                    decoder.allowance.pay(FRAME + ENVELOPE * count)
                if room < 0:
                    raise _explain_too_many(len(parts) - 1)
                if kind in MESSAGES:
                    # A lane that is not busy sends its messages one at a time; `unpack_from` is faster for one.
                    marks = [HEAD.unpack_from(first, heads)] if count == 1 else [*HEAD.iter_unpack(first[heads:start])]
                    envelopes = decoder.unpack_messages(schema_named(schema), marks, view[start:at])
                    frames.append((DATA, lane, session, seq, envelopes))
                else:
                    frames.append((kind, lane, session, seq, self._unpack_payload(kind, view[start:at])))
            except (WireError, Costly) as error:
                frames.append(_replace_refused(kind, lane, session, seq, str(error) or str(too_costly())))
                if len(frames) > 2 * MAX_FRAMES:
                    raise _explain_too_many(len(parts) - 1) from error
        return frames

    def _check_lengths(self, count: int, length: int, there: int) -> None:
        """Raises WireError if the number of messages or the body length in a record's header cannot be right.

        Several messages that share a record may have RECORD_BYTES in total, even if the limit for one message is lower.
        """
        if there < 0:
            raise WireError(f"a truncated record: it ends within the ids of its {count} messages")
        most = self._max_body_bytes if count < 2 else max(RECORD_BYTES, self._max_body_bytes)
        if length > most + ARRAY.size:
            raise WireError(f"a body of {length} bytes; at most {most} are allowed")
        if length > there:
            raise WireError(f"a truncated body: expected {length} bytes, got {there}")

    def _unpack_payload(self, kind: int, body: memoryview) -> Any:
        if kind not in KINDS:
            raise WireError(f"a frame of unknown kind {kind}")
        payload = self._decoder.unpack(body) if body else None
        if not payload_fits(kind, payload):
            raise WireError(f"a frame of kind {kind} with an invalid payload: {reprlib.repr(payload)}")
        return payload


class Refused:
    """A frame that was refused, with the reason. It fails its lane."""

    __slots__ = ("lane", "reason", "session")

    def __init__(self, lane: int, session: int, reason: str) -> None:
        self.lane = lane
        self.session = session
        self.reason = reason


def _explain_too_many(num_parts: int) -> WireError:
    return WireError(
        f"a multipart of more than {MAX_FRAMES} frames, or with {num_parts} arrays; at most {MAX_FRAMES} frames and "
        f"{MAX_PARTS} arrays are allowed"
    )


def _replace_refused(kind: int, lane: int, session: int, seq: int, reason: str) -> Frame | Refused:
    """The replacement of a refused frame, which ends the wait for that frame.

    Frames of the control link are numbered, so the replacement has the same number: an answer that is an error, or
    a request or note of a kind that no handler answers.
    """
    if kind in TO_SENDER:
        return REFUSE, lane, session, 0, f"the consumer's process sent {reason}"
    if kind == REPLY:
        return REPLY, lane, session, seq, (False, {"type": "WireError", "text": f"the answer is {reason}"})
    if kind in (REQUEST, NOTIFY, ABORT):
        return REQUEST if kind == REQUEST else NOTIFY, lane, session, seq, (reason, None)
    return Refused(lane, session, reason)

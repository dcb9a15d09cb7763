"""Multiparts: encodes the frames for one peer and collects them into multiparts within the peer's allowance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flowrl.channel.encoding.codec import ArrayPlace, Buffer, Encoder
from flowrl.channel.encoding.cost import (
    FEW_BYTES,
    FLOOR_BYTES,
    MOST_BYTES,
    MOST_TEXT_BYTES,
    PER_BYTE,
    WORST,
    Allowance,
    Costly,
    too_costly,
)
from flowrl.channel.encoding.envelope import Envelope
from flowrl.channel.encoding.frames import (
    ARRAY,
    ARRAY_32,
    DATA,
    HEAD,
    HEADER,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_FRAMES,
    MAX_PARTS,
    PREAMBLE,
    RECORD_BYTES,
    TOMBSTONE,
    WIRE_VERSION,
    Frame,
)
from flowrl.channel.encoding.schema import KNOWN, UNSENDABLE, Schema, schema_of, unsendable
from flowrl.errors import WireError
from flowrl.messages import Tombstone

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
        self._carried = self._encoder.carried
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
        return self._before + self._frames

    def _message(self, lane: int, session: int, seq: int, envelope: Envelope) -> None:
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
                self._cut()
                self._message(lane, session, seq, envelope)
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
            self._close(record)
            record = None
        each, num_more = schema.cost + _FRAME_COST, 0
        cost = self._cost + encoder.cost + (each if record is None else each * (record.next - record.first + 1))
        if cost <= FLOOR_BYTES and num_bytes <= RECORD_BYTES:  # no exact check is needed
            num_more = (FLOOR_BYTES - cost) // each
        elif not self._takes(cost, num_bytes):
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

    def _frame(self, kind: int, lane: int, session: int, seq: int, payload: Any) -> None:
        encoder = self._encoder
        body = b"" if payload is None else encoder.pack(payload)
        num_bytes = len(body)
        if self._open is not None:
            self._close(self._open)
        cost = self._cost + _FRAME_COST + WORST * num_bytes + encoder.tables_cost + encoder.tables_bulk
        if num_bytes > FEW_BYTES or (cost > FLOOR_BYTES and not self._takes(cost, num_bytes)):
            if self._frames:
                self._cut()
                self._frame(kind, lane, session, seq, payload)
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
            self._cut()

    def _takes(self, cost: int, num_bytes: int) -> bool:
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

    def _close(self, record: _Record) -> None:
        """Finish the open record, and add it to the multipart's totals: it takes no more messages."""
        self._cost += (record.next - record.first) * (record.schema.cost + _FRAME_COST)
        self._num_bytes += record.num_bytes
        self._write(record)
        self._open = None

    def _write(self, record: _Record) -> None:
        """Add the record, as bytes, to the current multipart."""
        schema = record.schema
        kind = TOMBSTONE if schema.cls is Tombstone else DATA
        count, length = len(record.bodies), ARRAY.size + record.num_bytes
        self._records.append(HEADER.pack(kind, record.lane, record.session, record.first, schema.hash, count, length))
        self._records += record.heads
        self._records.append(ARRAY.pack(ARRAY_32, count))
        self._records += record.bodies

    def _cut(self) -> None:
        """Finish the current multipart, which is full. The current value, if any, is encoded again for the next one."""
        self._encoder.undo()
        self._before += self._frames
        self._full.append(self._finished())

    def _finished(self) -> list[Buffer]:
        """Return the current multipart, and begin the next one."""
        if self._open is not None:
            self._write(self._open)
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
            full.append(self._finished())
        return full

    def take(self) -> list[Buffer]:
        """The multipart of everything added since the last call, which has to fit into one."""
        (multipart,) = self.multiparts()
        return multipart

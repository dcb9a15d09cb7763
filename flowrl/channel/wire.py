"""Frames: what two processes say to each other, as bytes.

Everything pending for one peer leaves as one multipart:

    part 0    preamble (magic, wire version, whether parts follow, sender's epoch and host), then records:
              header (kind, number of tensors, lane, session, seq, ticket, member, schema, body
              length, message id) and body (msgpack, empty for None)
    part 1…   raw array buffers, which bodies refer to by index

Small messages therefore share one part. Whatever does not parse is refused with WireError; nothing
is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from struct import Struct
from struct import error as StructError
from typing import Any

from flowrl.channel.codec import Buffer, Decoder, Encoder, Place, Schema, schema_named, schema_of
from flowrl.channel.envelope import Envelope
from flowrl.channel.stored import dump, load
from flowrl.errors import WireError
from flowrl.messages import Message, Tombstone

__all__ = ["Frame", "MessageDecoder", "MessageEncoder", "Refused", "dump", "lane_number", "load"]

MAGIC = b"flow"
WIRE_VERSION = 2
MAX_BODY_BYTES = 1 << 30

# Kinds of frames. A lane's own, to its receiver (hello, data, cancel, tombstone, close, error) and to its
# sender (credit, ack, resend, sync, refuse); and those of a pair of processes, from REQUEST on.
HELLO, CREDIT, DATA, ACK, CANCEL, TOMBSTONE, CLOSE, ERROR, RESEND, SYNC, REFUSE = range(1, 12)
TO_RECEIVER = frozenset((HELLO, DATA, CANCEL, TOMBSTONE, CLOSE, ERROR))
MESSAGES = frozenset((DATA, TOMBSTONE))
TO_SENDER = frozenset((CREDIT, ACK, RESEND, SYNC, REFUSE))
REQUEST, REPLY, ABORT, NOTIFY, RELEASE, BYE = range(20, 26)
KINDS = frozenset((*TO_RECEIVER, *TO_SENDER, REQUEST, REPLY, ABORT, NOTIFY, RELEASE, BYE))

Frame = tuple[int, int, int, int, Any]
"""(kind, lane, session, seq, payload): payload is an Envelope for DATA, else a msgpack-able value."""

_preamble = Struct("<4sHHIH")
_FOLLOWED = 6  # offset of "whether parts follow"
_header = Struct("<BxHIIQqiII16s")
_no_id = bytes(16)


def lane_number(name: str) -> int:
    """32 bits that stand for a lane's name on the wire."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big")


class MessageEncoder:
    """Collects frames for one peer into a multipart. `place` puts large arrays into shared memory."""

    def __init__(self, host: str, epoch: int, place: Place | None = None) -> None:
        name = host.encode()
        self._starts = tuple(
            _preamble.pack(MAGIC, WIRE_VERSION, followed, epoch, len(name)) + name for followed in (0, 1)
        )
        self._encoder = Encoder(place)
        self._records: list[bytes] = [b""]

    @property
    def pending(self) -> int:
        """Number of frames added since `take`."""
        return len(self._records) >> 1

    def add(self, frames: Iterable[Frame]) -> int:
        """Encode `frames` behind those before. Returns `pending`. Raises WireError for a value that cannot travel."""
        encoder, records = self._encoder, self._records
        arrays = encoder.frames
        for kind, lane, session, seq, payload in frames:
            before = len(arrays)
            try:
                if kind == DATA:
                    message: Message = payload.body
                    schema = schema_of(type(message))
                    body = encoder.body(schema, payload.group_id, message)
                    mark = TOMBSTONE if schema.cls is Tombstone else DATA
                    rest = payload.ticket, payload.member, schema.hash, len(body), payload.id
                else:
                    mark, body = kind, b"" if payload is None else encoder.pack(payload)
                    rest = 0, 0, 0, len(body), _no_id
            except (WireError, OverflowError, ValueError) as error:
                del arrays[before:]
                raise WireError(f"cannot send: {error}") from error
            records += (_header.pack(mark, len(arrays) - before, lane, session, seq, *rest), body)
        return len(records) >> 1

    def take(self) -> list[Buffer]:
        """The multipart of everything added since the last call."""
        records, arrays = self._records, self._encoder.frames
        self._records, self._encoder.frames = [b""], []
        records[0] = self._starts[bool(arrays)]
        return [b"".join(records), *arrays]


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
            known = self._senders[first[:end]] = self._parse_sender(first[:end])
        return known

    @staticmethod
    def _parse_sender(preamble: bytes) -> tuple[str, int]:
        magic, version, _, epoch, _ = _preamble.unpack_from(preamble)
        if magic != MAGIC:
            raise WireError(f"a frame that starts with {magic!r}, not {MAGIC!r}: the peer is no flowrl process")
        if version != WIRE_VERSION:
            raise WireError(f"wire version {version}, this process speaks {WIRE_VERSION}; run one flowrl everywhere")
        return preamble[_preamble.size :].decode(), epoch

    def decode(self, parts: Sequence[Any]) -> list[Frame | Refused]:
        """The frames of one multipart, in order; Refused in place of one whose body is wrong.

        Raises WireError when the records themselves do not parse.
        """
        first: bytes = parts[0]
        view = memoryview(first)
        decoder = self._decoder
        decoder.frames = parts[1:]
        at, end = _preamble.size + _preamble.unpack_from(first)[4], len(first)
        unpack_from, header_bytes = _header.unpack_from, _header.size
        frames: list[Frame | Refused] = []
        schema: Schema | None = None  # of the message before: most are alike
        while at < end:
            try:
                kind, _, lane, session, seq, ticket, member, number, length, id = unpack_from(first, at)
            except StructError as error:
                raise WireError(f"a truncated header ({error})") from error
            at += header_bytes
            body = view[at : at + length]
            at += length
            try:
                if length > self._max_body_bytes or at > end:
                    raise WireError(f"a body of {length} bytes; at most {min(self._max_body_bytes, end)} can be")
                if kind in MESSAGES:
                    if schema is None or schema.hash != number:
                        schema = schema_named(number)
                    group_id, message = decoder.body(schema, body)
                    frames.append((DATA, lane, session, seq, Envelope(id, ticket, group_id, member, message)))
                elif kind in KINDS:
                    frames.append((kind, lane, session, seq, decoder.unpack(body) if length else None))
                else:
                    raise WireError(f"a frame of unknown kind {kind}")
            except WireError as error:
                frames.append(Refused(lane, session, str(error)))
        return frames


class Refused:
    """A frame that was not taken, and why. Fails its lane."""

    __slots__ = ("lane", "reason", "session")

    def __init__(self, lane: int, session: int, reason: str) -> None:
        self.lane = lane
        self.session = session
        self.reason = reason

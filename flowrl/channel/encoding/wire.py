"""Wire format: the frames that two processes exchange, as bytes.

Everything pending for one peer leaves as one multipart, or as several if it is large (`multiparts`):

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
from collections.abc import Callable, Sequence
from struct import error as StructError
from typing import Any

from flowrl.channel.encoding.codec import Decoder
from flowrl.channel.encoding.cost import ENVELOPE, FRAME, Costly, too_costly
from flowrl.channel.encoding.frames import (
    ABORT,
    ACK,
    ARRAY,
    BARE,
    BYE,
    CANCEL,
    CLOSE,
    CONFIRM,
    CREDIT,
    DATA,
    ERROR,
    FOLLOWED,
    HEAD,
    HEAD_BYTES,
    HEADER,
    HEADER_BYTES,
    HELLO,
    KINDS,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_FRAMES,
    MAX_PARTS,
    MESSAGES,
    NAME_LENGTH,
    NAME_LENGTH_AT,
    NOTIFY,
    PREAMBLE,
    PREAMBLE_BYTES,
    RECORD_BYTES,
    REFUSE,
    RELEASE,
    REPLY,
    REQUEST,
    RESEND,
    SYNC,
    TO_RECEIVER,
    TO_SENDER,
    TOMBSTONE,
    WIRE_VERSION,
    Frame,
    fits,
    lane_number,
)
from flowrl.channel.encoding.multiparts import MessageEncoder
from flowrl.channel.encoding.schema import schema_named
from flowrl.channel.encoding.stored import dump, load
from flowrl.errors import WireError

__all__ = [
    "ABORT",
    "ACK",
    "BARE",
    "BYE",
    "CANCEL",
    "CLOSE",
    "CONFIRM",
    "CREDIT",
    "DATA",
    "ERROR",
    "HELLO",
    "KINDS",
    "MAGIC",
    "MAX_BODY_BYTES",
    "MAX_FRAMES",
    "MAX_PARTS",
    "MESSAGES",
    "NOTIFY",
    "RECORD_BYTES",
    "REFUSE",
    "RELEASE",
    "REPLY",
    "REQUEST",
    "RESEND",
    "SYNC",
    "TOMBSTONE",
    "TO_RECEIVER",
    "TO_SENDER",
    "WIRE_VERSION",
    "Frame",
    "MessageDecoder",
    "MessageEncoder",
    "Refused",
    "dump",
    "lane_number",
    "load",
]


def followed(first: bytes) -> bool:
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
        if known is None:
            known = self._senders[first[:end]] = _sender(first[:end])
        return known

    def decode(self, parts: Sequence[Any]) -> list[Frame | Refused]:
        """The frames of one multipart whose `sender` is known, in order. A frame whose body is invalid is replaced by
        one that fails its lane (Refused, or REFUSE if the frame was for the lane's sender), or, on the control link,
        by one that reports the error (`_instead`).

        Raises WireError if the records themselves do not parse.
        """
        first: bytes = parts[0]
        view = memoryview(first)
        decoder = self._decoder
        arrays = parts[1:]
        decoder.begin(len(first) + sum(map(len, arrays)) if arrays else len(first), arrays)
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
                    self._check(count, length, end - start)
                if decoder.counting:
                    decoder.pay(FRAME + ENVELOPE * count)
                if room < 0:
                    raise _too_many(len(parts) - 1)
                if kind in MESSAGES:
                    # A lane that is not busy sends its messages one at a time; `unpack_from` is faster for one.
                    marks = [HEAD.unpack_from(first, heads)] if count == 1 else [*HEAD.iter_unpack(first[heads:start])]
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

    def _payload(self, kind: int, body: memoryview) -> Any:
        if kind not in KINDS:
            raise WireError(f"a frame of unknown kind {kind}")
        payload = self._decoder.unpack(body) if body else None
        if not fits(kind, payload):
            raise WireError(f"a frame of kind {kind} with an invalid payload: {reprlib.repr(payload)}")
        return payload


def _sender(preamble: bytes) -> tuple[str, int]:
    magic, version, _, incarnation, length = PREAMBLE.unpack_from(preamble)
    if magic != MAGIC:
        raise WireError(f"a frame that starts with {magic!r} instead of {MAGIC!r}: the peer is not a flowrl process")
    if version != WIRE_VERSION:
        raise WireError(f"wire version {version}, but this process uses {WIRE_VERSION}; run the same flowrl everywhere")
    name = preamble[PREAMBLE_BYTES:]
    if len(name) < length:
        raise WireError(f"a truncated sender's name: expected {length} bytes, got {len(name)}")
    try:
        return name.decode(), incarnation
    except UnicodeDecodeError as error:
        raise WireError(f"a sender's name that is not valid UTF-8 ({error})") from error


class Refused:
    """A frame that was refused, with the reason. It fails its lane."""

    __slots__ = ("lane", "reason", "session")

    def __init__(self, lane: int, session: int, reason: str) -> None:
        self.lane = lane
        self.session = session
        self.reason = reason


def _too_many(num_parts: int) -> WireError:
    return WireError(
        f"a multipart of more than {MAX_FRAMES} frames, or with {num_parts} arrays; at most {MAX_FRAMES} frames and "
        f"{MAX_PARTS} arrays are allowed"
    )


def _instead(kind: int, lane: int, session: int, seq: int, reason: str) -> Frame | Refused:
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

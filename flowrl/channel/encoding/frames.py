"""The kinds of frames, the payload of each kind, and their layout in a multipart (see `wire`)."""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct
from typing import Any

from flowrl.channel.encoding.cost import SHORT, SMALL_BYTES

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


def fits(kind: int, payload: Any) -> bool:
    """Whether `payload` is valid for frames of this kind. The code that processes frames relies on it."""
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
    """Whether `control` can convert this data back to an error."""
    texts = [error.get(name, "") for name in ("type", "text", "traceback")]
    node = error.get("node", ("", 0, "", "", None))
    return (
        error.keys() >= {"type", "text"}
        and all(type(text) is str for text in texts)
        and type(node) is tuple
        and [*map(type, node[:4])] == [str, int, str, str]
        and [*map(type, node[4:])] in ([int], [type(None)])
    )

"""The envelope around a message, and the ids that make replays recognisable.

An id depends only on what the message was made from, never on time, process or replica: a node
that runs again on a replayed item sends messages with the same ids, and receivers drop them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from flowrl.messages import Message, Tombstone

ID_BYTES = 16


@dataclass(slots=True)
class Envelope:
    """One message in transit: `body` and what the engine knows about it.

    `ticket` is -1 outside admission; `member` is -1 if the message represents a whole group.
    """

    id: bytes
    ticket: int = -1
    group_id: str = ""
    member: int = -1
    body: Message = None  # type: ignore[assignment]

    @property
    def lost(self) -> bool:
        """True if this is a tombstone: it replaces a sample or group that will not arrive."""
        return isinstance(self.body, Tombstone)


def message_id(parents: Sequence[bytes], port: str, ordinal: int) -> bytes:
    """Id of the `ordinal`-th message that `port` sent on behalf of `parents` (in that order)."""
    digest = blake2b(b"".join(parents), digest_size=ID_BYTES)
    digest.update(b"%d %s" % (ordinal, port.encode()))
    return digest.digest()


def source_id(source: str, cursor: str) -> bytes:
    """Id of the message that `source` reads at `cursor`."""
    return blake2b(f"{source}\0{cursor}".encode(), digest_size=ID_BYTES).digest()

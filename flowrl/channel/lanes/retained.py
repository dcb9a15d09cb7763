"""The bytes of messages that a sender keeps until their ack."""

from __future__ import annotations

from collections.abc import Iterable

from flowrl.channel.encoding.schema import Envelope, payload_bytes


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

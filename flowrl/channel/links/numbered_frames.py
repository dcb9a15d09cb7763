"""Once: frames of the control link arrive once and in order, even over connections that break.

There are two pure machines, one at each end of one direction between two incarnations. Links that never break need
neither: their frames carry no number.

Invariants
- Frames are numbered from 1 in the order in which they were made. The receiver admits each number once, and only
  after the previous number; it drops a frame that arrives early, because the sender repeats it.
- The sender keeps a frame until the receiver has confirmed it. After every reconnection it sends all kept
  frames again, in order.
- Frames are lost, repeated or overtaken only when a connection breaks, and the sender is notified of each new
  connection.

Nothing waits here. The kept frames are those made until a confirmation arrives, which may need a new connection first.
"""

from __future__ import annotations

from collections import deque

from flowrl.channel.encoding.multiparts import ABORT, CONFIRM, NOTIFY, REPLY, REQUEST, Frame

NUMBERED = frozenset((REQUEST, REPLY, ABORT, NOTIFY))
"""Kinds that are numbered. Other frames between two processes may arrive twice, or late."""
LOW_BITS = 32
"""A number is sent in two fields of the header that the frames of lanes use for lane and session."""


class Outgoing:
    """The sending end. Numbering and keeping are two steps, so that a frame that cannot be sent uses no number."""

    def __init__(self) -> None:
        self._kept: deque[Frame] = deque()
        self._confirmed = 0

    def numbered(self, frame: Frame) -> Frame:
        """The frame as it is sent, with the next number."""
        kind, _, _, seq, payload = frame
        high, low = divmod(self._confirmed + len(self._kept) + 1, 1 << LOW_BITS)
        return kind, high, low, seq, payload

    def keep(self, frame: Frame) -> None:
        """Keep a frame that `numbered` returned and that was added to the link."""
        self._kept.append(frame)

    def unconfirmed(self) -> list[Frame]:
        """The frames to repeat over a new connection, oldest first."""
        return list(self._kept)

    def on_confirm(self, number: int) -> None:
        """The receiver has admitted all frames up to `number`."""
        for _ in range(min(number - self._confirmed, len(self._kept))):
            self._kept.popleft()
            self._confirmed += 1


class Incoming:
    """The receiving end."""

    def __init__(self) -> None:
        self.has_unflushed = False
        """True if a confirmation is to be sent."""
        self._number = 0

    def lets_in(self, frame: Frame) -> bool:
        """Whether `frame` is admitted, because it is the next one. A frame without a number is always admitted."""
        number = frame[1] << LOW_BITS | frame[2]
        if not number:
            return True
        self.has_unflushed = True  # also for a repetition: the confirmation may have been lost
        if number != self._number + 1:
            return False
        self._number = number
        return True

    def flush(self) -> list[Frame]:
        """The confirmation for the sender."""
        self.has_unflushed = False
        return [(CONFIRM, 0, 0, self._number, None)]

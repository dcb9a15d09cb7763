"""Once: frames of the control link arrive once and in their order, also over connections that break.

Two pure machines, one at each end of one direction between two incarnations. Links that never break need
neither: their frames carry no number.

Invariants
- Frames are numbered from 1 in the order in which they were made. The receiver lets each number in once, and only
  after the one before; what comes early is dropped, because it comes again.
- The sender keeps a frame until the receiver has confirmed it. For every connection that was made anew it sends
  all that it keeps again, in order.
- Frames are lost, repeated and overtaken only where a connection breaks, and the sender hears of each new one.

Nothing waits here. What is kept is bounded by what is made while a word travels back, or a connection is made.
"""

from __future__ import annotations

from collections import deque

from flowrl.channel.wire import ABORT, CONFIRM, NOTIFY, REPLY, REQUEST, Frame

NUMBERED = frozenset((REQUEST, REPLY, ABORT, NOTIFY))
"""The other frames between two processes may come twice, or come late."""
LOW_BITS = 32
"""A number travels in two of a header's fields, which the frames of lanes use for lane and session."""


class Outgoing:
    """The end that makes frames. Numbering and keeping are two steps: what cannot travel gets no number."""

    def __init__(self) -> None:
        self._kept: deque[Frame] = deque()
        self._confirmed = 0

    def numbered(self, frame: Frame) -> Frame:
        """The frame as it travels, with the next number."""
        kind, _, _, seq, payload = frame
        high, low = divmod(self._confirmed + len(self._kept) + 1, 1 << LOW_BITS)
        return kind, high, low, seq, payload

    def keep(self, frame: Frame) -> None:
        """A frame of `numbered` is on its way."""
        self._kept.append(frame)

    def unconfirmed(self) -> list[Frame]:
        """What a new connection has to carry again, oldest first."""
        return list(self._kept)

    def on_confirm(self, number: int) -> None:
        """The receiver has let in everything up to `number`."""
        for _ in range(min(number - self._confirmed, len(self._kept))):
            self._kept.popleft()
            self._confirmed += 1


class Incoming:
    """The end that takes frames in."""

    def __init__(self) -> None:
        self.has_unflushed = False
        """There is something to confirm."""
        self._number = 0

    def lets_in(self, frame: Frame) -> bool:
        """Whether `frame` is the next one. One without a number always is."""
        number = frame[1] << LOW_BITS | frame[2]
        if not number:
            return True
        self.has_unflushed = True  # also for a repetition: the word may have been lost
        if number != self._number + 1:
            return False
        self._number = number
        return True

    def flush(self) -> list[Frame]:
        """The word for the sender."""
        self.has_unflushed = False
        return [(CONFIRM, 0, 0, self._number, None)]

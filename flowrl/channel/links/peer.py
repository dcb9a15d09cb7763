"""Peer: a router's state for another endpoint (or this one), with the frames that wait to be sent to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowrl.channel.encoding.multiparts import Frame
from flowrl.channel.links.link import Link
from flowrl.channel.links.numbered_frames import NUMBERED, Incoming, Outgoing
from flowrl.errors import WireError


class Debtor(Protocol):
    """A machine with frames to flush: a lane's, or the `Incoming` that confirms received frames."""

    def flush(self) -> list[Frame]: ...


@dataclass(eq=False)
class Peer:
    """What the router knows of one other host, or of its own."""

    host: str
    incarnation: int | None = None
    """None until `join`."""
    link: Link | None = None
    failed: str = ""
    pending: list[Frame] = field(default_factory=list)
    """Frames of the control link that wait for `join`."""
    early: list[tuple[int, Sequence[Any]]] = field(default_factory=list)
    """(incarnation, frames) that wait for `join`."""
    outgoing: Outgoing = field(default_factory=Outgoing)
    """Control frames to the peer's current incarnation, over a link that may break."""
    incoming: Incoming = field(default_factory=Incoming)
    unflushed: list[Debtor] = field(default_factory=list)
    dirty: bool = False
    """Frames may have to be sent at the end of the tick."""
    begun: int = -1
    """The last tick in which frames left at once: the tick's later frames leave together."""
    busy: bool = False
    """Frames left at once since the router last checked for delayed credits and acks."""
    num_comparisons: int = 0
    """Number of steps in which lanes to or from this peer compared what was sent with what has arrived: a step may
    send frames again, behind frames that were sent later at first."""
    flush_due: bool = False
    """Delayed credits and acks have waited long enough: they leave with the next message."""

    def say(self, link: Link, frame: Frame) -> None:
        """Add a frame of the control link to `link`. Raises WireError for a value that cannot be sent."""
        if link.breaks and frame[0] in NUMBERED:
            frame = self.outgoing.numbered(frame)
            link.add([frame])
            self.outgoing.keep(frame)
        else:
            link.add([frame])

    def say_pending(self, link: Link) -> list[tuple[Frame, WireError]]:
        """Add the frames that waited for `join`. Returns those that cannot be sent, with the error."""
        pending, self.pending = self.pending, []
        unsaid: list[tuple[Frame, WireError]] = []
        for frame in pending:
            try:
                self.say(link, frame)
            except WireError as error:
                unsaid.append((frame, error))
        return unsaid


class ControlPeer(Protocol):
    """Receives the frames that belong to no lane."""

    def receive(self, host: str, frame: Frame) -> None: ...
    def unsaid(self, host: str, frame: Frame, error: WireError) -> None: ...
    def gone(self, host: str, reason: str) -> None: ...

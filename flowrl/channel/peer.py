"""Peer: another endpoint (or this one) as a router knows it, and what waits to be said to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowrl.channel.link import Link
from flowrl.channel.once import NUMBERED, Incoming, Outgoing
from flowrl.channel.wire import Frame
from flowrl.errors import WireError


class Debtor(Protocol):
    """A machine that has something to say: a lane's, or the one that confirms what came in."""

    def flush(self) -> list[Frame]: ...


@dataclass(eq=False)
class Peer:
    """One host (this one included), as known here."""

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
    """What is said to this incarnation of it over a link that may break."""
    incoming: Incoming = field(default_factory=Incoming)
    unflushed: list[Debtor] = field(default_factory=list)
    dirty: bool = False
    """Something may be due at the end of the loop's tick."""
    begun: int = -1
    """The last tick in which something left at once: what follows in it leaves together."""
    busy: bool = False
    """Something left at once since the last look at what is owed."""
    flush_due: bool = False
    """What is owed has waited long enough: the next message takes it along."""

    def say(self, link: Link, frame: Frame) -> None:
        """Add a frame of the control link to what leaves on `link`. Raises WireError for what cannot travel."""
        if link.breaks and frame[0] in NUMBERED:
            frame = self.outgoing.numbered(frame)
            link.add([frame])
            self.outgoing.keep(frame)
        else:
            link.add([frame])

    def say_pending(self, link: Link) -> list[tuple[Frame, WireError]]:
        """Add what waited for `join`. Returns what of it cannot travel."""
        pending, self.pending = self.pending, []
        unsaid: list[tuple[Frame, WireError]] = []
        for frame in pending:
            try:
                self.say(link, frame)
            except WireError as error:
                unsaid.append((frame, error))
        return unsaid


class ControlPeer(Protocol):
    """Where frames go that belong to no lane."""

    def receive(self, host: str, frame: Frame) -> None: ...
    def unsaid(self, host: str, frame: Frame, error: WireError) -> None: ...
    def gone(self, host: str, reason: str) -> None: ...

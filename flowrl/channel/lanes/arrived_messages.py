"""Seen: admits every message id to a port once.

Invariants
- An id is open from its first arrival until its message is finished; each further copy adds a claim.
- When the message is finished, every claim is acked, on the lane and in the session of its copy.
- A finished id is remembered until at least `remember` further ids are finished, and then forgotten. A copy can
  only arrive while the item it was made from is unacked at its producer, so only while that item's ticket is
  open; far fewer than `remember` messages pass one port in that time.

Pure bookkeeping: nothing here waits.
"""

from __future__ import annotations

from typing import Protocol

REMEMBER = 1 << 16


class Acks(Protocol):
    """The part of a lane's receiving end that deals with acks."""

    @property
    def session(self) -> int: ...
    def finish(self, seq: int, session: int) -> None: ...


SeenClaim = tuple[Acks, int, int]
"""One copy of a message: its lane, seq and session."""


class Seen:
    """The ids that have entered one port."""

    def __init__(self, remember: int = REMEMBER) -> None:
        self._remember = remember
        self._open: dict[bytes, SeenClaim | list[SeenClaim]] = {}
        self._recent: set[bytes] = set()
        self._older: set[bytes] = set()

    def enter(self, id: bytes, lane: Acks, seq: int) -> bool:
        """Record a copy. Returns True if it is the first. A copy of a finished message is acked at once."""
        claims = self._open.get(id)
        if claims is None:
            if id in self._recent or id in self._older:
                lane.finish(seq, lane.session)
                return False
            self._open[id] = (lane, seq, lane.session)
            return True
        self._open[id] = [*_each(claims), (lane, seq, lane.session)]
        return False

    def restore(self, id: bytes) -> None:
        """Record a message that came from a checkpoint and not over a lane."""
        assert id not in self._open
        self._open[id] = []

    def is_open(self, id: bytes) -> bool:
        """Whether the message has arrived and is not finished."""
        return id in self._open

    def open_of(self, lane: Acks) -> list[int]:
        """The seqs of the copies that arrived on `lane` in its current session and are not finished."""
        claims = [claim for copies in self._open.values() for claim in _each(copies)]
        return [seq for at, seq, session in claims if at is lane and session == lane.session]

    def finish(self, id: bytes) -> None:
        """The message is finished: ack every copy. Call once per id."""
        claims = self._open.pop(id)
        recent = self._recent
        if len(recent) >= self._remember:  # two sets: forgetting many ids is one assignment
            self._older = recent
            self._recent = recent = set()
        recent.add(id)
        if isinstance(claims, tuple):
            lane, seq, session = claims
            lane.finish(seq, session)
        else:
            for lane, seq, session in claims:
                lane.finish(seq, session)


def _each(claims: SeenClaim | list[SeenClaim]) -> list[SeenClaim]:
    """The claims as a list. Most ids have one copy, which is stored without a list."""
    return claims if isinstance(claims, list) else [claims]

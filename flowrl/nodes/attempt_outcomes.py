"""How the last attempts at episodes ended, and when that ends the run."""

from __future__ import annotations

from collections import Counter, deque

from flowrl.errors import FlowrlError
from flowrl.graph.node import Context

LOOKED_BACK = 256
"""Attempts among which failures are counted."""
FIRST_ATTEMPTS = 16
"""If so many attempts are over and all of them failed, the run ends too."""


class AttemptOutcomes:
    """Of one node replica; `played` names what is played, for messages."""

    def __init__(self, context: Context, played: str) -> None:
        self._context = context
        self._played = played
        self._last: deque[str] = deque(maxlen=LOOKED_BACK)
        """The cause of each of the last attempts that failed; "" for one that did not."""
        self._succeeded = False
        self._not_resumed: set[str] = set()
        self._events: set[str] = set()
        """Events that have failed several attempts; zygotes may die a few times only."""

    def succeeded(self) -> None:
        """An attempt was played to its end."""
        self._succeeded = True
        self._last.append("")

    def not_resumed(self, cause: str, text: str) -> None:
        """A half-done attempt of a resumed run cannot go on, which is no failure."""
        if cause not in self._not_resumed:
            self._context.progress(f"a half-done episode begins anew: {text}")
            self._not_resumed.add(cause)
        self._context.metric(cause, 1)

    def failed(self, cause: str, text: str, *, event: str = "") -> None:
        """An attempt failed. Raises FlowrlError if that is what mostly happens.

        Attempts that failed by one event count as one: hundreds may be open when a zygote dies, once.
        """
        if event in self._events:
            return
        if event:
            self._events.add(event)
        if cause not in self._last:
            self._context.progress(f"an attempt at an episode failed: {text}")
        self._last.append(cause)
        failed = Counter(cause for cause in self._last if cause)
        most, over = failed.most_common(1)[0][0], len(self._last)
        hopeless = not self._succeeded and over >= FIRST_ATTEMPTS
        if hopeless or (over == LOOKED_BACK and failed.total() > LOOKED_BACK // 2):
            raise FlowrlError(
                f"{failed.total()} of the last {over} attempts at episodes of {self._played!r} failed, mostly by "
                f"{most}; the last failure: {text}"
            )

"""How the last attempts at episodes ended, when further attempts wait, and when the run ends.

Failures come early, successes take time: of 1,024 episodes that start together, a few of which cannot be played, the
first to end have all failed. So attempts are judged in the order in which they started. The run ends if more than half
of the attempts that are looked at have failed. These are `LOOKED_BACK` attempts that started before those that are
still open. If none has succeeded, and as many have failed as were open at the same time (at least `FIRST_ATTEMPTS`),
all of the last attempts, open ones included, are looked at before these, and these only if they started after the
`PATIENCE_S` below: the open ones may outnumber all others.

A server that environments or agents need may be away for a moment. If the last `FIRST_ATTEMPTS` attempts to end have
all failed, each further attempt waits until an attempt succeeds or its own pause is over. For `PATIENCE_S` from then
on, failures use up no retry and do not end the run, unless waiting cannot remove their cause (`NOT_BY_WAITING`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice

from flowrl.errors import FlowrlError
from flowrl.graph.node import Context

LOOKED_BACK = 256
"""Attempts among which failures are counted."""
FIRST_ATTEMPTS = 16
"""If this many attempts have ended and all of them failed, something is wrong."""
PATIENCE_S = 60.0
PAUSES_S = (5.0, 20.0)
"""The shortest and the longest pause before an attempt while all attempts fail; it grows with the time they do."""
NOT_BY_WAITING = frozenset({"no_reward", "no_calls", "no_room", "env_malformed"})
"""Causes that lie in the environment or agent itself, so that waiting does not help."""


@dataclass(eq=False)
class BegunAttempt:
    """One attempt; `cause` is "" after a success, None while it is open."""

    began_s: float
    cause: str | None = None


class AttemptOutcomes:
    """The outcomes of one node replica's attempts; `played` names what is played, for messages."""

    def __init__(self, context: Context, played: str, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._played = played
        self._now_s = now_s
        self._begun: deque[BegunAttempt] = deque()
        """The last attempts that count, in the order in which they started."""
        self._open = self._most_open = 0
        self._ended: deque[str] = deque(maxlen=FIRST_ATTEMPTS)
        """The causes of the last attempts to end; "" for one that succeeded."""
        self._succeeded = False
        self._num_failed = 0
        self._only_fail_since: float | None = None
        self._recovered = asyncio.Event()
        self._not_resumed: set[str] = set()
        self._last_texts: dict[str, str] = {}
        """The last failure of each cause."""
        self._events: set[str] = set()
        """Events that may fail several attempts at once. There are few, because zygotes may die only a few times."""

    async def wait_ready(self) -> None:
        """Wait before an attempt while all attempts fail."""
        if (for_s := self._failing_for_s()) is None or for_s >= PATIENCE_S:
            return
        shortest, longest = PAUSES_S
        with self._context.outside(f"{self._played} to succeed again"), suppress(TimeoutError):
            await asyncio.wait_for(self._recovered.wait(), min(max(shortest, for_s / 2), longest))

    @contextmanager
    def begin_attempt(self) -> Iterator[BegunAttempt]:
        """An attempt that lasts as long as this context. An attempt that neither succeeds nor fails does not count."""
        attempt = BegunAttempt(self._now_s())
        self._open += 1
        self._most_open = max(self._most_open, self._open)
        self._begun.append(attempt)
        while len(self._begun) > LOOKED_BACK + self._most_open:
            self._begun.popleft()
        try:
            yield attempt
        finally:
            self._open -= 1
            if attempt.cause is None:
                self._leave_out(attempt)

    def note_success(self, attempt: BegunAttempt) -> None:
        """An attempt was played to its end."""
        attempt.cause = ""
        self._succeeded = True
        self._ended.append("")
        if self._only_fail_since is not None:
            self._only_fail_since = None
            self._recovered.set()
            self._recovered = asyncio.Event()

    def note_not_resumed(self, cause: str, text: str) -> None:
        """A half-done attempt of a resumed run cannot continue; this is not a failure."""
        if cause not in self._not_resumed:
            self._context.progress(f"a half-done episode begins anew: {text}")
            self._not_resumed.add(cause)
        self._context.metric(cause, 1)

    def note_failure(self, attempt: BegunAttempt, cause: str, text: str, *, event: str = "") -> bool:
        """An attempt failed; returns whether that uses up one of its episode's retries.

        Raises FlowrlError if most attempts fail. Attempts that failed by the same event count as one: hundreds may be
        open when a single zygote dies.
        """
        attempt.cause = cause
        if event and event in self._events:
            self._leave_out(attempt)
            return True
        if event:
            self._events.add(event)
        if cause not in self._last_texts:
            self._context.progress(f"an attempt at an episode failed: {text}")
        self._last_texts[cause] = text
        self._num_failed += 1
        self._ended.append(cause)
        only_fail = len(self._ended) == FIRST_ATTEMPTS and all(self._ended)
        if only_fail and self._only_fail_since is None and not NOT_BY_WAITING.issuperset(self._ended):
            self._only_fail_since = self._now_s()
            self._context.progress(
                f"the last {FIRST_ATTEMPTS} attempts at episodes of {self._played!r} failed; further ones wait for one "
                f"to succeed, for up to {PATIENCE_S:g} s. The last failure: {text}"
            )
        for_s = self._failing_for_s()
        patient = for_s is not None and for_s < PATIENCE_S and cause not in NOT_BY_WAITING
        if not patient and (judged := self._why_end_run()):
            raise FlowrlError(judged)
        return not patient

    def _leave_out(self, attempt: BegunAttempt) -> None:
        """Do not count an attempt that says nothing about whether attempts succeed."""
        with suppress(ValueError):  # it is no longer among the last attempts
            self._begun.remove(attempt)

    def _failing_for_s(self) -> float | None:
        """For how long attempts have only failed; None if they do not."""
        return None if self._only_fail_since is None else self._now_s() - self._only_fail_since

    def _why_end_run(self) -> str:
        """The message of the error that ends the run; "" if nothing ends it."""
        if not self._succeeded and self._num_failed >= max(FIRST_ATTEMPTS, self._most_open):
            if message := self._mostly_failed(list(self._begun)):
                return message
            if self._only_fail_since is not None and self._begun[0].began_s < self._only_fail_since + PATIENCE_S:
                return ""  # attempts that failed while a server may have been away
        if len(self._begun) < LOOKED_BACK + self._most_open:
            return ""
        return self._mostly_failed(list(islice(self._begun, LOOKED_BACK)))

    def _mostly_failed(self, looked_at: Sequence[BegunAttempt]) -> str:
        """The message if more than half of these attempts have failed; "" otherwise."""
        failed = Counter(attempt.cause for attempt in looked_at if attempt.cause)
        if 2 * failed.total() <= len(looked_at):
            return ""
        over = sum(attempt.cause is not None for attempt in looked_at)
        commonest = str(failed.most_common(1)[0][0])
        return (
            f"{failed.total()} of the last {over} attempts at episodes of {self._played!r} failed, mostly by "
            f"{commonest}; the last of these: {self._last_texts[commonest]}"
        )

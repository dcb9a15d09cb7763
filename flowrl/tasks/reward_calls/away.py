"""Servers that cannot be reached: which of several may be asked, when to try again, and when to give up.

A server is away from the time that it cannot be reached (`Outage.failed`) until it gives any answer
(`Outage.answered`). While another server can be reached, an away server is asked only after its pause is over. While
all are away, nothing is asked until the first pause is over. Such an outage ends with an answer, or `away_s` after the
last server went away. Pauses double from one failure to the next and are shortened at random, so that clients do not
return at the same moment.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from flowrl.errors import FlowrlError

AWAY_S = 600.0
BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 8.0
TOLD_AFTER_S = 1.0
"""Shorter outages are not reported."""


class ServersAway(FlowrlError):
    """No server of a reward could be reached for as long as a run waits."""


def pause_s(backoff_s: float, failures: int, asked_s: float = 0.0) -> float:
    """Seconds to pause after `failures` failures in a row (from 1); at least `asked_s`, which the server asked for."""
    longest = min(backoff_s * 2.0 ** min(failures - 1, 16), LONGEST_BACKOFF_S)
    return max(longest * random.uniform(0.5, 1.0), asked_s)


def retry_after_s(header: str | None) -> float:
    """The seconds that a Retry-After header asks for, as a number or a date; 0 if there is none that can be read."""
    if not header:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def _nothing(text: str) -> None:
    """Reports to nobody."""


def _plain(what: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Patience:
    """How long to wait for servers that cannot be reached, and how the wait is reported."""

    away_s: float = AWAY_S
    """0: a request that reaches no server fails after its tries, like any other."""
    outside: Callable[[str], AbstractContextManager[None]] = _plain
    """Entered by every request that waits for an answer while no server can be reached; like `context.outside`."""
    report: Callable[[str], None] = _nothing
    """Called with one line when the last server has gone away, and with another when a server is back."""


PATIENT = Patience()


@dataclass
class _Server:
    failures: int = 0
    retry_at: float = 0.0


@dataclass
class Outage:
    """What is known about the servers `urls`. Times are of the monotonic clock."""

    urls: Sequence[str]
    patience: Patience
    backoff_s: float = BACKOFF_S
    answers: int = 0
    """Number of answers of all servers, from which a request can tell whether others get answers while it fails."""
    since: float | None = None
    """When the last server went away; None while at least one can be reached."""
    why: str = ""
    """The last failure."""
    _servers: dict[str, _Server] = field(init=False)
    _reported: bool = field(init=False, default=False)
    _changed: asyncio.Future[None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._servers = {url: _Server() for url in self.urls}

    @property
    def what(self) -> str:
        """What is waited for."""
        return f"the reward server {', '.join(self.urls)}"

    def changed(self) -> asyncio.Future[None]:
        """Done when `since` becomes None, or stops being None."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def candidates(self) -> list[str]:
        """The servers that may be asked now; [] while all pause."""
        now = time.monotonic()
        return [url for url, server in self._servers.items() if server.retry_at <= now]

    def wait_s(self) -> float:
        """Seconds until a server may be asked, or until the outage ends the run."""
        now = time.monotonic()
        first = min(server.retry_at for server in self._servers.values()) - now
        left = first if self.since is None else self.since + self.patience.away_s - now
        return max(0.0, min(first, left))

    def is_over(self) -> bool:
        """Whether all servers have been away for `away_s`."""
        return self.since is not None and time.monotonic() >= self.since + self.patience.away_s

    def error(self) -> ServersAway:
        """The error that ends the run."""
        return ServersAway(
            f"{self.what} could not be reached for {self.patience.away_s:g} s: {self.why}; start it again and go on "
            "with --resume, or set --reward-away-s higher"
        )

    def answered(self, url: str) -> None:
        """`url` has given an answer of any kind."""
        self.answers += 1
        self._servers[url] = _Server()
        if self.since is None:
            return
        if self._reported:
            self.patience.report(f"{self.what} answers again after {time.monotonic() - self.since:.0f} s")
        self.since, self._reported = None, False
        self._change()

    def failed(self, url: str, why: str, asked_s: float = 0.0) -> None:
        """`url` could not be reached; it asks for a pause of `asked_s`."""
        server, now = self._servers[url], time.monotonic()
        if server.retry_at <= now:  # requests that fail together count as one failure
            server.failures += 1
        server.retry_at = max(server.retry_at, now + pause_s(self.backoff_s, server.failures, asked_s))
        if self.since is None and all(one.failures for one in self._servers.values()):
            self.since = now
            self._change()
        self.why = why
        if self.since is not None and not self._reported and now - self.since >= TOLD_AFTER_S:
            self._reported = True
            self.patience.report(f"waits for {self.what}: {why}; it is tried again for {self.patience.away_s:g} s")

    def _change(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

"""The request ledger: the outcome of every request to the policy.

Invariants
- A request is booked when it has ended, and abandoned at most once. The tokens of an abandoned request are redone
  tokens of its sample.
- Reports of generators and reports about episodes come from different hosts, so they arrive in any order, even after
  the sample has its fate. The result is the same. Only reports on one turn have a fixed order: if the turn was asked
  twice, the newer request answers it.
- No process of a run is restarted, so attempts and turns count up within an incarnation. If a checkpoint has a record
  of an episode, they continue from it after a resume, and an open request is asked again under its number. Otherwise
  the episode starts again with attempt 0.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.runtime.ledger.ledger import Ledger

KEPT_CLOSED = 4096
"""Number of samples with a known fate whose requests are kept in memory, for late reports."""
ASKED_AGAIN = "asked again"
GENERATED_AGAIN = "generated again"
REDONE = "redone"
"""The checkpoint has the sample as generated, so this copy is not sent."""
RESUMED = "resumed"


@dataclass(slots=True, frozen=True)
class Request:
    """A request that is not abandoned."""

    number: int
    request_id: str
    attempt: int
    turn: int
    tokens: int


@dataclass(slots=True)
class SampleRequests:
    """What is known about the requests of one sample."""

    live: list[Request] = field(default_factory=list)
    void: dict[int, str] = field(default_factory=dict)
    """Void attempt of this incarnation -> its cause."""


class RequestLedger:
    """The requests of the samples in flight. Adds rows to the ledger; `Accounting` commits them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._next = ledger.next_number("requests")
        """Number of the next request."""
        self._taken_up: list[tuple[str, bool, Request]] = []
        """(sample, whether it is generated, request) of each request found by a resume. `kept` decides about these."""
        self._before: set[int] = set()
        """Numbers of requests of samples that were generated before a resume. If such a sample is lost and made again,
        all these requests of it are abandoned."""
        self._samples: defaultdict[str, SampleRequests] = defaultdict(SampleRequests)
        self._closed: deque[str] = deque()
        """Samples with a known fate, the oldest first."""
        self._sample_of: dict[str, str] = {}
        """Id of a live request of a turn -> its sample."""
        self._early: dict[str, str] = {}
        """Id of a request that was abandoned, but is not booked yet -> the reason."""
        self._kept: set[str] = set()

    def take_up(self) -> None:
        """Load the requests of the samples that a resume finds in flight."""
        for sample_id, is_generated, *row in self._ledger.live_requests():
            request = Request(*row)
            self._samples[sample_id].live.append(request)
            self._taken_up.append((sample_id, bool(is_generated), request))

    def note_kept(self, generated: Collection[str], requests: Collection[str]) -> None:
        """Decide about what `take_up` has loaded: the checkpoint has the `generated` samples and the `requests`.

        Everything that is asked again for these samples is redone work, and these requests still count. All other
        requests of unfinished samples are abandoned.
        """
        self._kept |= set(generated)
        for sample_id, is_generated, request in self._taken_up:
            if is_generated:
                self._before.add(request.number)
            elif request.request_id in requests:
                self._sample_of[request.request_id] = sample_id
            else:
                self._abandon_request(sample_id, request, RESUMED)
        self._taken_up = []

    def close_sample(self, sample_id: str) -> None:
        """The sample has its fate: keep its requests for late reports until KEPT_CLOSED more samples are closed."""
        if sample_id in self._samples:
            self._closed.append(sample_id)
            if len(self._closed) > KEPT_CLOSED:
                for request in self._samples.pop(self._closed.popleft()).live:
                    self._sample_of.pop(request.request_id, None)

    # Reports

    def book_generated(
        self, sample_id: str, generator: str, at_s: float, finish_reason: str, spans: Sequence[Sequence[Any]]
    ) -> None:
        """Book a sample that was not asked turn by turn: a request for each of its policy spans."""
        for earlier in list(self._samples[sample_id].live):
            self._abandon_request(sample_id, earlier, GENERATED_AGAIN, redone=False)
        for turn, (start, tokens, digest, oldest, newest) in enumerate(spans):
            sizes = (tokens, start, None)
            rest = (digest, *sizes, oldest, newest, generator, finish_reason, at_s)
            self._samples[sample_id].live.append(self._add_request(sample_id, sample_id, 0, turn, *rest))

    def book_request(self, request_id: str, sample_id: str, attempt: int, turn: int, *rest: Any) -> None:
        """Book the request of a turn; `rest` is the rest of its event."""
        state = self._samples[sample_id]
        played_now = [r for r in state.live if r.number not in self._before]
        for earlier in [r for r in played_now if (r.attempt, r.turn) == (attempt, turn)]:
            self._abandon_request(sample_id, earlier, ASKED_AGAIN)
        request = self._add_request(request_id, sample_id, attempt, turn, *rest)
        state.live.append(request)
        self._sample_of[request_id] = sample_id
        early = self._early.pop(request_id, None)
        reason = REDONE if sample_id in self._kept else state.void.get(attempt, early)
        if reason is not None:
            self._abandon_request(sample_id, request, reason)

    def book_again(self, request_id: str, sample_id: str, attempt: int, turn: int, digest: str, *rest: Any) -> None:
        """Book a request that its caller reports, unless its generator reported it before it died."""
        if not self._ledger.has_request(request_id, sample_id, digest):
            self.book_request(request_id, sample_id, attempt, turn, digest, *rest)

    def book_lost(self, request_id: str, sample_id: str, attempt: int, turn: int, *rest: Any) -> None:
        """Book a request that its generator could not finish; `rest` is as for `request`, followed by the reason.

        Another generator is asked under the same id, and its report may have arrived already, so other requests stay as
        they are.
        """
        *of_request, reason = rest
        request = self._add_request(request_id, sample_id, attempt, turn, *of_request)
        self._ledger.add_row("abandon", reason, request.number)
        self._ledger.add_row("redone", request.tokens, sample_id)

    def book_abandoned(self, request_id: str, reason: str) -> None:
        """Abandon the newest request of this id, now or when its report arrives."""
        sample_id = self._sample_of.get(request_id)
        if sample_id is None:
            self._early[request_id] = reason
            return
        mine = [r for r in self._samples[sample_id].live if r.request_id == request_id]
        self._abandon_request(sample_id, mine[-1], reason)

    def book_void(self, sample_id: str, attempt: int, cause: str) -> None:
        """Abandon all requests of the attempt, including those reported later. A repeated call changes nothing."""
        state = self._samples[sample_id]
        if attempt in state.void or sample_id in self._kept:
            return
        state.void[attempt] = cause
        self._ledger.add_row("void", sample_id, attempt, cause)
        for request in [r for r in state.live if r.attempt == attempt and r.number not in self._before]:
            self._abandon_request(sample_id, request, cause)

    def book_episode(self, sample_id: str, row: Sequence[Any] | None) -> None:
        """Book a finished episode; None: another sample that was asked for turn by turn.

        If a resume lost it, and it was played again, the earlier requests are abandoned.
        """
        state = self._samples[sample_id]
        for earlier in [r for r in state.live if r.number in self._before]:
            self._abandon_request(sample_id, earlier, GENERATED_AGAIN, redone=False)
        if row is not None:
            environment, attempts, turns, truncated, seconds, ended_s = row
            self._ledger.add_row("episode", sample_id, environment, attempts, turns, truncated, None, seconds, ended_s)

    def episode_failed(self, sample_id: str, row: Sequence[Any]) -> None:
        """Book an episode that failed in all its attempts."""
        environment, attempts, turns, cause, seconds, ended_s = row
        if sample_id not in self._kept:
            self.book_void(sample_id, attempts - 1, cause)
            self._ledger.add_row("episode", sample_id, environment, attempts, turns, None, cause, seconds, ended_s)

    # Rows

    def _add_request(
        self, request_id: str, sample_id: str, attempt: int, turn: int, digest: str, *rest: Any
    ) -> Request:
        tokens, context, cached, oldest, newest, generator, finish_reason, at_s = rest
        request = Request(self._next, request_id, attempt, turn, tokens)
        self._next += 1
        place, sizes = (request_id, sample_id, attempt, turn), (tokens, context, cached)
        made = (oldest, newest, generator, finish_reason, at_s)
        self._ledger.add_row("request", request.number, *place, digest, *sizes, *made)
        return request

    def _abandon_request(self, sample_id: str, request: Request, reason: str, *, redone: bool = True) -> None:
        """Book the reason. Without `redone`, the sample's own event counts the tokens as redone."""
        self._ledger.add_row("abandon", reason, request.number)
        if redone:
            self._ledger.add_row("redone", request.tokens, sample_id)
        self._samples[sample_id].live.remove(request)
        if self._sample_of.get(request.request_id) == sample_id:
            del self._sample_of[request.request_id]

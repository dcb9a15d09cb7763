"""Reports of a node replica to the ledger: its `context.ledger`.

Events are collected and sent as one notification within SEND_WITHIN_S. Events that others may wait for (a loss, a
step, weights held) are sent at once, together with all events collected before them, so the ledger receives the
events of one replica in order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.messages import Bool, Int32, Prompt, Sample, Scored, Tombstone
from flowrl.messages.episode import Episode, Reply, Turn, empty_reply
from flowrl.runtime.ledger.token_digest import PolicySpan, policy_spans, request_digest, spans_by_sequence
from flowrl.wire.encoding.cost import chunked

if TYPE_CHECKING:
    from flowrl.wire.endpoint import Endpoint


SEND_WITHIN_S = 0.05
BOOKED_WITHIN_S = 60.0
"""A server that answers now has sent its reports of answers this long ago: its loop runs, and so do its timers."""
DRIVER = "driver"
CANCELLED = "cancelled"
"""Why a request is abandoned: who asked has left, or its session has ended, before the reply."""
NOT_USED = "not_used"
"""Why a request is abandoned: its reply is in no sequence of the sample that it was asked for."""
AGAIN = "request again"
"""Kind of the report of a request that its caller makes."""
EARLY = "rows"
"""Kind of an event with rows that come before the event of their table: (EARLY, replica, rows)."""
WITH_TABLES = frozenset(("step", "evaluation"))
"""Kinds whose last two fields are the last rows of their table, and the replica."""


@dataclass(frozen=True)
class Use:
    """How one batch used one sample."""

    sample_id: str
    group_id: str
    tokens: int
    """Policy tokens that entered the loss, each counted once."""
    stale_tokens: int = 0
    """Policy tokens masked out of the loss because of their age."""
    oldest_version: int | None = None
    """Oldest version of the tokens that entered the loss; None if none did, or if no policy sampled them."""
    masked_tokens: int = 0
    """Policy tokens that a node's `loss_mask` kept out of the loss."""
    spans: tuple[PolicySpan, ...] = ()
    """All policy spans of the sequences in the batch, including those outside of the loss."""
    times_trained: int = 0
    """Number of batches that have used the sample before."""

    def row(self) -> tuple[Any, ...]:
        """The use as a step reports it: plain values, in the order of the fields, without the group."""
        counts = (self.tokens, self.stale_tokens, self.masked_tokens, self.oldest_version)
        again = (self.times_trained,) if self.times_trained else ()
        return (self.sample_id, *counts, [tuple(span) for span in self.spans], *again)

    @classmethod
    def of(cls, sample: Sample, loss_mask: Bool | None = None) -> Use:
        """The use of `sample` with the tokens of `loss_mask` (default: all tokens that the sample's own mask allows).

        Masks cover all sequences of the sample, one after the other. Tokens that the sample's own mask allows and
        `loss_mask` excludes are too old: they count as stale.
        """
        own: Bool | None = getattr(sample, "loss_mask", None)
        allowed = sample.whole_mask if own is None else own & sample.whole_mask
        mask = allowed if loss_mask is None else loss_mask & allowed
        tokens, num_allowed = int(mask.sum()), int(allowed.sum())
        oldest = _policy_version(int(sample.whole_versions[mask].min())) if tokens else None
        stale, masked = num_allowed - tokens, sample.response_tokens - num_allowed
        spans = tuple(policy_spans(sample))
        again = getattr(sample, "times_trained", 0)
        return cls(sample.sample_id, sample.group_id, tokens, stale, oldest, masked, spans, again)


@dataclass(frozen=True)
class EvaluationRow:
    """One answer of an evaluation. `phase` is before, during or after (the training)."""

    phase: str
    step: int
    prompt_id: str
    member: int
    score: float
    correct: bool
    response_tokens: int
    oldest_version: int | None
    """Oldest version of its tokens; None if it has no tokens."""
    newest_version: int | None
    task: str = ""


class LedgerClient:
    """Collects and sends the events of one node replica. `stand_ins` are the nodes that may lose a replica."""

    def __init__(self, link: Endpoint, replica: str, *, stand_ins: Collection[str] = ()) -> None:
        self.replica = replica
        self._link = link
        self._stand_ins = frozenset(stand_ins)
        self._answered: defaultdict[str, deque[tuple[float, tuple[Any, ...]]]] = defaultdict(deque)
        """Server -> (time.monotonic(), report) of each request that it has answered recently."""
        self._lost: set[str] = set()
        """Servers that have died."""
        self._replies: dict[str, set[str]] = {}
        """Derived sample of this node that is not reported yet -> the digests of the replies to its requests."""
        self._events: list[tuple[Any, ...]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False

    async def admit(
        self,
        node: str,
        samples: Sequence[Prompt],
        *,
        trainers: Sequence[str] | None = None,
        asks: int = 0,
        asked_by: str | None = None,
    ) -> int | None:
        """A ticket for one group, committed in the ledger; None when no further group is wanted.

        `samples` are the members of one group; `trainers` are the trainers that they can reach (all by default). `asks`
        and `asked_by` are those of `flowrl.graph.ports.Out.admit`. Waits for the ticket.
        """
        rows = _admitted_rows(samples)
        body: dict[str, Any] = {"node": node, "group_id": samples[0].group_id, "rows": rows, "trainers": trainers}
        if asks or asked_by is not None:
            body |= {"asks": asks, "asked_by": asked_by}
        ticket: int | None = await self._link.request(DRIVER, "admit", body)
        return ticket

    async def derive(
        self, parent_id: str, label: str, samples: Sequence[Prompt], *, trainers: Sequence[str] | None = None
    ) -> None:
        """Book samples derived from another, which can reach `trainers`. Returns when the ledger has committed them."""
        self.flush()
        body = {"parent_id": parent_id, "label": label, "rows": _admitted_rows(samples), "trainers": trainers}
        await self._link.request(DRIVER, "derive", body)
        self._replies |= {sample.sample_id: set() for sample in samples}

    def asked(self, sample: Sample, *, resumed: bool) -> None:
        """Report the rollout of a derived sample whose requests this node has asked for turn by turn, once.

        Raises FlowrlError if tokens of it are marked as the policy's that no reply has. If the invocation was `resumed`
        with a record, it may have replies that this process does not know.
        """
        replies = self._replies.pop(sample.sample_id, None)
        if not replies:  # reported before, or sampled by a generator that has reported it
            return
        spans = policy_spans(sample)
        wrong = [] if resumed else [span for span in spans if span.digest not in replies]
        if wrong:
            raise FlowrlError(
                f"sample {sample.sample_id!r}, derived from {sample.parent_id!r}, marks {wrong[0].tokens} tokens after "
                f"its first {wrong[0].start} as the policy's, but no reply to its requests has exactly these tokens, "
                "logprobs and versions in this context: its policy_mask may be true for its own continuation only, not "
                "for the part that it shares with its parent"
            )
        self._add("episode", *_rollout_row(sample), spans[0].start if spans else len(sample.token_ids), None)

    def forget_replies(self, sample_id: str) -> None:
        """The work on a derived sample is over."""
        self._replies.pop(sample_id, None)

    def generated(self, sample: Sample) -> None:
        """Report a finished rollout, with the versions of its policy tokens (-1 for a dataset's: reported as None).

        Each of its policy spans is booked as a request. For episodes call `request` and `episode` instead.
        """
        reason = "length" if sample.truncated else "stop"
        requests = [
            (*span, *_version_range(sequence.versions[span.start :][: span.tokens]))
            for sequence, spans in zip(sample.sequences, spans_by_sequence(sample), strict=True)
            for span in spans
        ]
        self._add("generated", *_rollout_row(sample), reason, requests)

    # Episodes

    def request(self, turn: Turn, reply: Reply) -> None:
        """Report that the request of a turn has ended. The generator calls this before it answers.

        Held-out turns are not booked, and neither are those that are not trained.
        """
        if _is_booked(turn):
            self._add("request", *_request_row(turn, reply))

    def answered(self, server: str, turn: Turn, reply: Reply) -> None:
        """Note that a replica has answered a turn here.

        If the replica dies before it sends its report of the request, the report is made here (`server_lost`), from the
        content of the answer.
        """
        if not _is_booked(turn):
            return
        if (replies := self._replies.get(turn.sample_id)) is not None:
            replies.add(_digest_of(turn, reply))
        if server.partition("/")[0] not in self._stand_ins:
            return
        row = _request_row(turn, reply)
        if server in self._lost:  # the answer was in transit
            self._add(AGAIN, *row)
            return
        lately, now = self._answered[server], time.monotonic()
        while lately and lately[0][0] < now - BOOKED_WITHIN_S:
            lately.popleft()
        lately.append((now, row))

    def server_lost(self, replica_ids: Collection[str]) -> None:
        """The processes of these replicas have died: report the requests that they have answered here recently."""
        self._lost.update(replica_ids)
        for server in replica_ids:
            for _, row in self._answered.pop(server, ()):
                self._add(AGAIN, *row)
        self.flush()

    def request_lost(self, turn: Turn, reply: Reply, reason: str) -> None:
        """Report, instead of `request`, that a request has ended with these tokens, which are abandoned.

        The request is asked again under the same id, so the two reports may arrive in any order.
        """
        if _is_booked(turn):
            self._add("request lost", *_request_row(turn, reply), reason)

    def cancelled(self, turn: Turn) -> None:
        """Report that a turn was given up before its reply, so that its number is not missing.

        The generator's own report of the request may also arrive, before or after this: the second `abandoned` is for
        that report.
        """
        if _is_booked(turn):
            self.request(turn, empty_reply(turn))
            for _ in range(2):
                self.abandoned(turn.request_id, CANCELLED)

    def abandoned(self, request_id: str, reason: str) -> None:
        """Report that the reply of a request that has ended is not used, for example because the call was cancelled."""
        self._add("abandoned", request_id, reason)

    def attempt_void(self, sample_id: str, attempt: int, cause: str) -> None:
        """Report that an attempt of an episode, counted from 0, is given up; its tokens count as redone."""
        self._add("void", sample_id, attempt, cause)

    def episode(self, episode: Episode, *, truncated: str | None, seconds: float) -> None:
        """Report a finished episode, instead of `generated`. `truncated`: what cut it off; None if nothing did."""
        spans = policy_spans(episode)
        prompt_tokens = spans[0].start if spans else len(episode.token_ids)
        row = (episode.environment, episode.attempts, episode.turns, truncated, seconds, time.time())
        self._add("episode", *_rollout_row(episode), prompt_tokens, row)

    def sampled(self, sample: Sample, replies: Sequence[Reply], unused: Iterable[str], seconds: float) -> None:
        """Report a sample that a node has made of replies, instead of `generated`: an episode of this node.

        `unused` are the other requests that were asked for the sample and have ended.
        """
        for request_id in unused:
            self.abandoned(request_id, NOT_USED)
        if sample.sample_id in self._replies:  # a derived sample is reported when it is sent
            arrays = [(r.context_ids, r.token_ids, r.behavior_logprobs, r.versions) for r in replies]
            self._replies[sample.sample_id].update(request_digest(*of_reply) for of_reply in arrays)
            return
        cut = "tokens" if replies[-1].finish_reason == "length" else None
        row = (self.replica.partition("/")[0], 1, len(replies), cut, seconds, time.time())
        self._add("episode", *_rollout_row(sample), replies[0].context_ids.size, row)

    def episode_failed(
        self, sample_id: str, environment: str, attempts: int, turns: int, cause: str, seconds: float
    ) -> None:
        """Report an episode whose last attempt also failed, with the `turns` of that attempt, which becomes void."""
        self._add("episode failed", sample_id, (environment, attempts, turns, cause, seconds, time.time()))

    def scored(self, sample: Scored) -> None:
        """Report that a sample has its reward."""
        self._add("scored", sample.sample_id, float(sample.reward), sample.scored_s or time.time())

    def lost(self, marker: Tombstone, trainers: Sequence[str] | None = None) -> None:
        """Report the marker's sample, or whole group, as filtered, failed or dropped at `trainers` (default: all)."""
        who = (marker.group_id, marker.member, marker.sample_ids)
        self._add("lost", trainers, *who, marker.state, marker.reason, marker.response_tokens)
        self.flush()

    async def assert_bound(self, trainer: str, version: int, group_ids: Sequence[str]) -> None:
        """Call before `trainer` updates `version` with these groups. Raises FlowrlError if one of them is too old.

        Only for trainers whose versions are not those of the tokens; other trainers know the age of every token.
        """
        await self._link.request(DRIVER, "ages", {"trainer": trainer, "version": version, "group_ids": group_ids})

    def step(self, record: Mapping[str, Any], uses: Sequence[Use], *, policy: str) -> None:
        """Report a finished batch: its metrics line, and how it used each of its samples.

        `record["step"]` is the version that the batch made. Call it once per batch, with the uses of all ranks.
        `policy` is the name under which the weights are published: the name of the trainer node.
        """
        line = {name: _to_plain(value) for name, value in record.items()}  # first: this may raise
        self._add("step", policy, line, self._last_of([use.row() for use in uses]), self.replica)
        self.flush()

    def finished(self, trainer: str, sample_ids: Sequence[str]) -> None:
        """Report that `trainer` has finished a batch with these samples, which it books in a step before or after."""
        self._add("finished", trainer, sample_ids)

    def holds(self, replica: str, policy: str, version: int) -> None:
        """Report that `replica` now serves with `version` of `policy`; tickets may wait for that."""
        self._add("holds", replica, policy, version)
        self.flush()

    def evaluation(self, rows: Sequence[EvaluationRow]) -> None:
        """Report the results of one evaluation, which have their own table."""
        now = time.time()
        table = [(*dataclasses.astuple(row), now) for row in rows]
        self._add("evaluation", self._last_of(_to_plain(table)), self.replica)
        self.flush()

    def pause(self, paused: bool) -> None:
        """Send all collected events, and hold back later ones until `pause(False)`.

        A checkpoint's ledger then contains what happened until the checkpoint's messages were read, and nothing later.
        """
        self._paused = False
        self.flush()
        self._paused = paused

    def flush(self) -> None:
        """Send all collected events. The host calls it once more when the replica ends."""
        if self._paused:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._events:
            events, self._events = self._events, []
            for part in chunked(events):
                self._link.notify(DRIVER, "ledger", {"events": part})

    def _last_of(self, rows: Sequence[Any]) -> Sequence[Any]:
        """The last part of `rows`. Events with the other parts are added first, because a single event is not split."""
        *parts, last = [*chunked(rows)] or [[]]
        for part in parts:
            self._add(EARLY, self.replica, part)
        return last

    def _add(self, *event: Any) -> None:
        self._events.append(event)
        if self._timer is None and not self._paused:
            self._timer = asyncio.get_running_loop().call_later(SEND_WITHIN_S, self.flush)


def _is_booked(turn: Turn) -> bool:
    return turn.ticket >= 0 and turn.trained


def _admitted_rows(samples: Sequence[Prompt]) -> list[tuple[Any, ...]]:
    return [(s.sample_id, s.prompt_id, s.epoch, s.member, len(s.token_ids)) for s in samples]


def _digest_of(turn: Turn, reply: Reply) -> str:
    return request_digest(_context_of(turn, reply), reply.token_ids, reply.behavior_logprobs, reply.versions)


def _context_of(turn: Turn, reply: Reply) -> Int32:
    """The tokens that the reply continues: the generator renders those of messages."""
    return reply.context_ids if turn.messages else turn.token_ids


def _request_row(turn: Turn, reply: Reply) -> tuple[Any, ...]:
    """The report of a request that has ended now; generator and caller make the same one, except for the time."""
    digest, context = _digest_of(turn, reply), len(_context_of(turn, reply))
    place = (turn.request_id, turn.sample_id, turn.attempt, turn.turn)
    sizes = (len(reply.token_ids), context, reply.cached_tokens)
    return (*place, digest, *sizes, *_version_range(reply.versions), reply.generator, reply.finish_reason, time.time())


def _rollout_row(sample: Sample) -> tuple[Any, ...]:
    """Sample, generator, number of policy tokens, their oldest and newest version, and when they were complete."""
    versions = sample.whole_versions[sample.whole_mask]
    made_s = sample.generated_s or time.time()
    return (sample.sample_id, sample.generator, len(versions), *_version_range(versions), made_s)


def _version_range(versions: Int32) -> tuple[int | None, int | None]:
    """The oldest and the newest version; None for tokens of a dataset, and without tokens."""
    return (
        (_policy_version(int(versions.min())), _policy_version(int(versions.max()))) if len(versions) else (None, None)
    )


def _policy_version(version: int) -> int | None:
    return version if version >= 0 else None


def _to_plain(value: Any) -> Any:
    """Convert numpy and torch scalars to Python numbers, also inside containers."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, np.generic) or hasattr(value, "item"):
        return value.item()
    return value


class LongTables:
    """Puts tables together: rows of each replica wait for the event that has the last rows of their table."""

    def __init__(self) -> None:
        self._early: dict[str, list[Any]] = defaultdict(list)

    def join_tables(self, events: Iterable[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
        """The events in order, with whole tables, and without the events and fields that were needed to split them."""
        for kind, *fields in events:
            if kind == EARLY:
                replica, rows = fields
                self._early[replica] += rows
            elif kind in WITH_TABLES:
                *before, last, replica = fields
                yield (kind, *before, [*self._early.pop(replica, ()), *last])
            else:
                yield (kind, *fields)

"""Accounting: tickets and ledger of one run, kept in the driver; every host reports to it.

Invariants
- A group is committed in the ledger before `admit` answers, and so before its first prompt is sent.
- No group and no sample is admitted twice; only a resumed source admits the groups in flight again, each once.
- A derived sample is committed before `derive_samples` returns. It takes no ticket, and joins the group of its parent.
- A sample is in flight until its fate at every trainer that it can reach is known (`fates`). The ticket of its group
  is out until the state of the group's last sample is known. A loss on a branch that leads to no trainer changes
  nothing here.
- A trainer's use of a token older than the bound is not booked: it ends the run.
- After a resume, repeated work on a sample changes its row only if the result of the earlier work is gone.
- Other events are committed with the next admission or step, and at the latest COMMIT_WITHIN_S after they arrive.
  Events are booked in order; a large step is booked in pieces (`bookings`).

Waits: `admit` waits for the events before it, then for a returned ticket, the end of a pause, or the end of
admission; `derive_samples` for the events before it; `until_held` for consumers to load or to die.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import FlowrlError
from flowrl.runtime.ledger.bookings import Bookings
from flowrl.runtime.ledger.ledger import Fate, Ledger, LedgerSnapshot
from flowrl.runtime.ledger.ledger_client import LedgerClient, LongTables, Use
from flowrl.runtime.ledger.ledger_file import LEDGER, Terms
from flowrl.runtime.ledger.request_ledger import RequestLedger
from flowrl.runtime.ledger.sample_fates import (
    ELSEWHERE,
    LEFT_AT_END,
    Fates,
    Reuse,
    require_fresh,
    require_next,
    used_after_all,
)
from flowrl.wire.tickets import Tickets

if TYPE_CHECKING:
    from flowrl.wire.endpoint import Endpoint

__all__ = ["LEDGER", "Accounting", "LedgerClient", "Use"]

LedgerRow = Sequence[Any]

USES_AT_ONCE = 250
"""Number of uses that are booked in one piece, which takes some 10 ms."""


class Accounting:
    """Tickets, ledger and the admission queue. Not thread-safe: use it only on the driver's event loop.

    `tickets` names the trainers, the main one first: its steps are the run's steps, and its next record contains the
    other trainers' records under their names. `on_step` gets that record. `on_closed` gets each sample's final state:
    sample, state, reason, and the step that trained it or else the next one. `bound` is the largest staleness of a
    trained token. For a trainer of `own_clock`, the age of a use counts from the version of its own weights that was
    held when the group was admitted. With `resume`, groups that the ledger has in flight keep their tickets;
    it is then as the checkpoint `restored_from` has it.
    """

    def __init__(
        self,
        run_dir: Path,
        tickets: Tickets,
        *,
        on_step: Callable[[dict[str, Any]], object],
        on_closed: Callable[[str, str, str | None, int], object] = lambda *sample: None,
        bound: int | None = None,
        reuse: Reuse | None = None,
        own_clock: Collection[str] = (),
        resume: bool = False,
        restored_from: Path | None = None,
    ) -> None:
        self.tickets = tickets
        self.ledger = Ledger(run_dir / LEDGER, Terms.read(run_dir), restored_from=restored_from)
        self._main = tickets.trainers[0]
        self._bound = bound
        self._reuse = reuse or Reuse()
        self._own_clock = frozenset(own_clock)
        self._on_step = on_step
        self._on_closed = on_closed
        self._other_records: dict[str, Any] = {}
        self._fates = Fates(tickets.trainers)
        self._reserved: dict[str, str] = {}
        """Sample whose admission has not ended yet -> its group."""
        self._taken_up: dict[str, int] = {}
        """Group that a resume found in flight -> its ticket, until its source admits it again."""
        self._requests = RequestLedger(self.ledger)
        self._generated_before, self._scored_before = set[str](), set[str]()
        self._tables = LongTables()
        self._waiters: list[asyncio.Future[None]] = []
        self.bookings = Bookings(self.ledger)
        self._book: dict[str, Callable[..., Iterator[None] | None]] = {
            "generated": self._book_generated,
            "request": self._requests.book_request,
            "request again": self._requests.book_again,
            "request lost": self._requests.book_lost,
            "abandoned": self._requests.book_abandoned,
            "void": self._requests.book_void,
            "episode": self._book_episode,
            "episode failed": self._requests.episode_failed,
            "scored": self._book_score,
            "lost": self._book_lost,
            "step": self._book_step,
            "finished": self._fates.note_finished,
            "holds": self.tickets.holds,
            "evaluation": self._book_evaluation,
        }
        if resume:  # the groups in flight, with their known fates, and their requests
            self._requests.take_up()
            self._fates.take_up(self.ledger.in_flight(), self.ledger.known_fates())
            self._taken_up = self.in_flight()
            groups = self._fates.groups.values()
            known = {group.ticket: (tuple(group.held), group.known_steps()) for group in groups}
            tickets.restore(known, self.ledger.next_number("tickets"), self.ledger.kept_tickets())

    def register_handlers(self, endpoint: Endpoint) -> None:
        """Register the handlers for the `LedgerClient` of every host."""

        async def admit(host: str, body: Mapping[str, Any]) -> int | None:
            asking = {name: body[name] for name in ("asks", "asked_by") if name in body}
            return await self.admit_group(
                body["node"], body["group_id"], body["rows"], trainers=body["trainers"], **asking
            )

        def record(host: str, body: Mapping[str, Any]) -> None:
            self.record_events(body["events"])

        async def ages(host: str, body: Mapping[str, Any]) -> None:
            trainer = body["trainer"]
            for group in (self._fates.groups[name] for name in body["group_ids"] if name in self._fates.groups):
                require_fresh(trainer, body["version"], group.held.get(trainer), group.group_id, self._bound)

        async def derive(host: str, body: Mapping[str, Any]) -> None:
            await self.derive_samples(body["parent_id"], body["label"], body["rows"], trainers=body["trainers"])

        endpoint.on("admit", admit)
        endpoint.on("derive", derive)
        endpoint.on("ledger", record)
        endpoint.on("ages", ages)

    # Admission

    async def admit_group(
        self,
        node: str,
        group_id: str,
        rows: Sequence[LedgerRow],
        *,
        trainers: Sequence[str] | None = None,
        asks: int = 0,
        asked_by: str | None = None,
    ) -> int | None:
        """A committed ticket for the group, or None when admission has ended.

        `rows`: (sample_id, prompt_id, epoch, member, prompt_tokens); `trainers`: the trainers that the group can reach,
        all by default; `asks` and `asked_by`: those of `Out.admit`. A group that a resume found in flight, because its
        source was sending it when the checkpoint was written, gets its old ticket, once. Raises FlowrlError if the
        group was admitted before, or is being admitted, or if the sample that asked for it may not do so.
        """
        sample_ids = [row[0] for row in rows]
        if group_id in self._taken_up:
            if strange := set(sample_ids) - self.ledger.samples_of(group_id):
                raise FlowrlError(
                    f"node {node!r} admitted group {group_id!r} again after --resume, with samples that it did not "
                    f"have before ({', '.join(sorted(strange))}); resume with the options that the run was started with"
                )
            return self._taken_up.pop(group_id)
        if repeated := self._describe_repeated(group_id, sample_ids, [row[3] for row in rows]):
            raise FlowrlError(
                f"node {node!r} admitted {repeated}; a source has to give every group of every epoch its own "
                "group_id, and every member of a group its own sample_id and number"
            )

        self._reserved |= dict.fromkeys(sample_ids, group_id)
        try:
            await self.bookings.wait_for_jobs()  # events reported before this request count
            reserve = dict.fromkeys(sample_ids, asks) if asks else None
            while True:
                asked_by = self._find_asking(node, group_id, 1 + len(rows) * asks, asked_by)
                if (ticket := self.tickets.try_admit(trainers, asks=reserve, asked_by=asked_by)) is not None:
                    break
                if self.tickets.closed:
                    return None
                await self._wait_for_change()
            reached = self.tickets.trainers if trainers is None else trainers
            self._open_group(ticket, group_id, rows, reached, (asks, asked_by))
            await self.bookings.this_tick()
            return ticket
        finally:
            for sample_id in sample_ids:
                del self._reserved[sample_id]

    def _find_asking(self, node: str, group_id: str, needed: int, asked_by: str | None) -> str | None:
        """`asked_by`, if tickets are kept for it; None if it has its reward or its fate, and waits for no group.

        Raises FlowrlError if there is no such sample, or if it may not ask for `needed` groups.
        """
        if asked_by is None:
            return None
        left = self.tickets.num_kept_for(asked_by)
        if left is None and self.ledger.group_of(asked_by) is None:
            raise FlowrlError(
                f"node {node!r} admitted group {group_id!r} with asked_by={asked_by!r}, but no sample of this name was "
                "admitted; give the sample_id of the sample that waits for the group"
            )
        if left is not None and left < needed:
            raise FlowrlError(
                f"node {node!r} admitted group {group_id!r} with asked_by={asked_by!r}, which needs {needed} of the "
                f"tickets kept for that sample, and {left} are left; admit the sample's group with a larger asks="
            )
        return None if left is None else asked_by

    def _describe_repeated(self, group_id: str, sample_ids: Sequence[str], members: Sequence[int]) -> str:
        """A text that names what of the group was admitted before; "" if nothing was."""
        known = group_id in self._fates.groups or group_id in self._reserved.values()
        if known or self.ledger.samples_of(group_id):
            return f"group {group_id!r} a second time"
        if (number := Counter(members).most_common(1)[0])[1] > 1:
            return f"group {group_id!r} with {number[1]} members that have the number {number[0]}"
        for sample_id, times in Counter(sample_ids).items():
            if times > 1:
                return f"group {group_id!r} with {times} samples of the same id, {sample_id!r}"
            if (other := self._reserved.get(sample_id) or self.ledger.group_of(sample_id)) is not None:
                return f"sample {sample_id!r} a second time, in group {group_id!r} after group {other!r}"
        return ""

    def _open_group(
        self,
        ticket: int,
        group_id: str,
        rows: Sequence[LedgerRow],
        trainers: Sequence[str],
        asking: tuple[int, str | None],
    ) -> None:
        floors, now = self.tickets.floors(), time.time()
        held = {trainer: floors[trainer] for trainer in trainers}
        self.ledger.add_row("ticket", ticket, group_id, json.dumps(held))
        if asking != (0, None):
            self.ledger.add_row("asking", *asking, ticket)
        for sample_id, prompt_id, epoch, member, prompt_tokens in rows:
            born = floors[self._main]
            self.ledger.add_row("admitted", sample_id, group_id, prompt_id, epoch, member, prompt_tokens, born, now)
        self._fates.open_group(group_id, ticket, held, {row[3]: row[0] for row in rows})

    async def derive_samples(
        self, parent_id: str, label: str, rows: Sequence[LedgerRow], *, trainers: Sequence[str]
    ) -> None:
        """Commit further samples, in the group and under the ticket of `parent_id`.

        `rows` are those of `admit_group`; `trainers` are the trainers that the samples can reach. A repeated call with
        the same samples changes nothing. A sample whose parent is lost at a trainer is lost there, too: the group may
        have been given up meanwhile. Raises FlowrlError for other samples than before, for a parent that was never
        admitted, and for one that a trainer has used.
        """
        booked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def book() -> Iterator[None]:  # a job: losses reported before this request count, and no commit is half done
            try:
                self._open_derived(parent_id, label, rows, trainers)
                booked.set_result(None)
            except FlowrlError as error:
                booked.set_exception(error)
            yield from ()

        self.bookings.add_job(book())
        await booked
        await self.bookings.this_tick()

    def _open_derived(self, parent_id: str, label: str, rows: Sequence[LedgerRow], trainers: Sequence[str]) -> None:
        if known_ids := self.ledger.derived_from(parent_id, label):
            if known_ids == {row[0] for row in rows}:
                return
            raise FlowrlError(
                f"{len(rows)} samples were derived from {parent_id!r} under {label!r}, but {len(known_ids)} before; "
                "derive as many as before, or under another label"
            )
        group_id = self.ledger.group_of(parent_id)
        if group_id is None:
            raise FlowrlError(f"samples were derived from {parent_id!r}, which was never admitted")
        group = self._fates.groups.get(group_id)
        if group is not None:
            known = group.fates.get(parent_id, {})
        else:  # the fates of the whole group are known: its state says what the parent's are
            self.ledger.commit_rows()
            ticket, held, state, reason = self.ledger.closed_sample(parent_id)
            group = self._fates.open_group(group_id, ticket, held, {})
            known = dict.fromkeys(held, Fate(state=state, reason=reason))
        if used := [trainer for trainer in trainers if trainer in known and known[trainer].trained]:
            raise FlowrlError(
                f"samples were derived from {parent_id!r}, which {used[0]!r} has used already; derive them before the "
                "sample is sent on"
            )
        self._fates.add_members(group, {row[3]: row[0] for row in rows})
        now = time.time()
        for ordinal, (sample_id, prompt_id, epoch, member, prompt_tokens) in enumerate(rows):
            born = group.held.get(self._main, self.tickets.floor(self._main))
            self.ledger.add_row("admitted", sample_id, group_id, prompt_id, epoch, member, prompt_tokens, born, now)
            self.ledger.add_row("derived", sample_id, parent_id, label, ordinal)
            for trainer in group.held:
                if (lost := known.get(trainer) if trainer in trainers else ELSEWHERE) is not None:
                    self._settle_sample(sample_id, trainer, lost)

    def _wait_for_change(self) -> asyncio.Future[None]:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def _wake_waiters(self) -> None:
        """Wake all waiters, in order of request, to check their conditions again."""
        waiters, self._waiters = self._waiters, []
        for waiter in [waiter for waiter in waiters if not waiter.done()]:
            waiter.set_result(None)

    def resume_admission(self, reason: str) -> None:
        """End a pause that `tickets.pause(reason)` began, for a checkpoint or an evaluation."""
        self.tickets.resume(reason)
        self._wake_waiters()

    def end_admission(self) -> None:
        """Waiting and later admissions get None: no further group is wanted."""
        self.tickets.close()
        self._wake_waiters()

    def consumer_died(self, replica: str) -> None:
        self.tickets.died(replica)
        self._wake_waiters()

    def consumer_returned(self, replica: str, loads: Mapping[str, int]) -> None:
        """Call before the replica begins to load; see `Tickets.returned`."""
        self.tickets.returned(replica, loads)

    async def until_held(self, version: int, by: Collection[str] | None = None) -> None:
        """Returns when every live consumer holds `version`, or a newer one, of the first policy.

        `by`: wait only for these consumers.
        """
        while self.tickets.floor(self._main, by) < version:
            await self._wait_for_change()

    def note_kept(self, generated: Set[str], scored: Set[str], requests: Set[str] = frozenset()) -> None:
        """Note the samples that the checkpoint has as generated and as scored, and the `requests` whose replies it has.

        An invocation that was in its last send at the snapshot makes its samples again, and these copies are not sent.
        All other requests of unfinished samples are abandoned.
        """
        self._generated_before |= generated
        self._requests.note_kept(generated, requests)
        self._scored_before |= scored

    # Events

    def record_events(self, events: Sequence[LedgerRow]) -> None:
        """Book events from `LedgerClient`, in order: at once, unless earlier events or a large step take longer."""
        self.bookings.add_job(self._book_events(events))

    def _book_events(self, events: Sequence[LedgerRow]) -> Iterator[None]:
        for kind, *fields in self._tables.join_tables(events):
            yield from self._book[kind](*fields) or ()
        self._wake_waiters()
        self.bookings.commit_later()

    def _book_generated(self, *event: Any) -> None:
        *rollout, finish_reason, spans = event
        sample_id, generator, tokens, oldest, newest, at_s = rollout
        if sample_id in self._generated_before:
            self.ledger.add_row("redone", tokens, sample_id)
            return
        self.ledger.add_row("generated", generator, tokens, oldest, newest, at_s, sample_id)
        self._requests.book_generated(sample_id, generator, at_s, finish_reason, spans)

    def _book_episode(self, *event: Any) -> None:
        *rollout, prompt_tokens, row = event
        sample_id, generator, tokens, oldest, newest, at_s = rollout
        if sample_id not in self._generated_before:  # else its requests are redone
            self.ledger.add_row("prompt", prompt_tokens, sample_id)
            self.ledger.add_row("generated", generator, tokens, oldest, newest, at_s, sample_id)
            self._requests.book_episode(sample_id, row)

    def _book_score(self, sample_id: str, reward: float, at_s: float) -> None:
        self.tickets.release_kept(sample_id)
        if sample_id not in self._scored_before:
            self.ledger.add_row("scored", reward, at_s, sample_id)

    def _book_lost(
        self,
        trainers: Sequence[str] | None,
        group_id: str,
        member: int,
        sample_ids: Sequence[str],
        state: str,
        reason: str,
        tokens: int,
    ) -> None:
        """Book a loss at `trainers` (None: at all of them) of the samples that `Fates.find_samples` finds."""
        lost = self._fates.find_samples(group_id, member, sample_ids)
        if tokens and len(lost) == 1:
            self.ledger.add_row("partial", tokens, lost[0])
        for sample_id in lost:
            for trainer in self.tickets.trainers if trainers is None else trainers:
                self._settle_sample(sample_id, trainer, Fate(state=state, reason=reason))

    def _book_step(self, trainer: str, record: dict[str, Any], uses: Sequence[LedgerRow]) -> Iterator[None]:
        """Book a finished batch, which made version `record["step"]` of `trainer`, in pieces."""
        step = int(record["step"])
        require_next(trainer, step, self.tickets.versions)
        self.ledger.add_row("step", trainer, step, time.time())
        for number, (sample_id, tokens, stale_tokens, masked_tokens, oldest, spans, *again) in enumerate(uses, 1):
            if again and not tokens:  # all of it is kept out of the loss, as in its first use
                continue
            if again:
                self._book_reuse(trainer, step, sample_id, again[0], tokens, masked_tokens, oldest)
            else:
                self._book_use(trainer, step, sample_id, tokens, stale_tokens, masked_tokens, oldest)
            for start, length, digest in spans:
                self.ledger.add_row("span", sample_id, trainer, step, start, length, digest)
            if number % USES_AT_ONCE == 0:
                yield
        self.tickets.made(trainer, step)
        yield from self.bookings.commit_in_pieces()
        main = trainer == self._main
        if main:
            self._on_step(record | self._other_records)
        self._other_records = {} if main else self._other_records | {trainer: record}

    def _book_use(
        self, trainer: str, step: int, sample_id: str, tokens: int, stale: int, masked: int, oldest: int | None
    ) -> None:
        group = self._fates.group_of(sample_id)
        if group is None and self.ledger.group_of(sample_id) is not None:
            raise used_after_all(trainer, step, sample_id)
        # The generator reports the sample later; until then, and if that report never comes, this count applies.
        self.ledger.add_row("partial", tokens + stale + masked, sample_id)
        if trainer in self._own_clock:
            oldest = None if group is None else group.held.get(trainer)
        if not tokens and (stale or masked):
            why = ("dropped", "stale") if stale else ("filtered", "masked")
            self._settle_sample(sample_id, trainer, Fate(step, 0, stale, masked, None, *why))
            return
        if tokens:
            require_fresh(trainer, step - 1, oldest, sample_id, self._bound)
        self.ledger.add_row("used", sample_id, trainer, step - 1, step, tokens, stale, masked, oldest)
        self._settle_sample(sample_id, trainer, Fate(step, tokens, stale, masked, oldest))

    def _book_reuse(
        self, trainer: str, step: int, sample_id: str, times: int, tokens: int, masked: int, oldest: int | None
    ) -> None:
        """Book that the trainer has used the sample again, after `times` uses in earlier steps. No fate changes."""
        group = self._fates.group_of(sample_id)
        finished = group is None or not any(trainer in trainers for trainers in group.open.values())
        self._reuse.require_allowed(
            trainer, step, sample_id, times, self.ledger.count_uses(sample_id, trainer), finished=finished
        )
        require_fresh(trainer, step - 1, oldest, sample_id, self._reuse.max_age)
        self.ledger.add_row("reused", sample_id, trainer, step - 1, step, times, tokens, masked, oldest)

    def _settle_sample(self, sample_id: str, trainer: str, fate: Fate) -> None:
        """Note a fate, and its consequences for the sample, its group's ticket, and admission."""
        group = self._fates.settle_fate(sample_id, trainer, fate)
        if group is None:
            return
        self.tickets.release_kept(sample_id)
        if not fate.trained and len(group.held) > 1:
            self.ledger.add_row("left_out", sample_id, trainer, fate.state, fate.reason)
        if (state := self._fates.final_state(group, sample_id)) is not None:
            self._close_sample(sample_id, state)
        if group.is_done(trainer):
            made = group.newest_step(trainer)
            if made is None:
                self.tickets.left_out(group.ticket, trainer)
            else:
                self.tickets.trained(group.ticket, trainer, made)
        if not group.open:
            step = self._fates.step_of(group)
            self.ledger.add_row("settled", "dropped" if step is None else "trained", step, group.ticket)

    def _close_sample(self, sample_id: str, fate: Fate) -> None:
        """Book the final state of a sample."""
        self._requests.close_sample(sample_id)
        next_step = self.tickets.versions[self._main] + 1
        self._on_closed(sample_id, fate.state, fate.reason, next_step if fate.step is None else fate.step)
        if not fate.trained:
            row = (fate.state, fate.reason, fate.stale_tokens, fate.masked_tokens)
            self.ledger.add_row("unused", *row, sample_id)
            return
        assert fate.step is not None
        tokens = (fate.tokens, fate.stale_tokens, fate.masked_tokens)
        self.ledger.add_row("trained", *tokens, fate.oldest_version, fate.step - 1, fate.step, time.time(), sample_id)

    def book_line(self, step: int, line: str) -> None:
        """Book that the metrics line of that step is written; `line` is its hash."""
        self.ledger.add_row("line", line, self._main, step)
        self.bookings.commit_later()

    def _book_evaluation(self, rows: Sequence[LedgerRow]) -> None:
        for row in rows:
            self.ledger.add_row("evaluated", *row)

    # Storage

    def describe_unbooked(self) -> str:
        """See `Fates.describe_unbooked`."""
        self.bookings.finish_jobs()
        return self._fates.describe_unbooked()

    def is_open(self, sample_id: str) -> bool:
        """Whether the sample is in flight."""
        return self._fates.group_of(sample_id) is not None

    def was_admitted(self, sample_id: str) -> bool:
        """Whether the sample is in the ledger."""
        return self.ledger.group_of(sample_id) is not None

    def in_flight(self) -> dict[str, int]:
        """Group in flight -> its ticket, in order of admission."""
        return {group_id: group.ticket for group_id, group in self._fates.groups.items()}

    def as_of_now(self) -> LedgerSnapshot:
        """The ledger as it is now, for a checkpoint."""
        self.bookings.commit_all()
        return self.ledger.as_of_now()

    def close(self, *, orderly: bool) -> None:
        """Commit for the last time. At an orderly end, drop all samples still in flight, with reason `run_end`."""
        self.end_admission()
        try:
            self.bookings.finish_jobs()
        finally:
            if orderly:
                for sample_id, trainer in self._fates.still_open():
                    self._settle_sample(sample_id, trainer, LEFT_AT_END)
                self.ledger.add_row("ended in order", time.time())
            self.bookings.commit_all()
            self.ledger.close()

"""The books: tickets and ledger of one run, kept in the driver and fed by every host.

Invariants
- A group stands committed in the ledger before `admit` answers, so before its first prompt leaves.
- No group and no sample is admitted twice: `_admitting`, `_groups` and the ledger know every one there is.
- Every admitted sample leaves `in_flight` at most once; later news of it changes no state.
- A group whose samples have all been filtered, failed or dropped gives its ticket back by itself.
- What is made of a sample again after a resume changes its row only if what was made before is gone.
- Other events are committed with the next admission or step, and COMMIT_WITHIN_S after they came at
  the latest.

Waits: `admit` waits for a returned ticket, the end of a pause, or the end of admission; `until_held`
for consumers to load or to die.
"""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flowrl.channel.tickets import Tickets
from flowrl.errors import FlowrlError
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.ledger_client import LedgerClient, Use

__all__ = ["LEDGER", "Books", "LedgerClient", "Use"]

COMMIT_WITHIN_S = 0.5
LEDGER = "ledger.sqlite"

Row = Sequence[Any]


class Handlers(Protocol):
    """Where the books hang their handlers: `flowrl.channel.endpoint.Endpoint`."""

    def on(self, kind: str, handler: Callable[..., Any]) -> None: ...


@dataclass(slots=True)
class _Group:
    ticket: int
    in_flight: set[str]


class Books:
    """Tickets, ledger and the admission queue. Not thread-safe: the driver's event loop only.

    `policies` are the names under which trainers publish (`Weights.policy`). The first one's use of a
    sample is what the `samples` table tells; the others stand in `uses` alone, and their records in
    the first one's next record, under their names. Where no weights flow back there are none: then the
    first trainer that finishes a batch is the one. `on_step` gets that record. With `resume` the groups
    that the ledger has in flight keep their tickets.
    """

    def __init__(
        self,
        run_dir: Path,
        tickets: Tickets,
        *,
        policies: Sequence[str],
        on_step: Callable[[dict[str, Any]], object],
        resume: bool = False,
    ) -> None:
        self.tickets = tickets
        self.ledger = Ledger(run_dir / LEDGER)
        self._main = policies[0] if policies else None
        self._on_step = on_step
        self._other_records: dict[str, Any] = {}
        self._groups: dict[str, _Group] = {}
        """Groups with a sample in flight or an open ticket."""
        self._group_of: dict[str, str] = {}
        """Sample in flight -> its group."""
        self._admitting: dict[str, str] = {}
        """Sample whose `admit` has not been answered yet -> its group."""
        self._taken_up: dict[str, int] = {}
        """Group that the resume found in flight -> its ticket, until its source asks for it."""
        self._generated_before: set[str] = set()
        self._scored_before: set[str] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self._committing: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._book: dict[str, Callable[..., None]] = {
            "generated": self._generated,
            "scored": self._scored,
            "lost": self._lost,
            "step": self._step,
            "holds": self._holds,
            "evaluation": self._evaluation,
        }
        if resume:
            self._take_up()

    def serve(self, endpoint: Handlers) -> None:
        """Answer the `LedgerClient` of every host."""

        async def admit(host: str, body: Mapping[str, Any]) -> int | None:
            return await self.admit(body["node"], body["group_id"], body["rows"])

        def record(host: str, body: Mapping[str, Any]) -> None:
            self.record(body["events"])

        endpoint.on("admit", admit)
        endpoint.on("ledger", record)

    # Admission

    async def admit(self, node: str, group_id: str, rows: Sequence[Row]) -> int | None:
        """A committed ticket for the group, or None when admission has ended.

        `rows`: (sample_id, prompt_id, epoch, member, prompt_tokens). A group that a resume found in flight
        (the checkpoint came while its source was sending it) gets the ticket it has, once. Raises FlowrlError
        for a group or sample that was admitted before, or is being admitted.
        """
        sample_ids = [row[0] for row in rows]
        if group_id in self._taken_up:
            return self._take_again(node, group_id, sample_ids)
        if repeated := self._repeated(group_id, sample_ids):
            raise FlowrlError(
                f"node {node!r} admitted {repeated}; a source has to give every group of every epoch its own "
                "group_id, and every member of a group its own sample_id"
            )
        self._admitting |= dict.fromkeys(sample_ids, group_id)  # nobody else takes these ids during the waits
        try:
            while (ticket := self.tickets.try_admit()) is None:
                if self.tickets.closed:
                    return None
                await self._change()
            self._open(ticket, group_id, rows)
            await self._commit_this_turn()
            return ticket
        finally:
            for sample_id in sample_ids:
                del self._admitting[sample_id]

    def _take_again(self, node: str, group_id: str, sample_ids: Sequence[str]) -> int:
        if strange := set(sample_ids) - self.ledger.samples_of(group_id):
            raise FlowrlError(
                f"node {node!r} admitted group {group_id!r} again after --resume, with samples that it did not have "
                f"before ({', '.join(sorted(strange))}); resume with the options that the run was started with"
            )
        return self._taken_up.pop(group_id)

    def _repeated(self, group_id: str, sample_ids: Sequence[str]) -> str:
        """What of the group was admitted before, in words; "" if nothing was."""
        if group_id in self._groups or group_id in self._admitting.values() or self.ledger.samples_of(group_id):
            return f"group {group_id!r} a second time"
        for sample_id, times in Counter(sample_ids).items():
            if times > 1:
                return f"group {group_id!r} with {times} samples of the same id, {sample_id!r}"
            other = ChainMap(self._admitting, self._group_of).get(sample_id) or self.ledger.group_of(sample_id)
            if other is not None:
                return f"sample {sample_id!r} a second time, in group {group_id!r} after group {other!r}"
        return ""

    def _open(self, ticket: int, group_id: str, rows: Sequence[Row]) -> None:
        born = self.tickets.floor(self._main) if self._main else 0
        now = time.time()
        self.ledger.add("ticket", ticket, group_id)
        for sample_id, prompt_id, epoch, member, prompt_tokens in rows:
            self.ledger.add("admitted", sample_id, group_id, prompt_id, epoch, member, prompt_tokens, born, now)
            self._group_of[sample_id] = group_id
        self._groups[group_id] = _Group(ticket, {row[0] for row in rows})

    def _change(self) -> asyncio.Future[None]:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def _changed(self) -> None:
        """Let all that wait look again, in order of asking."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def pause_admission(self, reason: str) -> None:
        """Admit nothing until `resume_admission(reason)`: for checkpoints and evaluations."""
        self.tickets.pause(reason)

    def resume_admission(self, reason: str) -> None:
        self.tickets.resume(reason)
        self._changed()

    def end_admission(self) -> None:
        """Waiting and later admissions get None: no further group is wanted."""
        self.tickets.close()
        self._changed()

    def consumer_died(self, replica: str) -> None:
        self.tickets.died(replica)
        self._changed()

    def consumer_returned(self, replica: str, loads: Mapping[str, int]) -> None:
        """Call before the replica begins to load; see `Tickets.returned`."""
        self.tickets.returned(replica, loads)

    async def until_held(self, version: int) -> None:
        """Returns when every live consumer holds `version`, or a newer one, of the first policy."""
        while self._main and self.tickets.floor(self._main) < version:
            await self._change()

    def kept(self, generated: Set[str], scored: Set[str]) -> None:
        """A checkpoint has these samples generated, and scored, already: a turn that the cut found in its last
        send makes them once more, and that copy goes nowhere."""
        self._generated_before |= generated
        self._scored_before |= scored

    # Events

    def record(self, events: Sequence[Row]) -> None:
        """Book events in order; `LedgerClient` makes them."""
        for kind, *fields in events:
            self._book[kind](*fields)
        self._changed()
        self._commit_later()

    def _generated(
        self, sample_id: str, generator: str, tokens: int, oldest: int | None, newest: int | None, at_s: float
    ) -> None:
        if sample_id in self._generated_before:
            self.ledger.add("redone", tokens, sample_id)
            return
        self.ledger.add("generated", generator, tokens, oldest, newest, at_s, sample_id)

    def _scored(self, sample_id: str, reward: float, at_s: float) -> None:
        if sample_id not in self._scored_before:
            self.ledger.add("scored", reward, at_s, sample_id)

    def _lost(self, ticket: int, sample_ids: Sequence[str], state: str, reason: str, tokens: int) -> None:
        lost = sample_ids or self._in_flight_of(ticket)
        if tokens and len(lost) == 1:
            self.ledger.add("partial", tokens, lost[0])
        for sample_id in lost:
            group = self._leave(sample_id)
            if group is None:
                continue
            self.ledger.add("ended", state, reason, sample_id)
            if not group.in_flight and self.tickets.dropped(group.ticket):
                self.ledger.add("settled", "dropped", None, group.ticket)
        self._forget_closed()

    def _in_flight_of(self, ticket: int) -> list[str]:
        return [sample for group in self._groups.values() if group.ticket == ticket for sample in group.in_flight]

    def _step(self, policy: str, record: dict[str, Any], uses: Sequence[Row]) -> None:
        """A batch is finished and made version `record["step"]` of `policy`."""
        self._main = self._main or policy
        step, now = int(record["step"]), time.time()
        main = policy == self._main
        tickets = list(dict.fromkeys(self._groups[use[1]].ticket for use in uses if use[1] in self._groups))
        for sample_id, _, tokens, stale_tokens, oldest in uses:
            if tokens or not stale_tokens:
                self.ledger.add("used", sample_id, policy, step - 1, step, tokens)
            if main and self._leave(sample_id) is not None:
                self._close_trained(sample_id, step, tokens, stale_tokens, oldest, now)
        for ticket in tickets if main else ():
            self.ledger.add("settled", "trained", step, ticket)
        self.tickets.trained(tickets, policy, step)
        self._forget_closed()
        self.commit()
        if main:
            self._on_step(record | self._other_records)
        self._other_records = {} if main else self._other_records | {policy: record}

    def _close_trained(
        self, sample_id: str, step: int, tokens: int, stale_tokens: int, oldest: int | None, now: float
    ) -> None:
        if stale_tokens and not tokens:
            self.ledger.add("stale", stale_tokens, sample_id)
        else:
            self.ledger.add("trained", tokens, stale_tokens, oldest, step - 1, step, now, sample_id)

    def _holds(self, replica: str, policy: str, version: int) -> None:
        self.tickets.holds(replica, policy, version)
        self._forget_closed()

    def _evaluation(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.ledger.add("evaluated", *row)

    def _leave(self, sample_id: str) -> _Group | None:
        """Take the sample out of flight; None if it had left before."""
        group_id = self._group_of.pop(sample_id, None)
        if group_id is None:
            return None
        group = self._groups[group_id]
        group.in_flight.discard(sample_id)
        return group

    def _forget_closed(self) -> None:
        for group_id, group in list(self._groups.items()):
            if not group.in_flight and not self.tickets.is_open(group.ticket):
                del self._groups[group_id]

    # Storage

    def commit(self) -> None:
        """Write what is buffered, and let the admissions that wait for it go on.

        Raises FlowrlError where the ledger cannot be written; so do the waiting admissions. Called by the
        loop, it goes to the loop's exception handler: the driver ends the run before a node hears of it.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._committing = self._committing, None
        try:
            if self.ledger.dirty:
                self.ledger.commit()
        except FlowrlError as error:
            if waiting is not None:
                waiting.set_exception(error)
            raise
        else:
            if waiting is not None:
                waiting.set_result(None)

    def _commit_this_turn(self) -> asyncio.Future[None]:
        """One commit for all that is admitted in this turn of the loop."""
        if self._committing is None:
            loop = asyncio.get_running_loop()
            self._committing = loop.create_future()
            loop.call_soon(self.commit)
        return asyncio.shield(self._committing)

    def _commit_later(self) -> None:
        if self._timer is None and self.ledger.dirty:
            self._timer = asyncio.get_running_loop().call_later(COMMIT_WITHIN_S, self.commit)

    def _take_up(self) -> None:
        for sample in self.ledger.in_flight():
            group = self._groups.setdefault(sample.group_id, _Group(sample.ticket, set()))
            group.in_flight.add(sample.sample_id)
            self._group_of[sample.sample_id] = sample.group_id
        self._taken_up = self.in_flight()
        self.tickets.restore(self._taken_up.values(), self.ledger.next_ticket())

    def in_flight(self) -> dict[str, int]:
        """Group in flight -> its ticket, in order of admission."""
        return {group_id: group.ticket for group_id, group in self._groups.items() if group.in_flight}

    def backup(self, directory: Path) -> None:
        """Copy the ledger as it is now into a checkpoint directory."""
        self.ledger.backup(directory / LEDGER)

    def close(self, *, orderly: bool) -> None:
        """The last commit. At an orderly end what is still in flight is dropped, reason `run_end`."""
        self.end_admission()
        if orderly:
            for group in list(self._groups.values()):
                self._lost(group.ticket, sorted(group.in_flight), "dropped", "run_end", 0)
        self.commit()
        self.ledger.close()

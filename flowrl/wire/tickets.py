"""Tickets bound how far admission runs ahead of the weights; the window forms batches by ticket.

A group takes a ticket when it is admitted. The ticket is returned exactly once: when, for each trainer that the group
can reach, one of two conditions holds. Either the trainer leaves the group out, or every live consumer of that
trainer's weights holds the version that the group helped to make. With P groups per batch there are B = (S + 1)·P
tickets. Tickets are numbered from 0 in the order of admission.

Why this bounds staleness: a group admitted while the oldest held version is b has fewer than B
groups ahead of it that are not yet in version b, and the window lets at most W − 1 later groups
overtake it. So it is in batch b + 1 + (B − 1 + W − 1) // P at the latest, and updates a version at
most S + ceil((W − 1) / P) newer than any of its tokens.

The bound holds for each trainer separately, in its own versions: a group that a trainer leaves out does not count as
ahead of other groups.

A sample may ask for further groups, and stay unfinished until they are (a proposal waits for its solvers). Tickets are
kept for these groups from the admission of the asking group on: a group takes a ticket only if one is left for itself
and for every group that it and the open groups before it may still ask for. So a group that was asked for never waits
for a ticket, whatever the order in which groups are trained, and every open group can finish. It is admitted even when
the steps need no more groups, because the group that asked for it is one that they need.

Both classes are pure: they never wait. What ends a wait for a ticket: `left_out`, `trained`, `made`,
`holds`, `died`, `resume`, `release_kept`; it ends for good with `close`, or when the last wanted group is trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Tickets:
    """The open tickets of one admission.

    `ahead` is S; None is for a graph without feedback, where the number of tickets is not bounded. `consumers` are the
    (node replica, trainer) pairs that load weights. They count as holding `start_version` from the beginning, because
    they serve nothing before they have loaded it; for a trainer in `start_versions` that version counts instead.
    `trainers`, the main one first, are all trainers that may train a group or leave it out; by default those of the
    consumers. A version that no consumer loads counts as held as soon as it is made. `max_groups` is the number of
    groups that the main trainer has to train in total, None for no limit.
    """

    def __init__(
        self,
        groups_per_batch: int,
        ahead: int | None,
        *,
        consumers: Iterable[tuple[str, str]],
        trainers: Sequence[str] = (),
        publish_every: int = 1,
        start_version: int = 0,
        start_versions: Mapping[str, int] | None = None,
        max_groups: int | None = None,
    ) -> None:
        assert ahead is None or ahead >= publish_every - 1, f"publish_every={publish_every} waits for itself"
        self.num_tickets = None if ahead is None else (ahead + 1) * groups_per_batch
        self.max_groups = max_groups
        self.num_trained = 0
        """Number of groups that the main trainer has trained."""
        self.closed = max_groups == 0
        """True if no group will be admitted again."""
        begin = start_versions or {}
        self._held = {consumer: begin.get(consumer[1], start_version) for consumer in consumers}
        self._dead: set[str] = set()
        self.trainers = tuple(trainers) or tuple(dict.fromkeys(trainer for _, trainer in self._held)) or ("",)
        self._newest = {trainer: begin.get(trainer, start_version) for trainer in self.trainers}
        """Trainer -> its newest version."""
        self._open: dict[int, dict[str, int | None]] = {}
        """Open ticket -> trainer -> the version that the group helped to make, or None if the trainer leaves it out.
        A trainer has no entry as long as neither is known."""
        self._expected: dict[int, tuple[str, ...]] = {}
        """Open ticket -> the trainers that its group can reach."""
        self._num_untrained = 0
        """Length of `untrained()`."""
        self._kept: dict[str, int] = {}
        """Sample -> the number of tickets kept for the groups that it may still ask for."""
        self._num_kept = 0
        self._next = 0
        self._pauses: list[str] = []

    def try_admit(
        self,
        trainers: Sequence[str] | None = None,
        *,
        asks: Mapping[str, int] | None = None,
        asked_by: str | None = None,
    ) -> int | None:
        """Take the next ticket. Returns None if the next group has to wait; `why_waiting` returns the reason.

        `trainers`: those that the group can reach; all by default. `asks`: sample of the group -> how many groups may
        be admitted because of it, those included that they ask for themselves. `asked_by`: the sample because of which
        this group is admitted; tickets are kept for it (`num_kept_for`).
        """
        asks = asks or {}
        needed = 1 + sum(asks.values())
        if self.closed or self._pauses:
            return None
        if asked_by is not None:
            assert self._kept[asked_by] >= needed, f"{asked_by} may ask for fewer groups"
            self._keep(asked_by, self._kept[asked_by] - needed)
        elif self.num_wanted == 0 or self._all_out(needed):
            return None
        for sample, number in asks.items():
            self._keep(sample, number)
        ticket = self._next
        self._next += 1
        self._open_ticket(ticket, self.trainers if trainers is None else tuple(trainers), {})
        return ticket

    def _open_ticket(self, ticket: int, trainers: tuple[str, ...], fates: Mapping[str, int | None]) -> None:
        self._open[ticket] = dict(fates)
        self._expected[ticket] = trainers
        self._num_untrained += self._main_trainer(ticket) not in fates

    def why_waiting(self) -> str:
        """Why the next group cannot be admitted now, "" if it can."""
        if self._pauses:
            return f"admission is closed: {self._pauses[-1]}"
        if self.num_wanted == 0:
            return f"all {self.max_groups} groups that the steps need are trained or in flight"
        if self._all_out():
            return f"all {self.num_tickets} tickets are out: {self._what_holds_them()}"
        return ""

    def num_kept_for(self, sample: str) -> int | None:
        """Number of tickets kept for the groups that the sample may still ask for; None if it waits for none."""
        return self._kept.get(sample)

    def release_kept(self, sample: str) -> None:
        """The sample waits for no further group: it has its reward, or it is lost or trained."""
        self._num_kept -= self._kept.pop(sample, 0)

    def _keep(self, sample: str, number: int) -> None:
        self._num_kept += number - self._kept.get(sample, 0)
        self._kept[sample] = number

    def _all_out(self, needed: int = 1) -> bool:
        return self.num_tickets is not None and self.num_open + self._num_kept + needed > self.num_tickets

    @property
    def num_wanted(self) -> int | None:
        """Groups still to be admitted if the main trainer trains all groups in flight; None if there is no limit."""
        if self.max_groups is None:
            return None
        return max(self.max_groups - self.num_trained - self._num_untrained, 0)

    @property
    def num_open(self) -> int:
        """Number of tickets taken and not yet returned."""
        return len(self._open)

    def untrained(self) -> list[int]:
        """The open tickets whose group the main trainer still has to train, in order of admission."""
        return [ticket for ticket, fates in self._open.items() if self._main_trainer(ticket) not in fates]

    def _main_trainer(self, ticket: int) -> str:
        """The trainer that decides whether the group counts for the steps: the first that the group can reach."""
        expected = self._expected[ticket]
        return next((trainer for trainer in self.trainers if trainer in expected), "")

    def floor(self, trainer: str, by: Collection[str] | None = None) -> int:
        """The oldest version of `trainer` that a live consumer holds; if none is alive, the newest version held.

        `by`: of these replicas only.
        """
        chosen = {replica: version for (replica, of), version in self._held.items() if of == trainer}
        held = {replica: version for replica, version in chosen.items() if by is None or replica in by}
        if not held:
            return self._newest.get(trainer, 0)
        live = [version for replica, version in held.items() if replica not in self._dead]
        return min(live) if live else max(held.values())

    @property
    def versions(self) -> dict[str, int]:
        """Trainer -> its newest version."""
        return dict(self._newest)

    def floors(self) -> dict[str, int]:
        """Trainer -> its `floor`, the version of its weights that every live consumer holds."""
        return {trainer: self.floor(trainer) for trainer in self.trainers}

    def left_out(self, ticket: int, trainer: str) -> None:
        """`trainer` will not train the group. Has no effect if the group's result at this trainer is known already."""
        self._settle_ticket(ticket, trainer, None)

    def trained(self, ticket: int, trainer: str, version: int) -> None:
        """A finished batch that contains the group, or its last part, made `version` of `trainer`."""
        self._settle_ticket(ticket, trainer, version)

    def _settle_ticket(self, ticket: int, trainer: str, version: int | None) -> None:
        fates = self._open.get(ticket)
        if fates is None or trainer in fates:
            return
        fates[trainer] = version
        if trainer == self._main_trainer(ticket):
            self._num_untrained -= 1
            self.num_trained += version is not None
        self._give_back([ticket])  # only this one: the other tickets have not changed, and a batch settles many
        if self.max_groups is not None and self.num_trained >= self.max_groups:
            self.closed = True

    def made(self, trainer: str, version: int) -> None:
        """`trainer` has finished the batch that made `version`."""
        self._newest[trainer] = max(version, self._newest.get(trainer, version))
        self._return_held()

    def holds(self, replica: str, trainer: str, version: int) -> None:
        """`replica` now serves with `version` of `trainer`. A version older than the known one is ignored."""
        consumer = (replica, trainer)
        assert consumer in self._held, f"{replica} is no consumer of {trainer!r}; known are {sorted(self._held)}"
        before = self.floor(trainer)
        self._held[consumer] = max(self._held[consumer], version)
        if self.floor(trainer) != before:
            self._return_held()

    def died(self, replica: str) -> None:
        """Tickets no longer wait for `replica`."""
        self._dead.add(replica)
        self._return_held()

    def returned(self, replica: str, loads: Mapping[str, int]) -> None:
        """`replica` is alive again, and loads at least the versions `loads` before it serves anything.

        Call this before `replica` starts to load: tickets of later versions have to wait for it from now on.
        """
        self._dead.discard(replica)
        for trainer, version in loads.items():
            self._held[replica, trainer] = version

    def pause(self, reason: str) -> None:
        """Admit nothing until the matching `resume(reason)`."""
        self._pauses.append(reason)

    def resume(self, reason: str) -> None:
        """End the pause that began with the same reason."""
        self._pauses.remove(reason)

    def close(self) -> None:
        """Admit no more groups."""
        self.closed = True

    def restore(
        self,
        open_tickets: Mapping[int, tuple[Sequence[str], Mapping[str, int | None]]],
        next_ticket: int,
        kept: Mapping[str, int] | None = None,
    ) -> None:
        """Restore a checkpoint: these groups are in flight again, and numbering continues at `next_ticket`.

        `open_tickets`: ticket -> (the trainers that its group can reach, their results as far as they are known);
        `kept`: sample -> the number of groups that it may still ask for.
        """
        for sample, number in (kept or {}).items():
            self._keep(sample, number)
        self._open.clear()
        self._expected.clear()
        self._num_untrained = 0
        for ticket, (trainers, fates) in sorted(open_tickets.items()):
            self._open_ticket(ticket, tuple(trainers), fates)
        self._next = next_ticket

    def _return_held(self) -> None:
        self._give_back([*self._open])

    def _give_back(self, tickets: Iterable[int]) -> None:
        """Return those of these open tickets that nobody needs any more."""
        floors = self.floors()
        for ticket in [ticket for ticket in tickets if self._is_back(ticket, floors)]:
            self._num_untrained -= self._main_trainer(ticket) not in self._open[ticket]
            del self._open[ticket], self._expected[ticket]

    def _is_back(self, ticket: int, floors: Mapping[str, int]) -> bool:
        """Whether each trainer left the group out, or made a version with it that every live consumer holds."""
        fates = self._open[ticket]
        return all(
            trainer in fates and ((version := fates[trainer]) is None or version <= floors[trainer])
            for trainer in self._expected[ticket]
        )

    def _what_holds_them(self) -> str:
        num_untrained = sum(
            any(trainer not in fates for trainer in self._expected[ticket]) for ticket, fates in self._open.items()
        )
        parts = [f"{num_untrained} groups are not trained yet"] if num_untrained else []
        if self._num_kept:
            parts.append(
                f"{self._num_kept} are kept for groups that {len(self._kept)} samples without a reward may ask for"
            )
        wanted = {
            trainer: version
            for fates in self._open.values()
            for trainer, version in fates.items()
            if version is not None
        }
        for (replica, trainer), version in sorted(self._held.items()):
            if replica not in self._dead and version < wanted.get(trainer, version):
                parts.append(f"{replica} holds version {version} of {trainer}, {wanted[trainer]} is made")
        return "; ".join(parts)


class Window(Generic[T]):
    """Forms batches of `groups_per_batch` items out of finished groups, whole or in pieces.

    `look_ahead` is W: an item may be taken only if its ticket is less than W after the oldest ticket that is not yet
    settled; 1 is strict order of admission. 0 means no window: items are taken in order of arrival
    (`on_limit="mask"`, and streams without tickets).
    """

    def __init__(self, groups_per_batch: int, look_ahead: int = 1, *, first: int = 0) -> None:
        assert groups_per_batch >= 1 and look_ahead >= 0
        self.groups_per_batch = groups_per_batch
        self.look_ahead = look_ahead
        self._base = first
        """The oldest ticket neither taken nor dropped."""
        self._settled: set[int] = set()
        """Tickets after `_base` that are taken or dropped."""
        self._finished: dict[int, T] = {}
        self._arrivals = 0
        self._begun = 0
        """Number of items already taken for the current, incomplete batch."""

    def __len__(self) -> int:
        """Number of finished items that wait for their batch."""
        return len(self._finished)

    def offer(self, ticket: int, item: T | None) -> None:
        """Add a finished group, or a dropped one if `item` is None. Each ticket is offered once."""
        if not self.look_ahead:
            if item is not None:
                self._finished[self._arrivals] = item
                self._arrivals += 1
            return
        if ticket < self._base or ticket in self._settled or ticket in self._finished:
            raise ValueError(f"ticket {ticket} was offered before")
        if item is None:
            self._settle_tickets([ticket])
        else:
            self._finished[ticket] = item

    @property
    def begun(self) -> int:
        """Number of items already taken for the current, incomplete batch."""
        return self._begun

    @property
    def missing(self) -> int:
        """Number of items that the current batch still needs."""
        return self.groups_per_batch - self._begun

    def take(self, least: int | None = None) -> list[T] | None:
        """Take all items that the batch still needs, in order of tickets; None if too few groups may be taken now.

        With `least`, a piece of the batch is enough if it has at least `least` items. A piece may contain a group that
        is outside the window if fewer groups are older than the batch still needs: the group will then be in this batch
        whatever becomes of the older ones. So a batch taken in pieces has the same groups as one taken whole.
        """
        chosen = self._choose_tickets(early=least is not None)
        if len(chosen) < min(self.missing, least or self.missing):
            return None
        return self._remove_items(chosen)

    def flush(self) -> Iterator[list[T]]:
        """At the end of the stream: batches of all remaining items, in order; the last may be smaller.

        If a batch was started in pieces, the first batch completes it, and is empty if no items are left. A batch is
        removed only when it is requested, so `state` still covers the batches not yet requested.
        """
        while self._finished or self._begun:
            items = self._remove_items(sorted(self._finished)[: self.missing])
            if not self._finished:
                self._begun = 0
            yield items

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, without the finished items: the engine delivers those again."""
        begun = {"begun": self._begun} if self._begun else {}
        return {"base": self._base, "settled": sorted(self._settled), **begun}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._base = int(state["base"])
        self._settled = {int(ticket) for ticket in state["settled"]}
        self._begun = int(state.get("begun", 0))

    def _choose_tickets(self, *, early: bool) -> list[int]:
        if not early and len(self._finished) < self.missing:
            return []  # a cheap exit: this method is called for each group that finishes
        chosen: list[int] = []
        taken: set[int] = set()
        base = self._base
        for ticket in sorted(self._finished):
            while base in self._settled or base in taken:
                base += 1
            waits = self.look_ahead and ticket >= base + self.look_ahead
            if len(chosen) == self.missing or (waits and not (early and self._num_older(ticket) < self.missing)):
                break
            chosen.append(ticket)
            taken.add(ticket)
        return chosen

    def _num_older(self, ticket: int) -> int:
        """Tickets before this one that are neither taken nor dropped."""
        return ticket - self._base - sum(settled < ticket for settled in self._settled)

    def _remove_items(self, tickets: list[int]) -> list[T]:
        items = [self._finished.pop(ticket) for ticket in tickets]
        if self.look_ahead:
            self._settle_tickets(tickets)
        self._begun = (self._begun + len(items)) % self.groups_per_batch
        return items

    def _settle_tickets(self, tickets: Iterable[int]) -> None:
        self._settled.update(tickets)
        while self._base in self._settled:
            self._settled.remove(self._base)
            self._base += 1

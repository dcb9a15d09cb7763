"""Tickets bound how far admission runs ahead of the weights; the window forms batches by ticket.

A ticket is taken when a group is admitted and comes back once: when every live consumer of each
policy holds the version that the group helped to make, or when the group is dropped. With P groups
a batch there are B = (S + 1)·P of them. Tickets are numbered from 0 in the order of admission.

Why that bounds staleness. A group admitted while the oldest held version is b has fewer than B
groups ahead of it that are not yet in version b, and the window lets at most W − 1 later groups
overtake it. So it is in batch b + 1 + (B − 1 + W − 1) // P at the latest, and updates a version at
most S + ceil((W − 1) / P) newer than any of its tokens.

Both classes are pure: they never wait. What ends a wait for a ticket: `dropped`, `trained`,
`holds`, `died`, `resume`, or for good `close` and the last wanted group being trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Tickets:
    """The open tickets of one admission.

    `ahead` is S; None is for a graph without feedback, whose tickets are not bounded. `consumers` are
    the (node replica, policy) pairs that load weights; they count as holding `start_version` from the
    beginning, because they serve nothing before they have loaded it. `max_groups` is the number of
    groups that have to be trained in all, None for no end.
    """

    def __init__(
        self,
        groups_per_batch: int,
        ahead: int | None,
        *,
        consumers: Iterable[tuple[str, str]],
        publish_every: int = 1,
        start_version: int = 0,
        max_groups: int | None = None,
    ) -> None:
        assert ahead is None or ahead >= publish_every - 1, f"publish_every={publish_every} waits for itself"
        self.num_tickets = None if ahead is None else (ahead + 1) * groups_per_batch
        self.max_groups = max_groups
        self.num_trained = 0
        self.closed = False
        """True when no group will ever be admitted again."""
        self._held = dict.fromkeys(consumers, start_version)
        self._dead: set[str] = set()
        self._policies = frozenset(policy for _, policy in self._held)
        self._made: dict[int, dict[str, int]] = {}
        """Open ticket -> policy -> the version its group helped to make."""
        self._next = 0
        self._pauses: list[str] = []

    def try_admit(self) -> int | None:
        """Take the next ticket, or None if the next group has to wait; `why_waiting` says for what."""
        if self.closed or self.why_waiting():
            return None
        ticket = self._next
        self._next += 1
        self._made[ticket] = {}
        return ticket

    def why_waiting(self) -> str:
        """What keeps the next group from being admitted, "" if nothing does."""
        if self._pauses:
            return f"admission is closed: {self._pauses[-1]}"
        if self.num_wanted == 0:
            return f"all {self.max_groups} groups that the steps need are trained or in flight"
        if self.num_tickets is not None and len(self._made) >= self.num_tickets:
            return f"all {self.num_tickets} tickets are out: {self._what_holds_them()}"
        return ""

    @property
    def num_wanted(self) -> int | None:
        """Groups still to be admitted if none of those in flight is dropped; None without an end."""
        if self.max_groups is None:
            return None
        return max(self.max_groups - self.num_trained - len(self.untrained()), 0)

    @property
    def num_open(self) -> int:
        """Tickets taken and not yet returned."""
        return len(self._made)

    def is_open(self, ticket: int) -> bool:
        """Taken and not yet returned."""
        return ticket in self._made

    def untrained(self) -> list[int]:
        """The open tickets whose group still has to be trained, in order of admission."""
        return [ticket for ticket, made in self._made.items() if not self._is_trained(made)]

    def floor(self, policy: str) -> int:
        """The oldest version of `policy` that a live consumer holds; the newest held if none lives."""
        held = {replica: version for (replica, of), version in self._held.items() if of == policy}
        live = [version for replica, version in held.items() if replica not in self._dead]
        return min(live) if live else max(held.values(), default=0)

    def dropped(self, ticket: int) -> bool:
        """The group will not be trained: its ticket returns. False if it had returned or is trained."""
        if self._made.get(ticket) != {}:
            return False
        del self._made[ticket]
        return True

    def trained(self, tickets: Iterable[int], policy: str, version: int) -> None:
        """A finished batch with these groups made `version` of `policy`. One that no consumer loads is ignored."""
        if self._policies and policy not in self._policies:
            return
        for ticket in tickets:
            made = self._made.get(ticket)
            if made is None or policy in made:
                continue
            made[policy] = version
            self.num_trained += self._is_trained(made)
        self._return_held()
        if self.max_groups is not None and self.num_trained >= self.max_groups:
            self.closed = True

    def holds(self, replica: str, policy: str, version: int) -> None:
        """`replica` now serves with `version` of `policy`. Older news than what is known is ignored."""
        consumer = (replica, policy)
        assert consumer in self._held, f"{replica} is no consumer of {policy!r}; known are {sorted(self._held)}"
        self._held[consumer] = max(self._held[consumer], version)
        self._return_held()

    def died(self, replica: str) -> None:
        """Tickets no longer wait for `replica`."""
        self._dead.add(replica)
        self._return_held()

    def returned(self, replica: str, loads: Mapping[str, int]) -> None:
        """`replica` lives again and loads at least the versions `loads` before it serves anything.

        Call it before it starts to load: tickets of later versions have to wait for it from now on.
        """
        self._dead.discard(replica)
        for policy, version in loads.items():
            self._held[replica, policy] = version

    def pause(self, reason: str) -> None:
        """Admit nothing until the matching `resume(reason)`."""
        self._pauses.append(reason)

    def resume(self, reason: str) -> None:
        """End the pause that was made with the same reason."""
        self._pauses.remove(reason)

    def close(self) -> None:
        """Admit nothing any more."""
        self.closed = True

    def restore(self, open_tickets: Iterable[int], next_ticket: int) -> None:
        """Take up a checkpoint: these groups are in flight again, and numbering goes on."""
        self._made = {ticket: {} for ticket in sorted(open_tickets)}
        self._next = next_ticket

    def _return_held(self) -> None:
        floors = {policy: self.floor(policy) for policy in self._policies}
        for ticket, made in list(self._made.items()):
            if self._is_trained(made) and all(made[policy] <= floor for policy, floor in floors.items()):
                del self._made[ticket]

    def _is_trained(self, made: Mapping[str, int]) -> bool:
        """By every policy; without consumers, by whoever trains."""
        return len(made) >= max(len(self._policies), 1)

    def _what_holds_them(self) -> str:
        num_untrained = len(self.untrained())
        parts = [f"{num_untrained} groups are not trained yet"] if num_untrained else []
        wanted = {policy: version for made in self._made.values() for policy, version in made.items()}
        for (replica, policy), version in sorted(self._held.items()):
            if replica not in self._dead and version < wanted.get(policy, version):
                parts.append(f"{replica} holds version {version} of {policy}, {wanted[policy]} is made")
        return "; ".join(parts)


class Window(Generic[T]):
    """Forms batches of `groups_per_batch` items out of finished groups.

    `look_ahead` W: an item may be taken while fewer than W tickets, itself included, lie between it
    and the oldest ticket not yet settled; 1 is strict order of admission. 0 is no window: items are
    taken in order of arrival (`on_limit="mask"`, and streams without tickets).
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

    def __len__(self) -> int:
        """Finished items that wait for their batch."""
        return len(self._finished)

    @property
    def waits_for(self) -> int:
        """The oldest ticket that is neither taken nor dropped."""
        return self._base

    def offer(self, ticket: int, item: T | None) -> None:
        """A group is finished, or dropped if `item` is None. Each ticket is offered once."""
        if not self.look_ahead:
            if item is not None:
                self._finished[self._arrivals] = item
                self._arrivals += 1
            return
        if ticket < self._base or ticket in self._settled or ticket in self._finished:
            raise ValueError(f"ticket {ticket} was offered before")
        if item is None:
            self._settle([ticket])
        else:
            self._finished[ticket] = item

    def take(self) -> list[T] | None:
        """The next batch in order of tickets, None while too few groups may be taken."""
        chosen = self._choose()
        if len(chosen) < self.groups_per_batch:
            return None
        return self._remove(chosen)

    def flush(self) -> list[list[T]]:
        """At the end of the stream: what is left, in order, the last batch smaller than the others."""
        left = sorted(self._finished)
        step = self.groups_per_batch
        return [self._remove(left[start : start + step]) for start in range(0, len(left), step)]

    def state(self) -> dict[str, Any]:
        """For a checkpoint. Finished items are not in it: the engine delivers them again."""
        return {"base": self._base, "settled": sorted(self._settled)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned."""
        self._base = int(state["base"])
        self._settled = {int(ticket) for ticket in state["settled"]}

    def _choose(self) -> list[int]:
        chosen: list[int] = []
        base = self._base
        for ticket in sorted(self._finished):
            base = self._oldest_open(base, chosen)
            if len(chosen) == self.groups_per_batch or (self.look_ahead and ticket >= base + self.look_ahead):
                break
            chosen.append(ticket)
        return chosen

    def _oldest_open(self, base: int, chosen: list[int]) -> int:
        taken = set(chosen)
        while base in self._settled or base in taken:
            base += 1
        return base

    def _remove(self, tickets: list[int]) -> list[T]:
        items = [self._finished.pop(ticket) for ticket in tickets]
        if self.look_ahead:
            self._settle(tickets)
        return items

    def _settle(self, tickets: Iterable[int]) -> None:
        self._settled.update(tickets)
        while self._base in self._settled:
            self._settled.remove(self._base)
            self._base += 1

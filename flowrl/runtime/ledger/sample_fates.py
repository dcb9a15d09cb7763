"""Fates: the outcome of each sample at each trainer that it can reach. Pure bookkeeping.

Invariants
- A sample has one fate at each trainer that its group can reach: a use or a loss. The first report is final. A later
  loss changes nothing; a later use is an error of the graph or of flowrl.
- A sample's state is known when its last fate is known: trained if any trainer used it, otherwise the state of its
  loss at the first trainer.
- A trainer is done with a group when it has a fate for each of the group's samples.
- A sample that is derived from another joins its group while the fate of the other is open, so no trainer is done with
  the group before. What was lost before it derived a sample has lost that, too.

`trainers` is ordered, the main one first; a graph without trainers has the single name "".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flowrl.errors import FlowrlError
from flowrl.runtime.ledger.ledger import Fate, OpenSample

LEFT_AT_END = Fate(state="dropped", reason="run_end")
ELSEWHERE = Fate(state="dropped", reason="not_routed")
"""The fate of a derived sample at a trainer that it cannot reach."""


@dataclass(slots=True)
class GroupFates:
    """A group in which some sample has an open fate."""

    group_id: str
    ticket: int
    held: Mapping[str, int]
    """Trainer that the group can reach -> the version of its weights that all consumers held at admission."""
    members: dict[int, str]
    """Member -> sample, those derived included."""
    open: dict[str, set[str]]
    """Sample -> the trainers at which its fate is open; samples without open fates are removed."""
    fates: dict[str, dict[str, Fate]] = field(default_factory=dict)
    """Sample -> trainer -> fate."""

    def is_done(self, trainer: str) -> bool:
        """Whether every sample has its fate at `trainer`."""
        return not any(trainer in trainers for trainers in self.open.values())

    def newest_step(self, trainer: str) -> int | None:
        """The newest version of `trainer` whose batch contained a sample of the group; None if no batch did."""
        steps = [fate.step for fates in self.fates.values() if (fate := fates.get(trainer)) is not None]
        return max((step for step in steps if step is not None), default=None)

    def known_steps(self) -> dict[str, int | None]:
        """Trainer that is done with the group -> the result of `made`."""
        return {trainer: self.newest_step(trainer) for trainer in self.held if self.is_done(trainer)}


class Fates:
    """The groups in flight, and the fates of their samples."""

    def __init__(self, trainers: Sequence[str]) -> None:
        self.trainers = tuple(trainers)
        self.groups: dict[str, GroupFates] = {}
        """In order of admission."""
        self._group_of: dict[str, GroupFates] = {}
        """Sample with an open fate -> its group."""
        self._finished: dict[str, dict[str, None]] = {trainer: {} for trainer in trainers}
        """Trainer -> samples of finished batches for which the trainer has booked no fate yet."""

    def open_group(self, group_id: str, ticket: int, held: Mapping[str, int], members: Mapping[int, str]) -> GroupFates:
        """Add an admitted group."""
        group = self.groups[group_id] = GroupFates(group_id, ticket, held, {}, {})
        self.add_members(group, members)
        return group

    def add_members(self, group: GroupFates, members: Mapping[int, str]) -> None:
        """Add samples to the group. Raises FlowrlError if it has other samples of these numbers."""
        for member, sample_id in members.items():
            if (other := group.members.setdefault(member, sample_id)) != sample_id:
                raise FlowrlError(f"sample {sample_id!r} has the number {member} of {other!r} in their group")
            group.open[sample_id] = set(group.held)
            self._group_of[sample_id] = group

    def take_up(self, samples: Iterable[OpenSample], known: Iterable[tuple[str, str, str, Fate]]) -> None:
        """Load the samples that a resumed run finds in flight, and the known fates (group, sample, trainer, fate)."""
        for row in samples:
            group = self.groups.setdefault(row.group_id, GroupFates(row.group_id, row.ticket, row.held, {}, {}))
            self.add_members(group, {row.member: row.sample_id})
        for group_id, sample_id, trainer, fate in known:
            group = self.groups[group_id]
            group.fates.setdefault(sample_id, {})[trainer] = fate
            group.open.get(sample_id, set()).discard(trainer)

    def group_of(self, sample_id: str) -> GroupFates | None:
        """The group of a sample with an open fate."""
        return self._group_of.get(sample_id)

    def find_samples(self, group_id: str, member: int, sample_ids: Sequence[str]) -> list[str]:
        """The samples with an open fate to which a loss applies.

        These are `member` of the group; if `member` is below 0, those of `sample_ids`; if none are given, the whole
        group.
        """
        group = self.groups.get(group_id)
        if group is None:
            return [sample for sample in sample_ids if not group_id and sample in self._group_of]
        if member >= 0:
            chosen = [sample for number, sample in group.members.items() if number == member]
        else:
            chosen = list(sample_ids or group.open)
        return [sample for sample in chosen if sample in group.open]

    def settle_fate(self, sample_id: str, trainer: str, fate: Fate) -> GroupFates | None:
        """Note a fate. Returns its group; if the fate was known before, changes nothing and returns None.

        Raises FlowrlError if `trainer` uses a sample whose fate there is known already.
        """
        group = self._group_of.get(sample_id)
        known = {} if group is None else group.fates.get(sample_id, {})
        if group is None or trainer not in group.open[sample_id]:
            if fate.trained and trainer in known:
                before = known[trainer]
                was = f"had used it at step {before.step} already; two branches bring it the same sample, join them"
                if not before.trained:
                    why = "a node dropped it after sending it under another name"
                    was = f"the sample is {before.state} ({before.reason}); {why}"
                raise FlowrlError(f"trainer {trainer!r} used sample {sample_id!r} at step {fate.step}, but {was}")
            return None
        group.fates.setdefault(sample_id, {})[trainer] = fate
        group.open[sample_id].discard(trainer)
        self._finished[trainer].pop(sample_id, None)
        if not group.open[sample_id]:
            del group.open[sample_id], self._group_of[sample_id]
        if not group.open:
            del self.groups[group.group_id]
        return group

    def note_finished(self, trainer: str, sample_ids: Iterable[str]) -> None:
        """`trainer` has finished a batch with these samples."""
        for sample_id in sample_ids:
            group = self._group_of.get(sample_id)
            if group is not None and trainer in group.open[sample_id]:
                self._finished[trainer][sample_id] = None

    def describe_unbooked(self) -> str:
        """A text about a trainer that finished samples without booking what it did with them; "" if there is none."""
        for trainer, samples in self._finished.items():
            if samples:
                return (
                    f"trainer {trainer!r} finished batches with {len(samples)} samples that it booked in no step "
                    f"(first {next(iter(samples))!r}); context.ledger.step needs the uses of the whole batch, "
                    "in a gang those of all ranks"
                )
        return ""

    def final_state(self, group: GroupFates, sample_id: str) -> Fate | None:
        """The final state of the sample over all trainers; None while a fate is open."""
        if sample_id in group.open:
            return None
        reached = [trainer for trainer in self.trainers if trainer in group.held]
        fates = [group.fates[sample_id][trainer] for trainer in reached if trainer in group.fates[sample_id]]
        return next((fate for fate in fates if fate.trained), fates[0])

    def step_of(self, group: GroupFates) -> int | None:
        """The newest version made with the group at the first trainer that used it; None if no trainer did."""
        for trainer in [trainer for trainer in self.trainers if trainer in group.held]:
            used = [fates[trainer] for fates in group.fates.values() if trainer in fates and fates[trainer].trained]
            if used:
                return max(fate.step or 0 for fate in used)
        return None

    def still_open(self) -> Iterator[tuple[str, str]]:
        """(sample, trainer) of every open fate, from a copy, so that fates may be settled during the iteration."""
        groups = list(self.groups.values())
        yield from [(s, t) for group in groups for s, trainers in group.open.items() for t in sorted(trainers)]


@dataclass(frozen=True)
class Reuse:
    """What the graph allows of samples that are trained again; by default nothing."""

    max_uses: int | None = None
    """By one trainer, the first use included."""
    max_age: int | None = None
    """The age of a token that is trained again, in versions."""

    def require_allowed(
        self, trainer: str, step: int, sample_id: str, times: int, known: int, *, finished: bool
    ) -> None:
        """Raise FlowrlError unless the trainer may use the sample after `times` uses, of which `known` are booked."""
        what = f"trainer {trainer!r} used sample {sample_id!r} again at step {step}"
        if self.max_uses is None:
            raise FlowrlError(
                f"{what}, but the graph declares no reuse: its tokens would be trained more than once. Give the "
                "batcher replay=Replay(groups=...), which bounds and proves reuse"
            )
        if not known or not finished:
            raise FlowrlError(f"{what}, but it has not finished its group in an earlier step; a reuse follows that")
        if known != times:
            raise FlowrlError(f"{what} as use {times + 1}, but the ledger has {known} earlier uses of it")
        if times >= self.max_uses:
            raise FlowrlError(f"{what} as use {times + 1}, but the graph allows {self.max_uses} (replay.max_uses)")


def require_next(trainer: str, step: int, versions: Mapping[str, int]) -> None:
    """Raise FlowrlError unless `step` is the one that follows the newest of the trainer's `versions`."""
    if trainer not in versions:
        raise FlowrlError(
            f"node {trainer!r} booked a step, but the graph does not know it as a trainer; declare trains=True in its "
            "facts()"
        )
    if step != versions[trainer] + 1:
        raise FlowrlError(
            f"trainer {trainer!r} booked step {step} after step {versions[trainer]}; it has to book each batch once, "
            "in order, with the version that it makes. After a resume, versions continue from "
            "context.start_version; in a gang, only one replica books"
        )


def require_fresh(trainer: str, version: int, oldest: int | None, of: str, bound: int | None) -> None:
    """Raise FlowrlError if `version` is updated with tokens whose age, counted from version `oldest`, exceeds `bound`.

    This is the last check: the tickets and the window already prevent such an update.
    """
    if bound is not None and oldest is not None and version - oldest > bound:
        raise FlowrlError(
            f"{trainer!r} updates version {version} with tokens of {of!r}, whose age counts from version {oldest}: "
            f"a staleness of {version - oldest}, but the graph allows {bound}. Form its batches in the order of "
            "tickets (`self.PORT.ordered()`), as TokenBatch does"
        )


def used_after_all(trainer: str, step: int, sample_id: str) -> FlowrlError:
    """The error for a use of a sample whose last fate is known."""
    return FlowrlError(
        f"{trainer!r} used sample {sample_id!r} at step {step}, but the state of this sample is already final: two "
        "branches bring the trainer the same sample, or a node forwards a sample that it dropped, or left out of an "
        "earlier message made from the same items"
    )

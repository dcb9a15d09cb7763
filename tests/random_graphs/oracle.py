"""What is wrong with a run, by the nodes' own record and by what its samples had to become.

Nothing is taken on trust from flowrl: its ledger is compared with the record, and so is its audit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.random_graphs.expected import ITEM, Expected
from tests.random_graphs.life import Ending
from tests.random_graphs.shape import Shape

RUN_END, STALE, MASKED = "dropped: run_end", "dropped: stale", "filtered: masked"
SHOWN = 6


@dataclass(frozen=True)
class Violation:
    kind: str
    """end, steps, bound, twice, again, fate, ledger, audit, seen or open."""
    text: str


def violations(shape: Shape, endings: Sequence[Ending]) -> list[Violation]:
    """All that is wrong with the run of which these are the lives."""
    found = [Violation("audit", f"life {number} crashed: {text}") for number, text in _of_crashes(endings)]
    return found + _at_the_end(shape, endings)


def _of_crashes(endings: Sequence[Ending]) -> Iterator[tuple[int, str]]:
    """What the audit finds in what a crash left, before anybody goes on from it."""
    for number, ending in enumerate(endings):
        for violation in ending.audit.violations[:SHOWN] if ending.audit is not None else ():
            yield number, f"{violation.kind}: {violation.text}"


def _at_the_end(shape: Shape, endings: Sequence[Ending]) -> list[Violation]:
    last = endings[-1]
    if last.ran.error is not None:
        error = last.ran.error
        return [Violation("end", f"life {len(endings) - 1} ended with {type(error).__name__}: {error}")]
    return [Violation(kind, text) for kind, text in _Judge(shape, endings).all()]


class Use(NamedTuple):
    """What a trainer did with a sample, by its own record."""

    version: int
    tokens: int
    stale: int
    masked: int
    oldest: int | None
    """Of the tokens that it trained."""


def _uses(batches: Sequence[dict[str, Any]]) -> dict[str, Use]:
    """By sample."""
    return {
        sample_id: Use(batch["version"], *counts) for batch in batches for sample_id, counts in batch["samples"].items()
    }


class _Judge:
    """Looks at the last life: its record goes back to the first."""

    def __init__(self, shape: Shape, endings: Sequence[Ending]) -> None:
        self.shape = shape
        self.endings = endings
        self.last = endings[-1]
        self.record = self.last.record
        self.expected = Expected(shape, self.record.derived)
        self.main = shape.trainers[0]
        self.own_clock = [] if shape.shares_batches else shape.trainers[1:]
        self.used = {trainer: _uses(self.record.trained[trainer]) for trainer in shape.trainers}
        self.interrupted = any(ending.ran.outcome and ending.ran.outcome.interrupted for ending in endings)
        self.may_be_left = shape.steps is not None
        """Finished groups that no batch takes any more; without `--steps` every group is trained."""
        self.groups = self.record.admitted
        self.samples = [sample for group in self.groups for sample in self.expected.members(group)]

    def all(self) -> Iterator[tuple[str, str]]:
        for kind, check in (
            ("open", self.left_open),
            ("steps", self.steps),
            ("bound", self.bound),
            ("twice", self.twice),
            ("again", self.again),
            ("fate", self.fates),
            ("ledger", self.ledger),
            ("seen", self.seen),
            ("audit", self.audit),
        ):
            for number, text in enumerate(check()):
                if number < SHOWN:
                    yield kind, text

    def left_open(self) -> Iterator[str]:
        for track, text in self.last.open.items():
            yield f"{track} was left with {text}"

    def steps(self) -> Iterator[str]:
        """`--steps` is exact, unless the data end before; every batch is whole, but for the last at an end."""
        shape, batches = self.shape, self.record.trained[self.main]
        for trainer, made in self.record.trained.items():
            if [batch["version"] for batch in made] != list(range(len(made))):
                yield f"{trainer} updated the versions {[batch['version'] for batch in made]}"
        if shape.steps is not None and len(batches) > shape.steps:
            yield f"{self.main} made {len(batches)} versions where --steps asked for {shape.steps}"
        data_ended = bool(shape.total) and len(self.groups) == shape.total
        if shape.steps is not None and len(batches) < shape.steps and not data_ended:
            yield f"{self.main} made {len(batches)} of {shape.steps} versions, although there are data"
        if shape.steps is None and not data_ended:
            yield f"{len(self.groups)} of {shape.total} groups were admitted"
        if self.interrupted:
            return
        for batch in batches[:-1] if data_ended else batches:
            if batch["num_groups"] != shape.groups_per_step:
                yield f"version {batch['version'] + 1} of {self.main} was made of {batch['num_groups']} groups"

    def bound(self) -> Iterator[str]:
        """By the tokens, but of a trainer with versions of its own by the one held when the group was admitted."""
        for trainer in self.shape.trainers:
            for sample_id, use in self.used[trainer].items():
                oldest = self._held(trainer, sample_id) if trainer in self.own_clock else use.oldest
                if use.tokens and oldest is not None and use.version - oldest > self.shape.bound:
                    yield (
                        f"{trainer} updated version {use.version} with {sample_id}, which is of {oldest}; the bound is "
                        f"{self.shape.bound}"
                    )

    def _held(self, trainer: str, sample_id: str) -> int | None:
        """The version of `trainer` that was held everywhere when the sample's group was admitted, if that is known."""
        held = self.record.held.get(sample_id.split(":")[0])
        return held[trainer][1] if held is not None and self._is_counted(trainer) else None

    def _is_counted(self, trainer: str) -> bool:
        """Whether anybody loads its weights."""
        return any(link.out == f"{trainer}.weights" for link in self.shape.links)

    def twice(self) -> Iterator[str]:
        if repeated := [group for group, times in Counter(self.groups).items() if times > 1]:
            yield f"groups admitted more than once: {repeated}"
        for trainer, batches in self.record.trained.items():
            times = Counter(sample for batch in batches for sample in batch["samples"])
            if repeated := [f"{sample} {count} times" for sample, count in times.items() if count > 1]:
                yield f"{trainer} trained {', '.join(repeated)}"

    def again(self) -> Iterator[str]:
        """What was trained again: after its first use, each time once, within cap and age, and so in the ledger."""
        replay, booked = self.shape.replay, set[tuple[Any, ...]]()
        for trainer, batches in self.record.trained.items():
            times, first = Counter[str](), dict[str, int]()
            for batch in batches:
                for sample_id, (number, tokens, _, masked, oldest) in batch["again"].items():
                    times[sample_id] += 1
                    age = batch["version"] - first.get(sample_id, batch["version"])
                    if number != times[sample_id] or not 0 < age <= replay.max_age or number >= replay.max_uses:
                        yield f"{trainer} trained {sample_id} again, {number} of {times[sample_id]} times, {age} later"
                    if tokens and batch["version"] - oldest > self.shape.bound + replay.max_age:
                        yield f"{trainer} trained {sample_id} again at version {batch['version']}, of {oldest}"
                    if tokens:
                        step = batch["version"] + 1
                        booked.add((trainer, sample_id, step - 1, step, number, tokens, masked, oldest))
                first |= dict.fromkeys(batch["samples"], batch["version"])
        columns = "trainer, sample_id, version, step, number, tokens, masked_tokens, oldest_version"
        yield from self._compare("reuses", set(self.last.ran.rows(f"SELECT {columns} FROM reuses")), booked)

    def fates(self) -> Iterator[str]:
        """Who trained what."""
        for trainer in self.shape.trainers:
            used = self.used[trainer]
            for sample_id in self.samples:
                ways = self.expected.trained(trainer, sample_id)
                if sample_id in used and ITEM not in ways:
                    yield f"{trainer} trained {sample_id}, which had to be {_said(ways)}"
                if sample_id not in used and ways == {ITEM} and not self.may_be_left:
                    yield f"{trainer} did not train {sample_id}, although nothing was to be left over"
            if strange := set(used) - set(self.samples):
                yield f"{trainer} trained {sorted(strange)}, which were not admitted"

    # The ledger

    def ledger(self) -> Iterator[str]:
        rows = {row[0]: row[1:] for row in self.last.ran.rows("SELECT sample_id, state, reason, step FROM samples")}
        yield from self._compare("samples admitted", set(rows), set(self.samples))
        yield from self._compare("uses", self._uses_in_ledger(), self._uses())
        yield from self._compare("tokens", *self._tokens())
        yield from self._admissions()
        yield from self._losses_by_trainer()
        for sample_id, (state, reason, step) in rows.items():
            if sample_id in self.samples:
                yield from self._state(sample_id, f"{state}: {reason}" if reason else state, step)
        if opened := self.last.ran.rows("SELECT ticket, group_id FROM tickets WHERE state = 'open'"):
            yield f"tickets are open at the end: {opened[:SHOWN]}"

    def _compare(self, what: str, booked: set[Any], true: set[Any]) -> Iterator[str]:
        if missing := true - booked:
            yield f"{what}: the ledger lacks {sorted(missing, key=str)[:SHOWN]}"
        if strange := booked - true:
            yield f"{what}: only the ledger has {sorted(strange, key=str)[:SHOWN]}"

    def _tokens(self) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
        """(sample, tokens generated): booked, true."""
        booked = self.last.ran.rows("SELECT sample_id, response_tokens FROM samples")
        return set(booked), {(sample_id, self.expected.tokens(sample_id)) for sample_id in self.samples}

    def _admissions(self) -> Iterator[str]:
        """What was held at admission: booked, and what the source saw before and after."""
        born = dict(self.last.ran.rows("SELECT DISTINCT group_id, born_version FROM samples"))
        for group_id, held in self.last.ran.rows("SELECT group_id, held FROM tickets"):
            versions = json.loads(held)
            yield from self._around(group_id, self.main, born.get(group_id, -1), "is booked as born at")
            for trainer in filter(self._is_counted, versions):
                yield from self._around(group_id, trainer, versions[trainer], f"is booked with {trainer} at")

    def _around(self, group_id: str, trainer: str, booked: int, said: str) -> Iterator[str]:
        held = self.record.held.get(group_id)
        if held is not None and not held[trainer][0] <= booked <= held[trainer][1]:
            yield f"{group_id} {said} {booked}, but {held[trainer]} were held around its admission"

    def _uses_in_ledger(self) -> set[tuple[Any, ...]]:
        columns = "trainer, sample_id, version, step, tokens, stale_tokens, masked_tokens, oldest_version"
        return {
            (trainer, *row, None if trainer in self.own_clock else oldest)
            for trainer, *row, oldest in self.last.ran.rows(f"SELECT {columns} FROM uses")
        }

    def _uses(self) -> set[tuple[Any, ...]]:
        """Of samples of which tokens were trained."""
        return {
            (trainer, sample_id, use.version, use.version + 1, use.tokens, use.stale, use.masked, oldest)
            for trainer in self.shape.trainers
            for sample_id, use in self.used[trainer].items()
            for oldest in [None if trainer in self.own_clock else use.oldest]
            if use.tokens
        }

    def _losses_by_trainer(self) -> Iterator[str]:
        """With several trainers each sample has a loss at each that did not use it."""
        if len(self.shape.trainers) == 1:
            return
        booked: dict[tuple[str, str], list[str]] = {}
        for sample_id, trainer, state, reason in self.last.ran.rows("SELECT * FROM losses"):
            booked.setdefault((sample_id, trainer), []).append(f"{state}: {reason}")
        for trainer in self.shape.trainers:
            used = self.used[trainer]
            for sample_id in self.samples:
                use, told = used.get(sample_id), booked.get((sample_id, trainer), [])
                if use is not None and use.tokens:
                    if told:
                        yield f"{trainer} trained {sample_id}, and yet it stands as {told}"
                elif len(told) != 1 or told[0] not in (ways := self._losses(sample_id, trainer)):
                    yield f"{sample_id} is {told} at {trainer}, but had to be {_said(ways)}"

    def _state(self, sample_id: str, state: str, step: int | None) -> Iterator[str]:
        """Trained if any trainer used it, by the first that did; else lost, as it was to the first trainer."""
        uses = [self.used[trainer].get(sample_id) for trainer in self.shape.trainers]
        steps = [use.version + 1 for use in uses if use is not None and use.tokens]
        if steps and (state, step) != ("trained", steps[0]):
            yield f"{sample_id} is {state} (step {step}), but was trained at step {steps[0]}"
        elif not steps and state not in (ways := self._losses(sample_id, self.main)):
            yield f"{sample_id} is {state}, but had to be {_said(ways)}"

    def _losses(self, sample_id: str, trainer: str) -> frozenset[str]:
        """What the ledger may say of a sample of which `trainer` trained no token."""
        if (use := self.used[trainer].get(sample_id)) is not None:
            return frozenset({STALE if use.stale else MASKED})
        found = self.expected.trained(trainer, sample_id)
        return (found - {ITEM}) | (frozenset({RUN_END}) if self.may_be_left and ITEM in found else frozenset())

    # Nodes that take note of what they see

    def seen(self) -> Iterator[str]:
        for part in self.shape.parts.values():
            if part.kind in ("group", "join_groups", "group_sink"):
                counts = self.expected.groups_at(part.name, self.groups)
            elif part.kind == "sample_sink":
                counts = self.expected.samples_at(part.name, self.samples)
            else:
                continue
            for name in self._tracks(part.name):
                yield from self._count(name, counts)

    def _tracks(self, node: str) -> list[str]:
        everything = any(link.dispatch == "broadcast" for link in self.shape.into(node))
        return [f"{node}/{index}" for index in range(self.shape.parts[node].replicas)] if everything else [node]

    def _count(self, name: str, counts: dict[str, tuple[int, int]]) -> Iterator[str]:
        seen = self.record.seen.get(name, Counter())
        wrong = {key: seen[key] for key, (least, most) in counts.items() if not least <= seen[key] <= most}
        if wrong:
            some = ", ".join(f"{key} {times} times" for key, times in list(wrong.items())[:SHOWN])
            yield f"{name} saw {some}, instead of {counts[next(iter(wrong))]}"

    def audit(self) -> Iterator[str]:
        report = self.last.ran.audit()
        for violation in report.violations:
            yield f"{violation.kind}: {violation.text}"
        trained = sum(use.tokens for use in self._first_uses())
        if report.figures["  trained"] != trained:
            yield f"{report.figures['  trained']} tokens trained by the audit, {trained} by count"

    def _first_uses(self) -> Iterable[Use]:
        found: dict[str, Use] = {}
        for trainer in reversed(self.shape.trainers):
            found |= {sample_id: use for sample_id, use in self.used[trainer].items() if use.tokens}
        return found.values()


def _said(ways: frozenset[str]) -> str:
    return " or ".join(sorted(ways)) or "nothing that a node could have made it"

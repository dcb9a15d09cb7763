"""What is wrong with a run, by the nodes' own record and by what its samples had to become.

Nothing is taken on trust from flowrl: its ledger is compared with the record, and so is its audit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.random_graphs.expected import ITEM, Expected
from tests.random_graphs.life import Ending
from tests.random_graphs.shape import Shape

RUN_END, STALE = "dropped: run_end", "dropped: stale"
SHOWN = 6


@dataclass(frozen=True)
class Violation:
    kind: str
    """end, steps, bound, twice, fate, ledger, audit, seen or open."""
    text: str


def violations(shape: Shape, endings: Sequence[Ending]) -> list[Violation]:
    """All that is wrong with the run of which these are the lives."""
    last = endings[-1]
    if last.ran.error is not None:
        error = last.ran.error
        return [Violation("end", f"life {len(endings) - 1} ended with {type(error).__name__}: {error}")]
    found = _Judge(shape, endings)
    return [Violation(kind, text) for kind, text in found.all()]


class _Judge:
    """Looks at the last life: its record goes back to the first."""

    def __init__(self, shape: Shape, endings: Sequence[Ending]) -> None:
        self.shape = shape
        self.expected = Expected(shape)
        self.endings = endings
        self.last = endings[-1]
        self.record = self.last.record
        self.main = shape.trainers[0]
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
        """Of the policy by its tokens, of another trainer by what it was when the group was admitted."""
        for trainer, batches in self.record.trained.items():
            for batch in batches:
                for sample_id, (tokens, oldest) in batch["samples"].items():
                    if trainer != self.main:
                        oldest = self._held(trainer, sample_id)
                    if tokens and oldest is not None and batch["version"] - oldest > self.shape.bound:
                        yield (
                            f"{trainer} updated version {batch['version']} with {sample_id}, which is of {oldest}; the "
                            f"bound is {self.shape.bound}"
                        )

    def _held(self, trainer: str, sample_id: str) -> int | None:
        counted = any(link.out == f"{trainer}.weights" for link in self.shape.links)
        held = self.record.held.get(sample_id.split(":")[0])
        return held[trainer][1] if counted and held is not None else None

    def twice(self) -> Iterator[str]:
        if repeated := [group for group, times in Counter(self.groups).items() if times > 1]:
            yield f"groups admitted more than once: {repeated}"
        for trainer, batches in self.record.trained.items():
            times = Counter(sample for batch in batches for sample in batch["samples"])
            if repeated := [f"{sample} {count} times" for sample, count in times.items() if count > 1]:
                yield f"{trainer} trained {', '.join(repeated)}"

    def fates(self) -> Iterator[str]:
        """Who trained what."""
        for trainer in self.shape.trainers:
            used = self._used(trainer)
            for sample_id in self.samples:
                ways = self.expected.trained(trainer, sample_id)
                if sample_id in used and ITEM not in ways:
                    yield f"{trainer} trained {sample_id}, which had to be {_said(ways)}"
                if sample_id not in used and ways == {ITEM} and not self.may_be_left:
                    yield f"{trainer} did not train {sample_id}, although nothing was to be left over"
            if strange := set(used) - set(self.samples):
                yield f"{trainer} trained {sorted(strange)}, which were not admitted"

    def _used(self, trainer: str) -> dict[str, tuple[int, int, int | None]]:
        """Sample -> version, tokens, oldest version."""
        return {
            sample_id: (batch["version"], tokens, oldest)
            for batch in self.record.trained[trainer]
            for sample_id, (tokens, oldest) in batch["samples"].items()
        }

    # The ledger

    def ledger(self) -> Iterator[str]:
        rows = {row[0]: row[1:] for row in self.last.ran.rows("SELECT sample_id, state, reason, step FROM samples")}
        yield from self._compare("samples admitted", set(rows), set(self.samples))
        yield from self._compare("uses", self._uses_in_ledger(), self._uses())
        yield from self._compare("tokens", *self._tokens())
        yield from self._born()
        for sample_id, (state, reason, step) in rows.items():
            if sample_id in self.samples:
                yield from self._state(sample_id, f"{state}: {reason}" if reason else state, step)
        if opened := self.last.ran.rows("SELECT ticket, group_id FROM tickets WHERE state = 'open'"):
            yield f"tickets are open at the end: {opened[:SHOWN]}"

    def _compare(self, what: str, booked: set[Any], true: set[Any]) -> Iterator[str]:
        if missing := true - booked:
            yield f"{what}: the ledger lacks {sorted(missing)[:SHOWN]}"
        if strange := booked - true:
            yield f"{what}: only the ledger has {sorted(strange)[:SHOWN]}"

    def _tokens(self) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
        """(sample, tokens generated): booked, true."""
        booked = self.last.ran.rows("SELECT sample_id, response_tokens FROM samples")
        return set(booked), {(sample_id, self.expected.tokens(sample_id)) for sample_id in self.samples}

    def _born(self) -> Iterator[str]:
        """What was held at admission: booked, and what the source saw before and after."""
        for group_id, born in self.last.ran.rows("SELECT DISTINCT group_id, born_version FROM samples"):
            held = self.record.held.get(group_id)
            if held is not None and not held[self.main][0] <= born <= held[self.main][1]:
                yield f"{group_id} is booked as born at {born}, but {held[self.main]} were held around its admission"

    def _uses_in_ledger(self) -> set[tuple[str, str, int, int, int]]:
        return set(self.last.ran.rows("SELECT trainer, sample_id, version, step, tokens FROM uses"))

    def _uses(self) -> set[tuple[str, str, int, int, int]]:
        """Of samples of which tokens were trained."""
        return {
            (trainer, sample_id, version, version + 1, tokens)
            for trainer in self.shape.trainers
            for sample_id, (version, tokens, _) in self._used(trainer).items()
            if tokens
        }

    def _state(self, sample_id: str, state: str, step: int | None) -> Iterator[str]:
        """Trained if any trainer used it, by the first that did; else lost, as one of the nodes lost it."""
        uses = [self._used(trainer).get(sample_id) for trainer in self.shape.trainers]
        steps = [version + 1 for version, tokens, _ in filter(None, uses) if tokens]
        if steps and (state, step) != ("trained", steps[0]):
            yield f"{sample_id} is {state} (step {step}), but was trained at step {steps[0]}"
        elif not steps and state not in self._losses(sample_id, stale=any(uses)):
            yield f"{sample_id} is {state}, but had to be {_said(self._losses(sample_id, stale=any(uses)))}"

    def _losses(self, sample_id: str, *, stale: bool) -> frozenset[str]:
        """What the ledger may say of a sample that no trainer used."""
        if stale:
            return frozenset({STALE})
        found = frozenset().union(*(self.expected.trained(name, sample_id) for name in self.shape.trainers))
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
        trained = sum(tokens for _, tokens, _ in self._first_uses())
        if report.figures["  trained"] != trained:
            yield f"{report.figures['  trained']} tokens trained by the audit, {trained} by count"

    def _first_uses(self) -> list[tuple[int, int, int | None]]:
        found = {}
        for trainer in reversed(self.shape.trainers):
            found.update({sample: use for sample, use in self._used(trainer).items() if use[1]})
        return list(found.values())


def _said(ways: frozenset[str]) -> str:
    return " or ".join(sorted(ways)) or "nothing that a node could have made it"

"""The audit of metrics.jsonl: every line is unchanged since the run wrote it, and agrees with the ledger.

A line is written after the commit that books its step, and its hash is booked with a later commit. So, after a run is
killed, the ledger may end with steps without a line, and the file may end with a line whose hash is not booked.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.runtime.audit.audit_chain import LOST_COMMITS, is_cut_off, missing_heads
from flowrl.runtime.audit.audit_rules import Violation
from flowrl.runtime.telemetry.metrics import METRICS, line_hash, parse_line

STEPS = "SELECT CAST(step AS INTEGER), line FROM steps WHERE trainer = ?"
USES = """
SELECT CAST(step AS INTEGER), TOTAL(tokens), MAX(version - oldest_version) FROM uses WHERE trainer = ? GROUP BY 1
"""
REUSES = "SELECT CAST(step AS INTEGER), TOTAL(tokens) FROM reuses WHERE trainer = ? GROUP BY 1"
BY_OTHERS = "by something other than the run"


@dataclass(frozen=True)
class Booked:
    """The ledger's record of a step."""

    line: str | None
    tokens: int
    staleness: int | None
    reused: int


def _read_booked(db: sqlite3.Connection, trainer: str) -> dict[int, Booked]:
    used = {step: (int(tokens), age) for step, tokens, age in db.execute(USES, (trainer,))}
    again = {step: int(tokens) for step, tokens in db.execute(REUSES, (trainer,))}
    return {
        step: Booked(line, *used.get(step, (0, None)), again.get(step, 0))
        for step, line in db.execute(STEPS, (trainer,))
    }


@dataclass(frozen=True)
class Line:
    """A line of the file: its exact text, and its parsed record."""

    text: str
    record: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def head(self) -> str:
        return str(self.record.get("ledger_head"))


def check_lines(
    db: sqlite3.Connection, trainer: str, lines: Sequence[str], num_known: int, lost: str
) -> Iterator[Violation]:
    """Check the `lines` of the main trainer's steps; the first `num_known` existed before the ledger was read.

    `lost` explains why the ledger may lack a commit.
    """
    booked = _read_booked(db, trainer)
    newest, cut_off = max(booked, default=0), is_cut_off(db)
    whole: list[Line] = []
    for number, text in enumerate(lines, start=1):
        try:
            line = Line(text, parse_line(text))
        except ValueError as problem:
            yield Violation("metrics", f"{METRICS}:{number} is damaged: {problem}")
            continue
        if line.step <= newest or (number <= num_known and not cut_off):
            whole.append(line)

    if whole and whole[0].step != 1:
        yield Violation("metrics", f"the first line is of step {whole[0].step} instead of step 1")
    for before, after in itertools.pairwise(whole):
        if after.step != before.step + 1:
            yield Violation("metrics", f"after the line of step {before.step} comes the line of step {after.step}")
    there = {line.step for line in whole}
    for step in sorted(step for step, of in booked.items() if of.line is not None and step not in there):
        yield Violation("metrics", f"the line of step {step} was written, but it is missing now: removed {BY_OTHERS}")

    yield from _check_heads(db, [line for line in whole if line.step <= newest], LOST_COMMITS)
    # Later lines are of steps that a lost commit has booked.
    yield from _check_heads(db, [line for line in whole if line.step > newest], lost)
    for line in whole:
        yield from _compare_line(line, booked.get(line.step))


def _check_heads(db: sqlite3.Connection, lines: Sequence[Line], lost: str) -> Iterator[Violation]:
    strange = missing_heads(db, {line.head for line in lines})
    for line in lines:
        if line.head in strange:
            text = f"the line of step {line.step} was written after commit {line.head}, which the ledger does not have"
            yield Violation("metrics", f"{text}: {lost}")


def _compare_line(line: Line, booked: Booked | None) -> Iterator[Violation]:
    if booked is None:
        yield Violation("metrics", f"there is a line of step {line.step}, but the ledger does not have this step")
        return
    booked_values = {
        "tokens_trained": booked.tokens,
        "staleness_max": booked.staleness,
        "reused_tokens": booked.reused,
    }
    for name, value in booked_values.items():
        said = line.record.get(name)
        if said is not None and value is not None and said != value:
            yield Violation("metrics", f"step {line.step}: {name} is {said} in the line, but {value} in the ledger")
    if booked.line is not None and booked.line != line_hash(line.text):
        yield Violation("metrics", f"the line of step {line.step} differs from what was written: changed {BY_OTHERS}")

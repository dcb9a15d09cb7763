"""`flowrl audit RUN`: proves a run's books from its own files, or names what is wrong with them.

From `ledger.sqlite` and the bound in `graph.json`: every admitted sample is in exactly one state that
fits its columns; policy tokens generated = trained + stale + masked + filtered + failed + dropped + in flight;
no token is trained twice; no token older than the bound was trained, nor sampled by weights older than
those held when its group was admitted; never more groups in flight than there are tickets. Where
`metrics.jsonl` is there, its lines have to agree with the ledger.

Reads only, so it can look at a run that is still going.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.runtime.books import LEDGER
from flowrl.runtime.metrics import METRICS, read

SHOWN_PER_KIND = 20


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong. `kind` is state, tokens, uses, versions, bound, tickets, metrics or evaluations."""

    kind: str
    text: str


@dataclass(frozen=True)
class AuditReport:
    """What an audit found; `str` of it is what the command line prints."""

    violations: list[Violation] = field(default_factory=list)
    figures: dict[str, int | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        lines = [f"{name:<24}{'–' if value is None else value}" for name, value in self.figures.items()]
        if self.ok:
            return "\n".join([*lines, "audit: ok"])
        shown: Counter[str] = Counter()
        for violation in self.violations:
            shown[violation.kind] += 1
            if shown[violation.kind] <= SHOWN_PER_KIND:
                lines.append(f"audit: {violation.kind}: {violation.text}")
        for kind, count in shown.items():
            if count > SHOWN_PER_KIND:
                lines.append(f"audit: {kind}: and {count - SHOWN_PER_KIND} more")
        return "\n".join([*lines, f"audit: {len(self.violations)} violations"])


# (kind, text with the columns of the row, query that returns the rows that are wrong)
ROW_CHECKS = (
    ("state", "sample {0} is in state {1!r}, which there is not",
     "SELECT sample_id, state FROM samples WHERE state NOT IN ('in_flight','trained','filtered','failed','dropped')"),
    ("state", "sample {0} is {1} without a reason",
     "SELECT sample_id, state FROM samples WHERE state IN ('filtered','failed','dropped') AND reason IS NULL"),
    ("state", "sample {0} is {1}, and yet it stands as trained at step {2}",
     "SELECT sample_id, state, step FROM samples WHERE state <> 'trained' AND step IS NOT NULL"),
    ("state", "sample {0} is trained, but at no step",
     "SELECT sample_id FROM samples WHERE state = 'trained' AND step IS NULL"),
    ("state", "sample {0} is trained, but was never generated",
     "SELECT sample_id FROM samples WHERE state = 'trained' AND generated_s IS NULL"),
    ("tokens", "sample {0}: {1} policy tokens generated, but {2} trained and {3} stale",
     "SELECT sample_id, response_tokens, trained_tokens, stale_tokens FROM samples"
     " WHERE state = 'trained' AND trained_tokens + stale_tokens + masked_tokens <> response_tokens"),
    ("tokens", "sample {0} is {1}, but {2} of its tokens count as trained",
     "SELECT sample_id, state, trained_tokens FROM samples WHERE state <> 'trained' AND trained_tokens <> 0"),
    ("tokens", "sample {0} is dropped as stale, but {1} of its {2} tokens are stale",
     "SELECT sample_id, stale_tokens, response_tokens FROM samples"
     " WHERE reason = 'stale' AND stale_tokens <> response_tokens"),
    ("uses", "sample {0} was used {2} times by {1}: its tokens are trained more than once",
     "SELECT sample_id, trainer, COUNT(*) FROM uses GROUP BY sample_id, trainer HAVING COUNT(*) > 1"),
    ("uses", "{1} used sample {0}, which was never admitted",
     "SELECT sample_id, trainer FROM uses WHERE sample_id NOT IN (SELECT sample_id FROM samples)"),
    ("uses", "{1} used sample {0} at step {2}, but the sample is {3}",
     "SELECT sample_id, trainer, uses.step, state FROM uses JOIN samples USING (sample_id) WHERE state <> 'trained'"),
    ("uses", "sample {0} is trained at step {1} with {2} tokens, but no trainer's use says so",
     "SELECT sample_id, step, trained_tokens FROM samples AS s WHERE state = 'trained' AND NOT EXISTS"
     " (SELECT 1 FROM uses AS u WHERE u.sample_id = s.sample_id AND u.step = s.step AND u.tokens = s.trained_tokens)"),
    ("versions", "sample {0}: step {1} updates version {2}, not the one before it",
     "SELECT sample_id, step, trained_version FROM samples WHERE step IS NOT NULL AND trained_version IS NOT step - 1"
     " UNION ALL SELECT sample_id, step, version FROM uses WHERE version <> step - 1"),
    ("versions", "sample {0} was admitted when version {1} was held everywhere, but has tokens of version {2}",
     "SELECT sample_id, born_version, oldest_version FROM samples WHERE oldest_version < born_version"),
    ("versions", "sample {0}: versions out of order: tokens of {1} to {2}, trained ones from {3}, updating {4}",
     "SELECT sample_id, oldest_version, newest_version, oldest_trained_version, trained_version FROM samples"
     " WHERE oldest_version > newest_version OR oldest_trained_version < oldest_version"
     " OR oldest_trained_version > newest_version OR newest_version > trained_version"),
    ("tickets", "group {0} has samples, but never took a ticket",
     "SELECT DISTINCT group_id FROM samples WHERE group_id NOT IN (SELECT group_id FROM tickets)"),
    ("tickets", "ticket {0} was taken for group {1}, which has no samples",
     "SELECT ticket, group_id FROM tickets WHERE group_id NOT IN (SELECT group_id FROM samples)"),
    ("tickets", "ticket {0} is {1}, but sample {2} of its group is {3}",
     "SELECT ticket, t.state, sample_id, s.state FROM tickets t JOIN samples s USING (group_id)"
     " WHERE t.state = 'dropped' AND s.state = 'trained' OR t.state <> 'open' AND s.state = 'in_flight'"),
    ("tickets", "ticket {0} is open, but nothing of its group {1} is in flight",
     "SELECT ticket, group_id FROM tickets AS t WHERE state = 'open' AND NOT EXISTS"
     " (SELECT 1 FROM samples AS s WHERE s.group_id = t.group_id AND s.state = 'in_flight')"),
    ("tickets", "ticket {0} came back with step {1}, but sample {2} of its group was trained at step {3}",
     "SELECT ticket, t.step, sample_id, s.step FROM tickets t JOIN samples s USING (group_id)"
     " WHERE t.state <> 'open' AND s.step IS NOT NULL AND s.step IS NOT t.step"),
    ("evaluations", "the evaluation {0} training at step {1} ran on versions {2} to {3}; it has to run on one",
     "SELECT phase, step, MIN(oldest_version), MAX(newest_version) FROM evaluations"
     " GROUP BY phase, step HAVING MIN(oldest_version) <> MAX(newest_version)"),
)  # fmt: skip

VERSION_CHECK = (
    "SELECT sample_id, trained_tokens, generator FROM samples"
    " WHERE trained_tokens > 0 AND oldest_trained_version IS NULL"
)
BOUND_CHECK = (
    "SELECT sample_id, oldest_trained_version, trained_version FROM samples"
    " WHERE trained_version - oldest_trained_version > ?"
)
FIGURES = {
    "samples": "SELECT COUNT(*) FROM samples",
    "groups": "SELECT COUNT(*) FROM tickets",
    "steps": "SELECT COUNT(DISTINCT step) FROM samples WHERE step IS NOT NULL",
    "tokens generated": "SELECT TOTAL(response_tokens) FROM samples",
    "  trained": "SELECT TOTAL(trained_tokens) FROM samples",
    "  stale": "SELECT TOTAL(stale_tokens) FROM samples",
    "  masked": "SELECT TOTAL(masked_tokens) FROM samples",
    "  filtered": "SELECT TOTAL(response_tokens - stale_tokens - masked_tokens) FROM samples WHERE state = 'filtered'",
    "  failed": "SELECT TOTAL(response_tokens - stale_tokens - masked_tokens) FROM samples WHERE state = 'failed'",
    "  dropped": "SELECT TOTAL(response_tokens - stale_tokens - masked_tokens) FROM samples WHERE state = 'dropped'",
    "  in flight": "SELECT TOTAL(response_tokens - stale_tokens - masked_tokens) FROM samples WHERE"
    " state = 'in_flight'",
    "tokens redone": "SELECT TOTAL(redone_tokens) FROM samples",
    "max staleness": "SELECT MAX(trained_version - oldest_trained_version) FROM samples",
}


def audit(run_dir: Path) -> AuditReport:
    """Check the books of `run_dir`. Raises ConfigError if there are none to check."""
    run_dir = Path(run_dir)
    numbers = _numbers(run_dir / "graph.json")
    with closing(_open(run_dir / LEDGER)) as db:
        try:
            return _prove(db, numbers, run_dir / METRICS)
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{run_dir / LEDGER} is damaged ({error}), so nothing can be proven; take the newest checkpoint's copy"
            ) from None


def _prove(db: sqlite3.Connection, numbers: Mapping[str, Any], metrics: Path) -> AuditReport:
    db.execute("BEGIN")  # one snapshot of a run that may still be writing
    figures = {name: _integer(db.execute(query).fetchone()[0]) for name, query in FIGURES.items()}
    figures["bound"] = numbers["max_staleness"]
    violations = [
        *_rows(db),
        *_equation(figures),
        *_bound(db, numbers["max_staleness"], _holders(numbers)),
        *_tickets(db, numbers["tickets"]),
        *_metrics(db, read(metrics)),
    ]
    return AuditReport(violations, figures)


def _numbers(path: Path) -> Mapping[str, Any]:
    try:
        numbers = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} holds no run (no {path.name} there); name a run directory") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is no JSON ({error}); the bound that the run declared is needed from it") from None
    missing = [name for name in ("tickets", "max_staleness") if name not in numbers]
    if missing:
        raise ConfigError(f"{path} does not give {', '.join(missing)}; it has to be the one that the run wrote")
    return dict(numbers)


def _open(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise ConfigError(f"{path.parent} holds no {path.name}; name a directory in which `flowrl run` has run")
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, isolation_level=None)
    try:
        db.execute("PRAGMA query_only = ON")  # mode=ro would leave a WAL file behind
        db.execute("SELECT 1 FROM samples, tickets, uses, evaluations LIMIT 0")
    except sqlite3.DatabaseError as error:
        db.close()
        raise ConfigError(f"{path} is no ledger of flowrl: {error}") from None
    return db


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)


def _rows(db: sqlite3.Connection) -> Iterator[Violation]:
    for kind, text, query in ROW_CHECKS:
        for row in db.execute(query):
            yield Violation(kind, text.format(*row))


def _equation(figures: Mapping[str, int | None]) -> Iterator[Violation]:
    parts = {name.strip(): value or 0 for name, value in figures.items() if name.startswith("  ")}
    total = figures["tokens generated"] or 0
    if total != sum(parts.values()):
        listed = " + ".join(f"{value} {name}" for name, value in parts.items())
        yield Violation("tokens", f"{total} policy tokens generated, but {listed} make {sum(parts.values())}")


def _holders(graph: Mapping[str, Any]) -> set[str] | None:
    """The nodes that hold weights: what others bring into a graph is data, of no version. None if not known."""
    if "edges" not in graph:
        return None
    return {edge["into"].partition(".")[0] for edge in graph["edges"] if edge["kind"] == "latest"}


def _bound(db: sqlite3.Connection, bound: int | None, holders: set[str] | None) -> Iterator[Violation]:
    if bound is None:
        return
    for sample_id, tokens, generator in db.execute(VERSION_CHECK):
        if holders is None or not generator or generator.partition("/")[0] in holders:
            yield Violation("versions", f"sample {sample_id} has {tokens} trained tokens of no version")
    for sample_id, oldest, updated in db.execute(BOUND_CHECK, (bound,)):
        text = f"sample {sample_id}: a token of version {oldest} trained version {updated}"
        yield Violation("bound", f"{text} (staleness {updated - oldest}), the bound is {bound}")


def _tickets(db: sqlite3.Connection, num_tickets: int | None) -> Iterator[Violation]:
    """Groups ahead of a new one that were trained, but in a version not yet held everywhere."""
    if num_tickets is None:
        return
    ahead: list[int] = []
    query = (
        "SELECT ticket, t.step, MIN(born_version) FROM tickets t JOIN samples USING (group_id)"
        " GROUP BY ticket ORDER BY ticket"
    )
    for ticket, step, born in db.execute(query):
        ahead = [earlier for earlier in ahead if earlier > born]
        if len(ahead) >= num_tickets:
            text = f"ticket {ticket} was taken with {len(ahead)} of {num_tickets} tickets still out"
            yield Violation("tickets", f"{text} (version {born} was held everywhere)")
        if step is not None:
            ahead.append(step)


def _metrics(db: sqlite3.Connection, lines: list[dict[str, Any]]) -> Iterator[Violation]:
    """The last step of the ledger may lack its line: a killed run commits first."""
    steps = [line["step"] for line in lines]
    for before, after in itertools.pairwise(steps):
        if after != before + 1:
            yield Violation("metrics", f"the line of step {before} is followed by that of step {after}")
    query = (
        "SELECT step, TOTAL(trained_tokens), MAX(trained_version - oldest_trained_version) FROM samples"
        " WHERE step IS NOT NULL GROUP BY step"
    )
    booked = {step: (int(tokens), staleness) for step, tokens, staleness in db.execute(query)}
    missing = sorted(step for step in booked if step not in steps and lines and step != max(booked))
    yield from (Violation("metrics", f"step {step} trained, but it has no line") for step in missing)
    for line in lines if booked else ():
        tokens, staleness = booked.get(line["step"], (0, None))
        yield from _compare(line, "tokens_trained", tokens)
        yield from _compare(line, "staleness_max", staleness)


def _compare(line: Mapping[str, Any], name: str, booked: int | None) -> Iterator[Violation]:
    if line.get(name) is not None and booked is not None and line[name] != booked:
        yield Violation("metrics", f"step {line['step']}: the line says {name} {line[name]}, the ledger {booked}")

"""`flowrl audit RUN`: proves that a run's ledger is correct from the run's own files, or lists the violations.

From `ledger.sqlite` alone it proves: every admitted sample is in exactly one state, which matches its columns and its
use by the trainers; policy tokens generated = trained + stale + masked + filtered + failed + dropped + in flight; no
trainer trains a token twice; every trained token is a sampled one, in the context and with the logprob and version
with which it was sampled; no trained token was older than the bound in force at its step, or sampled by weights
older than those held when its group was admitted; there were never more groups in flight than tickets; and every row
is as the run's commits left it. `metrics.jsonl` and the checkpoints must agree with the ledger.

The audit only reads, so it can check a run in progress. Rows stay in the database; only violations are kept in memory.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.runtime.audit.audit_chain import (
    LOST_COMMITS,
    check_chain,
    check_checkpoints,
    kept_heads,
    lost_commits,
)
from flowrl.runtime.audit.audit_groups import apply_rules, check_groups
from flowrl.runtime.audit.audit_lines import check_lines
from flowrl.runtime.audit.audit_rules import AT_TICKET, RUN_CHECKS, Violation
from flowrl.runtime.ledger.chain import Sum
from flowrl.runtime.ledger.declared_bounds import Terms
from flowrl.runtime.ledger.ledger_file import DAMAGE, LEDGER, TABLES, open_to_read, read_terms, unreadable
from flowrl.runtime.ledger.ledger_segments import SEGMENTS
from flowrl.runtime.telemetry.metrics import METRICS, whole_lines

SHOWN_PER_KIND = 20
CACHE_KIB = 64 << 10
"""SQLite's page cache during an audit, whose joins visit the indexes of several tables in turn."""


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit; the command line prints its `str`."""

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


# One row for each ticket, in order: the ticket, the oldest version that a generator held when it was taken, the number
# of tickets in force then, and the step that trained its group (NULL if none has).
TAKEN = f"""
SELECT ticket, CAST(MIN(born_version) AS INTEGER), CAST({AT_TICKET.format("tickets")} AS INTEGER),
    CASE WHEN :several THEN (SELECT CAST(MAX(u.step) AS INTEGER) FROM uses u JOIN samples o USING (sample_id)
                             WHERE o.group_id = t.group_id AND u.trainer = :main) ELSE CAST(t.step AS INTEGER) END
FROM tickets t JOIN samples s USING (group_id) GROUP BY ticket ORDER BY ticket
"""


def audit(run_dir: Path) -> AuditReport:
    """Check the records of `run_dir`, again if a resume changed them meanwhile.

    Raises ConfigError if it has no readable ledger.
    """
    run_dir = Path(run_dir)
    path = run_dir / LEDGER
    if not path.is_file():
        raise ConfigError(_no_ledger(run_dir))
    report = None
    while report is None:
        report = _audit_once(run_dir)
    return report


def _no_ledger(run_dir: Path) -> str:
    if (run_dir / METRICS).is_file() or any(run_dir.glob(f"checkpoints/*/{SEGMENTS}")):
        return (
            f"{run_dir} has lost its {LEDGER}, so nothing can be proven; each checkpoint has its rows, and flowrl run "
            "--resume continues from the newest"
        )
    if (run_dir / "graph.json").is_file():
        return f"{run_dir} holds no {LEDGER}: the run there ended before it could admit anything; start it again"
    return f"{run_dir} holds no run; name a directory in which `flowrl run` has run"


def _audit_once(run_dir: Path) -> AuditReport | None:
    """The audit; None if a resume removed metrics lines meanwhile, so that files and ledger show different moments.

    The run may be in progress. It writes a metrics line, or a checkpoint, after the ledger's commit that the line or
    checkpoint names, and a later commit books the line's hash. Hence the order of reading: the ledger must know every
    line and checkpoint that was read before the ledger, and every line that the ledger has booked must be among those
    that are read after it.
    """
    checkpoints, before = kept_heads(run_dir), whole_lines(run_dir / METRICS)
    with closing(open_to_read(run_dir / LEDGER)) as db:
        try:
            db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            db.execute("PRAGMA temp_store = MEMORY")
            db.execute("PRAGMA query_only = OFF")  # which temporary tables need, too
            db.execute("BEGIN")
            state = db.execute("PRAGMA integrity_check(1)").fetchone()[0]  # the first read fixes the snapshot
            if state != "ok":
                raise sqlite3.DatabaseError(state)
            lines = whole_lines(run_dir / METRICS)
            if lines[: len(before)] != before:  # a run only appends lines, a resume removes some
                return None
            lost = lost_commits(db, run_dir, checkpoints)
            return prove(db, lines=lines, num_known=len(before), checkpoints=checkpoints, lost=lost)
        except DAMAGE as error:
            raise ConfigError(unreadable(run_dir / LEDGER, error)) from None


def prove(
    db: sqlite3.Connection,
    *,
    lines: Sequence[str],
    num_known: int,
    checkpoints: Mapping[str, str] | None = None,
    lost: str = LOST_COMMITS,
) -> AuditReport:
    """Check a ledger, and the metrics lines against it; the ledger must know the first `num_known` lines.

    `checkpoints` maps each checkpoint that the ledger must know to the head of the commit after which it was written.
    `lost` explains why the ledger may lack a commit.
    """
    terms, strange = _terms(db)
    values = _parameters(db, terms)
    sums = {table: Sum.of(db.execute(f"SELECT * FROM {table}")) for table in TABLES}
    wrong, figures = check_groups(db, values, {table: of.num_rows for table, of in sums.items()})
    (num_steps,) = db.execute("SELECT COUNT(DISTINCT step) FROM steps").fetchone()
    violations = [
        *strange,
        *wrong,
        *apply_rules(db, RUN_CHECKS, values),
        *_equation(figures),
        *_tickets_out(db, values),
        *check_lines(db, values["main"], lines, num_known, lost),
        *check_checkpoints(db, checkpoints or {}, lost),
        *check_chain(db, sums),
    ]
    counted = {name: figures[name] for name in ("samples", "groups")} | {"steps": num_steps}
    return AuditReport(violations, {**counted, **figures, "bound": terms.max_staleness})


def _terms(db: sqlite3.Connection) -> tuple[Terms, list[Violation]]:
    try:
        return read_terms(db), []
    except ValueError as error:
        return Terms(), [Violation("steps", f"the newest incarnation does not say which nodes train: {error}")]


def _parameters(db: sqlite3.Connection, terms: Terms) -> dict[str, Any]:
    """The parameters of the queries: the `main` trainer, whether there are `several`, and lists of nodes as JSON."""
    trainers = terms.trainers or tuple(name for (name,) in db.execute("SELECT DISTINCT trainer FROM steps"))
    lists = {"trainers": terms.trainers, "own_clock": terms.own_clock, "holders": terms.holders}
    texts = {name: None if nodes is None else json.dumps(nodes) for name, nodes in lists.items()}
    return {"main": next(iter(trainers), ""), "several": len(trainers) > 1, **texts}


def _equation(figures: Mapping[str, int | None]) -> Iterator[Violation]:
    parts = {name.strip(): value or 0 for name, value in figures.items() if name.startswith("  ")}
    total = figures["tokens generated"] or 0
    if total != sum(parts.values()):
        listed = " + ".join(f"{value} {name}" for name, value in parts.items())
        yield Violation("tokens", f"{total} policy tokens generated, but {listed} make {sum(parts.values())}")


def _tickets_out(db: sqlite3.Connection, values: Mapping[str, Any]) -> Iterator[Violation]:
    """Tickets taken while too many were out. A trained group's ticket is out until its version is held everywhere."""
    ahead: list[int] = []
    """A heap: the steps of the tickets that are out."""
    for ticket, born, num_tickets, step in db.execute(TAKEN, values):
        while ahead and ahead[0] <= born:
            heappop(ahead)
        if num_tickets is not None and len(ahead) >= num_tickets:
            text = f"ticket {ticket} was taken with {len(ahead)} of {num_tickets} tickets still out"
            yield Violation("tickets", f"{text} (version {born} was held everywhere)")
        if step is not None:
            heappush(ahead, step)

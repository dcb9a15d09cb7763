"""`flowrl audit RUN`: proves that a run's ledger is correct from the run's own files, or lists the violations.

From `ledger.sqlite` alone it proves: every admitted sample is in exactly one state, which matches its columns and its
use by the trainers; policy tokens generated = trained + stale + masked + filtered + failed + dropped + in flight; no
trainer trains a token twice, except in a declared reuse of a finished group, within its cap and its bound; every
trained token is a sampled one, in the context and with the logprob and version with which it was sampled; no trained
token was older than the bound in force at its step, or sampled by weights older than those held when its group was
admitted; there were never more groups in flight than tickets; and every row is as the run's commits left it.
`metrics.jsonl` and the checkpoints must agree with the ledger.

The audit changes no record, so it can check a run in progress. Rows stay in the database; only violations are kept in
memory. `continue_audit` leaves a seal for the next audit (audit_seal).
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
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
from flowrl.runtime.audit.audit_groups import MAX_REUSED, apply_rules, check_groups
from flowrl.runtime.audit.audit_lines import check_lines
from flowrl.runtime.audit.audit_rules import AT_TICKET, ENDED, RUN_CHECKS, Violation
from flowrl.runtime.audit.audit_seal import SEAL, RowRanges, Seal
from flowrl.runtime.audit.table_pages import Pages
from flowrl.runtime.ledger import chain
from flowrl.runtime.ledger.ledger_file import (
    COLUMNS,
    DAMAGE,
    LEDGER,
    Terms,
    describe_unreadable,
    open_to_read,
    read_terms,
)
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
    notes: Sequence[str] = ()
    """Sentences about the audit itself."""
    seal: Seal | None = None
    """What the next audit may go on from."""

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        lines = [f"{name:<24}{'–' if value is None else value}" for name, value in self.figures.items()]
        lines += self.notes
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
    """Check the records of `run_dir`, all of them. Writes nothing. Raises ConfigError if it has no readable ledger."""
    return _audit_until_still(Path(run_dir), None, sealing=False)


def continue_audit(run_dir: Path, *, whole: bool = False) -> AuditReport:
    """`audit` that goes on from where the last one stopped, if it has left a seal (audit_seal), and leaves one itself.

    With `whole` it begins anew. No connection of this process may have the ledger open (table_pages). Raises
    ConfigError if there is no readable ledger.
    """
    run_dir = Path(run_dir)
    report = None
    if not whole and (seal := Seal.read(run_dir / SEAL)) is not None:
        with suppress(ConfigError):
            report = _audit_until_still(run_dir, seal, sealing=True)
    if report is None or not report.ok:  # whatever is wrong, a whole audit names it
        report = _audit_until_still(run_dir, None, sealing=True)
    if report.seal is not None:
        try:
            report.seal.write(run_dir / SEAL)
        except OSError as error:
            note = f"{run_dir / SEAL} cannot be written ({error}); the next audit begins anew"
            report = replace(report, notes=(*report.notes, note))
    return report


def _audit_until_still(run_dir: Path, seal: Seal | None, *, sealing: bool) -> AuditReport:
    """The audit, again if a resume changed the records meanwhile."""
    if not (run_dir / LEDGER).is_file():
        if (run_dir / METRICS).is_file() or any(run_dir.glob(f"checkpoints/*/{SEGMENTS}")):
            raise ConfigError(
                f"{run_dir} has lost its {LEDGER}, so nothing can be proven; each checkpoint has its rows, and flowrl "
                "run --resume continues from the newest"
            )
        if (run_dir / "graph.json").is_file():
            raise ConfigError(
                f"{run_dir} holds no {LEDGER}: the run there ended before it could admit anything; start it again"
            )
        raise ConfigError(f"{run_dir} holds no run; name a directory in which `flowrl run` has run")
    report = None
    while report is None:
        report = _audit_once(run_dir, seal, sealing=sealing)
    return report


def _audit_once(run_dir: Path, seal: Seal | None, *, sealing: bool) -> AuditReport | None:
    """The audit; None if a resume removed metrics lines meanwhile, so that files and ledger show different moments.

    The run may be in progress. It writes a metrics line, or a checkpoint, after the ledger's commit that the line or
    checkpoint names, and a later commit books the line's hash. Hence the order of reading: the ledger must know every
    line and checkpoint that was read before the ledger, and every line that the ledger has booked must be among those
    that are read after it.
    """
    checkpoints, before = kept_heads(run_dir), whole_lines(run_dir / METRICS)
    with ExitStack() as files, closing(open_to_read(run_dir / LEDGER)) as db:
        try:
            db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            db.execute("PRAGMA temp_store = MEMORY")
            db.execute("PRAGMA query_only = OFF")  # which temporary tables need, too
            pages = files.enter_context(Pages(run_dir / LEDGER)) if sealing else None
            if pages is None or not pages.begin_transaction(db):
                pages, seal = None, None
                db.execute("BEGIN")
            if seal is None:
                state = db.execute("PRAGMA integrity_check(1)").fetchone()[0]  # the first read fixes the snapshot
                if state != "ok":
                    raise sqlite3.DatabaseError(state)
            lines = whole_lines(run_dir / METRICS)
            if lines[: len(before)] != before:  # a run only appends lines, a resume removes some
                return None
            lost = lost_commits(db, run_dir, checkpoints)
            return prove_ledger(
                db,
                lines=lines,
                num_known=len(before),
                checkpoints=checkpoints,
                lost=lost,
                pages=pages,
                seal=seal,
            )
        except DAMAGE as error:
            raise ConfigError(describe_unreadable(run_dir / LEDGER, error)) from None


def prove_ledger(
    db: sqlite3.Connection,
    *,
    lines: Sequence[str],
    num_known: int,
    checkpoints: Mapping[str, str] | None = None,
    lost: str = LOST_COMMITS,
    pages: Pages | None = None,
    seal: Seal | None = None,
) -> AuditReport:
    """Check a ledger, and the metrics lines against it; the ledger must know the first `num_known` lines.

    `checkpoints` maps each checkpoint that the ledger must know to the head of the commit after which it was written.
    `lost` explains why the ledger may lack a commit. With `pages`, those of the ledger, the report has a seal; what is
    as in `seal` is not checked again.
    """
    terms, strange = Terms(), list[Violation]()
    try:
        terms = read_terms(db)
    except ValueError as error:
        strange.append(Violation("steps", f"the newest incarnation does not say which nodes train: {error}"))
    values = _rule_parameters(db, terms)
    incarnations = db.execute(f"SELECT number, first_ticket, {', '.join(COLUMNS)} FROM incarnations ORDER BY number")
    parameters = {"values": values, "incarnations": incarnations.fetchall()}
    (ended,) = db.execute(f"SELECT {ENDED}").fetchone()
    rows = RowRanges.of(db, pages, seal)
    sums = rows.sums
    sealed = {} if seal is None else seal.holding_ranges(db, rows, ended=bool(ended), parameters=parameters)
    groups = check_groups(db, values, {table: of.num_rows for table, of in sums.items()}, sealed)
    parts = {name.strip(): value or 0 for name, value in groups.figures.items() if name.startswith("  ")}
    total, unequal = groups.figures["tokens generated"] or 0, list[Violation]()
    if total != sum(parts.values()):
        listed = " + ".join(f"{value} {name}" for name, value in parts.items())
        text = f"{total} policy tokens generated, but {listed} make {sum(parts.values())}"
        unequal.append(Violation("tokens", text))
    (num_steps,) = db.execute("SELECT COUNT(DISTINCT step) FROM steps").fetchone()
    violations = [
        *strange,
        *groups.violations,
        *apply_rules(db, RUN_CHECKS, {**values, "since": rows.first_step(db) if sealed else 0}),
        *unequal,
        *_check_tickets_out(db, values),
        *check_lines(db, values["main"], lines, num_known, lost),
        *check_checkpoints(db, checkpoints or {}, lost),
        *check_chain(db, sums),
    ]
    figures = {name: groups.figures[name] for name in ("samples", "groups")} | {"steps": num_steps}
    figures |= {**groups.figures, "bound": terms.max_staleness}
    if terms.max_uses is None:  # nobody asks what a run without replay has trained again
        figures = {name: value for name, value in figures.items() if value or name not in ("tokens reused", MAX_REUSED)}
    newest = chain.read_newest(db)
    if violations or pages is None or newest is None:
        return AuditReport(violations, figures)
    notes = []
    if seal is not None:
        num_rows = sum(of.num_rows for of in sums.values())
        notes.append(f"{rows.num_read} of {num_rows} rows are new since commit {seal.commit}, or near one that is")
    return AuditReport(
        violations, figures, notes, Seal(newest.number, bool(ended), parameters, rows.ranges, groups.ranges)
    )


def _rule_parameters(db: sqlite3.Connection, terms: Terms) -> dict[str, Any]:
    """The parameters of the queries: the `main` trainer, whether there are `several`, and lists of nodes as JSON."""
    trainers = terms.trainers or tuple(name for (name,) in db.execute("SELECT DISTINCT trainer FROM steps"))
    lists = {"trainers": terms.trainers, "own_clock": terms.own_clock, "holders": terms.holders}
    texts = {name: None if nodes is None else json.dumps(nodes) for name, nodes in lists.items()}
    return {"main": next(iter(trainers), ""), "several": len(trainers) > 1, **texts}


def _check_tickets_out(db: sqlite3.Connection, values: Mapping[str, Any]) -> Iterator[Violation]:
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

"""The audit of groups, in ranges of TICKETS_AT_ONCE tickets: which rules they break, and the figures.

Nearly all samples of a run are *plain*: trained whole by the only trainer, or lost before it, and asked for once. One
statement finds the groups of a range that have nothing but plain samples. All other groups of the range are copied to
temporary tables with the names of the ledger's, and there the rules are asked about them alone. A plain group breaks no
rule of GROUP_CHECKS, whether the run has ended or not: every rule that is added needs its part in PLAIN.

A row that belongs to no group, since its sample was never admitted, is in no range. So the rows that ranges have read
are counted, and where a table has more, the rules are asked about the whole ledger. Groups with derived samples are not
plain, because they have more members than were admitted; where no size of groups is known, they have rows in `derived`
that no plain group accounts for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.runtime.audit.audit_rules import (
    AGREES,
    AT_TICKET,
    GROUP_CHECKS,
    HELD,
    NEVER_MASKED,
    Check,
    Violation,
)

TICKETS_AT_ONCE = 1024
"""Number of tickets that are examined at once; the rows of their groups are in memory then."""
OF_SAMPLES = ("uses", "reuses", "requests", "spans", "attempts", "episodes", "losses", "derived")
TABLES = ("tickets", "samples", *OF_SAMPLES)
"""The tables whose rows belong to groups."""

# Tokens of the samples in one state, without stale and masked ones, which have their own lines.
LOST = "SELECT TOTAL(response_tokens - stale_tokens - masked_tokens) FROM samples WHERE state = '{}'"
MAX_STALENESS = "max staleness"
MAX_REUSED = "max age of a reuse"
FIGURES = {
    "samples": "SELECT COUNT(*) FROM samples",
    "groups": "SELECT COUNT(*) FROM tickets",
    "tokens generated": "SELECT TOTAL(response_tokens) FROM samples",
    "  trained": "SELECT TOTAL(trained_tokens) FROM samples",
    "  stale": "SELECT TOTAL(stale_tokens) FROM samples",
    "  masked": "SELECT TOTAL(masked_tokens) FROM samples",
    "  filtered": LOST.format("filtered"),
    "  failed": LOST.format("failed"),
    "  dropped": LOST.format("dropped"),
    "  in flight": LOST.format("in_flight"),
    "tokens redone": "SELECT TOTAL(redone_tokens) FROM samples",
    "tokens reused": "SELECT TOTAL(tokens) FROM reuses",
    "requests": "SELECT COUNT(*) FROM requests",
    "requests abandoned": "SELECT COUNT(*) FROM requests WHERE abandoned IS NOT NULL",
    "policy spans": "SELECT COUNT(*) FROM spans",
    "policy spans proven": f"SELECT COUNT(*) FROM spans p WHERE EXISTS"
    f" (SELECT 1 FROM requests r WHERE {AGREES} AND r.abandoned IS NULL)",
    MAX_STALENESS: "SELECT MAX(version - oldest_version) FROM uses",
    MAX_REUSED: "SELECT MAX(version - oldest_version) FROM reuses",
}
COUNTED = {"samples": "samples", "requests": "requests", "spans": "policy spans"}
"""Tables whose number of rows is a figure."""
Figures = Mapping[str, int | None]

# True for a sample `s` of the ticket `t` with at most one use `u`, request `r` and span `p`. The parameters:
# `:last_step`, the last of the steps of the trainer; `:least`, the smallest bound of any incarnation, NULL if none has
# one; `:never_masked`, whether no incarnation masks stale tokens; `:any_else`, whether `episodes`, `attempts`,
# `losses` or `reuses` have rows.
PLAIN_TRAINED = """
s.state = 'trained' AND s.reason IS NULL AND s.generated_s IS NOT NULL AND s.trained_s IS NOT NULL
AND typeof(s.step) = 'integer' AND s.step BETWEEN 1 AND :last_step AND s.trained_version = s.step - 1
AND s.trained_tokens + s.stale_tokens + s.masked_tokens = s.response_tokens
AND (s.oldest_version >= s.born_version AND s.newest_version BETWEEN s.oldest_version AND s.trained_version
     AND s.oldest_trained_version BETWEEN s.oldest_version AND s.newest_version
     AND (s.trained_tokens <> s.response_tokens OR s.oldest_trained_version = s.oldest_version)
     AND (:least IS NULL OR s.trained_version - s.oldest_trained_version <= :least)
  OR s.oldest_version IS NULL AND s.newest_version IS NULL AND s.oldest_trained_version IS NULL AND :least IS NULL)
AND u.trainer = :main AND u.step = s.step AND u.version = s.trained_version AND u.tokens = s.trained_tokens
AND u.stale_tokens = s.stale_tokens AND u.masked_tokens = s.masked_tokens
AND u.oldest_version IS s.oldest_trained_version
AND p.trainer = u.trainer AND p.step = u.step AND p.tokens = r.tokens AND p.start = r.context_tokens
AND p.digest = r.digest
"""
PLAIN_LOST = """
s.state IN ('filtered', 'failed', 'dropped') AND s.reason IS NOT NULL AND s.step IS NULL AND s.trained_version IS NULL
AND s.oldest_trained_version IS NULL AND s.trained_s IS NULL AND s.trained_tokens = 0 AND s.response_tokens >= 0
AND s.stale_tokens + s.masked_tokens <= s.response_tokens
AND (s.reason <> 'stale' OR s.stale_tokens > 0 AND s.stale_tokens + s.masked_tokens = s.response_tokens)
AND (s.oldest_version < s.born_version OR s.oldest_version > s.newest_version) IS NOT TRUE
AND u.sample_id IS NULL AND p.sample_id IS NULL AND (s.generated_s IS NOT NULL OR r.number IS NULL)
"""
PLAIN_REQUEST = """
r.abandoned IS NULL AND r.tokens = s.response_tokens AND r.turn = 0
AND MIN(r.context_tokens, r.attempt, COALESCE(r.cached_tokens, 0)) >= 0
AND (r.cached_tokens > r.context_tokens OR r.oldest_version > r.newest_version) IS NOT TRUE
"""
PLAIN_SAMPLE = f"""
({PLAIN_TRAINED} OR {PLAIN_LOST})
AND MIN(s.prompt_tokens, s.trained_tokens, s.stale_tokens, s.masked_tokens, s.member, s.epoch, s.born_version) >= 0
AND s.redone_tokens = 0 AND NOT (s.stale_tokens > 0 AND :never_masked)
AND (r.number IS NULL AND s.generated_s IS NULL OR {PLAIN_REQUEST})
AND (NOT :any_else OR NOT EXISTS (SELECT 1 FROM main.episodes e WHERE e.sample_id = s.sample_id)
     AND NOT EXISTS (SELECT 1 FROM main.attempts a WHERE a.sample_id = s.sample_id)
     AND NOT EXISTS (SELECT 1 FROM main.losses l WHERE l.sample_id = s.sample_id)
     AND NOT EXISTS (SELECT 1 FROM main.reuses n WHERE n.sample_id = s.sample_id))
"""
LOST_TOKENS = "TOTAL(CASE s.state WHEN '{}' THEN s.response_tokens - s.stale_tokens - s.masked_tokens END)"
# A row for each group of plain samples: its ticket, its number of uses, and the figures, in their order. If all samples
# have different numbers in their group, and there is one row for each, none stands for two.
PLAIN = f"""
SELECT t.ticket, COUNT(u.sample_id), COUNT(*), 1, TOTAL(s.response_tokens), TOTAL(s.trained_tokens),
    TOTAL(s.stale_tokens), TOTAL(s.masked_tokens), {LOST_TOKENS.format("filtered")}, {LOST_TOKENS.format("failed")},
    {LOST_TOKENS.format("dropped")}, 0, 0, 0, COUNT(r.number), 0, COUNT(p.sample_id), COUNT(p.sample_id),
    MAX(u.version - u.oldest_version), NULL
FROM main.tickets t CROSS JOIN main.samples s ON s.group_id = t.group_id
    LEFT JOIN main.uses u ON u.sample_id = s.sample_id LEFT JOIN main.requests r ON r.sample_id = s.sample_id
    LEFT JOIN main.spans p ON p.sample_id = s.sample_id
WHERE t.ticket BETWEEN :first AND :last AND {PLAIN_SAMPLE}
GROUP BY t.ticket
HAVING COUNT(*) = COUNT(DISTINCT s.member) AND MIN(s.born_version) = MAX(s.born_version)
    AND COUNT(*) = (SELECT COUNT(*) FROM main.samples g WHERE g.group_id = t.group_id)
    AND (COUNT(*) <> {AT_TICKET.format("group_size")}) IS NOT TRUE
    AND (SELECT COUNT(*) = 1 AND MAX(h.key = :main AND h.value = s.born_version) FROM {HELD} h)
    AND CASE WHEN MAX(s.step) IS NULL THEN t.state = 'dropped' AND t.step IS NULL
             ELSE t.state = 'trained' AND t.step = MAX(s.step) END
"""


@dataclass(frozen=True)
class GroupRange:
    """What the groups of a range of tickets have."""

    figures: Figures
    rows: Mapping[str, int]
    """Table -> number of its rows that belong to the groups."""
    num_other: int
    """Number of groups that are not plain."""


@dataclass(frozen=True)
class Groups:
    """What the audit of all groups has found."""

    violations: list[Violation]
    figures: Figures
    ranges: Mapping[int, GroupRange] = field(default_factory=dict)
    """First possible ticket -> the groups from it on. Empty if there are rows that belong to no group."""


def check_groups(
    db: sqlite3.Connection,
    values: Mapping[str, Any],
    num_rows: Mapping[str, int],
    sealed: Mapping[int, GroupRange] | None = None,
) -> Groups:
    """Find the rules that groups break, and the figures. `sealed` has the ranges that need no check.

    `values` are the parameters of the rules, `num_rows` the sizes of the tables. `db` has temporary tables meanwhile.
    """
    wrong: dict[Check, list[Violation]] = {check: [] for check in GROUP_CHECKS}
    of_plain = {**values, **_parameters_of_plain(db, values, num_rows)}
    known = sealed or {}
    _create_copies(db)
    try:
        done = {first: known.get(first) or _check_range(db, of_plain, first, wrong) for first in _first_tickets(db)}
    finally:
        for table in TABLES:
            db.execute(f"DROP TABLE temp.{table}")
    if any(num_rows[table] != sum(one.rows[table] for one in done.values()) for table in TABLES):
        return Groups(list(apply_rules(db, GROUP_CHECKS, values)), _query_figures(db))
    violations = [violation for of_check in wrong.values() for violation in of_check]
    return Groups(violations, _sum_figures([one.figures for one in done.values()]), done)


def apply_rules(db: sqlite3.Connection, checks: Iterable[Check], values: Mapping[str, Any]) -> Iterator[Violation]:
    """What the rules find in the tables that their names mean now: temporary ones before the ledger's."""
    for check in checks:
        for row in db.execute(check.query, values):
            yield Violation(check.kind, check.text.format(*row))


def _parameters_of_plain(
    db: sqlite3.Connection, values: Mapping[str, Any], num_rows: Mapping[str, int]
) -> dict[str, Any]:
    """The further parameters of PLAIN. With a clock of its own, or strange steps, a trainer has no plain sample."""
    simple, num_steps = db.execute(
        "SELECT MIN(step) = 1 AND MAX(step) = COUNT(*) AND SUM(typeof(step) = 'integer') = COUNT(*)"
        " AND :main NOT IN (SELECT value FROM json_each(:own_clock)), COUNT(*) FROM steps WHERE trainer = :main",
        values,
    ).fetchone()
    least, never_masked = db.execute(f"SELECT MIN(max_staleness), {NEVER_MASKED} FROM incarnations").fetchone()
    any_else = any(num_rows[table] for table in ("episodes", "attempts", "losses", "reuses"))
    last_step = num_steps if simple else 0
    return {"last_step": last_step, "least": least, "never_masked": never_masked, "any_else": any_else}


def _first_tickets(db: sqlite3.Connection) -> Iterator[int]:
    """The first possible ticket of each range that has tickets."""
    (ticket,) = db.execute("SELECT MIN(ticket) FROM main.tickets").fetchone()
    while ticket is not None:
        first = ticket // TICKETS_AT_ONCE * TICKETS_AT_ONCE
        yield first
        (ticket,) = db.execute(
            "SELECT MIN(ticket) FROM main.tickets WHERE ticket >= ?", (first + TICKETS_AT_ONCE,)
        ).fetchone()


def _check_range(
    db: sqlite3.Connection, values: Mapping[str, Any], first: int, wrong: Mapping[Check, list[Violation]]
) -> GroupRange:
    """Check the groups of the range that begins with ticket `first`; what they break is added to `wrong`."""
    bounds = {"first": first, "last": first + TICKETS_AT_ONCE - 1}
    plain = [] if values["several"] else db.execute(PLAIN, {**values, **bounds}).fetchall()
    tickets, num_uses, *columns = zip(*plain, strict=True) if plain else [()] * (2 + len(FIGURES))
    figures: Figures = {name: _combine_values(name, column) for name, column in zip(FIGURES, columns, strict=True)}
    rows = dict.fromkeys(TABLES, 0) | {"tickets": len(tickets), "uses": sum(num_uses)}
    rows |= {table: figures[name] or 0 for table, name in COUNTED.items()}
    there = db.execute("SELECT ticket FROM main.tickets WHERE ticket BETWEEN :first AND :last", bounds).fetchall()
    other = sorted({ticket for (ticket,) in there}.difference(tickets))
    if other:
        for table, number in _copy_groups(db, other).items():
            rows[table] += number
        figures = _sum_figures([figures, _query_figures(db)])
        for check in GROUP_CHECKS:
            wrong[check].extend(apply_rules(db, [check], values))
    return GroupRange(figures, rows, len(other))


def _create_copies(db: sqlite3.Connection) -> None:
    """Create empty temporary tables with the names of the ledger's; where a query names one, they are meant."""
    for table in TABLES:
        db.execute(f"CREATE TEMP TABLE {table} AS SELECT * FROM main.{table} LIMIT 0")
    for table in ("samples", *OF_SAMPLES):
        db.execute(f"CREATE INDEX temp.{table}_copied ON {table} (sample_id)")
    for table in ("tickets", "samples"):
        db.execute(f"CREATE INDEX temp.{table}_copied_by_group ON {table} (group_id)")


def _copy_groups(db: sqlite3.Connection, tickets: Sequence[int]) -> dict[str, int]:
    """Fill the temporary tables with the groups of these tickets alone. Returns the number of rows of each."""
    for table in TABLES:
        db.execute(f"DELETE FROM temp.{table}")
    copied = {}
    db.executemany("INSERT INTO temp.tickets SELECT * FROM main.tickets WHERE ticket = ?", [(one,) for one in tickets])
    db.execute("INSERT INTO temp.samples SELECT s.* FROM temp.tickets CROSS JOIN main.samples s USING (group_id)")
    for table in OF_SAMPLES:
        db.execute(f"INSERT INTO temp.{table} SELECT o.* FROM temp.samples CROSS JOIN main.{table} o USING (sample_id)")
    for table in TABLES:
        (copied[table],) = db.execute(f"SELECT COUNT(*) FROM temp.{table}").fetchone()
    return copied


def _query_figures(db: sqlite3.Connection) -> Figures:
    return {name: _combine_values(name, db.execute(query).fetchone()) for name, query in FIGURES.items()}


def _sum_figures(parts: Sequence[Figures]) -> Figures:
    """The figures of several parts of a ledger together."""
    return {name: _combine_values(name, [part[name] for part in parts]) for name in FIGURES}


def _combine_values(name: str, values: Iterable[float | None]) -> int | None:
    known = [value for value in values if value is not None]
    if name in (MAX_STALENESS, MAX_REUSED):
        return int(max(known)) if known else None
    return int(sum(known))

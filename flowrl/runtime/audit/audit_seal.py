"""The seal: what an audit has proven, in RUN/audit.seal, so that the next audit goes on from there.

The rows of a table are sealed in ranges of ROWS_AT_ONCE row numbers, each with the digest of the pages that hold it and
the sum of its rows' hashes; groups are sealed in the ranges of `audit_groups`.

Invariants
- The next audit reads every page of the tables, as bytes. A range with the digest that the seal has is the same rows;
  the rows of every other range are read and hashed. So the sums that the chain binds are those of all rows that are
  there now, and a row that something other than the run has changed is found, however old it is.
- Groups with rows in such other ranges are checked again. Which groups these are, the changed rows tell: the run moves
  no row to another sample or group, and writes no numbers of an incarnation or a step anew.
- A seal holds for the rules and parameters with which it was made, and is written only if nothing was found.
- A ledger that was rewound or replaced has other pages, so nothing of the seal holds for it.
- A row of more than half a page may continue on pages that are no leaves. Its range is never sealed.

Like the chain, a seal has no key: it is no proof against somebody who writes it anew.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from flowrl.runtime.audit.audit_groups import PLAIN, TABLES, TICKETS_AT_ONCE, GroupRange
from flowrl.runtime.audit.audit_rules import CHECKS
from flowrl.runtime.audit.table_pages import DIGEST_BYTES, Pages
from flowrl.runtime.checkpoints.rundir import write_whole
from flowrl.runtime.ledger import ledger_file
from flowrl.runtime.ledger.chain import MODULUS, Sum, sum_rows

SEAL = "audit.seal"
ROWS_AT_ONCE = 4096
NO_STEP = 1 << 62


@dataclass(frozen=True)
class RowRange:
    """Rows of one table."""

    pages: str | None
    """The digest of their pages; None if it does not bind them."""
    num_rows: int
    row_hashes: str


@dataclass(frozen=True)
class RowRanges:
    """The rows of all tables."""

    ranges: Mapping[str, Mapping[int, RowRange]]
    """Table -> number of the range -> its rows."""
    changed: Mapping[str, list[int]]
    """Table -> the ranges that were read row by row."""

    @classmethod
    def of(cls, db: sqlite3.Connection, pages: Pages | None, seal: Seal | None) -> Self:
        """Read what is not as in the seal; `pages` are those of the ledger."""
        ranges: dict[str, dict[int, RowRange]] = {}
        changed: dict[str, list[int]] = {}
        for table in ledger_file.TABLES:
            leaves = None if pages is None else pages.find_leaves(db, table)
            sealed = {} if seal is None else seal.rows.get(table, {})
            ranges[table], changed[table] = {}, []
            for number in _range_numbers(db, table):
                first, last = _range_bounds(number)
                digest = None if leaves is None else leaves.digest_rows(first, last)
                found = sealed.get(number)
                if found is None or digest is None or found.pages != digest:
                    rows = db.execute(f"SELECT * FROM main.{table} WHERE rowid BETWEEN ? AND ?", (first, last))
                    total, longest = sum_rows(rows)
                    whole = pages is not None and longest <= pages.page_bytes // 2
                    found = RowRange(digest if whole else None, total.num_rows, f"{total.row_hashes:x}")
                    changed[table].append(number)
                ranges[table][number] = found
        return cls(ranges, changed)

    @property
    def sums(self) -> dict[str, Sum]:
        """The sum of each table."""
        return {
            table: Sum(
                sum(one.num_rows for one in ranges.values()),
                sum(int(one.row_hashes, 16) for one in ranges.values()) % MODULUS,
            )
            for table, ranges in self.ranges.items()
        }

    def first_step(self, db: sqlite3.Connection) -> int:
        """The first step of a use that was read; one after all of them if none was."""
        query = "SELECT MIN(step) FROM main.uses WHERE rowid BETWEEN ? AND ?"
        found = [db.execute(query, _range_bounds(number)).fetchone()[0] for number in self.changed["uses"]]
        return min((step for step in found if step is not None), default=NO_STEP)

    @property
    def num_read(self) -> int:
        """How many rows were read one by one."""
        return sum(self.ranges[table][number].num_rows for table, of in self.changed.items() for number in of)


@dataclass(frozen=True)
class Seal:
    """What an audit without findings has proven."""

    commit: int
    """The newest one."""
    ended: bool
    """Whether the run had ended in order."""
    parameters: Mapping[str, Any]
    """Those of the rules, and the incarnations."""
    rows: Mapping[str, Mapping[int, RowRange]]
    groups: Mapping[int, GroupRange]
    """First ticket -> the groups from it on."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The seal at `path`; None if there is none, or it is damaged, or of other rules."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            body = content["seal"]
            if content["digest"] != _digest_content(body) or content["rules"] != _digest_rules():
                return None
        except (OSError, ValueError, TypeError, KeyError):
            return None
        rows = {
            table: {int(number): RowRange(**one) for number, one in of.items()} for table, of in body["rows"].items()
        }
        groups = {int(first): GroupRange(**one) for first, one in body["groups"].items()}
        return cls(**{**body, "rows": rows, "groups": groups})

    def write(self, path: Path) -> None:
        """Write the seal in place of an older one. Raises OSError."""
        body = asdict(self)
        write_whole(path, json.dumps({"digest": _digest_content(body), "rules": _digest_rules(), "seal": body}))

    def holding_ranges(
        self, db: sqlite3.Connection, rows: RowRanges, *, ended: bool, parameters: Mapping[str, Any]
    ) -> dict[int, GroupRange]:
        """The ranges of groups that need no check: none of their rows has changed, nor what the rules depend on."""
        if json.dumps(self.parameters) != json.dumps(parameters):
            return {}
        changed = {ticket // TICKETS_AT_ONCE * TICKETS_AT_ONCE for ticket in _changed_tickets(db, rows.changed)}
        if ended != self.ended:  # some rules are for runs that have ended; plain groups keep these, too
            changed |= {first for first, one in self.groups.items() if one.num_other}
        return {first: one for first, one in self.groups.items() if first not in changed}


def _changed_tickets(db: sqlite3.Connection, changed: Mapping[str, list[int]]) -> Iterator[int]:
    """The tickets of the groups that have rows in these ranges."""
    for table in TABLES:
        joined = {
            "tickets": "main.tickets t",
            "samples": "main.samples o JOIN main.tickets t USING (group_id)",
        }.get(table, f"main.{table} o JOIN main.samples s USING (sample_id) JOIN main.tickets t USING (group_id)")
        query = (
            f"SELECT DISTINCT t.ticket FROM {joined} WHERE {'t' if table == 'tickets' else 'o'}.rowid BETWEEN ? AND ?"
        )
        for number in changed[table]:
            yield from (ticket for (ticket,) in db.execute(query, _range_bounds(number)))


def _range_numbers(db: sqlite3.Connection, table: str) -> Iterator[int]:
    """The numbers of the ranges in which the table has rows."""
    (row,) = db.execute(f"SELECT MIN(rowid) FROM main.{table}").fetchone()
    while row is not None:
        number = row // ROWS_AT_ONCE
        yield number
        (row,) = db.execute(
            f"SELECT MIN(rowid) FROM main.{table} WHERE rowid >= ?", ((number + 1) * ROWS_AT_ONCE,)
        ).fetchone()


def _range_bounds(number: int) -> tuple[int, int]:
    """The first and the last row number of a range."""
    return number * ROWS_AT_ONCE, (number + 1) * ROWS_AT_ONCE - 1


def _digest_rules() -> str:
    """A digest of everything that a seal vouches for."""
    return _digest_content(
        [[[check.kind, check.text, check.query] for check in CHECKS], PLAIN, TICKETS_AT_ONCE, ROWS_AT_ONCE]
    )


def _digest_content(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=DIGEST_BYTES).hexdigest()

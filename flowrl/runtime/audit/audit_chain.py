"""The audit's last check: every row of every table is as the run's commits left it (flowrl.runtime.ledger.chain).

It names the table, not the row: the checks that have rules for rows report what is wrong with a row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.runtime.audit.audit_rules import Violation
from flowrl.runtime.checkpoints import checkpoint
from flowrl.runtime.ledger import chain, ledger_segments
from flowrl.runtime.ledger.chain import Commit, Sum
from flowrl.runtime.ledger.ledger_file import TABLES

LOST_COMMITS = "it has lost commits, or it is the ledger of another run"
LOST_LAST = "it has lost its last commits, as when a machine loses its power"
BY_OTHERS = "by something other than the run; --resume restores the rows of the newest checkpoint"


def check_chain(db: sqlite3.Connection, found: Mapping[str, Sum]) -> Iterator[Violation]:
    """Report links that do not follow from the previous link, and tables that differ from the last commit.

    `found` has the sum of each table's rows.
    """
    before: Commit | None = None
    for commit in chain.read_commits(db):
        if commit != Commit.after(before, commit.committed_s, commit.digest):
            told = "the first" if before is None else f"commit {before.number}"
            yield Violation("chain", f"commit {commit.number} does not follow from {told}: changed {BY_OTHERS}")
        before = commit
    contents = chain.read_contents(db)
    if before is None:
        yield Violation("chain", f"the ledger has no commit: its rows were removed {BY_OTHERS}")
    elif chain.hash_content(contents) != before.digest:
        yield Violation("chain", f"the table `contents` does not match commit {before.number}: changed {BY_OTHERS}")
    recorded = {name: (num_rows, row_hashes) for name, num_rows, row_hashes in contents}
    for table in TABLES:
        if table not in recorded:
            text = f"the table `contents` has no row for the table {table}: removed"
        elif found[table].num_rows != recorded[table][0]:
            num_rows, left = found[table].num_rows, recorded[table][0]
            text = f"the table {table} has {num_rows} rows, but the last commit left {left}: added or removed"
        elif found[table].as_row(table) != (table, *recorded[table]):
            text = f"rows of the table {table} differ from what the last commit left: changed"
        else:
            continue
        yield Violation("chain", f"{text} {BY_OTHERS}")


def missing_heads(db: sqlite3.Connection, heads: Collection[str]) -> set[str]:
    """The members of `heads` that no commit has."""
    return set(heads) - {commit.head for commit in chain.read_commits(db) if commit.head in heads}


def is_cut_off(db: sqlite3.Connection) -> bool:
    """Whether a resume has rewound the ledger and booked nothing since: the metrics may not be rewound yet."""
    row = db.execute(
        "SELECT number > 0 AND first_commit = (SELECT MAX(number) FROM commits)"
        " FROM incarnations ORDER BY number DESC LIMIT 1"
    ).fetchone()
    return row is not None and bool(row[0])


def kept_heads(run_dir: Path) -> dict[str, str]:
    """Checkpoint -> head of the commit after which it was written. Skips damaged ones: a resume reports those."""
    heads = {}
    for _, path in checkpoint.steps_of(run_dir / "checkpoints"):
        with suppress(ConfigError):
            heads[path.name] = str(checkpoint.read_manifest(path).get("ledger_head"))
    return heads


def lost_commits(db: sqlite3.Connection, run_dir: Path, heads: Mapping[str, str]) -> str:
    """Why the ledger may lack commits: if checkpoints show that it is this run's, it has only lost the last ones.

    A machine that loses its power may lose the end of the WAL. `heads` is the result of `kept_heads`.
    """
    newest, names = chain.read_newest(db), sorted(heads, reverse=True)
    if newest is None or not names:
        return LOST_COMMITS
    for name in names:
        with suppress(ConfigError):
            if ledger_segments.has_commit(run_dir / "checkpoints" / name, newest.head):
                return f"{LOST_LAST}; --resume continues from {names[0]}, which has them"
    if missing_heads(db, {heads[names[0]]}):
        return LOST_COMMITS
    return f"{LOST_LAST}; --resume continues from {names[0]}"


def check_checkpoints(db: sqlite3.Connection, heads: Mapping[str, str], lost: str) -> Iterator[Violation]:
    """Report checkpoints of commits that the ledger does not have. A resume moves aside those that it undoes."""
    strange = missing_heads(db, set(heads.values()))
    newest = max((name for name, head in heads.items() if head not in strange), default="")
    for name, head in heads.items():
        if head in strange:
            text = f"{name} was written after commit {head}, which the ledger does not have"
            yield Violation("checkpoints", f"{text}: {lost if name > newest else LOST_COMMITS}")

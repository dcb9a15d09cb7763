"""The audit of groups in ranges finds what the rules find in the whole ledger, whatever is falsified."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowrl.runtime.audit import audit_groups
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.audit.audit_groups import FIGURES, PLAIN, TABLES, check_groups
from flowrl.runtime.audit.audit_rules import GROUP_CHECKS
from tests.runtime.ledger.small_run import two_trainers, whole_run
from tests.runtime.ledger.test_audit_falsified import change, columns, remove, repeat, swap

NUM_SEEDS = 250
VALUES: dict[str, Any] = {
    "main": "trainer",
    "several": False,
    "trainers": '["trainer"]',
    "own_clock": "[]",
    "holders": '["generator"]',
}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The ledger of a run with groups of every kind, and one trainer."""
    directory = tmp_path_factory.mktemp("run")
    asyncio.run(whole_run(directory))
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        db.execute("PRAGMA journal_mode = DELETE")  # an image in WAL mode is no database by itself
        return bytes(db.serialize())


@pytest.fixture
def db(image: bytes) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.deserialize(image)
        yield db


def in_ranges(db: sqlite3.Connection) -> tuple[Counter[Any], dict[str, int | None]]:
    """What the audit finds, and its figures."""
    num_rows = {table: db.execute(f"SELECT COUNT(*) FROM main.{table}").fetchone()[0] for table in TABLES}
    groups = check_groups(db, VALUES, num_rows)
    return Counter((v.kind, v.text) for v in groups.violations), dict(groups.figures)


def in_whole(db: sqlite3.Connection) -> tuple[Counter[Any], dict[str, int | None]]:
    """What each rule finds by itself, and the figures."""
    found = Counter(
        (check.kind, check.text.format(*row)) for check in GROUP_CHECKS for row in db.execute(check.query, VALUES)
    )
    values = {name: db.execute(query).fetchone()[0] for name, query in FIGURES.items()}
    return found, {name: None if value is None else int(value) for name, value in values.items()}


def num_plain(db: sqlite3.Connection) -> int:
    values = audit_groups._parameters_of_plain(db, VALUES, dict.fromkeys(TABLES, 0))
    return len(db.execute(PLAIN, {**VALUES, **values, "first": 0, "last": 1 << 60}).fetchall())


def test_trained_and_lost_samples_are_plain(db: sqlite3.Connection) -> None:
    assert num_plain(db) == db.execute("SELECT COUNT(*) FROM tickets").fetchone()[0] == 14
    assert {state for (state,) in db.execute("SELECT state FROM samples")} == {"trained", "filtered", "failed"}
    assert in_ranges(db) == in_whole(db)
    assert not in_ranges(db)[0]


def falsify(db: sqlite3.Connection, rng: random.Random) -> str:
    """One to three changes of rows of groups. Returns what was done."""
    done = []
    tables = [
        one for one in (*TABLES, "steps", "incarnations") if db.execute(f"SELECT 1 FROM {one} LIMIT 1").fetchone()
    ]
    fields = [(table, column) for table, column in columns() if table in tables]
    for _ in range(rng.choice([1, 1, 2, 3])):
        table, column = rng.choice(fields)
        if not db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]:
            continue
        kind = rng.choice(["change", "change", "change", "swap", "remove", "repeat"])
        if kind in ("change", "swap"):
            (change if kind == "change" else swap)(db, table, column, rng)
        else:
            (remove if kind == "remove" else repeat)(db, table, rng)
        done.append(f"{kind} {table}.{column}")
    return ", ".join(done)


@pytest.mark.parametrize("at_once", [4, 1024])
def test_whatever_is_falsified_the_same_is_found(image: bytes, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranges are proven here without the hash chain, which would find nearly all of it, too."""
    monkeypatch.setattr(audit_groups, "TICKETS_AT_ONCE", at_once)
    num_wrong = 0
    for seed in range(NUM_SEEDS * at_once, NUM_SEEDS * (at_once + 1)):
        rng = random.Random(seed)
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
            db.deserialize(image)
            what = falsify(db, rng)
            found, figures = in_ranges(db)
            assert (found, figures) == in_whole(db), f"seed {seed}: {what}"
            num_wrong += bool(found)
    assert num_wrong > NUM_SEEDS // 2


def test_rows_of_no_group_are_found(db: sqlite3.Connection) -> None:
    db.execute("INSERT INTO losses VALUES ('stranger', 'trainer', 'filtered', 'x')")
    db.execute("INSERT INTO attempts VALUES ('stranger', 3, 'x', 0)")
    found, _ = in_ranges(db)
    assert found == in_whole(db)[0]
    assert ("losses", "trainer left out sample stranger, which was never admitted") in found


def test_a_run_of_two_trainers_has_no_plain_group(tmp_path: Path) -> None:
    asyncio.run(two_trainers(tmp_path))
    report = audit(tmp_path)
    assert report.ok and report.figures["samples"] == 18 and report.figures["policy spans proven"] == 30

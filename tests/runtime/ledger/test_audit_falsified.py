"""Whatever is changed in a ledger, or in the metrics beside it, the audit finds.

A finished run's records are falsified in memory: every column of every table in turn, then at random, a thousand
times. A failure names the seed; `falsified(records, seed)` repeats it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowrl.runtime.audit.audit import AuditReport, prove_ledger
from flowrl.runtime.ledger.chain import TABLES as CHAIN_TABLES
from flowrl.runtime.ledger.ledger_file import TABLES
from flowrl.runtime.telemetry.metrics import whole_lines
from flowrl.testing import run_graph
from tests.runtime.ledger.small_run import derived_run, two_trainers

NUM_SEEDS = 1000
REPLAYED = Path(__file__).parent / "graphs_proof" / "replayed.py"


@dataclass(frozen=True)
class Records:
    """A run's ledger, as a database image, and its metrics lines."""

    image: bytes
    lines: list[str]

    @contextmanager
    def ledger(self) -> Iterator[sqlite3.Connection]:
        """A copy to falsify."""
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
            db.deserialize(self.image)
            yield db


def replayed_run(directory: Path) -> None:
    run_graph(REPLAYED, directory, steps=5)


RUNS: dict[str, Callable[[Path], None]] = {
    "two trainers": lambda directory: asyncio.run(two_trainers(directory)),
    "derived": lambda directory: asyncio.run(derived_run(directory)),
    "replayed": replayed_run,
}
"""Runs that together have rows in every table."""


@pytest.fixture(scope="module")
def all_records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Records]:
    found = {}
    for name, run in RUNS.items():
        directory = tmp_path_factory.mktemp("run")
        run(directory)
        with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
            db.execute("PRAGMA journal_mode = DELETE")  # an image in WAL mode is no database by itself
            found[name] = Records(db.serialize(), whole_lines(directory / "metrics.jsonl"))
    return found


def filled_tables(records: Records) -> set[str]:
    with records.ledger() as db:
        return {t for t in (*TABLES, *CHAIN_TABLES) if db.execute(f"SELECT COUNT(*) FROM {t}").fetchone()[0]}


def look(db: sqlite3.Connection, lines: list[str]) -> AuditReport:
    return prove_ledger(db, lines=lines, num_known=len(lines))


@functools.cache
def columns() -> list[tuple[str, str]]:
    from flowrl.runtime.ledger import chain, ledger_file

    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(ledger_file.SCHEMA + chain.SCHEMA)
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        assert sorted(tables) == sorted([*TABLES, *CHAIN_TABLES])
        return [(table, name) for table in tables for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]


def other_values(value: Any, rng: random.Random) -> list[Any]:
    """What a falsifier might write instead."""
    if isinstance(value, int):
        return [value + 1, value - 1, value + rng.randint(2, 1000), -value, 0, None, "x"]
    if isinstance(value, float):
        return [value + 1e-6, value * 2 + 1, -value, 0.0, None]
    if isinstance(value, str):
        return [value + "x", value[:-1], value.upper(), "", "trained", "0", None]
    return [0, 1, 7, "x", 1.5]


def change(db: sqlite3.Connection, table: str, column: str, rng: random.Random) -> bool:
    """Write something else into one row; False where the table forbids it, or nothing has changed."""
    rows = db.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
    rowid, value = rng.choice(rows)
    new = rng.choice([*other_values(value, rng), *(other for _, other in rows)])
    before = Counter(db.execute(f"SELECT * FROM {table}"))
    try:
        db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, rowid))
    except sqlite3.IntegrityError:
        return False
    return typed(before) != typed(Counter(db.execute(f"SELECT * FROM {table}")))


def typed(rows: Counter[Any]) -> Counter[str]:
    """1 and 1.0 are two values."""
    return Counter({repr(row): count for row, count in rows.items()})


def remove(db: sqlite3.Connection, table: str, rng: random.Random) -> bool:
    """One row, several, or all."""
    rows = [rowid for (rowid,) in db.execute(f"SELECT rowid FROM {table}")]
    for rowid in rng.sample(rows, rng.choice([1, rng.randint(1, len(rows)), len(rows)])):
        db.execute(f"DELETE FROM {table} WHERE rowid = ?", (rowid,))
    return True


def repeat(db: sqlite3.Connection, table: str, rng: random.Random) -> bool:
    """A row stands there once more, under another key where it has one."""
    row = list(rng.choice(db.execute(f"SELECT * FROM {table}").fetchall()))
    if rng.random() < 0.7 and isinstance(row[0], int | str):
        row[0] = row[0] + 1000 if isinstance(row[0], int) else row[0] + " again"
    try:
        db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    except sqlite3.IntegrityError:
        return False
    return True


def swap(db: sqlite3.Connection, table: str, column: str, rng: random.Random) -> bool:
    """Two rows exchange what they say."""
    (one, first), (two, second) = rng.choices(db.execute(f"SELECT rowid, {column} FROM {table}").fetchall(), k=2)
    before = typed(Counter(db.execute(f"SELECT * FROM {table}")))
    try:
        db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (second, one))
        db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (first, two))
    except sqlite3.IntegrityError:
        return False
    return before != typed(Counter(db.execute(f"SELECT * FROM {table}")))


def change_lines(lines: list[str], rng: random.Random) -> list[str]:
    """Lines removed, repeated, exchanged, cut, or with another value somewhere."""
    index, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    line = json.loads(lines[index])
    name = rng.choice(list(line))
    falsified = {**line, name: rng.choice(other_values(line[name], rng))}
    return rng.choice(
        [
            [],
            lines[:index],
            lines[:index] + lines[index + 1 :],
            [*lines, lines[index]],
            [lines[other] if i == index else lines[index] if i == other else line for i, line in enumerate(lines)],
            [line[: rng.randrange(len(line))] if i == index else line for i, line in enumerate(lines)],
            [json.dumps(falsified) if i == index else line for i, line in enumerate(lines)],
            [json.dumps({k: v for k, v in json.loads(line).items() if k != name}) for line in lines],
        ]
    )


def falsified(records: Records, seed: int) -> tuple[str, AuditReport]:
    """What was done with this seed, and what the audit says of it."""
    rng, filled = random.Random(seed), filled_tables(records)
    with records.ledger() as db:
        lines = records.lines
        while True:
            table, column = rng.choice([place for place in columns() if place[0] in filled])
            kind = rng.choice(["change", "change", "change", "swap", "remove", "repeat", "lines"])
            if kind == "lines":
                lines = change_lines(records.lines, rng)
                done = lines != records.lines
            elif kind in ("change", "swap"):
                done = (change if kind == "change" else swap)(db, table, column, rng)
            else:
                done = (remove if kind == "remove" else repeat)(db, table, rng)
            if done:
                return f"seed {seed}: {kind} {table}.{column}", look(db, lines)


def test_the_records_are_sound(all_records: dict[str, Records]) -> None:
    for records in all_records.values():
        with records.ledger() as db:
            report = look(db, records.lines)
            assert report.ok, str(report)
    assert set().union(*map(filled_tables, all_records.values())) == {*TABLES, *CHAIN_TABLES}


@pytest.mark.parametrize(("table", "column"), columns())
def test_every_column_is_bound(all_records: dict[str, Records], table: str, column: str) -> None:
    rng = random.Random(f"{table}.{column}")
    records = next(one for one in all_records.values() if table in filled_tables(one))
    changed = 0
    while changed < 3:
        with records.ledger() as db:
            if change(db, table, column, rng):
                changed += 1
                assert not look(db, records.lines).ok


@pytest.mark.parametrize("name", RUNS)
def test_whatever_is_falsified_is_found(all_records: dict[str, Records], name: str) -> None:
    seeds = range(NUM_SEEDS if name == "two trainers" else NUM_SEEDS // 5)
    print(f"seeds 0 to {seeds[-1]}")
    missed = [what for seed in seeds for what, report in [falsified(all_records[name], seed)] if report.ok]
    assert missed == []

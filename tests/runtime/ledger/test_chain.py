"""The hash chain: what it says of a ledger after any writes, failures and resumes; and the audits that rest on it."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest

from flowrl.errors import ConfigError, FlowrlError
from flowrl.runtime.audit import audit as audits
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.audit.audit_chain import check_chain
from flowrl.runtime.checkpoints import checkpoint
from flowrl.runtime.checkpoints.resume import rewind_run
from flowrl.runtime.ledger import ledger_file
from flowrl.runtime.ledger.chain import SCHEMA, Chain, Commit, Sum, read_commits, read_contents
from flowrl.runtime.ledger.ledger import Ledger
from flowrl.runtime.ledger.ledger_file import LEDGER, Terms, open_to_read
from flowrl.runtime.ledger.ledger_segments import rebuild_ledger, segments_of
from flowrl.runtime.telemetry.metrics import whole_lines
from tests.runtime.ledger.small_run import MEMBERS, POLICY, SmallRun, whole_run


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(f"CREATE TABLE things (name TEXT, amount REAL, kind); {SCHEMA}")
        yield db


def written(db: sqlite3.Connection) -> Sum:
    return Sum.of(db.execute("SELECT * FROM things"))


@pytest.mark.parametrize("seed", range(20))
def test_what_triggers_add_up_is_what_the_table_holds(db: sqlite3.Connection, seed: int) -> None:
    rng, chain = random.Random(seed), Chain(db, ["things"])
    for commit in range(10):
        db.execute("BEGIN")
        for _ in range(rng.randint(0, 6)):
            rowid, value = rng.randint(1, 5), rng.choice([None, 1, 1.0, "1", b"1", ""])
            db.execute(
                rng.choice(
                    [
                        "INSERT INTO things VALUES ('a', ?1, ?2)",
                        "UPDATE things SET kind = ?2, amount = ?1 WHERE rowid = ?1",
                        "UPDATE things SET kind = kind WHERE ?1 > ?2",
                        "DELETE FROM things WHERE rowid = ?1 AND ?2 IS NOT NULL",
                        "UPDATE OR IGNORE things SET rowid = rowid + 100 WHERE rowid = ?1 AND ?2 IS NULL",
                    ]
                ),
                (rowid, value),
            )
        extended = chain.extend_chain(float(commit))
        kept = rng.random() < 0.7
        db.execute("COMMIT" if kept else "ROLLBACK")
        chain.end_transaction(extended if kept else None)
        assert chain.state.sums == {"things": written(db)}
    assert read_contents(db) in ([written(db).as_row("things")], [])
    before: Commit | None = None
    for link in read_commits(db):
        assert link == Commit.after(before, link.committed_s, link.digest)
        before = link
    assert before == chain.state.newest == Chain(db, []).state.newest


def test_what_changes_nothing_makes_no_link(db: sqlite3.Connection) -> None:
    chain = Chain(db, ["things"])
    for number, statement in enumerate(("INSERT INTO things VALUES ('a', 1, 2)", "UPDATE things SET kind = 2")):
        db.execute("BEGIN")
        db.execute(statement)
        chain.end_transaction(chain.extend_chain(float(number)))
        db.execute("COMMIT")
    assert [link.number for link in read_commits(db)] == [0]


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, "1"), ("1", b"1"), (None, ""), (0, None)])
def test_values_of_different_types_are_different_rows(one: object, other: object) -> None:
    assert Sum.of([(one,)]) != Sum.of([(other,)])


def test_rows_that_stand_twice_are_counted_twice() -> None:
    assert Sum.of([("a",), ("a",)]) != Sum.of([("a",)]) != Sum.of([])
    assert Sum.of([("a",), ("b",)]) == Sum.of([("b",), ("a",)])


def test_a_commit_that_fails_leaves_the_chain_and_can_be_repeated(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    head = ledger.head
    ledger.add_row("ticket", 0, "g0", "{}")
    ledger.add_row("used", "g0/0", POLICY, 0, 1, "many", None, 0, 0)  # a column that may not be NULL
    with pytest.raises(FlowrlError, match="cannot be written"):
        ledger.commit_rows()
    assert ledger.head == head
    ledger._rows["used"].clear()
    ledger.commit_rows()
    assert ledger.head != head
    ledger.close()
    with closing(open_to_read(tmp_path / "ledger.sqlite")) as db:
        sums = {table: Sum.of(db.execute(f"SELECT * FROM {table}")) for table in ledger_file.TABLES}
        assert list(check_chain(db, sums)) == []


# Resumes


async def run_with_checkpoints(directory: Path, *, ahead: int = 1) -> None:
    """Killed at step 6, with checkpoints of steps 2 and 4."""
    run = SmallRun(directory, ahead=ahead, steps=None)
    groups = 0
    waiting = []
    for step in range(1, 7):
        while not run.accounting.tickets.why_waiting():
            await run.admit(groups)
            waiting.append(run.generate(groups))
            groups += 1
        run.step([one for group in waiting[:2] for one in group])
        waiting = waiting[2:]
        if step in (2, 4):
            kept(directory, step).mkdir(parents=True)
            run.accounting.as_of_now().write(kept(directory, step))
            facts = {"step": step, "ledger_head": run.accounting.ledger.head}
            checkpoint.write_manifest(kept(directory, step), facts, threading.Event())
            run.accounting.ledger.note_published(kept(directory, step))
    run.close(orderly=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    asyncio.run(run_with_checkpoints(tmp_path))
    return tmp_path


def kept(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def go_back(run_dir: Path, step: int, terms: Terms | None = None) -> None:
    rewind_run(run_dir, kept(run_dir, step), step, terms or Terms.read(run_dir))


def test_a_run_with_checkpoints_is_sound(run_dir: Path) -> None:
    assert audit(run_dir).ok, str(audit(run_dir))


def test_a_resume_from_the_checkpoint_before_the_newest_is_sound(run_dir: Path) -> None:
    """The newest, which is damaged then, is put aside: its commits are undone."""
    go_back(run_dir, 2)
    assert audit(run_dir).ok, str(audit(run_dir))
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        assert db.execute("SELECT number, first_ticket, ended_s FROM incarnations").fetchall() == [
            (0, 0, None),
            (1, 6, None),
        ]


def test_a_ledger_that_went_back_without_a_resume_is_named(run_dir: Path) -> None:
    (run_dir / LEDGER).unlink()
    rebuild_ledger(kept(run_dir, 2), run_dir / LEDGER, ledger_file.SCHEMA + SCHEMA)
    with closing(sqlite3.connect(run_dir / LEDGER)) as db:
        db.execute(f"PRAGMA user_version = {ledger_file.FORMAT}")
    report = audit(run_dir)
    assert {violation.kind for violation in report.violations} == {"metrics", "checkpoints"}
    text = next(violation.text for violation in report.violations if violation.kind == "checkpoints")
    assert text.startswith("step_000004 was written after commit ")
    assert text.endswith(
        "which the ledger does not have: it has lost its last commits, as when a machine loses its power; --resume "
        "continues from step_000004, which has them"
    )


def test_a_checkpoint_of_another_run_is_named(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    asyncio.run(run_with_checkpoints(other))
    shutil.rmtree(kept(run_dir, 4))
    shutil.copytree(kept(other, 4), kept(run_dir, 4))
    texts = [violation.text for violation in audit(run_dir).violations]
    assert len(texts) == 1 and texts[0].startswith("step_000004 was written after commit ")


def test_a_damaged_checkpoint_is_the_next_resumes_business(run_dir: Path) -> None:
    segments_of(kept(run_dir, 4))[-1].write_bytes(b"no database" * 100)
    (kept(run_dir, 4) / "manifest.json").write_text("{")
    assert audit(run_dir).ok
    before = (run_dir / "ledger.sqlite").read_bytes()
    with pytest.raises(ConfigError, match="is no segment of a ledger, or damaged"):
        go_back(run_dir, 4)
    assert (run_dir / "ledger.sqlite").read_bytes() == before


def test_a_ledger_damaged_beyond_reading_is_replaced(run_dir: Path) -> None:
    (run_dir / "ledger.sqlite").write_bytes(b"no database, certainly not one" * 1000)
    (run_dir / "ledger.sqlite-wal").write_bytes(b"nor is this its log")
    go_back(run_dir, 4)
    assert audit(run_dir).ok, str(audit(run_dir))


def test_the_log_of_a_killed_run_does_not_get_into_the_rewound_ledger(tmp_path: Path) -> None:
    async def killed() -> Path:
        await run_with_checkpoints(tmp_path / "run")
        ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
        ledger.add_row("ticket", 999, "g999", "{}")
        ledger.commit_rows()
        copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
        ledger.close()
        return copy

    (tmp_path / "run").mkdir()
    copy = asyncio.run(killed())
    assert (copy / "ledger.sqlite-wal").stat().st_size > 0
    go_back(copy, 4)
    assert audit(copy).ok, str(audit(copy))


def test_each_step_is_held_to_the_bound_of_its_incarnation(tmp_path: Path) -> None:
    """Staleness 3 until step 4, then 1: what was trained before stays right, what comes after has to keep to 1."""
    asyncio.run(run_with_checkpoints(tmp_path, ahead=3))
    assert audit(tmp_path).figures["max staleness"] == 3

    async def go_on() -> None:
        run = SmallRun(tmp_path, ahead=1, resume=True, start_version=4, steps=None)
        open_samples = {row.sample_id for row in run.accounting.ledger.in_flight()}
        run.step([one for group in (8, 9) for one in run.generate(group) if one.sample_id in open_samples])
        run.close()

    smaller = Terms(max_staleness=1, tickets=4, window=1, groups_per_batch=2, group_size=MEMBERS, trainers=(POLICY,))
    go_back(tmp_path, 4, smaller)
    asyncio.run(go_on())
    report = audit(tmp_path)
    assert report.ok, str(report)
    assert (report.figures["max staleness"], report.figures["bound"]) == (3, 1)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:
        (sample_id,) = db.execute("SELECT MIN(sample_id) FROM uses WHERE step = 5").fetchone()
        db.execute("UPDATE uses SET oldest_version = 2 WHERE sample_id = ?", (sample_id,))
    texts = [violation.text for violation in audit(tmp_path).violations if violation.kind == "bound"]
    assert texts == [
        f"sample {sample_id}: a token of version 2 trained version 4 of trainer (staleness 2), but the bound is 1",
    ]


# Audits of a run that goes on


def test_what_comes_while_the_audit_reads_is_no_violation(tmp_path: Path) -> None:
    """A step is booked, its line written and that booked: before the ledger is read, and between the two reads."""
    run: list[SmallRun] = []

    def steps(path: Path) -> list[str]:
        lines = whole_lines(path)
        run[0].step([])
        run[0].accounting.bookings.commit_all()
        return lines

    async def body() -> None:
        run.append(SmallRun(tmp_path, steps=None))
        for _ in range(3):
            run[0].step([])
        with mock.patch.object(audits, "whole_lines", steps):
            report = audit(tmp_path)
        assert report.ok, str(report)
        assert report.figures["steps"] == 4
        run[0].close()

    asyncio.run(body())


def test_an_audit_that_meets_a_resume_looks_again(tmp_path: Path) -> None:
    asyncio.run(run_with_checkpoints(tmp_path))
    looks: list[int] = []

    def meet(path: Path) -> list[str]:
        lines = whole_lines(path)
        looks.append(len(lines))
        if len(looks) == 1:
            go_back(tmp_path, 4)
        return lines

    with mock.patch.object(audits, "whole_lines", meet):
        assert audit(tmp_path).ok
    assert looks == [6, 4, 4, 4]


def test_an_audit_leaves_no_file_behind(tmp_path: Path) -> None:
    asyncio.run(run_with_checkpoints(tmp_path))
    files = sorted(tmp_path.rglob("*"))
    audit(tmp_path)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_run_that_booked_nothing_is_sound(tmp_path: Path) -> None:
    asyncio.run(whole_run(tmp_path))
    (tmp_path / "killed").mkdir()
    Ledger(tmp_path / "killed" / "ledger.sqlite").close()
    report = audit(tmp_path / "killed")
    assert report.ok and report.figures["samples"] == 0

"""An audit that goes on from a seal finds what a whole one finds, whatever has happened to the ledger meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.runtime.audit import audit as audits
from flowrl.runtime.audit import audit_groups, audit_seal
from flowrl.runtime.audit.audit import audit, continue_audit
from flowrl.runtime.audit.audit_seal import SEAL, Seal
from flowrl.runtime.audit.table_pages import Pages
from flowrl.runtime.ledger.ledger import ALL_TABLES, Ledger
from flowrl.runtime.ledger.ledger_file import LEDGER
from tests.runtime.ledger.small_run import SmallRun, two_trainers
from tests.runtime.ledger.test_audit_falsified import change, columns, remove, repeat, swap
from tests.runtime.ledger.test_chain import go_back, run_with_checkpoints

NUM_SEEDS = 50
PER_TABLE = 2


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small ledgers have many."""
    monkeypatch.setattr(audit_seal, "ROWS_AT_ONCE", 16)
    for module in (audit_groups, audit_seal):
        monkeypatch.setattr(module, "TICKETS_AT_ONCE", 4)


class LongRun(SmallRun):
    """One that is stopped between its steps."""

    async def go_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            done = []
            while len(done) < 2:
                await self.admit(self.group)
                if made := self.generate(self.group, filtered=self.group % 5 == 4):
                    done.append(made)
                self.group += 1
            self.step([one for group in done for one in group])


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 steps; then it failed."""
    directory = tmp_path_factory.mktemp("long")
    run = LongRun(directory, steps=None)
    asyncio.run(run.go_on(60))
    run.close(orderly=False)
    return directory


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    asyncio.run(two_trainers(directory, steps=20))
    return directory


@pytest.fixture
def run_dir(long_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(long_run, tmp_path / "run"))


def seal_of(run_dir: Path) -> Seal:
    seal = Seal.read(run_dir / SEAL)
    assert seal is not None
    return seal


def same(run_dir: Path) -> bool:
    """Whether both audits find the same; says if they find nothing."""
    whole, further = audit(run_dir), continue_audit(run_dir)
    assert further.violations == whole.violations
    assert further.figures == whole.figures
    return whole.ok


def test_a_second_audit_reads_nothing_again(run_dir: Path) -> None:
    first = continue_audit(run_dir)
    assert first.ok and not first.notes
    assert (run_dir / SEAL).stat().st_mode & 0o777 == 0o600
    second = continue_audit(run_dir)
    num_rows = sum(one.num_rows for ranges in seal_of(run_dir).rows.values() for one in ranges.values())
    assert num_rows > 700 and len(seal_of(run_dir).groups) > 30
    assert second.notes == [f"0 of {num_rows} rows are new since commit {seal_of(run_dir).commit}, or near one that is"]
    assert str(second).splitlines()[-2:] == [*second.notes, "audit: ok"]
    assert (second.violations, second.figures) == (first.violations, first.figures)
    assert same(run_dir)
    begun = continue_audit(run_dir, whole=True)
    assert not begun.notes and begun.figures == first.figures


def test_the_command_goes_on_and_begins_anew(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = []
    for args in ([], [], ["--whole"], []):
        assert main(["audit", *args, str(run_dir)]) == 0
        notes.append("rows are new since" in capsys.readouterr().out)
    assert notes == [False, True, False, True]


def test_a_row_that_is_falsified_after_the_first_audit_is_found(run_dir: Path) -> None:
    """One of the oldest, in a column for which there is no rule."""
    assert continue_audit(run_dir).ok
    with closing(sqlite3.connect(run_dir / LEDGER, isolation_level=None)) as db:
        db.execute("UPDATE samples SET reward = reward + 1 WHERE rowid = (SELECT MIN(rowid) FROM samples)")
    texts = [violation.text for violation in continue_audit(run_dir).violations]
    assert len(texts) == 1 and texts[0].startswith("rows of the table samples differ from what the last commit left")
    assert not same(run_dir)


def falsify(db: sqlite3.Connection, table: str, rng: random.Random) -> None:
    """Change something in a table that has rows."""
    column = rng.choice([column for other, column in columns() if other == table])
    done = False
    while not done:
        kind = rng.choice([change, change, swap, remove, repeat])
        done = kind(db, table, rng) if kind in (remove, repeat) else kind(db, table, column, rng)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("of", ["long_run", "of_two"])
def test_an_old_row_that_is_falsified_after_the_first_audit_is_found(
    of: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    sealed = Path(shutil.copytree(request.getfixturevalue(of), tmp_path / "sealed"))
    assert continue_audit(sealed).ok
    num_falsified = 0
    for seed, table in enumerate(ALL_TABLES * PER_TABLE):
        rng, copy = random.Random(seed), Path(shutil.copytree(sealed, tmp_path / f"{seed}"))
        with ExitStack() as stack, closing(sqlite3.connect(copy / LEDGER, isolation_level=None)) as db:
            if not db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]:
                continue
            falsify(db, table, rng)
            if rng.random() < 0.5:  # the change stays in the log
                stack.enter_context(closing(sqlite3.connect(copy / LEDGER))).execute("SELECT * FROM steps").fetchall()
            db.close()
            assert not same(copy), f"seed {seed}: {table}"
            num_falsified += 1
    assert num_falsified >= 9 * PER_TABLE


def rows_of(path: Path) -> list[list[str]]:
    """All rows, found without an index."""
    with closing(sqlite3.connect(path)) as db:
        return [[repr(row) for row in db.execute(f"SELECT * FROM {table} NOT INDEXED")] for table in ALL_TABLES]


def test_bytes_that_are_damaged_after_the_first_audit_are_found(run_dir: Path) -> None:
    """Unless no row has them: bytes of an index, for example, which only a whole audit looks at."""
    assert continue_audit(run_dir).ok
    path, rng, seen = run_dir / LEDGER, random.Random(0), Counter[str]()
    whole, seal, rows = path.read_bytes(), (run_dir / SEAL).read_bytes(), rows_of(path)
    for seed in range(NUM_SEEDS):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 8])):
            place = rng.randrange(len(data))
            data[place] = rng.choice([data[place] ^ 1 << rng.randrange(8), 0, 0xEE, rng.randrange(256)])
        path.write_bytes(data[: rng.randrange(len(data))] if seed % 25 == 0 else data)
        for beside in run_dir.glob(f"{LEDGER}-*"):
            beside.unlink()
        (run_dir / SEAL).write_bytes(seal)
        results = []
        for prove in (audit, continue_audit):
            try:
                report = prove(run_dir)
                results.append((report.violations, report.figures))
            except ConfigError as problem:
                results.append(str(problem))
        seen["same" if results[0] == results[1] else "rows as they were"] += 1
        if results[0] != results[1]:
            assert rows_of(path) == rows, (seed, results)
    assert seen["same"] > NUM_SEEDS // 2, seen


def test_a_run_that_grows_is_audited_in_between(tmp_path: Path) -> None:
    """While it goes on, with its newest commits in the log, and after its end."""
    run = LongRun(tmp_path, steps=None)
    shares = []

    async def grow() -> None:
        for number in range(30):
            await run.go_on(2)
            await run.admit(run.group)  # in flight
            run.client.flush()
            run.accounting.ledger.commit_rows()
            report = continue_audit(tmp_path)
            assert report.ok and report.figures == audit(tmp_path).figures
            if number:
                words = report.notes[0].split()
                shares.append(int(words[0]) / int(words[2]))
            run.step(run.generate(run.group))
            run.group += 1

    asyncio.run(grow())
    run.close()
    assert same(tmp_path)
    assert shares[-1] < 0.25 < shares[0]


def test_what_only_a_run_that_has_ended_breaks_is_found_at_its_end(tmp_path: Path) -> None:
    """In a group of which no row has changed."""
    run = LongRun(tmp_path, steps=None)

    async def begin() -> None:
        await run.admit("left")
        await run.go_on(20)

    asyncio.run(begin())
    run.close(orderly=False)
    assert continue_audit(tmp_path).ok
    ledger = Ledger(tmp_path / LEDGER)
    ledger.add_row("ended in order", 1e9)
    ledger.commit_rows()
    ledger.close()
    assert not same(tmp_path)
    texts = [violation.text for violation in continue_audit(tmp_path).violations]
    assert "sample gleft/0 is in flight, but the run ended normally" in texts


def test_a_batch_that_grew_after_its_step_is_found(run_dir: Path) -> None:
    """By the further audit itself, before the whole one."""
    assert continue_audit(run_dir).ok
    ledger = Ledger(run_dir / LEDGER)
    ledger.add_row("used", "g4/0", "trainer", 1, 2, 0, 0, 0, None)
    ledger.commit_rows()
    ledger.close()
    report = audits._audit_until_still(run_dir, seal_of(run_dir), sealing=True)
    assert "step 2 trained samples of 3 groups, but a batch has 2 at most" in [one.text for one in report.violations]
    assert not same(run_dir)


def damage_seal(path: Path) -> None:
    content = json.loads(path.read_text())
    content["seal"]["rows"]["uses"]["0"]["num_rows"] += 1
    path.write_text(json.dumps(content))


def of_other_rules(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"rules": "x"}))


@pytest.mark.parametrize(
    "mistreat",
    [
        Path.unlink,
        damage_seal,
        of_other_rules,
        lambda path: path.write_bytes(b"\xff{"),
        lambda path: path.write_text("[]"),
    ],
)
def test_a_seal_that_is_damaged_or_of_other_rules_holds_nothing(
    run_dir: Path, mistreat: Callable[[Path], object]
) -> None:
    assert continue_audit(run_dir).ok
    before = (run_dir / SEAL).read_text()
    mistreat(run_dir / SEAL)
    report = continue_audit(run_dir)
    assert report.ok and not report.notes
    assert (run_dir / SEAL).read_text() == before


def test_a_ledger_that_was_rewound_or_replaced_is_audited_as_it_is(tmp_path: Path, long_run: Path) -> None:
    asyncio.run(run_with_checkpoints(tmp_path))
    assert continue_audit(tmp_path).ok
    go_back(tmp_path, 4)
    assert same(tmp_path)
    shutil.copy(long_run / LEDGER, tmp_path / LEDGER)
    assert not same(tmp_path)


def test_no_seal_is_left_of_a_ledger_that_is_wrong(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / LEDGER, isolation_level=None)) as db:
        db.execute("UPDATE samples SET reward = 2 WHERE sample_id = 'g1/1'")
    assert not continue_audit(run_dir).ok
    assert not (run_dir / SEAL).exists()


def test_a_seal_that_cannot_be_written_is_told(run_dir: Path) -> None:
    (run_dir / SEAL).mkdir()
    report = continue_audit(run_dir)
    assert report.ok and "audit.seal cannot be written" in report.notes[0]
    assert report.notes[0].endswith("the next audit begins anew")


def test_a_row_that_goes_beyond_its_page_is_read_each_time(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    for ticket in range(64):
        ledger.add_row("ticket", ticket, f"g{ticket}", "{}")
        ledger.add_row("admitted", f"g{ticket}/0", f"g{ticket}", "p" * (9000 if ticket == 20 else 9), 0, 0, 5, 0, 0.0)
    ledger.commit_rows()
    ledger.close()
    assert continue_audit(tmp_path).ok
    assert [number for number, one in seal_of(tmp_path).rows["samples"].items() if one.pages is None] == [1]
    path = tmp_path / LEDGER
    data = path.read_bytes()
    path.write_bytes(data.replace(b"p" * 4000, b"p" * 3999 + b"q", 1))
    assert not same(tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_differ_have_pages_that_differ(tmp_path: Path, seed: int) -> None:
    """Of any table, however its tree grows, and with its pages in the log, in the file, or in both."""
    rng, path = random.Random(seed), tmp_path / "some.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute(f"PRAGMA page_size = {rng.choice([512, 4096])}")
        writer.execute(f"PRAGMA journal_mode = {rng.choice(['WAL', 'WAL', 'DELETE'])}")
        writer.execute("CREATE TABLE things (name TEXT, amount)")
        writer.execute("CREATE INDEX by_name ON things (name)")
        seen: dict[tuple[int, int], tuple[str, list[object]]] = {}
        for _ in range(40):
            writer.execute("BEGIN")
            for _ in range(rng.choice([1, 3, 300])):
                row = rng.choice([rng.randint(-50, 2000), None, None])
                if row is not None and rng.random() < 0.3:
                    writer.execute("DELETE FROM things WHERE rowid = ?", (row,))
                else:
                    values = (row, "x" * rng.randint(1, 60), rng.random())
                    writer.execute("INSERT OR REPLACE INTO things (rowid, name, amount) VALUES (?, ?, ?)", values)
            writer.execute("COMMIT")
            if rng.random() < 0.3 and path.with_name("some.sqlite-wal").exists():
                writer.execute("PRAGMA wal_checkpoint(PASSIVE)")
            with Pages(path) as pages, closing(sqlite3.connect(path, isolation_level=None)) as db:
                assert pages.begin_transaction(db)
                leaves = pages.find_leaves(db, "things")
                assert leaves is not None
                for first in range(-100, 4000, 100):
                    bounds = (first, first + 99)
                    rows = db.execute("SELECT rowid, * FROM things WHERE rowid BETWEEN ? AND ?", bounds).fetchall()
                    digest = leaves.digest_rows(*bounds)
                    if bounds in seen and seen[bounds][0] == digest:
                        assert seen[bounds][1] == rows
                    seen[bounds] = (digest, rows)

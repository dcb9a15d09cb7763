"""The audit: sound books pass, and every kind of damage is named."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.runtime.audit.audit import _check_tickets_out, audit
from flowrl.runtime.audit.audit_rules import CHECKS
from flowrl.runtime.ledger.ledger import Ledger
from flowrl.runtime.ledger.ledger_file import LEDGER, Terms, describe_unreadable
from flowrl.runtime.telemetry.metrics import read_lines
from tests.runtime.ledger.audit_damages import DAMAGES, DAMAGES_OF_DERIVED, DAMAGES_OF_TWO
from tests.runtime.ledger.request_damages import REQUEST_DAMAGES
from tests.runtime.ledger.small_run import derived_run, two_trainers, whole_run

OF_TWO = DAMAGES_OF_TWO | REQUEST_DAMAGES


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    asyncio.run(whole_run(directory))
    return directory


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with an actor and a critic."""
    directory = tmp_path_factory.mktemp("two")
    asyncio.run(two_trainers(directory))
    return directory


@pytest.fixture
def run_dir(sound: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(sound, tmp_path / "run"))


def damage(run_dir: Path, *statements: str) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite", isolation_level=None)) as db:
        for statement in statements:
            changed = db.execute(statement).rowcount
            assert changed == 1, f"{changed} rows changed by {statement}"


def found(run_dir: Path) -> list[tuple[str, str]]:
    return [(violation.kind, violation.text) for violation in audit(run_dir).violations]


def test_sound_books_pass(run_dir: Path) -> None:
    files = sorted(path.name for path in run_dir.iterdir())
    report = audit(run_dir)
    assert report.ok, str(report)
    assert str(report).endswith("audit: ok")
    assert sorted(path.name for path in run_dir.iterdir()) == files
    figures = report.figures
    parts = ("trained", "stale", "filtered", "failed", "dropped", "in flight")
    assert figures["tokens generated"] == sum(figures[f"  {part}"] or 0 for part in parts)
    assert figures["steps"] == 6
    assert figures["  filtered"] and figures["  failed"]
    assert figures["policy spans"] and figures["policy spans proven"] == figures["policy spans"]
    assert figures["max staleness"] is not None and figures["max staleness"] <= 1 == figures["bound"]


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_named(run_dir: Path, name: str) -> None:
    statements, kind, text = DAMAGES[name]
    damage(run_dir, *statements)
    assert any(k == kind and text in t for k, t in found(run_dir)), found(run_dir)


@pytest.mark.parametrize("name", OF_TWO)
def test_each_damage_with_two_trainers_is_named(two: Path, tmp_path: Path, name: str) -> None:
    statements, kind, text = OF_TWO[name]
    copy = Path(shutil.copytree(two, tmp_path / "run"))
    assert audit(copy).ok, str(audit(copy))
    damage(copy, *statements)
    assert any(k == kind and text in t for k, t in found(copy)), found(copy)


def test_every_check_is_set_off_by_some_damage(sound: Path, two: Path, tmp_path: Path) -> None:
    """One that nothing sets off would be one that cannot fail."""
    texts, derived = set(), tmp_path / "derived"
    derived.mkdir()
    asyncio.run(derived_run(derived))
    for base, damages in ((sound, DAMAGES), (two, OF_TWO), (derived, DAMAGES_OF_DERIVED)):
        for name, (statements, _, _) in damages.items():
            copy = Path(shutil.copytree(base, tmp_path / f"{base.name} {name}"))
            damage(copy, *statements)
            texts |= {text for _, text in found(copy)}
    patterns = {check: re.compile(re.sub(r"\\{\d(!r)?\\}", ".*", re.escape(check.text))) for check in CHECKS}
    silent = [check.text for check, pattern in patterns.items() if not any(map(pattern.fullmatch, texts))]
    assert silent == []


def test_data_have_no_version_but_rollouts_do(run_dir: Path) -> None:
    damage(
        run_dir,
        "UPDATE samples SET oldest_trained_version = NULL, generator = 'pairs/0' WHERE sample_id = 'g0/0'",
        "UPDATE uses SET oldest_version = NULL WHERE sample_id = 'g0/0'",
    )
    for holder, wanted in (("generator", []), ("pairs", ["sample g0/0 has 7 trained tokens of no version"])):
        damage(run_dir, f"""UPDATE incarnations SET holders = '["{holder}"]'""")
        assert [text for kind, text in found(run_dir) if kind == "versions"] == wanted


def test_more_groups_in_flight_than_tickets_are_named(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite", isolation_level=None)) as db:
        (ticket,) = db.execute("SELECT MIN(ticket) FROM tickets WHERE step = 4").fetchone()
        db.execute("UPDATE samples SET born_version = 0")
    texts = [text for kind, text in found(run_dir) if kind == "tickets"]
    assert any("of 4 tickets still out (version 0 was held everywhere)" in text for text in texts), texts
    assert any(text.startswith(f"ticket {ticket} was taken with ") for text in texts), texts


def test_tickets_are_counted_in_time_proportional_to_their_number(tmp_path: Path) -> None:
    number, out = 20_000, 10_000
    ledger = Ledger(tmp_path / LEDGER, Terms(trainers=("trainer",), tickets=out + 1))
    for ticket in range(number):
        ledger.add_row("ticket", ticket, f"g{ticket}", "{}")
        ledger.add_row("admitted", f"g{ticket}/0", f"g{ticket}", "p", 0, 0, 5, max(0, ticket - out), 0.0)
        ledger.add_row("settled", "trained", ticket + 1, ticket)
    ledger.commit_rows()
    with closing(sqlite3.connect(ledger.path)) as db:
        began = time.process_time()
        assert list(_check_tickets_out(db, {"main": "trainer", "several": False})) == []
        assert time.process_time() - began < 1.0
    ledger.close()


def edit_line(run_dir: Path, step: int, **values: object) -> None:
    lines = [line | values if line["step"] == step else line for line in read_lines(run_dir / "metrics.jsonl")]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_lines_that_disagree_with_the_ledger_are_named(run_dir: Path) -> None:
    edit_line(run_dir, 2, tokens_trained=1)
    edit_line(run_dir, 3, staleness_max=7)
    edit_line(run_dir, 4, loss=0.25)
    texts = [text for kind, text in found(run_dir) if kind == "metrics"]
    assert [text.partition(":")[0] for text in texts] == [
        "step 2",
        "the line of step 2 differs from what was written",
        "step 3",
        "the line of step 3 differs from what was written",
        "the line of step 4 differs from what was written",
    ]
    assert texts[0].startswith("step 2: tokens_trained is 1 in the line, but ")
    assert texts[2].startswith("step 3: staleness_max is 7 in the line, but ")


def lines_of(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)


GONE = "the line of step {} was written, but it is missing now: removed by something other than the run"


@pytest.mark.parametrize(
    ("kept", "texts"),
    [
        ([0, 1, 3, 4, 5], ["after the line of step 2 comes the line of step 4", GONE.format(3)]),
        ([0, 1, 2, 3], [GONE.format(5), GONE.format(6)]),
        ([1, 2, 3, 4, 5], ["the first line is of step 2 instead of step 1", GONE.format(1)]),
        ([0, 1, 2, 3, 4, 5, 5], ["after the line of step 6 comes the line of step 6"]),
        ([], [GONE.format(step) for step in range(1, 7)]),
    ],
)
def test_lines_that_have_gone_or_stand_twice_are_named(run_dir: Path, kept: list[int], texts: list[str]) -> None:
    lines = lines_of(run_dir)
    (run_dir / "metrics.jsonl").write_text("".join(lines[index] for index in kept))
    assert found(run_dir) == [("metrics", text) for text in texts]


def test_metrics_that_have_gone_are_named(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    assert found(run_dir) == [("metrics", GONE.format(step)) for step in range(1, 7)]


def test_a_line_that_is_cut_or_no_json_is_named(run_dir: Path) -> None:
    lines = lines_of(run_dir)
    (run_dir / "metrics.jsonl").write_text("".join([lines[0], "{\n", *lines[2:5], lines[5][:-40]]))
    assert [text for _, text in found(run_dir)] == [
        "metrics.jsonl:2 is damaged: invalid JSON (Expecting property name enclosed in double quotes)",
        "after the line of step 1 comes the line of step 3",
        GONE.format(2),
        GONE.format(6),
    ]


def test_bytes_that_are_no_text_are_named_as_a_damaged_line(run_dir: Path) -> None:
    lines = [line.encode() for line in lines_of(run_dir)]
    (run_dir / "metrics.jsonl").write_bytes(b"".join([lines[0], b"\xa0\xff\r\n", *lines[2:5], lines[5][:-1] + b"\r\n"]))
    assert [text for _, text in found(run_dir)] == [
        "metrics.jsonl:2 is damaged: invalid JSON (Expecting value)",
        "after the line of step 1 comes the line of step 3",
        GONE.format(2),
        "the line of step 6 differs from what was written: changed by something other than the run",
    ]


def test_an_index_that_is_not_of_its_table_is_named(run_dir: Path) -> None:
    """The rows are those that the run wrote: one of them, written anew where the index does not see it."""
    path, index = run_dir / "ledger.sqlite", "name = 'uses_by_sample'"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        entry = db.execute(f"SELECT * FROM sqlite_master WHERE {index}").fetchone()
        db.execute(f"DELETE FROM sqlite_master WHERE {index}")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        row = db.execute("SELECT * FROM uses WHERE rowid = 1").fetchone()
        db.execute("DELETE FROM uses WHERE rowid = 1")
        db.execute(f"INSERT INTO uses VALUES ({', '.join('?' * len(row))})", row)
        db.execute("PRAGMA writable_schema = ON")
        db.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", entry)
    with pytest.raises(ConfigError, match=r"is damaged \(row \d+ missing from index uses_by_sample\), so nothing"):
        audit(run_dir)


def test_the_ledger_of_another_run_is_named(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    asyncio.run(whole_run(tmp_path / "other"))  # the same seed: but for times, the rows are the same
    shutil.copy(tmp_path / "other" / "ledger.sqlite", run_dir / "ledger.sqlite")
    texts = [text for kind, text in found(run_dir) if kind == "metrics"]
    assert sum("which the ledger does not have: it has lost commits, or" in text for text in texts) == 6


def test_an_empty_ledger_is_named(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite", isolation_level=None)) as db:
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            db.execute(f"DELETE FROM {table}")
    texts = [text for _, text in found(run_dir)]
    assert any(text.startswith("the ledger has no commit: its rows were removed") for text in texts)
    assert sum(text.startswith("there is a line of step ") for text in texts) == 6


def test_a_report_shows_the_first_of_each_kind(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite", isolation_level=None)) as db:
        count = db.execute("UPDATE samples SET state = 'mislaid'").rowcount
    lines = str(audit(run_dir)).splitlines()
    assert sum(line.startswith("audit: state: ") for line in lines) == 21
    assert count > 21
    assert lines[-1].endswith(" violations")


def test_a_run_that_still_goes_on_can_be_audited(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite", isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM uses")
        assert audit(run_dir).ok


OLD = "is a ledger of format 0, and this flowrl reads format 4; audit and resume that run with the flowrl that wrote it"


def make_old(path: Path) -> None:
    """As it was before there were commits."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for table in ("commits", "contents", "incarnations", "steps", "losses"):
            db.execute(f"DROP TABLE {table}")
        db.execute("PRAGMA user_version = 0")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20_000])


def drop_table(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DROP TABLE evaluations")


def remove_all(path: Path) -> None:
    for file in path.parent.iterdir():
        file.unlink()


def only_graph(path: Path) -> None:
    path.unlink()
    (path.parent / "metrics.jsonl").unlink()


@pytest.mark.parametrize(
    ("mistreat", "message"),
    [
        (remove_all, "holds no run; name a directory in which `flowrl run` has run"),
        (only_graph, "holds no ledger.sqlite: the run there ended before it could admit anything; start it again"),
        (Path.unlink, "has lost its ledger.sqlite, so nothing can be proven; "),
        (
            lambda path: path.write_text("not a database, certainly not one"),
            "is no ledger of flowrl: file is not",
        ),
        (
            lambda path: path.write_bytes(b""),
            "is no ledger of flowrl: it has no table attempts, ",
        ),
        (cut, "ledger.sqlite is damaged (database disk image is malformed), so nothing can be proven; "),
        (drop_table, "is no ledger of flowrl: it has no table evaluations"),
        (make_old, OLD),
    ],
)
def test_what_cannot_be_audited_is_refused(run_dir: Path, mistreat: Callable[[Path], object], message: str) -> None:
    mistreat(run_dir / "ledger.sqlite")
    with pytest.raises(ConfigError) as error:
        audit(run_dir)
    assert message in str(error.value)


def test_two_turns_may_be_answered_alike_in_the_same_context(two: Path, tmp_path: Path) -> None:
    """A template may show both the same context; each answer is then fed once, and a third time is one too many."""
    copy = Path(shutil.copytree(two, tmp_path / "run"))
    first = "(SELECT {} FROM requests WHERE request_id = 'g0/2:0:0')"
    alike = ", ".join(f"{name} = {first.format(name)}" for name in ("digest", "tokens", "context_tokens"))
    fed = ", ".join(
        f"{name} = {first.format(of)}"
        for name, of in (("digest", "digest"), ("tokens", "tokens"), ("start", "context_tokens"))
    )
    damage(copy, f"UPDATE requests SET {alike} WHERE request_id = 'g0/2:0:1'")
    for trainer in ("actor", "critic"):
        damage(copy, f"UPDATE spans SET {fed} WHERE sample_id = 'g0/2' AND trainer = '{trainer}' AND start = 9")
    tale = [text for _, text in found(copy)]
    assert not [text for text in tale if "times" in text or "in the same context" in text], tale
    damage(copy, "INSERT INTO spans SELECT * FROM spans WHERE sample_id = 'g0/2' AND trainer = 'actor' LIMIT 1")
    assert any("actor was fed the" in text and text.endswith("3 times") for _, text in found(copy))


def test_a_new_ledger_takes_nothing_over_from_a_deleted_one(tmp_path: Path) -> None:
    """A killed run leaves its WAL, which SQLite would replay into a new file of the same name."""
    killed = (
        "import os, pathlib\n"
        "from flowrl.runtime.ledger.ledger import Ledger\n"
        f"ledger = Ledger(pathlib.Path({str(tmp_path / LEDGER)!r}))\n"
        "ledger.add_row('ticket', 0, 'old', '{}')\nledger.commit_rows()\nos._exit(9)\n"
    )
    assert subprocess.run((sys.executable, "-c", killed), timeout=60, check=False).returncode == 9
    assert (tmp_path / f"{LEDGER}-wal").stat().st_size > 0
    (tmp_path / LEDGER).unlink()
    ledger = Ledger(tmp_path / LEDGER)
    ledger.add_row("ticket", 0, "new", "{}")
    ledger.commit_rows()
    ledger.close()
    with closing(sqlite3.connect(tmp_path / LEDGER)) as db:
        assert db.execute("SELECT group_id FROM tickets").fetchall() == [("new",)]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (sqlite3.SQLITE_READONLY, "cannot be opened"),
        (sqlite3.SQLITE_READONLY_DIRECTORY, "cannot be opened"),
        (sqlite3.SQLITE_CANTOPEN, "cannot be opened"),
        (sqlite3.SQLITE_CORRUPT, "is damaged"),
        (sqlite3.SQLITE_NOTADB, "is no ledger"),
    ],
)
def test_only_a_damaged_ledger_is_called_damaged(code: int, says: str, tmp_path: Path) -> None:
    error = sqlite3.OperationalError("as SQLite says")
    error.sqlite_errorcode = code
    assert f"{tmp_path / LEDGER} {says}" in describe_unreadable(tmp_path / LEDGER, error)

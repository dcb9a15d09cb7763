"""The audit: sound books pass, and every kind of damage is named."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.runtime.audit import ROW_CHECKS, audit
from flowrl.runtime.metrics import read
from tests.small_run import whole_run


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    asyncio.run(whole_run(directory))
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
    assert figures["max staleness"] is not None and figures["max staleness"] <= 1 == figures["bound"]


# Each damage with what the audit has to say of it: (kind, part of its text). Samples g0/0 and g0/1 are
# trained at step 1; all of group 4 is filtered or failed.
A = "UPDATE samples SET {} WHERE sample_id = 'g0/0'"
USE = "UPDATE uses SET {} WHERE sample_id = 'g0/0'"
DAMAGES = {
    "unknown state": ([A.format("state = 'lost'")], "state", "state 'lost', which there is not"),
    "no reason": (
        ["UPDATE samples SET reason = NULL WHERE sample_id = 'g4/0'"],
        "state",
        "sample g4/0 is filtered without a reason",
    ),
    "filtered and trained": (
        ["UPDATE samples SET step = 2, trained_version = 1 WHERE sample_id = 'g4/0'"],
        "state",
        "sample g4/0 is filtered, and yet it stands as trained at step 2",
    ),
    "trained at no step": ([A.format("step = NULL")], "state", "sample g0/0 is trained, but at no step"),
    "trained and never generated": (
        [A.format("generated_s = NULL")],
        "state",
        "g0/0 is trained, but was never generated",
    ),
    "a token more than generated": (
        [A.format("trained_tokens = trained_tokens + 1"), USE.format("tokens = tokens + 1")],
        "tokens",
        "sample g0/0: ",
    ),
    "tokens of a filtered sample": (
        ["UPDATE samples SET trained_tokens = 1 WHERE sample_id = 'g4/0'"],
        "tokens",
        "sample g4/0 is filtered, but 1 of its tokens count as trained",
    ),
    "stale in part": (
        ["UPDATE samples SET reason = 'stale', state = 'dropped', stale_tokens = 0 WHERE sample_id = 'g4/0'"],
        "tokens",
        "sample g4/0 is dropped as stale, but 0 of its ",
    ),
    "the sum does not add up": (
        [A.format("trained_tokens = trained_tokens - 1"), USE.format("tokens = tokens - 1")],
        "tokens",
        "policy tokens generated, but ",
    ),
    "trained twice": (
        ["INSERT INTO uses SELECT sample_id, trainer, 1, 2, tokens, 0, 0, 0 FROM uses WHERE sample_id = 'g0/0'"],
        "uses",
        "sample g0/0 was used 2 times by trainer",
    ),
    "a stranger": (
        ["INSERT INTO uses VALUES ('x/0', 'trainer', 0, 1, 3, 0, 0, 0)"],
        "uses",
        "trainer used sample x/0, which was never admitted",
    ),
    "used though filtered": (
        ["INSERT INTO uses VALUES ('g4/0', 'trainer', 1, 2, 3, 0, 0, 1)"],
        "uses",
        "trainer used sample g4/0 at step 2, but the sample is filtered",
    ),
    "no use": (["DELETE FROM uses WHERE sample_id = 'g0/0'"], "uses", "sample g0/0 is trained at step 1 with "),
    "another count of tokens": ([USE.format("tokens = tokens - 1")], "uses", "but no trainer's use says so"),
    "another version updated": ([A.format("trained_version = 3")], "versions", "g0/0: step 1 updates version 3"),
    "another version used": ([USE.format("version = 3")], "versions", "g0/0: step 1 updates version 3"),
    "tokens older than admission": (
        ["UPDATE samples SET born_version = 1 WHERE sample_id = 'g0/0'"],
        "versions",
        "sample g0/0 was admitted when version 1 was held everywhere, but has tokens of version 0",
    ),
    "tokens of the future": (
        [A.format("newest_version = 5")],
        "versions",
        "sample g0/0: versions out of order: tokens of 0 to 5, trained ones from 0, updating 0",
    ),
    "tokens of no version": ([A.format("oldest_trained_version = NULL")], "versions", "trained tokens of no version"),
    "a group without a ticket": (
        ["DELETE FROM tickets WHERE group_id = 'g0'"],
        "tickets",
        "group g0 has samples, but never took a ticket",
    ),
    "a ticket without a group": (
        ["INSERT INTO tickets VALUES (99, 'x', 'dropped', NULL, '{}')"],
        "tickets",
        "ticket 99 was taken for group x, which has no samples",
    ),
    "a dropped group that trained": (
        ["UPDATE tickets SET state = 'dropped' WHERE group_id = 'g0'"],
        "tickets",
        "ticket 0 is dropped, but sample g0/0 of its group is trained",
    ),
    "a ticket that never came back": (
        ["UPDATE tickets SET state = 'open' WHERE group_id = 'g4'"],
        "tickets",
        "is open, but nothing of its group g4 is in flight",
    ),
    "a ticket of another step": (
        ["UPDATE tickets SET step = 4 WHERE group_id = 'g0'"],
        "tickets",
        "ticket 0 came back with step 4, but sample g0/0 of its group was trained at step 1",
    ),
    "two versions in one evaluation": (
        ["UPDATE evaluations SET newest_version = 1 WHERE phase = 'before' AND prompt_id = 'q3'"],
        "evaluations",
        "the evaluation before training at step 0 ran on versions 0 to 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_named(run_dir: Path, name: str) -> None:
    statements, kind, text = DAMAGES[name]
    damage(run_dir, *statements)
    assert any(k == kind and text in t for k, t in found(run_dir)), found(run_dir)


def test_every_check_is_set_off_by_some_damage(sound: Path, tmp_path: Path) -> None:
    """One that nothing sets off would be one that cannot fail."""
    set_off = set()
    for name, (statements, _, _) in DAMAGES.items():
        copy = Path(shutil.copytree(sound, tmp_path / name))
        damage(copy, *statements)
        with closing(sqlite3.connect(copy / "ledger.sqlite")) as db:
            set_off |= {query for _, _, query in ROW_CHECKS if db.execute(query).fetchone()}
    assert set_off == {query for _, _, query in ROW_CHECKS}


def test_data_have_no_version_but_rollouts_do(run_dir: Path) -> None:
    damage(run_dir, "UPDATE samples SET oldest_trained_version = NULL, generator = 'pairs/0' WHERE sample_id = 'g0/0'")
    graph = json.loads((run_dir / "graph.json").read_text())
    for holder, wanted in (("generator", []), ("pairs", ["sample g0/0 has 7 trained tokens of no version"])):
        edges = [{"kind": "latest", "into": f"{holder}.weights"}, {"kind": "queue", "into": "reward.rollouts"}]
        (run_dir / "graph.json").write_text(json.dumps(graph | {"edges": edges}))
        assert [text for kind, text in found(run_dir) if kind == "versions"] == wanted


def test_a_token_older_than_the_bound_is_named(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite", isolation_level=None)) as db:
        sample_id, updated = db.execute("SELECT sample_id, trained_version FROM samples WHERE step = 5").fetchone()
        db.execute(
            "UPDATE samples SET oldest_version = 1, oldest_trained_version = 1, born_version = 1 WHERE sample_id = ?",
            (sample_id,),
        )
    text = f"sample {sample_id}: a token of version 1 trained version {updated} (staleness 3), the bound is 1"
    assert ("bound", text) in found(run_dir)


def test_more_groups_in_flight_than_tickets_are_named(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite", isolation_level=None)) as db:
        (ticket,) = db.execute("SELECT MIN(ticket) FROM tickets WHERE step = 4").fetchone()
        db.execute("UPDATE samples SET born_version = 0")
    texts = [text for kind, text in found(run_dir) if kind == "tickets"]
    assert any("of 4 tickets still out (version 0 was held everywhere)" in text for text in texts), texts
    assert any(text.startswith(f"ticket {ticket} was taken with ") for text in texts), texts


def edit_line(run_dir: Path, step: int, **values: object) -> None:
    lines = [line | values if line["step"] == step else line for line in read(run_dir / "metrics.jsonl")]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_lines_that_disagree_with_the_ledger_are_named(run_dir: Path) -> None:
    edit_line(run_dir, 2, tokens_trained=1)
    edit_line(run_dir, 3, staleness_max=7)
    texts = [text for kind, text in found(run_dir) if kind == "metrics"]
    assert len(texts) == 2
    assert texts[0].startswith("step 2: the line says tokens_trained 1, the ledger ")
    assert texts[1].startswith("step 3: the line says staleness_max 7, the ledger ")


def test_a_missing_line_is_named(run_dir: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:2] + lines[3:]))
    assert found(run_dir) == [
        ("metrics", "the line of step 2 is followed by that of step 4"),
        ("metrics", "step 3 trained, but it has no line"),
    ]


def test_the_last_line_may_be_missing_or_half_written(run_dir: Path) -> None:
    text = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text(text[:-40])
    assert found(run_dir) == []


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


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("graph.json", None, "holds no run (no graph.json there)"),
        ("graph.json", "{", "graph.json is no JSON"),
        ("graph.json", '{"tickets": 4}', "does not give max_staleness"),
        ("ledger.sqlite", None, "holds no ledger.sqlite"),
        ("ledger.sqlite", "not a database, certainly not one", "is no ledger of flowrl"),
    ],
)
def test_a_directory_that_is_no_run_is_refused(run_dir: Path, file: str, content: str | None, message: str) -> None:
    path = run_dir / file
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        audit(run_dir)
    assert message in str(error.value)

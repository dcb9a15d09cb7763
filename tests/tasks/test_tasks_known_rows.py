"""`KnownRows`: every row that a sample may be of, found by its prompt id, and held once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowrl.tasks import KnownRows, Row, Rows, Task, load_demonstrations, load_rows
from flowrl.tasks.row_reading import row_loading
from tests.tasks.row_compare import rows_in

ONCE = [{"prompt": f"{n}?", "answer": f"{n}"} for n in range(40)]
AGAIN = [*ONCE, *({"prompt": f"{n}?", "answer": f"{n} again"} for n in range(0, 40, 2))]
SCORED = [{"prompt": f"{n % 20}?", "answer": f"{n}", "score": n * 7 % 5} for n in range(80)]
FILES: Mapping[str, Sequence[Mapping[str, Any]]] = {"once": ONCE, "again": AGAIN, "scored": SCORED}
NAMES = {
    "prompts that differ": "{once}.jsonl",
    "prompts with several answers": "{again}.jsonl",
    "answers with scores": "{scored}.jsonl",
    "a least score": "{scored}.jsonl:min_score=2",
    "no scores": "{scored}.jsonl:score=-",
    "a mixture": "0.5*{again}.jsonl + 0.5*{scored}.jsonl:min_score=1 as other",
    "a mixture with a source that makes rows": "{scored}.jsonl + arithmetic:max_value=9",
    "rows that are made": "arithmetic:max_value=9",
    "rows that are made twice": "sticks:most=7",
}


def named(tmp_path: Path, name: str, **options: Any) -> Task:
    for file, rows in FILES.items():
        (tmp_path / f"{file}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Task(name.format(**{file: tmp_path / file for file in FILES}), **options)


def all_of(rows: Rows) -> list[Row]:
    return [*rows.train, *rows.held_out]


@pytest.mark.parametrize("template", ["", "Say {prompt}"])
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("name", NAMES)
def test_every_sample_finds_its_row(tmp_path: Path, name: str, where: str, template: str) -> None:
    """Also if it is of a row that only `load_rows` has been asked for, or only `load_demonstrations`."""
    task = named(tmp_path, NAMES[name], template=template)
    for load in (load_rows, load_demonstrations):
        with rows_in(where):
            expected = all_of(load(task, whole=True))
        with rows_in(where):
            known = KnownRows(task)
        for row in expected:
            found = known.get(row.prompt_id)
            assert found is not None and (found.turns, found.columns, found.score) == (
                row.turns,
                row.columns,
                row.score,
            )
    assert len(expected) > 10 and known.get("0" * 16) is None


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been read so far."""
    found: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found.append(function.__name__)
            return function(*args, **options)

        return call

    for name in ("read_records", "scan_source"):
        monkeypatch.setattr(row_loading, name, counted(getattr(row_loading, name)))
    return found


@pytest.mark.parametrize("name", ["once", "again"])
@pytest.mark.parametrize(("where", "how"), [("memory", "read_records"), ("disk", "scan_source")])
def test_a_file_is_read_once(tmp_path: Path, reads: list[str], name: str, where: str, how: str) -> None:
    with rows_in(where):
        KnownRows(named(tmp_path, f"{{{name}}}.jsonl"))
        assert reads == [how]


@pytest.mark.parametrize(("where", "how"), [("memory", "read_records"), ("disk", "scan_source")])
def test_rows_that_another_node_of_the_process_has_are_not_read_again(
    tmp_path: Path, reads: list[str], where: str, how: str
) -> None:
    with rows_in(where):
        task = named(tmp_path, "{once}.jsonl")
        row, known = load_rows(task).train[0], KnownRows(task)
        assert reads == [how]
        assert where == "disk" or known.get(row.prompt_id) is row, "it is held once"
        again = named(tmp_path, "{again}.jsonl")
        rows, known = load_rows(again, whole=True), KnownRows(again)
        every = all_of(load_demonstrations(again, whole=True))
        assert (len(all_of(rows)), len(every)) == (40, 60), "a prompt's other answers are no rows of `load_rows`"
        assert all(known.get(row.prompt_id) is not None for row in every)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("name", ["once", "again", "scored"])
def test_some_rows_of_different_prompts(tmp_path: Path, name: str, where: str) -> None:
    task = named(tmp_path, f"{{{name}}}.jsonl")
    with rows_in(where):
        known = KnownRows(task)
    with rows_in(where):
        expected = all_of(load_rows(task, whole=True))
    for most in (8, 100):
        assert [row.turns for row in known.of_prompts(most)] == [row.turns for row in expected[:most]]

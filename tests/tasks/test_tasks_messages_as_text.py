"""Text that is a list of messages is one, in every format, for every kind of rows, in memory and on disk; `text=raw`
reads it as text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from benchmarks.data.data_shape_cases import SNAPSHOT, cache_of_the_hub
from flowrl.errors import ConfigError
from flowrl.models import Policy
from flowrl.nodes import (
    DemonstrationSource,
    GivenResponses,
    Preferences,
    PreferenceSource,
    PromptSource,
    TaskSource,
)
from flowrl.tasks import Rows, Task, load_demonstrations, load_preferences, load_rows
from tests.tasks.row_compare import WHERE, rows_in

Records = list[dict[str, Any]]
COUNT = 20


def lines(records: Records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def table(records: Records) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]))
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().encode()


def parquet(records: Records) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), out)
    return out.getvalue()


def saved(home: Path, records: Records) -> str:
    import datasets

    datasets.Dataset.from_list(records).save_to_disk(str(home / "saved"))
    return str(home / "saved")


def file(name: str, write: Callable[[Records], bytes]) -> Callable[[Path, Records], str]:
    def written(home: Path, records: Records) -> str:
        (home / name).write_bytes(write(records))
        return str(home / name)

    return written


FORMATS = {
    "JSON lines": file("rows.jsonl", lines),
    "a JSON array": file("rows.json", lambda records: json.dumps(records).encode()),
    "CSV": file("rows.csv", table),
    "Parquet": file("rows.parquet", parquet),
    "a saved dataset": saved,
}


def user(n: int) -> dict[str, Any]:
    return {"role": "user", "content": f"q {n}"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def of_sharegpt(n: int) -> list[dict[str, Any]]:
    return [{"from": "human", "value": f"q {n}"}, {"from": "gpt", "value": f"a {n}"}]


SHAPES: dict[str, tuple[Callable[[int], dict[str, Any]], Callable[[Task], Rows]]] = {
    "prompts": (lambda n: {"prompt": [user(n)], "answer": f"a {n}"}, load_rows),
    "answers": (lambda n: {"prompt": f"q {n}", "answer": [said(f"a {n}")]}, load_demonstrations),
    "conversations": (lambda n: {"messages": [user(n), said(f"a {n}")]}, load_demonstrations),
    "of ShareGPT": (lambda n: {"conversations": of_sharegpt(n)}, load_demonstrations),
    "pairs": (
        lambda n: {"chosen": [user(n), said(f"a {n}")], "rejected": [user(n), said(f"b {n}")]},
        lambda task: load_preferences(task, "pairs"),
    ),
    "labelled": (
        lambda n: {"prompt": [user(n)], "completion": [said(f"a {n}")], "label": bool(n % 2)},
        lambda task: load_preferences(task, "labelled"),
    ),
}
"""Shape -> (its record with this number, how its rows are loaded)."""


def in_text(record: Mapping[str, Any], write: Callable[[Any], str] = json.dumps) -> dict[str, Any]:
    return {name: write(value) if isinstance(value, list) else value for name, value in record.items()}


def told(rows: Rows) -> list[Any]:
    both = (*rows.train, *rows.held_out)
    return sorted(json.dumps([row.turns, row.response, {k: str(v) for k, v in row.columns.items()}]) for row in both)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))


def lists(tmp_path: Path, shape: str) -> list[Any]:
    """The rows of the shape where its messages are lists."""
    record, load = SHAPES[shape]
    name = file("lists.jsonl", lines)(tmp_path, [record(n) for n in range(COUNT)])
    found = load(Task(name))
    assert not found.opened
    return told(found)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_text_that_lists_messages_is_these_messages_in_every_format(
    tmp_path: Path, form: str, shape: str, where: str
) -> None:
    record, load = SHAPES[shape]
    if form == "CSV" and shape == "labelled":
        record = lambda n: {**SHAPES[shape][0](n), "label": str(bool(n % 2))}  # noqa: E731
    expected = lists(tmp_path, shape)
    name = FORMATS[form](tmp_path, [in_text(record(n)) for n in range(COUNT)])
    with rows_in(where):
        found = load(Task(name))
    assert told(found) == expected
    columns = [column for column, value in SHAPES[shape][0](0).items() if isinstance(value, list)]
    assert found.opened == tuple(
        f"{name}: the text in the column {column!r} is a list of messages, and is read as such; {name}:text=raw reads "
        "it as plain text"
        for column in columns
    )


def test_so_it_is_in_a_dataset_of_the_hub_and_in_the_way_python_writes_lists(tmp_path: Path) -> None:
    record, load = SHAPES["conversations"]
    expected = lists(tmp_path, "conversations")
    with cache_of_the_hub(tmp_path):
        (tmp_path / SNAPSHOT).mkdir(parents=True)
        file(f"{SNAPSHOT}/train.jsonl", lines)(tmp_path, [in_text(record(n)) for n in range(COUNT)])
        found = load(Task("acme/rows"))
    assert told(found) == expected and len(found.opened) == 1
    name = file("python.csv", table)(tmp_path, [in_text(record(n), repr) for n in range(COUNT)])
    found = load(Task(name))
    assert told(found) == expected and len(found.opened) == 1


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("form", FORMATS)
def test_text_raw_keeps_the_text(tmp_path: Path, form: str, where: str) -> None:
    name = FORMATS[form](tmp_path, [in_text(SHAPES["prompts"][0](n)) for n in range(COUNT)])
    with rows_in(where):
        found = load_rows(Task(f"{name}:text=raw"))
    rows = (*found.train, *found.held_out)
    assert {row.prompt for row in rows} == {json.dumps([user(n)]) for n in range(COUNT)}
    assert not found.opened and not any(row.as_messages for row in rows)
    with pytest.raises(ConfigError, match="option text of a task is 'no'; it needs messages, or raw"):
        load_rows(Task(f"{name}:text=no"))


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": 1}]',
        "[]",
        "[1, 2]",
        '[{"role": "user", "content": "cut off',
        '{"role": "user", "content": "not a list"}',
        'say [{"role": "user", "content": "x"}]',
        "[{'role': open('x'), 'content': 1}]",
        '[{"role": "user", "content": "x"}, {"a": 1}]',
        "[{" * 5000,
    ],
)
def test_other_text_stays_text(tmp_path: Path, text: str) -> None:
    name = file("rows.jsonl", lines)(tmp_path, [{"prompt": f"{text}{' ' * n}", "answer": "1"} for n in range(COUNT)])
    found = load_rows(Task(name))
    assert all(row.prompt.startswith(text) for row in (*found.train, *found.held_out)) and not found.opened


def test_a_list_with_a_broken_message_is_refused_by_its_row(tmp_path: Path) -> None:
    records = [in_text(SHAPES["prompts"][0](n)) for n in range(COUNT)]
    records[4]["prompt"] = json.dumps([{"role": "robot", "content": "x"}])
    name = file("rows.jsonl", lines)(tmp_path, records)
    with pytest.raises(ConfigError, match=r"rows.jsonl:5: the prompt is .*robot.*; it needs text, or a list of"):
        load_rows(Task(name))


def test_columns_that_are_not_read_keep_their_text(tmp_path: Path) -> None:
    """Reward functions get them as the row has them, and nothing is said about them."""
    other = json.dumps([user(0)])
    for form in ("JSON lines", "CSV"):
        records = [{"prompt": f"q {n}", "answer": "1", "chosen": other, "more": other} for n in range(COUNT)]
        found = load_rows(Task(FORMATS[form](tmp_path, records)))
        assert {row.columns[name] for row in found.train for name in ("chosen", "more")} == {other}
        assert not found.opened


@pytest.fixture
def spoken(tmp_path: Path) -> Iterator[Callable[[str], Task]]:
    def task(shape: str) -> Task:
        return Task(file("rows.jsonl", lines)(tmp_path, [in_text(SHAPES[shape][0](n)) for n in range(COUNT)]))

    with rows_in("memory"):
        yield task


def test_sources_say_it_once_before_a_run(spoken: Callable[[str], Task]) -> None:
    tiny = Policy("tiny")
    nodes = {
        "prompts": lambda task: PromptSource(task, tiny),
        "conversations": lambda task: DemonstrationSource(task, tiny),
        "pairs": lambda task: PreferenceSource(Preferences(task, tiny)),
    }
    for shape, made in nodes.items():
        with rows_in("memory"):
            found = made(spoken(shape)).preflight()
        assert found is not None and "is a list of messages, and is read as such" in found, shape
    assert "read as such" in str(TaskSource(spoken("prompts")).preflight())


def test_responses_to_be_scored_are_text(tmp_path: Path) -> None:
    records = [{"prompt": f"q {n}", "response": json.dumps([said("a")])} for n in range(3)]
    name = file("rows.jsonl", lines)(tmp_path, records)
    with pytest.raises(ConfigError, match=r"rows.jsonl:\d: the column 'response' is a list of messages as text"):
        GivenResponses(Task(name), Policy("tiny")).preflight()
    GivenResponses(Task(f"{name}:text=raw"), Policy("tiny")).preflight()

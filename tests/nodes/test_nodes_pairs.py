"""Pairs on their way to a file and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowrl.errors import ConfigError
from flowrl.graph.load import load_file
from flowrl.messages import Group, Trainable
from flowrl.models import Policy
from flowrl.nodes import PairWriter, PromptSource
from flowrl.tasks import Task, load_preferences, load_rows
from flowrl.testing import NodeRecord, run_node, scored


@pytest.fixture
def task(tmp_path: Path) -> Task:
    long = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    rows: list[Any] = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    rows.append({"prompt": long, "answer": "4"})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Task(str(tmp_path / "rows.jsonl"))


def pair(prompt_id: str, chosen: str, rejected: str) -> Group:
    def member(number: int, text: str, reward: float, label: int) -> Trainable:
        made = scored(number, reward, group=prompt_id, prompt_id=prompt_id, response_text=text)
        return Trainable(**vars(made), label=label, pair=prompt_id, advantages=np.zeros(5, np.float32))

    return Group(prompt_id, (member(0, chosen, 1.5, 1), member(1, rejected, 0.5, -1)), 4)


def written(task: Task, path: Path, groups: list[Group]) -> tuple[NodeRecord, list[dict[str, Any]]]:
    record = run_node(PairWriter(str(path), task), {"groups": groups})
    return record, [json.loads(line) for line in path.read_text().splitlines()]


def test_pairs_are_written_and_read_again_with_the_same_split(task: Task, tmp_path: Path) -> None:
    rows = load_rows(task)
    groups = [pair(row.prompt_id, f"{row.answer}", "9é") for row in (*rows.train, *rows.held_out)]
    record, lines = written(task, tmp_path / "pairs.jsonl", groups)
    assert len(lines) == len(groups) and {line["margin"] for line in lines} == {1.0}
    assert record.reasons() == [("dropped", "written")] * len(groups)
    again = load_preferences(Task(str(tmp_path / "pairs.jsonl")), "pairs")
    for part, expected in ((again.train, rows.train), (again.held_out, rows.held_out)):
        assert [row.turns for row in part] == [row.turns for row in expected]
        assert [row.columns["chosen"] for row in part] == [row.answer for row in expected]
        assert {row.columns["rejected"] for row in part} == {"9é"}


def test_a_column_of_bytes_is_written_as_text(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"], "image": [b"\x89PNG", b""]})
    pq.write_table(table, tmp_path / "rows.parquet")
    task = Task(str(tmp_path / "rows.parquet"))
    found = load_rows(task)
    (row, *_) = [*found.train, *found.held_out]
    group = pair(row.prompt_id, "2", "3")
    group = replace(group, samples=tuple(replace(one, columns=row.columns) for one in group.samples))
    _, (line,) = written(task, tmp_path / "pairs.jsonl", [group])
    assert (line["chosen"], line["rejected"], line["image"]) == ("2", "3", str(row.columns["image"]))


def test_a_pair_with_an_answer_of_no_text_is_left_out(task: Task, tmp_path: Path) -> None:
    row = load_rows(task).train[0]
    groups = [pair(row.prompt_id, "4", ""), pair(row.prompt_id, "4", "5")]
    record, lines = written(task, tmp_path / "pairs.jsonl", groups)
    assert record.reasons() == [("filtered", "empty_answer"), ("dropped", "written")]
    assert [line["rejected"] for line in lines] == ["5"]


def test_a_long_conversation_is_written_as_messages(task: Task, tmp_path: Path) -> None:
    rows = load_rows(task)
    row = next(row for row in (*rows.train, *rows.held_out) if len(row.turns) == 3)
    _, (line,) = written(task, tmp_path / "pairs.jsonl", [pair(row.prompt_id, "4", "5")])
    assert [turn["role"] for turn in line["prompt"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_second_run_goes_on_behind_the_last_whole_pair(task: Task, tmp_path: Path, cut: int) -> None:
    path, rows = tmp_path / "pairs.jsonl", load_rows(task)
    groups = [pair(row.prompt_id, "é", "9") for row in (*rows.train, *rows.held_out)]
    written(task, path, groups[:5])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    file = load_file("pairs")
    built = file.build(file.parse(["--task", task.name, "--pairs", str(path), "--group-size", "2"]))
    left = run_node(built.nodes["prompts"], name="prompts").groups("prompts")
    done = {group.group_id for group in groups[: 5 - bool(cut)]}
    assert len(left) == 41 - len(done) and not {one[0].prompt_id for one in left} & done
    said = built.nodes["writer"].preflight()
    assert said == f"{path} has {len(done)} pairs already; the others follow"
    _, lines = written(task, path, [group for group in groups if group.group_id not in done])
    assert [line["prompt_id"] for line in lines] == [group.group_id for group in groups]


def test_a_file_that_is_no_file_of_pairs_is_not_written_to(task: Task, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1"}\n')
    with pytest.raises(ConfigError, match="was not written by flowrl; name another file"):
        PairWriter(str(tmp_path / "pairs.jsonl"), task).preflight()
    with pytest.raises(ConfigError, match="does not exist; create it"):
        PairWriter(str(tmp_path / "nowhere" / "pairs.jsonl"), task).preflight()
    assert PairWriter("pairs.txt", task).check(None) == ["path is 'pairs.txt'; name a file that ends in .jsonl"]
    assert PairWriter("pairs.jsonl", task).check(None) == []


@pytest.mark.parametrize("part", ["train", "held_out", "all"])
def test_a_source_of_one_part_or_of_all(task: Task, part: Any) -> None:
    rows = load_rows(task)
    expected = {"train": rows.train, "held_out": rows.held_out, "all": (*rows.train, *rows.held_out)}[part]
    assert rows.held_out and PromptSource(task, Policy("tiny"), part=part).rows() == expected
    assert PromptSource(task, Policy("tiny"), part=part, num_prompts=2).rows() == expected[:2]
    assert PromptSource(task, Policy("tiny"), num_prompts=0).check(None) == ["num_prompts is 0; it needs at least 1"]


def test_an_unknown_part_is_a_problem(task: Task) -> None:
    source = PromptSource(task, Policy("tiny"), part="some")  # type: ignore[arg-type]
    assert source.check(None) == ["part is 'some'; choose one of train, held_out, all"]

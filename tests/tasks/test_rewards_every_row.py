"""Rewards that get more of a row than its columns get it for every sample: of both parts, and of each response."""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.nodes import Reward
from flowrl.tasks import Row, Task, load_demonstrations, load_rows
from flowrl.testing import run_node, sample

TRL = """
async def short(completions, **kwargs):
    return [float(len(one[0]["content"])) for one in completions]
"""


def chats(tmp_path: Path, questions: list[str]) -> Task:
    """A task of messages whose reward takes messages."""
    (tmp_path / "trl.py").write_text(TRL)
    lines = [
        {"prompt": [{"role": "user", "content": one}], "answer": f"{number}"} for number, one in enumerate(questions)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Task(f"{tmp_path}/rows.jsonl", reward=f"{tmp_path}/trl.py")


def rewards(task: Task, rows: list[Row]) -> list[float]:
    given = [sample(n, response_text="four", prompt_id=row.prompt_id, columns={}) for n, row in enumerate(rows)]
    record = run_node(Reward(task), {"rollouts": given}, preflight=False)
    assert record.lost == []
    return [one.reward for one in record.sent("scored")]


def test_rows_of_the_part_that_others_hold_out(tmp_path: Path) -> None:
    task = chats(tmp_path, [f"{n}+1" for n in range(40)])
    found = load_rows(task, whole=True)
    assert found.train and found.held_out
    rows = [*found.train, *found.held_out]
    assert rewards(task, rows) == [4.0] * len(rows)


def test_a_file_whose_rows_are_all_held_out(tmp_path: Path) -> None:
    (held_out, *_) = (q for q in map(str, range(100)) if Row.ask(q).held_out)
    task = chats(tmp_path, [held_out])
    assert rewards(task, list(load_rows(task, whole=True).held_out)) == [4.0]


def test_each_response_of_a_prompt(tmp_path: Path) -> None:
    task = chats(tmp_path, ["2+2", "2+2", "2+2"])
    found = load_demonstrations(task, whole=True)
    rows = [*found.train, *found.held_out]
    assert len({row.prompt_id for row in rows}) == 3
    assert rewards(task, rows) == [4.0] * 3

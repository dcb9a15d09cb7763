"""Numbers of the data reach rewards, agents and environments as numbers, and what those return counts as one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from flowrl.agents.endpoint.agent_endpoint import checked_reward
from flowrl.agents.endpoint.apis.api import ApiProblem
from flowrl.agents.programs import AgentResult
from flowrl.environments.protocol import MalformedValue, Observation, Step
from flowrl.messages.base import number_in
from flowrl.nodes import TaskSource
from flowrl.nodes.sources.row_source import task_fields
from flowrl.tasks import Row, Task, load_preferences, load_rows
from flowrl.tasks.reward_calls.judge import BadReward
from flowrl.tasks.rewards import Part, check_reward, open_reward, parse_reward, row_columns
from tests.tasks.row_compare import WHERE, rows_in

COUNT = 10
REWARDS = """
def of_flowrl(prompts, responses, *, answer, target):
    return [float(int(r) == a and a + 0.5 == t) for r, a, t in zip(responses, answer, target)]
def of_flowrl_one(prompt, response, *, answer, target):
    return float(int(response) == answer and answer + 0.5 == target)
def of_trl(completions, answer, target, **columns):
    return [float(int(r) == a and a + 0.5 == t) for r, a, t in zip(completions, answer, target)]
def of_openrlhf(queries, prompts, labels):
    return [float(int(q.rpartition("?")[2]) == a) for q, a in zip(queries, labels)]
def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": int(solution_str) == ground_truth and extra_info["answer"] + 0.5 == extra_info["target"]}
"""


def all_rows_of(task: Task) -> list[Row]:
    found = load_rows(task, whole=True)
    return [*found.train, *found.held_out]


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return str(tmp_path / "rewards.py")


def data(tmp_path: Path, form: str) -> str:
    records = [{"prompt": f"q{n}?", "answer": n, "target": n + 0.5} for n in range(COUNT)]
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


async def asked(parts: tuple[Part, ...], task: Task, rows: list[Row], respond: Callable[[Row], str]) -> Any:
    client = open_reward(check_reward(parts, rows), timeout_s=30, concurrency=1)
    try:
        columns = [{**row.columns, **row_columns(parts, task.name, row.turns, row)} for row in rows]
        return await client.ask([row.prompt for row in rows], [respond(row) for row in rows], columns)
    finally:
        await client.close()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", ["of_flowrl", "of_flowrl_one", "of_trl", "of_openrlhf", "of_verl"])
def test_functions_of_every_convention_get_numbers(
    tmp_path: Path, rewards: str, name: str, form: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    with rows_in(where):
        task = Task(data(tmp_path, form))
        rows = all_rows_of(task)
    parts = parse_reward(f"{rewards}:{name}")
    verdicts = asyncio.run(asked(parts, task, rows, lambda row: str(row.answer)))
    assert verdicts.rewards == (1.0,) * COUNT


def test_preferences_and_agents_get_numbers_too(tmp_path: Path) -> None:
    task = Task(data(tmp_path, "jsonl"))
    for row in all_rows_of(task):
        columns = task_fields(task, row)["columns"]
        assert type(columns["answer"]) is int and type(columns["target"]) is float
    assert isinstance(TaskSource(task).rows()[0].columns["answer"], int)
    pairs = tmp_path / "pairs.jsonl"
    records = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b", "answer": n, "margin": 1} for n in range(20)]
    pairs.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert all(type(row.columns["answer"]) is int for row in load_preferences(Task(str(pairs)), "pairs").train)


@pytest.mark.parametrize(
    ("value", "kept", "text"),
    [
        (72, 72, "72"),
        (72.0, 72.0, "72.0"),
        (True, True, "True"),
        (Decimal("7.50"), 7.5, "7.5"),
        (Decimal("7"), 7, "7"),
        (10**30, str(10**30), str(10**30)),
        ("072", "072", "072"),
    ],
)
def test_an_answer_is_what_the_row_has(tmp_path: Path, value: Any, kept: Any, text: str) -> None:
    path = tmp_path / ("rows.parquet" if isinstance(value, Decimal) else "rows.jsonl")
    records = [{"prompt": f"q{n}", "answer": value} for n in range(COUNT)]
    if isinstance(value, Decimal):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (first, *_) = all_rows_of(Task(str(path)))
    assert (first.columns["answer"], type(first.columns["answer"])) == (kept, type(kept))
    assert first.answer == text and first.text_answer


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("72.0", "72", True),
        ("72", 72.0, True),
        (" 72\n", 72, True),
        ("1,234", "1234", True),
        ("1 234", "1234", True),
        ("1e3", 1000, True),
        ("0.0000001", 1e-07, True),
        (".5", "0.50", True),
        ("−5", "-5", True),
        ("yes", "yes ", True),
        ("True", True, True),
        ("72.1", "72", False),
        ("101", "0101", False),
        ("72 apples", "72", False),
        ("1 23", "123", False),
        ("nan", "NaN", False),
        ("yes", "no", False),
        ("", "0", False),
    ],
)
def test_the_default_check_compares_numbers_as_numbers(said: str, answer: Any, right: bool) -> None:
    parts = parse_reward(Task().own_verifier)
    row = Row.ask("q", answer=answer)
    assert asyncio.run(asked(parts, Task(), [row], lambda _: said)).rewards == (float(right),)


NUMBERS: dict[str, tuple[Any, float]] = {
    "a bool": (True, 1.0),
    "an int": (3, 3.0),
    "numpy's bool": (np.bool_(True), 1.0),
    "numpy's float32": (np.float32(0.5), 0.5),
    "numpy's int64": (np.int64(2), 2.0),
    "an array without axes": (np.array(0.5), 0.5),
    "an array of one": (np.array([0.5]), 0.5),
    "a tensor": (torch.tensor(0.5), 0.5),
    "a tensor of bool": (torch.tensor(True), 1.0),
    "a tensor with a gradient": (torch.tensor(0.5, requires_grad=True), 0.5),
    "a Decimal": (Decimal("0.5"), 0.5),
    "a Fraction": (Fraction(1, 2), 0.5),
}
OTHERS: dict[str, Any] = {
    "text": "1.0",
    "an array of two": np.array([0.5, 1.0]),
    "a tensor of two": torch.tensor([0.5, 1.0]),
    "complex": 1j,
    "numpy's complex": np.complex64(1j),
    "an array of text": np.array("1.0"),
}
INFINITE: dict[str, Any] = {
    "nan": float("nan"),
    "an infinite tensor": torch.tensor(float("inf")),
    "a Decimal": Decimal("NaN"),
    "a signaling Decimal": Decimal("sNaN"),
    "a large int": 10**400,
}


def verdict(value: Any, form: str) -> float:
    """The reward of a function that returns the value for its one sample."""
    from flowrl.tasks.reward_calls.judge import Judge, make_judge

    def one(prompt: str, response: str) -> Any:
        return value if form == "one" else {"reward": 0.0, "logs": {"x": value}}

    def of_trl(prompts: list[str], completions: list[str], **columns: Any) -> Any:
        return [value]

    def of_verl(data_source: str, solution_str: str, ground_truth: str) -> Any:
        return {"score": value}

    functions: dict[str, Callable[..., Any]] = {"one": one, "log": one, "trl": of_trl, "verl": of_verl}
    judge: Judge = make_judge(f"x.py:{form}", functions[form])
    found = judge(["p"], ["r"], [{"answer": "a"}])
    return found.logs["x"][0] if form == "log" else found.rewards[0]


@pytest.mark.parametrize("form", ["one", "log", "trl", "verl"])
@pytest.mark.parametrize("kind", NUMBERS)
def test_what_a_reward_returns_counts_as_a_number(kind: str, form: str) -> None:
    value, number = NUMBERS[kind]
    assert verdict(value, form) == number


@pytest.mark.parametrize("form", ["one", "log", "trl"])
@pytest.mark.parametrize("kind", [*OTHERS, *INFINITE])
def test_what_is_no_finite_number_is_refused(kind: str, form: str) -> None:
    value, wanted = (OTHERS[kind], "it needs numbers") if kind in OTHERS else (INFINITE[kind], "needs finite numbers")
    with pytest.raises(BadReward, match=wanted):
        verdict(value, form)


@pytest.mark.parametrize("kind", NUMBERS)
def test_agents_and_environments_may_return_them_too(kind: str) -> None:
    value, number = NUMBERS[kind]
    assert number_in(value) == number
    assert AgentResult.of(value).reward == number
    assert AgentResult.of({"reward": value, "seen": value}) == AgentResult(number, {"seen": number})
    step = Step(Observation("x"), value, metrics={"seen": value})
    assert step.reward == number and step.metrics == {"seen": number}


@pytest.mark.parametrize("kind", [*OTHERS, *INFINITE])
def test_agents_and_environments_return_finite_numbers(kind: str) -> None:
    value = (OTHERS | INFINITE)[kind]
    with pytest.raises(TypeError, match="it needs a finite number"):
        AgentResult.of(value)
    with pytest.raises(MalformedValue, match="it needs a finite number"):
        Step(Observation("x"), value)


def test_a_session_takes_true_as_one() -> None:
    assert (checked_reward(True), checked_reward(False), checked_reward(0.5)) == (1.0, 0.0, 0.5)
    assert AgentResult.of_line('{"reward": true}').reward == 1.0 and AgentResult.of_line("true").reward is None
    for other in ("1", None, [1], float("nan")):
        with pytest.raises(ApiProblem, match="it needs a finite number"):
            checked_reward(other)

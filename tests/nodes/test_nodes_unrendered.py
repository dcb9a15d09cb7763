"""A row that the chat template refuses: named before the run, or left out and counted, and it ends no run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.graph.node import Node
from flowrl.models import Policy, tokenizer_of
from flowrl.models.tokens.characters import CHAT_TEMPLATE, character_tokenizer
from flowrl.models.tokens.chat import Chat
from flowrl.nodes import (
    Demonstrations,
    DemonstrationSource,
    Evaluation,
    GivenAnswers,
    GivenResponses,
    HeldOutBatch,
    PreferenceDataset,
    Preferences,
    PreferenceSource,
    PromptSource,
    StepDataset,
)
from flowrl.nodes.sources import row_checks
from flowrl.nodes.sources.row_checks import prompt_texts, require_rendered, try_rows
from flowrl.tasks import Row, Task, load_demonstrations
from flowrl.testing import run_node

NUM_ROWS = 40
BAD = 3
"""The number of the row, from 1, that the template refuses."""
REFUSING = "{% for m in messages if 'BAD' in m['content'] %}{{ raise_exception('no BAD') }}{% endfor %}" + CHAT_TEMPLATE
Columns = dict[str, Any]


def good(number: int) -> Columns:
    return {"prompt": f"q{number}", "answer": "a", "response": "a", "chosen": "a", "rejected": "b"} | {
        "completion": "a",
        "label": True,
        "steps": ["a"],
        "labels": [1],
    }


def data(path: Path, bad: Columns, *options: str) -> Task:
    rows = [good(n) | (bad if n == BAD else {}) for n in range(1, NUM_ROWS + 1)]
    if "completion" in bad:  # with both kinds of columns, pairs are read
        rows = [{key: value for key, value in row.items() if key not in ("chosen", "rejected")} for row in rows]
    path = path.with_name("_".join([*bad, *options, path.name]))  # a process reads a file once
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Task(":".join([str(path), *options]))


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    (tmp_path / "refusing.jinja").write_text(REFUSING)
    return Policy("tiny", chat_template=str(tmp_path / "refusing.jinja"))


def pairs(task: Task, policy: Policy) -> Preferences:
    return Preferences(task, policy)


def labelled(task: Task, policy: Policy) -> Preferences:
    return Preferences(task, policy, kind="labelled")


TRYING: dict[str, tuple[Callable[[Task, Policy], Node], Columns]] = {
    "a prompt": (lambda t, p: PromptSource(t, p, part="all"), {"prompt": "BAD"}),
    "a demonstration": (lambda t, p: Demonstrations(t, p, part="all"), {"completion": "BAD"}),
    "a held-out demonstration too": (Demonstrations, {"prompt": "BAD"}),
    "a chosen answer": (lambda t, p: PreferenceDataset(pairs(t, p)), {"chosen": "BAD"}),
    "a rejected answer": (lambda t, p: PreferenceDataset(pairs(t, p)), {"rejected": "BAD"}),
    "a labelled answer": (lambda t, p: PreferenceDataset(labelled(t, p)), {"completion": "BAD"}),
    "the prompt of steps": (StepDataset, {"prompt": "BAD"}),
    "a given answer": (lambda t, p: GivenAnswers(t, p, share=0.5), {"completion": "BAD"}),
    "a response to score": (GivenResponses, {"response": "BAD"}),
}


@pytest.mark.parametrize("case", TRYING)
def test_a_row_is_named_before_the_run_or_left_out(case: str, policy: Policy, tmp_path: Path) -> None:
    node, bad = TRYING[case]
    task = data(tmp_path / "rows.jsonl", bad)
    with pytest.raises(ConfigError) as refused:
        node(task, policy).preflight()
    assert str(refused.value) == (
        f"1 of {NUM_ROWS} rows of '{task.source}' cannot be rendered for tiny, the first at {task.source}:{BAD}: the "
        "chat template refuses it (no BAD); mend it, or leave such rows out with malformed=skip"
    )
    task = data(tmp_path / "rows.jsonl", bad, "malformed=skip")
    assert node(task, policy).preflight() == (
        f"1 of {NUM_ROWS} rows cannot be rendered and are left out, the first at {task.source}:{BAD}: the chat "
        "template refuses it (no BAD)"
    )


def test_held_out_prompts_are_named_or_not_asked(policy: Policy, tmp_path: Path) -> None:
    task = data(tmp_path / "rows.jsonl", {})
    held_out = load_demonstrations(task).held_out[0]
    number = int(held_out.place.rpartition(":")[2])
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    for text in (f"BAD {n}" for n in range(100)):  # one that is held out
        if Row.ask(text).held_out:
            break
    lines[number - 1] = json.dumps(good(number) | {"prompt": text})
    (tmp_path / "other.jsonl").write_text("\n".join(lines))
    asked = Evaluation(Task(f"{tmp_path}/other.jsonl"), policy, num_prompts=2)
    with pytest.raises(ConfigError, match=rf"other.jsonl:{number}: the chat template refuses it \(no BAD\); mend it"):
        asked.preflight()
    asked = Evaluation(Task(f"{tmp_path}/other.jsonl:malformed=skip"), policy, num_prompts=2)
    assert "cannot be rendered and are left out" in str(asked.preflight())
    one, chat = asked.sets[0], Chat(tokenizer_of(policy))
    rows, _ = asked._fitting_rows(one, asked._check_set(one), chat)
    assert len(rows) == len(asked._check_set(one)) - 1 and text not in {row.prompt for row in rows}


def sent(source: Node, node: Node) -> tuple[list[Any], list[tuple[str, str]], dict[str, float], list[str]]:
    asked = run_node(source, name="prompts").sent("prompts")
    record = run_node(node, {"prompts": asked})
    return record.sent("groups"), record.reasons(), dict(record.metrics), record.progress


@pytest.mark.parametrize("bad", [{"completion": "BAD"}, {"prompt": "BAD"}])
def test_a_demonstration_that_is_left_out_is_counted(bad: Columns, policy: Policy, tmp_path: Path) -> None:
    task = data(tmp_path / "rows.jsonl", bad, "malformed=skip")
    source = DemonstrationSource(task, policy, epochs=1, part="all")
    groups, reasons, metrics, progress = sent(source, Demonstrations(task, policy, part="all"))
    assert len(groups) == NUM_ROWS - 1
    if "completion" in bad:
        assert reasons == [("dropped", "unrendered")] and metrics["rows_unrendered"] == 1
        assert f"rows.jsonl:{BAD}: the chat template refuses it (no BAD)" in progress[-1]
    else:
        assert reasons == []


@pytest.mark.parametrize(("kind", "bad"), [(pairs, "chosen"), (pairs, "rejected"), (labelled, "completion")])
def test_preferences_that_are_left_out_are_counted(
    kind: Callable[[Task, Policy], Preferences], bad: str, policy: Policy, tmp_path: Path
) -> None:
    given = kind(data(tmp_path / "rows.jsonl", {bad: "BAD"}, "malformed=skip"), policy)
    rows = given.read_rows()
    lost = sum(row.columns[bad] == "BAD" for row in rows.train)
    groups, reasons, _, _ = sent(PreferenceSource(given, epochs=1), PreferenceDataset(given))
    assert len(groups) == len(rows.train) - lost
    assert reasons == [("dropped", "unrendered")] * given.group_size * lost
    held_out = run_node(HeldOutBatch(given), name="held_out").sent("batch")[0]
    assert held_out.num_groups == len(rows.held_out) - (1 - lost)
    mismatched = [group.samples[0].mismatched for group in groups if kind is labelled]
    assert all("BAD" not in character_tokenizer().decode(one.token_ids) for one in mismatched)


def test_steps_that_are_left_out_are_counted(policy: Policy, tmp_path: Path) -> None:
    given = StepDataset(data(tmp_path / "rows.jsonl", {}), policy)
    source = DemonstrationSource(given.task, Policy("tiny"), epochs=1)
    asked = run_node(source, name="prompts").sent("prompts")
    assert len(run_node(given, {"prompts": asked}).sent("groups")) == len(asked)
    task = data(tmp_path / "bad.jsonl", {"prompt": "BAD"}, "malformed=skip")
    rows = load_demonstrations(task)
    number = sum(row.prompt == "BAD" for row in rows.train)
    asked = run_node(DemonstrationSource(task, Policy("tiny"), epochs=1), name="prompts").sent("prompts")
    record = run_node(StepDataset(task, policy), {"prompts": asked})
    assert (len(record.sent("groups")), record.reasons()) == (
        len(asked) - number,
        [("dropped", "unrendered")] * number,
    )
    held_out = run_node(HeldOutBatch(StepDataset(task, policy)), name="held_out").sent("batch")[0]
    assert held_out.num_groups == len(rows.held_out) - (1 - number)


def test_held_out_demonstrations_that_are_left_out_end_nothing(policy: Policy, tmp_path: Path) -> None:
    for column in ("prompt", "completion"):
        task = data(tmp_path / f"{column}.jsonl", {column: "BAD"}, "malformed=skip")
        (batch,) = run_node(HeldOutBatch(Demonstrations(task, policy)), name="held_out").sent("batch")
        rows = load_demonstrations(task).held_out
        assert batch.num_groups == sum("BAD" not in f"{row.prompt}{row.response}" for row in rows)


def test_rows_that_are_all_left_out_end_the_run_with_a_reason(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "BAD"}}\n' for n in range(40)))
    task = Task(f"{tmp_path}/rows.jsonl:malformed=skip")
    asked = run_node(DemonstrationSource(task, policy, epochs=1), name="prompts").sent("prompts")
    with pytest.raises(ConfigError, match=r"rows of .* are left out; the last one, .*rows.jsonl:\d+, cannot be rend"):
        run_node(Demonstrations(task, policy), {"prompts": asked})


def test_a_large_task_is_tried_in_processes(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_checks, "ALONE_S", 1e-6)
    monkeypatch.setattr(row_checks, "num_cores", lambda: 2)
    monkeypatch.setattr(row_checks, "CHUNK", 8)
    rows = [Row.ask("BAD" if n in (7, 311) else f"q{n}") for n in range(400)]
    found = try_rows(policy, Chat(tokenizer_of(policy)), rows, prompt_texts)
    assert found.tried == 400 and set(found.problems) == {7, 311}
    assert found.problems[7] == "the chat template refuses it (no BAD)"


def test_where_time_is_short_a_share_is_tried_that_is_spread_and_told(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_checks, "TRIAL_S", 0.0)
    monkeypatch.setattr(row_checks, "num_cores", lambda: 1)
    monkeypatch.setattr(row_checks, "try_rows", lambda *given: try_rows(*given, limit_s=0.0))
    rows = [Row.ask(f"q{n}") for n in range(1000)]
    said = require_rendered(policy, Task("arithmetic"), rows, prompt_texts)
    assert said is not None and said.startswith("128 of 1,000 rows, 13%, were rendered as a trial")
    some = sorted(next(row_checks.spread_chunks(1000)))
    assert len(some) == 128 and max(b - a for a, b in itertools.pairwise(some)) <= 8


@pytest.mark.parametrize("number", [1, 2, 3, 10, 127, 128, 129, 1000])
def test_every_row_is_tried_once(number: int) -> None:
    assert sorted(n for chunk in row_checks.spread_chunks(number) for n in chunk) == list(range(number))

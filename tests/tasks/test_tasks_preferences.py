"""Preference rows: pairs and labelled completions from disk and of the built-in task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.models import Policy
from flowrl.nodes.sources.preferences import Preferences, PreferenceSource
from flowrl.tasks import Task, load_preferences, load_rows
from flowrl.tasks.row_reading.preference_rows import Kind
from flowrl.tasks.rows import Row
from flowrl.testing import run_node


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def written(path: Path, records: list[dict[str, Any]], options: str = "") -> Task:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Task(f"{file}{options}")


def everything(task: Task, kind: Kind) -> list[Row]:
    rows = load_preferences(task, kind)
    return sorted((*rows.train, *rows.held_out), key=lambda row: str(row.columns))


FORMS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    "turns": {"prompt": [user("1+1=")], "chosen": [said("2")], "rejected": [said("3")]},
    "whole": {"prompt": [user("1+1=")], "chosen": [user("1+1="), said("2")], "rejected": [user("1+1="), said("3")]},
    "implied": {"chosen": [user("1+1="), said("2")], "rejected": [user("1+1="), said("3")]},
}


def many(record: dict[str, Any]) -> list[dict[str, Any]]:
    """`record` and enough others, so that the training part is not empty."""
    return [record, *({"prompt": f"{n}*", "chosen": "yes", "rejected": "no"} for n in range(20))]


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_is_the_same_in_every_form(form: str, tmp_path: Path) -> None:
    rows = everything(written(tmp_path, many(FORMS[form])), "pairs")
    (row,) = (row for row in rows if row.columns["chosen"] == "2")
    assert row.turns == (user("1+1="),)
    assert row.columns["rejected"] == "3"


@pytest.mark.parametrize("form", FORMS)
def test_the_rows_own_system_message_comes_first(form: str, tmp_path: Path) -> None:
    """As in other rows; it was a column for rewards, and the model was trained without it."""
    system = {"role": "system", "content": "Be brief."}
    rows = everything(written(tmp_path, many(FORMS[form] | {"system": "Be brief."})), "pairs")
    (row,) = (row for row in rows if row.columns["chosen"] == "2")
    assert row.turns == (system, user("1+1=")) and row.columns == {"chosen": "2", "rejected": "3"}
    (whole,) = (
        row
        for row in everything(
            written(tmp_path, many({"prompt": "1+1=", "system": "Be brief.", "completion": "2", "label": True}), ""),
            "labelled",
        )
        if row.columns["completion"] == "2"
    )
    assert whole.turns == (system, user("1+1="))


CONVERSATION = [user("Hello"), said("Hi"), user("1+1="), said("2")]
PAIR = {"chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("record", "options"),
    [
        (PAIR | {"messages": CONVERSATION[:3]}, ""),
        (PAIR | {"messages": CONVERSATION}, ""),
        (PAIR | {"prompt": "other", "messages": CONVERSATION}, ":messages=messages"),
        (PAIR | {"prompt": "other", "talk": CONVERSATION}, ":messages=talk"),
        (PAIR | {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"},
                                   {"from": "human", "value": "1+1="}]}, ""),
        ({"messages": CONVERSATION, "chosen": CONVERSATION, "rejected": [*CONVERSATION[:3], said("3")]},
         ":messages=messages"),
    ],
)  # fmt: skip
def test_the_prompt_may_be_a_conversation_in_another_column(
    record: dict[str, Any], options: str, tmp_path: Path
) -> None:
    """As in other rows: `messages=` was ignored."""
    records = [record, *(record | {"chosen": f"yes {n}", "rejected": "no"} for n in range(20))]
    for n, other in enumerate(records[1:]):  # enough prompts that some are trained on
        for column in ("prompt", "messages", "talk", "conversations"):
            if isinstance(turns := other.get(column), list):
                key = "content" if "content" in turns[0] else "value"
                other[column] = [{**turns[0], key: f"Hello {n}"}, *turns[1:]]
    rows = everything(written(tmp_path, records, options), "pairs")
    (row,) = (row for row in rows if row.columns["chosen"] == "2")
    assert row.turns == tuple(CONVERSATION[:3]) and row.columns["rejected"] == "3"
    assert set(row.columns) - {"prompt"} == {"chosen", "rejected"}


def test_a_conversation_that_an_option_names_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column 'talks', which messages= names"):
        everything(written(tmp_path, many({"prompt": "1+1=", **PAIR}), ":messages=talks"), "pairs")
    with pytest.raises(ConfigError, match="'talk' holds only an answer"):
        everything(written(tmp_path, [{"talk": [said("2")], **PAIR}], ":messages=talk"), "pairs")


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_number_that_is_none_is_refused_by_row_and_column(where: str, tmp_path: Path) -> None:
    """It went to rewards, which then were no numbers either."""
    records = many({"prompt": "1+1=", "answer": float("nan"), **PAIR})  # as in other rows, pandas' way to say null
    rows = everything(written(tmp_path, records, f":rows={where}"), "pairs")
    assert [row.columns["answer"] for row in rows if "answer" in row.columns] == []
    for number, column in enumerate(({"margin": float("nan")}, {"of": {"margins": [1.0, float("nan")]}})):
        (directory := tmp_path / f"{number}").mkdir()
        told = rf"rows.jsonl:1: the column '{next(iter(column))}' holds NaN.*write null"
        task = written(directory, many({"prompt": "1+1=", "answer": "2", **PAIR, **column}), f":rows={where}")
        with pytest.raises(ConfigError, match=told):
            everything(task, "pairs")
        with pytest.raises(ConfigError, match=told):
            load_rows(task)


def test_a_prompt_may_have_many_pairs_all_in_one_part(tmp_path: Path) -> None:
    records = [{"prompt": f"{n % 10}*", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(100)]
    rows = load_preferences(written(tmp_path, records), "pairs")
    assert len(rows.train) + len(rows.held_out) == 100
    assert len({row.prompt_id for row in rows.train}) == len(rows.train)
    assert not {row.prompt for row in rows.train} & {row.prompt for row in rows.held_out}
    assert rows.held_out and all(Row(row.turns).held_out for row in rows.held_out)


def test_a_pair_counts_as_two_labelled_completions(tmp_path: Path) -> None:
    rows = load_preferences(written(tmp_path, many(FORMS["text"])), "labelled")
    found = [row for row in (*rows.train, *rows.held_out) if row.prompt == "1+1="]
    assert [(row.columns["completion"], row.columns["label"]) for row in found] == [("2", True), ("3", False)]
    assert found[0].columns["pair"] == found[1].columns["pair"]


def test_labelled_completions_under_other_names(tmp_path: Path) -> None:
    records = [{"q": f"{n}+1=", "said": str(n), "good": n % 2} for n in range(20)]
    rows = everything(written(tmp_path, records, ":prompt=q,completion=said,label=good"), "labelled")
    assert {(row.prompt, row.columns["label"]) for row in rows} == {(f"{n}+1=", bool(n % 2)) for n in range(20)}


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_rows_have_their_place_and_the_answer_that_is_there(tmp_path: Path, kind: Kind, where: str) -> None:
    answers: list[Any] = [None, 4, ["a"]]
    records = [{"prompt": f"{n}?", "chosen": "y", "rejected": "n", "answer": one} for n, one in enumerate(answers)]
    rows = everything(written(tmp_path, many(FORMS["text"]) + records, f":rows={where}"), kind)
    found = {row.prompt: (row.place, row.columns.get("answer")) for row in rows if row.prompt.endswith("?")}
    file = tmp_path / "rows.jsonl"
    assert found == {"0?": (f"{file}:22", None), "1?": (f"{file}:23", 4), "2?": (f"{file}:24", ("a",))}


@pytest.mark.parametrize(
    ("options", "says"), [(":prompt=question", "'question', which prompt="), (":answer=a", "'a', w")]
)
def test_columns_that_are_named_have_to_be_there(tmp_path: Path, options: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"rows.jsonl:1: no column {says}"):
        everything(written(tmp_path, many(FORMS["implied"]), options), "pairs")


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_records_below_min_score_are_left_out_and_counted(tmp_path: Path, kind: Kind, where: str) -> None:
    records = [{"prompt": f"{n}?", "chosen": "y", "rejected": "n", "margin": n % 4} for n in range(20)]
    task = written(tmp_path, records, f":score=margin,min_score=2,rows={where}")
    assert {row.prompt for row in everything(task, kind)} == {f"{n}?" for n in range(20) if n % 4 >= 2}
    assert load_preferences(task, kind).low_scores == 10
    record = run_node(PreferenceSource(Preferences(task, Policy("tiny"), kind)), name="prompts", num_groups=0)
    assert record.metrics == {"rows_below_min_score": 10}
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no column 'margn', which score= names"):
        everything(Task(task.name.replace("score=margin", "score=margn")), kind)


def test_answers_beside_preferences_may_be_of_any_form(tmp_path: Path) -> None:
    """Nothing compares them; an evaluation that does checks its own rows."""
    records = [{"prompt": f"{n}?", "chosen": "y", "rejected": "n", "answer": "yes"} for n in range(20)]
    PreferenceSource(Preferences(written(tmp_path, records, ":check=choice"), Policy("tiny"))).preflight()


BAD: dict[str, tuple[Kind, dict[str, Any], str]] = {
    "missing": ("pairs", {"prompt": "1", "chosen": "2"}, r"rows\.jsonl:1: the column 'rejected' is missing"),
    "empty": ("pairs", {"prompt": "1", "chosen": "", "rejected": "3"}, r":1: the column 'chosen' is ''; it needs text"),
    "equal": ("pairs", {"prompt": "1", "chosen": "3", "rejected": "3"}, r":1: chosen and rejected are the same"),
    "other prompt": (
        "pairs",
        {"prompt": "1", "chosen": [user("2"), said("3")], "rejected": "x"},
        r":1: the column 'chosen' is .* after the prompt's turns",
    ),
    "no prompt": (
        "pairs",
        {"chosen": "2", "rejected": "3"},
        r":1: no column 'prompt', and 'chosen' is not a conversation",
    ),
    "label": ("labelled", {"prompt": "1", "completion": "2", "label": "good"}, r":1: the column 'label' is 'good'"),
    "no label": ("labelled", {"prompt": "1", "completion": "2"}, r":1: the column 'label' is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_row_is_named_with_its_line(case: str, tmp_path: Path) -> None:
    kind, record, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        load_preferences(written(tmp_path, many(record)), kind)
    rows = load_preferences(written(tmp_path, many(record), ":malformed=skip"), kind)
    assert len(rows.skipped) == 1 and len(rows.train) + len(rows.held_out) >= 20


def test_arithmetic_prefers_carrying() -> None:
    rows = everything(Task("arithmetic:max_value=12"), "pairs")
    assert ("5+8=", "13", "3") in {(row.prompt, row.columns["chosen"], row.columns["rejected"]) for row in rows}
    assert all(row.columns["chosen"] != row.columns["rejected"] for row in rows)


def test_a_task_without_preferences_says_what_would_have_some() -> None:
    with pytest.raises(ConfigError, match=r"has no preferences: .* columns chosen and rejected"):
        load_preferences(Task("reasoning_gym/chain_sum"), "pairs")

"""Fields of a message beside its text: `weight`, which is in the mask, and reasoning, which is never lost unsaid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.models import Chat, Policy
from flowrl.models.tokens.chat import Unrendered
from flowrl.nodes import Demonstrations, PreferenceDataset, Preferences, PromptSource
from flowrl.tasks import Row, Rows, Task, conversation, load_demonstrations, load_preferences, load_rows
from flowrl.tasks.evaluation_set import EvaluationSet
from flowrl.tasks.rows import REASONING
from tests.models.test_models_chat import CHATML, merging
from tests.tasks.row_compare import WHERE, rows_in

TINY = Policy("tiny")
SHOWS = CHATML.replace("m['content']", "('<think>\n' + m['{}'] + '\n</think>\n\n' if m['{}'] else '') + m['content']")
"""A template that shows reasoning which is under one name."""
KEPT_FOR_THE_LAST = SHOWS.replace("if m['{}']", "if m['{}'] and loop.last")


def shows(name: str, template: str = SHOWS) -> Any:
    return merging(template.replace("{}", name))


def user(text: str = "q") -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def written(tmp_path: Path, *records: dict[str, Any]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def of_file(rows: Rows) -> list[Row]:
    return sorted((*rows.train, *rows.held_out), key=lambda row: int(row.place.rpartition(":")[2]))


def trained(row: Row, render: str = "encode_demonstration", tokenizer: Any = None) -> str:
    tokenizer = tokenizer or merging()
    ids, mask = getattr(Chat(tokenizer), render)(row.turns, row.response)
    return str(tokenizer.decode(ids[mask]))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))


# weight


TURNS = [user(), said("wrong", weight=0), user("again"), said("right", weight=1)]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "record",
    [
        {"messages": TURNS},
        {"messages": json.dumps(TURNS)},
        {"messages": [{**turn, "weight": turn.get("weight", 0)} for turn in TURNS]},
        {"messages": [{**turn, "weight": bool(turn.get("weight"))} for turn in TURNS]},
        {"messages": [{**turn, "weight": turn.get("weight")} for turn in TURNS]},
        {"prompt": TURNS[:3], "answer": "right"},
        {"prompt": [TURNS[0]], "answer": TURNS[1:]},
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "wrong", "weight": 0.0},
                {"from": "human", "value": "again"},
                {"from": "gpt", "value": "right", "weight": 1.0},
            ]
        },
    ],
)
def test_a_turn_of_weight_0_is_read_and_not_trained(tmp_path: Path, record: dict[str, Any], where: str) -> None:
    plain = {"messages": [user(), said("wrong"), user("again"), said("right")]}
    with rows_in(where):
        weighted, usual = of_file(load_demonstrations(Task(written(tmp_path, record, plain)), whole=True))
    assert trained(weighted) == "right<|im_end|>" and trained(usual) == "wrong<|im_end|>right<|im_end|>"
    both = [Chat(merging()).encode_demonstration(row.turns, row.response)[0].tolist() for row in (weighted, usual)]
    assert both[0] == both[1]


def test_a_last_turn_of_weight_0_is_left_out_with_what_follows_the_trained_one(tmp_path: Path) -> None:
    turns = [user(), said("right"), user("again"), said("wrong", weight=0)]
    (row,) = of_file(load_demonstrations(Task(written(tmp_path, {"messages": turns})), whole=True))
    assert trained(row) == "right<|im_end|>"
    with pytest.raises(Unrendered, match="every turn that would be trained has weight 0"):
        trained(row, "encode_completion")


def test_completions_of_preferences_have_weights_and_reward_models_refuse_them(tmp_path: Path) -> None:
    chosen = [user(), said("call", weight=0), user("answer"), said("yes")]
    task = Task(written(tmp_path, {"prompt": "q", "chosen": chosen, "rejected": [user(), said("no")]}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flowrl.tasks.row_reading.row_loading._with_training_rows", lambda task, found, whole: found)
        load_preferences.cache_clear()
        (row,) = of_file(load_preferences(task, "pairs"))
    tokenizer = merging()
    ids, mask = Chat(tokenizer).encode_completion(row.turns, row.columns["chosen"])
    assert tokenizer.decode(ids[mask]) == "yes<|im_end|>"
    with pytest.raises(Unrendered, match="a turn of the response has weight 0, but a reward model scores the whole"):
        Chat(tokenizer).encode_scored(row.turns, row.columns["chosen"])


@pytest.mark.parametrize("weight", [0.5, 2, -1, "0", [0], {"x": 1}])
def test_other_weights_are_refused_by_their_row(tmp_path: Path, weight: Any) -> None:
    name = written(tmp_path, {"messages": TURNS}, {"messages": [user(), said("a", weight=weight)]})
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:2: .* the weight of a message of the assistant is .*; it needs 0"
    ):
        load_demonstrations(Task(name), whole=True)
    with rows_in("memory"):
        assert len(load_demonstrations(Task(f"{name}:malformed=skip"), whole=True).skipped) == 1


def test_a_weight_of_what_others_say_is_refused(tmp_path: Path) -> None:
    name = written(tmp_path, {"messages": [{**user(), "weight": 1}, said("a")]})
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: .* the weight of a message of the user is '1'"):
        load_demonstrations(Task(name), whole=True)


def test_weights_are_no_part_of_what_is_asked(tmp_path: Path) -> None:
    plain = {"prompt": [user(), said("wrong"), user("again")], "answer": "x"}
    weighted, usual = of_file(
        load_demonstrations(Task(written(tmp_path, {"prompt": TURNS[:3], "answer": "x"}, plain)), whole=True)
    )
    assert weighted.asked_id == usual.asked_id and weighted.held_out == usual.held_out
    assert conversation(Task(), weighted) == conversation(Task(), usual)
    told = Chat(merging()).encode_prompt(weighted.turns)[0]
    assert told == Chat(merging()).encode_prompt(usual.turns)[0]


# reasoning


def thinking(name: str = "reasoning_content", thought: Any = "hm", text: str = "a") -> dict[str, Any]:
    return said(text, **{name: thought})


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", REASONING)
def test_reasoning_that_the_template_does_not_show_is_refused_by_its_row(tmp_path: Path, name: str, where: str) -> None:
    data = written(tmp_path, {"messages": [user(), said("a")]}, {"messages": [user("p"), thinking(name)]})
    refused = (
        r"1 of 2 rows of .*rows.jsonl.* the first at .*rows.jsonl:2: a message has reasoning .*--task.reasoning inline"
    )
    with rows_in(where), pytest.raises(ConfigError, match=refused):
        Demonstrations(Task(data), TINY, part="all").preflight()
    for how in ("inline", "drop"):
        with rows_in(where):
            Demonstrations(Task(data, reasoning=how), TINY, part="all").preflight()


def test_prompts_and_preferences_are_refused_too(tmp_path: Path) -> None:
    prompts = written(tmp_path, {"prompt": [user(), thinking(), user("more")], "answer": "1"})
    with pytest.raises(ConfigError, match="a message has reasoning apart from its text"):
        PromptSource(Task(prompts), TINY, part="all").preflight()
    pairs = [{"prompt": f"q{n}", "chosen": [thinking()], "rejected": [said("b")]} for n in range(20)]
    (tmp_path / "pairs").mkdir()
    name = written(tmp_path / "pairs", *pairs)
    with pytest.raises(ConfigError, match="a message has reasoning apart from its text"):
        PreferenceDataset(Preferences(Task(name), TINY)).preflight()
    found = load_preferences(Task(name, reasoning="inline"), "pairs").train[0].columns["chosen"]
    assert [turn["content"] for turn in found] == ["<think>\nhm\n</think>\n\na"]
    no_template = merging(None)
    with pytest.raises(Unrendered, match="a message has reasoning"):
        Chat(no_template).encode_completion((user(),), (thinking(),))


@pytest.mark.parametrize("name", REASONING)
@pytest.mark.parametrize("shown", REASONING)
@pytest.mark.parametrize("template", [SHOWS, KEPT_FOR_THE_LAST])
def test_reasoning_is_given_under_the_name_that_the_template_shows(
    tmp_path: Path, name: str, shown: str, template: str
) -> None:
    (row,) = of_file(load_demonstrations(Task(written(tmp_path, {"messages": [user(), thinking(name)]})), whole=True))
    assert trained(row, tokenizer=shows(shown, template)) == "<think>\nhm\n</think>\n\na<|im_end|>"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("load", [load_demonstrations, load_rows])
def test_inline_and_drop_are_choices_for_every_template(tmp_path: Path, load: Callable[..., Rows], where: str) -> None:
    turns = [user(), thinking(thought="first\n", text="\nyes"), user("more"), thinking("thinking", "second", "no")]
    data = written(tmp_path, {"messages": turns})
    with rows_in(where):
        (inline,) = of_file(load(Task(data, reasoning="inline"), whole=True))
        (drop,) = of_file(load(Task(data, reasoning="drop"), whole=True))
    for tokenizer in (merging(), shows("reasoning_content")):
        first, second = "<think>\nfirst\n</think>\n\nyes", "<think>\nsecond\n</think>\n\nno"
        assert trained(inline, tokenizer=tokenizer) == f"{first}<|im_end|>{second}<|im_end|>"
        assert trained(drop, tokenizer=tokenizer) == "\nyes<|im_end|>no<|im_end|>"
    assert inline.columns["answer"] == drop.columns["answer"] == "no"


def test_reasoning_is_text_of_the_assistant(tmp_path: Path) -> None:
    for turns in ([user(), thinking(thought=["hm"])], [{**user(), "reasoning_content": "hm"}, said("a")]):
        with pytest.raises(
            ConfigError, match=r"rows.jsonl:1: .* reasoning_content of the (assistant|user) is .*needs text"
        ):
            load_demonstrations(Task(written(tmp_path, {"messages": turns})), whole=True)
    data = Task(written(tmp_path, {"messages": [user(), thinking(thought="")]}))
    (row,) = of_file(load_demonstrations(data, whole=True))
    assert row.reply == () and row.answer == "a"


def test_the_option_is_refused_where_it_would_change_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--task.reasoning is 'out'; choose one of inline, drop, or none"):
        Task("rows.jsonl", reasoning="out")
    with pytest.raises(ConfigError, match="task 'arithmetic' makes its rows, which have no reasoning; leave it out"):
        Task("arithmetic", reasoning="drop")
    data = Task(written(tmp_path, {"messages": [user(), said("a")]}), reasoning="drop")
    assert EvaluationSet.parse("arithmetic", like=data, samples=1).task.reasoning == ""
    assert EvaluationSet.parse(data.name, like=data, samples=1).task.reasoning == "drop"

"""Conversations with tools as data: their forms, what chat templates make of them, and what is trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.messages import Bool, Int32
from flowrl.models import Chat, Policy
from flowrl.models.tokens.characters import character_tokenizer, tool_tokenizer
from flowrl.models.tokens.tool_form import plain_value, tool_form
from flowrl.nodes import (
    Demonstrations,
    DemonstrationSource,
    PreferenceDataset,
    Preferences,
    PreferenceSource,
    PromptSource,
)
from flowrl.tasks import Row, Task, load_demonstrations, load_preferences, load_rows
from flowrl.testing import run_node
from tests.agents.chat_templates import ADD, characters, templates, with_template

MESSAGE = dict[str, Any]
AGENT = Policy("tiny_agent")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def call(n: int = 1, *, name: str = "add", **more: Any) -> MESSAGE:
    return {"type": "function", "function": {"name": name, "arguments": {"a": f"{n} 2"}}, **more}


def asked(n: int = 1) -> list[MESSAGE]:
    """Up to the tool's answer."""
    return [
        {"role": "user", "content": f"q{n}"},
        {"role": "assistant", "content": "", "tool_calls": [call(n)]},
        {"role": "tool", "content": "sum3", "name": "add"},
    ]


def replied(n: int = 1) -> list[MESSAGE]:
    return [*asked(n), {"role": "assistant", "content": f"It is {n}."}]


def written(path: Path, records: Sequence[Mapping[str, Any]], options: str = "") -> Task:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Task(f"{file}{options}")


def first(task: Task) -> Row:
    rows = load_rows(task, whole=True)
    return (*rows.train, *rows.held_out)[0]


OPENAI = {**call(), "function": {**call()["function"], "arguments": json.dumps(call()["function"]["arguments"])}}
FORMS: dict[str, Mapping[str, Any]] = {
    "messages": {"messages": replied(), "tools": [ADD]},
    "text of arguments and tools": {
        "messages": [asked()[0], {**asked()[1], "content": None, "tool_calls": [OPENAI]}, *replied()[2:]],
        "tools": json.dumps([ADD]),
    },
    "with the nulls of Parquet": {
        "messages": [{"name": None, "tool_calls": None, "reasoning_content": None, **turn} for turn in replied()],
        "tools": [{**ADD, "strict": None}],
    },
    "plain calls": {
        "messages": [asked()[0], {**asked()[1], "tool_calls": [call()["function"]]}, *replied()[2:]],
        "tools": [ADD["function"]],
    },
    "prompt and answer": {"prompt": asked(), "answer": "It is 1.", "tools": [ADD]},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_with_tools_is_the_same_in_every_form(form: str, tmp_path: Path) -> None:
    row = first(written(tmp_path, [FORMS[form]]))
    assert [dict(turn) for turn in row.turns] == [
        asked()[0],
        {**asked()[1], "tool_calls": (call(),)},
        asked()[2],
    ]
    assert json.loads(json.dumps(row.tools)) == [ADD]
    assert row.answer == "It is 1."
    assert row.reply == ()


def test_function_calls_of_sharegpt_are_tool_calls(tmp_path: Path) -> None:
    said = [("human", "q1"), ("function_call", json.dumps(call()["function"])), ("observation", "sum3"), ("gpt", "ok")]
    row = first(written(tmp_path, [{"conversations": [{"from": who, "value": text} for who, text in said]}]))
    assert row.turns[1]["tool_calls"] == (call(),)
    assert [turn["role"] for turn in row.turns] == ["user", "assistant", "tool"]


def test_a_last_turn_that_calls_a_tool_is_the_answer(tmp_path: Path) -> None:
    row = first(written(tmp_path, [{"messages": asked()[:2], "tools": [ADD]}]))
    assert row.reply == ({**asked()[1], "tool_calls": (call(),)},)
    assert row.answer == '{"name": "add", "arguments": {"a": "1 2"}}'


def test_the_same_messages_with_other_tools_are_another_prompt(tmp_path: Path) -> None:
    records = [{"prompt": "q", "answer": "a"}, {"prompt": "q", "answer": "a", "tools": [ADD]}]
    rows = load_rows(written(tmp_path, records), whole=True)
    assert len(rows.train) + len(rows.held_out) == 2


@pytest.mark.parametrize(
    ("record", "options", "said"),
    [
        ({"tools": "hammer"}, "", "the column 'tools' is 'hammer'.*tools=none"),
        ({"tools": [{"title": "x"}]}, "", "list of tool definitions"),
        ({}, ":tools=functions", "no column 'functions', which tools= names"),
        ({"messages": [asked()[0], {"role": "assistant", "tool_calls": [{"name": ""}]}]}, "", "a tool call is"),
        (
            {"messages": [asked()[0], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "no"}]}]},
            "",
            "JSON",
        ),
        ({"messages": [{"role": "user", "content": "q", "tool_calls": [call()]}]}, "", "calls of the assistant"),
    ],
)
def test_what_is_no_tool_is_refused_with_its_place(
    record: Mapping[str, Any], options: str, said: str, tmp_path: Path
) -> None:
    whole = record if "messages" in record else {"prompt": "q", "answer": "a", **record}
    with pytest.raises(ConfigError, match=f"rows.jsonl:1: .*{said}"):
        load_rows(written(tmp_path, [whole], options), whole=True)


def test_a_column_tools_of_another_meaning_can_be_left_alone(tmp_path: Path) -> None:
    row = first(written(tmp_path, [{"prompt": "q", "answer": "a", "tools": "hammer"}], ":tools=none"))
    assert (row.tools, row.columns["tools"]) == ((), "hammer")


# What templates make of it


def marked(tokenizer: Any, ids: Int32, mask: Bool) -> list[str]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
    return [tokenizer.decode(ids[start:end].tolist()) for start, end in edges]


REWRITING = {"deepseekv3", "gptoss", *(f"nemotron_3_{size}" for size in ("5_lightning", "nano", "super", "ultra"))}
"""Refused: the generation prompt is no beginning of the reply, or the last turn alone has another end."""


@pytest.mark.parametrize("name", templates())
def test_calls_and_answers_of_the_assistant_are_trained_and_nothing_else(name: str) -> None:
    tokenizer = with_template(characters(), templates()[name])
    form = tool_form(tokenizer)
    if not form.calls:
        with pytest.raises(ConfigError, match="tool calls"):
            Chat(tokenizer).encode_demonstration([*replied(1), *asked(5)], "It is 5.")
        return
    chat = Chat(tokenizer).with_tools((ADD,) if form.definitions else ())
    turns = [*replied(1), *asked(5)]
    try:
        ids, mask = chat.encode_demonstration(turns, "It is 5.")
    except ConfigError as problem:
        assert name.removesuffix("_training") in REWRITING and "rewrites" in str(problem)
        return
    text, trained = tokenizer.decode(ids.tolist()), "".join(marked(tokenizer, ids, mask))
    assert all(shown in text for shown in ("q1", "1 2", "sum3", "It is 1.", "q5", "5 2", "It is 5."))
    assert all(said in trained for said in ("1 2", "It is 1.", "5 2", "It is 5."))
    assert not any(other in trained for other in ("q1", "q5", "sum3", "Adds two numbers"))
    last_ids, last = chat.encode_completion(turns, "It is 5.")
    np.testing.assert_array_equal(last_ids, ids)
    assert "It is 5." in tokenizer.decode(ids[last].tolist())
    assert not any(earlier in tokenizer.decode(ids[last].tolist()) for earlier in ("5 2", "It is 1."))
    assert not (last & ~mask).any()


@pytest.mark.parametrize("name", [name for name, text in templates().items() if "generation %}" in text])
def test_masks_are_those_of_templates_that_mark_them_themselves(name: str) -> None:
    """What the template marks besides is a newline after an end, or stands in the prompt before the reply."""
    tokenizer = with_template(characters(), templates()[name])
    form = tool_form(tokenizer)
    tools = (ADD,) if form.calls and form.definitions else ()
    turns = asked() if form.calls else [asked()[0], {"role": "assistant", "content": "ok"}, asked(2)[0]]
    chat = Chat(tokenizer).with_tools(tools)
    reply = {"role": "assistant", "content": "It is 3."}
    try:
        ids, mask = chat.encode_demonstration(turns, "It is 3.")
    except ConfigError as problem:
        assert "rewrites" in str(problem)
        return
    told = form.form_messages([*turns, reply]) if form.calls else [*turns, reply]
    if name in ("idefics3_training", "smolvlm_training", "llava_next_training"):  # they show lists of parts alone
        told = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in told]
    theirs = tokenizer.apply_chat_template(
        told, tools=[plain_value(tool) for tool in tools] or None, return_dict=True, return_assistant_tokens_mask=True
    )
    np.testing.assert_array_equal(np.asarray(theirs["input_ids"])[: ids.size], ids)
    marks = np.asarray(theirs["assistant_masks"], np.bool_)[: ids.size]
    if name != "diffusion_gemma_training":  # it writes no prompt after a tool's answer, so the model has to
        assert not (mask & ~marks).any()
    prompt = f"{chat.encode_prompt(turns[:1])[0]} {'<｜tool▁outputs▁end｜>' if name.startswith('deepseek') else ''}"
    assert all(not piece.strip() or piece.strip() in prompt for piece in marked(tokenizer, ids, marks & ~mask))


def test_a_template_that_takes_arguments_as_text_gets_text() -> None:
    tokenizer = with_template(characters(), templates()["deepseekv3"])
    assert tool_form(tokenizer).json_arguments
    assert '{"a": "1 2"}' in Chat(tokenizer).encode_prompt(asked())[0]


STRICT = (
    "{% for m in messages %}<|{{ m.role }}|>{% for c in m.tool_calls or [] %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    "[{{ c.id }} {{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}={% endif %}{{ m.content }}<|end|>{% endfor %}"
)
"""Like Mistral's: calls need ids of nine letters or digits."""


def test_a_template_that_needs_ids_gets_them() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = STRICT
    turns = [
        asked()[0],
        {"role": "assistant", "content": "", "tool_calls": [call(1, id="of_another_length"), call(2, id="b")]},
        {"role": "tool", "content": "second", "tool_call_id": "b"},
        {"role": "tool", "content": "first", "tool_call_id": "of_another_length"},
    ]
    text = Chat(tokenizer).encode_prompt(turns)[0]
    assert "[call00000 add" in text and "[call00001 add" in text
    assert "call00001=second" in text and "call00000=first" in text


@pytest.mark.parametrize("turns", [asked()[:1], asked()])
def test_a_template_without_tools_is_refused(turns: list[MESSAGE]) -> None:
    tokenizer = character_tokenizer()
    with pytest.raises(ConfigError, match="chat template does not show; name a model or a --chat-template"):
        Chat(tokenizer).with_tools((ADD,)).encode_prompt(turns)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template that could show them"):
        Chat(tokenizer).with_tools((ADD,)).encode_prompt(turns)


# Nodes


def many(tmp_path: Path, make: Any, options: str = "") -> Task:
    return written(tmp_path, [{**make(n), "tools": [ADD]} for n in range(24)], options)


@pytest.mark.parametrize("trained", ["all", "last"])
def test_sft_trains_the_assistants_turns(trained: Any, tmp_path: Path) -> None:
    task = many(tmp_path, lambda n: {"messages": replied(n)})
    prompts = run_node(DemonstrationSource(task, AGENT, part="all"), name="prompts").sent("prompts")
    node = Demonstrations(task, AGENT, part="all", trained=trained)
    samples = [group.samples[0] for group in run_node(node, {"prompts": prompts}).sent("groups")]
    assert len(samples) == 24
    tokenizer = tool_tokenizer()
    for sample in samples:
        n = sample.response_text.removeprefix("It is ").removesuffix(".")
        whole = tokenizer.decode(sample.token_ids.tolist())
        calls = f'<|call|>add{{"a":"{n} 2"}}<|end|>'
        start = f"<|tools|>add<|end|><|user|>q{n}<|end|><|assistant|>"
        assert whole == f"{start}{calls}<|tool|>sum3<|end|><|assistant|>It is {n}.<|end|>"
        expected = [calls, f"It is {n}.<|end|>"] if trained == "all" else [f"It is {n}.<|end|>"]
        assert marked(tokenizer, sample.token_ids, sample.policy_mask) == expected


def test_sft_trains_a_last_turn_that_is_a_call(tmp_path: Path) -> None:
    task = many(tmp_path, lambda n: {"messages": asked(n)[:2]})
    prompts = run_node(DemonstrationSource(task, AGENT, part="all"), name="prompts").sent("prompts")
    (group, *_) = run_node(Demonstrations(task, AGENT, part="all"), {"prompts": prompts}).sent("groups")
    (said,) = marked(tool_tokenizer(), group.samples[0].token_ids, group.samples[0].policy_mask)
    assert said.startswith('<|call|>add{"a":') and said.endswith("<|end|>")


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
def test_completions_may_call_tools_and_go_on(kind: Any, tmp_path: Path) -> None:
    """Of a completion of several turns the assistant's are trained, not the tool's."""
    task = many(tmp_path, lambda n: {"prompt": f"q{n}", "chosen": replied(n)[1:], "rejected": "No."})
    data = Preferences(task, AGENT, kind=kind)
    prompts = run_node(PreferenceSource(data), name="prompts").sent("prompts")
    samples = [
        sample
        for group in run_node(PreferenceDataset(data), {"prompts": prompts}).sent("groups")
        for sample in group.samples
    ]
    tokenizer = tool_tokenizer()
    good = [sample for sample in samples if sample.label == 1]
    assert good and len(good) == len(samples) / 2
    for sample in good:
        calls, answer = marked(tokenizer, sample.token_ids, sample.policy_mask)
        assert calls.startswith("<|call|>add{") and answer.startswith("It is ")
        assert "sum3" in tokenizer.decode(sample.token_ids.tolist())
    for sample in set_of(samples, -1):
        assert marked(tokenizer, sample.token_ids, sample.policy_mask) == ["No.<|end|>"]
        assert tokenizer.decode(sample.token_ids.tolist()).startswith("<|tools|>add<|end|>")


def set_of(samples: list[Any], label: int) -> list[Any]:
    return [sample for sample in samples if sample.label == label]


def test_whole_conversations_are_pairs_by_what_they_begin_with_alike(tmp_path: Path) -> None:
    task = many(
        tmp_path,
        lambda n: {"chosen": replied(n), "rejected": [asked(n)[0], {"role": "assistant", "content": "No."}]},
    )
    rows = load_preferences(task, "pairs")
    for row in (*rows.train, *rows.held_out):
        assert [turn["role"] for turn in row.turns] == ["user"]
        assert [turn["role"] for turn in row.columns["chosen"]] == ["assistant", "tool", "assistant"]
        assert row.columns["rejected"] == "No."


def test_prompts_of_rl_show_their_tools(tmp_path: Path) -> None:
    task = many(tmp_path, lambda n: {"prompt": asked(n), "answer": str(n)})
    for prompt in run_node(PromptSource(task, AGENT, part="all"), name="prompts").sent("prompts"):
        assert prompt.text.startswith("<|tools|>add<|end|><|user|>q")
        assert prompt.text.endswith("<|tool|>sum3<|end|><|assistant|>")
        assert prompt.columns["tools"][0]["function"]["name"] == "add"


@pytest.mark.parametrize("node", ["sft", "rl", "pairs"])
def test_a_model_without_tools_is_refused_before_the_run(node: str, tmp_path: Path) -> None:
    task = many(tmp_path, lambda n: {"messages": replied(n), "chosen": "a", "rejected": "b"}, ":prompt=messages")
    if node == "sft":
        task = many(tmp_path, lambda n: {"messages": replied(n)})
    if node == "pairs":
        task = many(tmp_path, lambda n: {"prompt": asked(n), "chosen": "a", "rejected": "b"})
    if node == "rl":
        task = many(tmp_path, lambda n: {"prompt": asked(n), "answer": "a"})
    made = {
        "sft": lambda: Demonstrations(task, Policy("tiny")),
        "rl": lambda: PromptSource(task, Policy("tiny")),
        "pairs": lambda: PreferenceDataset(Preferences(task, Policy("tiny"))),
    }[node]()
    with pytest.raises(ConfigError, match="does not show; name a model or a --chat-template"):
        made.preflight()


def test_demonstrations_of_a_prompt_keep_their_own_tools(tmp_path: Path) -> None:
    other = {**ADD, "function": {**ADD["function"], "name": "sub"}}
    records = [{"prompt": "q", "answer": str(n), "tools": [tool]} for n in range(3) for tool in (ADD, other)]
    rows = load_demonstrations(written(tmp_path, records), whole=True)
    assert sorted((row.tools[0]["function"]["name"], row.answer) for row in (*rows.train, *rows.held_out)) == [
        (name, str(n)) for name in ("add", "sub") for n in range(3)
    ]
    assert len({row.prompt_id for row in (*rows.train, *rows.held_out)}) == 6

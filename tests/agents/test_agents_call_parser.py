"""Replies as messages: with response templates, without, and for any text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.agents import ChatTemplate, Conversation, ParsedReply, ReplyParser, reply_parser
from flowrl.agents.call_parser import ReplyParts, SampledText
from flowrl.agents.examination import shown_reply
from flowrl.environments import Action, ToolCall
from flowrl.errors import ConfigError
from flowrl.models.tokens.characters import character_tokenizer
from tests.agents.chat_templates import ADD, characters, merging, response_templates, templates, with_template

PARSERS = {
    "qwen2_5": "qwen3_template",
    "qwen3": "qwen3_template",
    "llama3_1": "llama3_template",
    "gptoss": "gptoss_template",
    "gemma4": "gemma4_template",
}
QUESTION = {"role": "user", "content": "a"}


def tokenizer_of(name: str, base: Any = None) -> Any:
    tokenizer = with_template(characters() if base is None else base, templates()[name])
    tokenizer.response_template = response_templates()[PARSERS[name]]
    return tokenizer


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"type": "function", "function": function}


def without_ids(parsed: ParsedReply) -> dict[str, Any]:
    calls = [{key: one[key] for key in ("type", "function")} for one in parsed.message.get("tool_calls", ())]
    return {**parsed.message, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("tokens", [characters, merging], ids=["characters", "merging"])
@pytest.mark.parametrize("name", PARSERS)
def test_a_sampled_call_is_fed_back_and_answered(name: str, tokens: Any) -> None:
    tokenizer = tokenizer_of(name, tokens())
    template = ChatTemplate(tokenizer, [ADD])
    sampled, _ = shown_reply(template, template.probe_call("mark7q"))
    conversation = Conversation(template)
    conversation.feed([QUESTION])
    parsed = reply_parser(tokenizer).parse(sampled, conversation.context(), [ADD])
    assert parsed.malformed == ""
    assert without_ids(parsed) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call('{"a": "mark7q"}')],
    }
    conversation.sampled(sampled, np.zeros(sampled.size), np.zeros(sampled.size), parsed.message)
    (made,) = Action.of_message(parsed.message).tool_calls
    assert made == ToolCall("add", {"a": "mark7q"}, parsed.message["tool_calls"][0]["id"])
    conversation.feed([{"role": "tool", "content": "Sum", "name": made.name, "tool_call_id": made.call_id}])
    assert "Sum" in template.decode(conversation.context())


REPLIES: list[tuple[str, str, Mapping[str, Any]]] = [
    ("qwen3", "hello<|im_end|>", {"content": "hello"}),
    ("qwen3", "hello", {"content": "hello"}),
    ("qwen3", "", {"content": ""}),
    ("qwen3", "<|im_end|>", {"content": ""}),
    ("qwen3", "<think>\nwhy\n</think>\n\nso<|im_end|>", {"content": "so", "reasoning_content": "why"}),
    ("qwen3", "<think>\nwhy", {"content": "", "reasoning_content": "why"}),
    (
        "qwen3",
        'hm<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "add", "arguments": {}}',
        {"content": "hm", "tool_calls": [call('{"a": 1}'), call("{}")]},
    ),
    (
        "qwen3",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": [1]}"}</tool_call>',
        {"content": "", "tool_calls": [call('{"a": [1]}')]},
    ),
    (
        "qwen3",
        f'<tool_call>{{"name": "add", "arguments": {{"a": {10**40}, "b": "\\ud800\\u00e9"}}}}</tool_call>',
        {"content": "", "tool_calls": [call(f'{{"a": {10**40}, "b": "?é"}}')]},
    ),
    (
        "gptoss",
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so<|return|>",
        {"content": "so", "thinking": "why"},
    ),
]


@pytest.mark.parametrize(("name", "reply", "expected"), REPLIES)
def test_a_reply_is_a_message(name: str, reply: str, expected: Mapping[str, Any]) -> None:
    tokenizer = tokenizer_of(name)
    context = ChatTemplate(tokenizer, [ADD]).render_text([QUESTION])
    parser = reply_parser(tokenizer)
    parsed = parser.parse(reply, context, [ADD])
    assert parsed.malformed == "" and without_ids(parsed) == {"role": "assistant", **expected}
    ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    assert without_ids(parser.parse(ids, context, [ADD])) == without_ids(parsed)
    parsed.message["content"].encode() and json.dumps(parsed.message).encode()


MALFORMED: list[tuple[str, str, str]] = [
    ("qwen3", "<tool_call>", "ValueError: json parser could not parse region as JSON"),
    ("qwen3", '<tool_call>{"name": "add"', "ValueError: json parser could not parse region as JSON"),
    ("qwen3", "<tool_call>3</tool_call>", "call 1 is '3'; it needs an object of name and arguments"),
    ("qwen3", '<tool_call>{"arguments": {}}</tool_call>', "the name of call 1 is 'None'; it needs text"),
    ("qwen3", '<tool_call>{"name": " ", "arguments": {}}</tool_call>', "the name of call 1 is ' '; it needs text"),
    ("qwen3", '<tool_call>{"name": "add"}</tool_call>', "the arguments of add are a NoneType; they need an object"),
    ("qwen3", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments of add are a list"),
    ("qwen3", '<tool_call>{"name": "add", "arguments": "{a"}</tool_call>', "JSONDecodeError: Expecting property name"),
    (
        "qwen3",
        f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 40}{"]" * 40}}}}}</tool_call>',
        "the arguments of add are nested deeper than 32",
    ),
    ("qwen3", f"<tool_call>{'[' * 100_000}", "RecursionError: maximum recursion depth exceeded"),
    ("qwen3", f'<tool_call>{{"name": "add", "arguments": {{"a": {"1" * 5000}}}}}</tool_call>', "ValueError: Exceeds"),
    ("qwen3", '<tool_call>{"name": "\\ud800", "arguments": 1}</tool_call>', "the arguments of ? are a int"),
    ("gptoss", "to=functions.add<|channel|>comm", "the text has none of the forms that a reply can have"),
]


@pytest.mark.parametrize(("name", "reply", "why"), MALFORMED)
def test_a_call_that_cannot_be_read_leaves_the_text_and_says_why(name: str, reply: str, why: str) -> None:
    parser = reply_parser(tokenizer_of(name))
    parsed = parser.parse(f"{reply}</s>", "", [ADD])
    assert parsed.malformed.startswith(why)
    assert parsed.message == {"role": "assistant", "content": reply}
    parsed.malformed.encode()
    assert parser.parse(f"{reply}</s>", "", ()) == ParsedReply({"role": "assistant", "content": reply})


def test_without_tools_nothing_is_a_call() -> None:
    reply = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parsed = reply_parser(tokenizer_of("qwen3")).parse(f"{reply}</s>", "", ())
    assert parsed == ParsedReply({"role": "assistant", "content": reply})


def test_a_tokenizer_without_a_parser_gives_content_alone() -> None:
    tokenizer = character_tokenizer()
    parser = reply_parser(tokenizer)
    ids = tokenizer("<|user|>12<|end|>")["input_ids"]
    for reply in (ids, np.array(ids, np.int32), "<|user|>12<|end|>"):
        assert parser.parse(reply, "", [ADD]) == ParsedReply({"role": "assistant", "content": "<|user|>12"})


def test_a_calls_id_is_the_same_each_time_and_another_elsewhere() -> None:
    parser = reply_parser(tokenizer_of("qwen3"))
    reply = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2

    def ids(context: str) -> list[str]:
        return [one["id"] for one in parser.parse(reply, context, [ADD]).message["tool_calls"]]

    assert ids("a") == ids("a") and len({*ids("a"), *ids("b")}) == 4
    assert all(len(one) == 9 and one.isalnum() for one in ids("a"))


def test_an_id_in_the_text_stays() -> None:
    def extract(sampled: SampledText) -> ReplyParts:
        return ReplyParts("", calls=[{**call("{}"), "id": "add:0"}, {**call("{}"), "id": "random"}])

    parser = ReplyParser(character_tokenizer(), extract)
    first, second = parser.parse("add:0 and another", "", [ADD]).message["tool_calls"]
    assert first["id"] == "add:0" and second["id"] != "random"


@pytest.mark.parametrize(
    ("template", "key"),
    [
        ("{{ m.reasoning_content }}", "reasoning_content"),
        ("{% if enable_thinking %}{{ m['reasoning'] }}{% endif %}", "reasoning"),
        ("{{ message.thinking }}", "thinking"),
        ("{% if enable_thinking %}{% endif %}", "reasoning_content"),
    ],
)
def test_reasoning_has_the_key_that_the_template_reads(template: str, key: str) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    parser = ReplyParser(tokenizer, lambda sampled: ReplyParts("b", "a"))
    assert parser.parse("ab", "").message == {"role": "assistant", "content": "b", key: "a"}


def test_a_response_template_that_cannot_be_used_is_refused() -> None:
    tokenizer = character_tokenizer()
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(ConfigError, match=r"response_template cannot be used .*; correct it"):
        reply_parser(tokenizer)


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": ',
        '"add"',
        ', "arguments": ',
        "{",
        "}",
        "[",
        "]",
        '"',
        "<think>",
        "</think>",
        "<|call|>",
        "to=functions.add",
        "<|channel|>",
        "commentary json",
        "<|message|>",
        "final",
        "<|im_end|>",
        "\n",
        "<|tool_call>call:add",
        "<tool_call|>",
        '<|"|>',
        "\\ud800",
        "1",
        "\\",
        "é",
        "null",
        '"parameters": ',
        "<|eot_id|>",
    ]
)


@pytest.fixture(scope="module")
def parsers() -> dict[str, ReplyParser]:
    return {name: reply_parser(tokenizer_of(name)) for name in PARSERS}


@settings(max_examples=300, deadline=None)
@given(text=st.lists(PIECES | st.text(max_size=5), max_size=20).map("".join))
def test_parsing_never_raises_and_what_it_gives_can_be_sent(parsers: dict[str, ReplyParser], text: str) -> None:
    for parser in parsers.values():
        parsed = parser.parse(text, "", [ADD])
        assert not (parsed.malformed and "tool_calls" in parsed.message)
        assert text or not parsed.malformed
        json.dumps([parsed.message, parsed.malformed], ensure_ascii=False).encode("utf-8", "surrogatepass")
        for made in Action.of_message(parsed.message).tool_calls:
            made.name.encode() and json.dumps(made.arguments, ensure_ascii=False).encode()

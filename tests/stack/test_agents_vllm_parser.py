"""vLLM's own parsers, by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.agents import ReplyParser, examine, parser_trial, reply_parser
from flowrl.agents.call_parser import parser_names
from flowrl.agents.parser_trial import examine_with_parsers, parsers_that_read
from flowrl.environments import Action
from flowrl.errors import ConfigError
from flowrl.models import Policy, load_tokenizer, resolve
from flowrl.models.tokens.characters import character_tokenizer
from tests import warm
from tests.agents.chat_templates import ADD, characters, templates, with_template

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]


def tokenizer() -> Any:
    found = character_tokenizer()
    found.add_tokens(TOKENS)
    return found


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


HERMES = '<tool_call>{"name": "add", "arguments": {"a": "1 2"}}</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1 2\n</parameter>\n</function>\n</tool_call>"
ONE_TWO = [call("add", '{"a": "1 2"}')]
READ: list[tuple[str, str | None, str, Mapping[str, Any], list[dict[str, Any]]]] = [
    ("hermes", None, f"hm {HERMES}", {"content": "hm "}, ONE_TWO),
    ("hermes", None, "hello", {"content": "hello"}, []),
    ("hermes", None, "", {"content": ""}, []),
    ("hermes", "deepseek_r1", f"why</think>so{HERMES}", {"content": "so", "reasoning_content": "why"}, ONE_TWO),
    ("hermes", "deepseek_r1", "why", {"content": "", "reasoning_content": "why"}, []),
    ("hermes", "deepseek_r1", "why</think>", {"content": "", "reasoning_content": "why"}, []),
    ("qwen3_coder", None, XML, {"content": ""}, ONE_TWO),
    ("qwen3_coder", "qwen3", f"why</think>{XML}", {"content": "", "reasoning_content": "why"}, ONE_TWO),
    ("qwen3_coder", "qwen3", "why</think>so", {"content": "so", "reasoning_content": "why"}, []),
    ("pythonic", None, '[add(a="1 2"), add(a="3")]', {"content": ""}, [*ONE_TWO, call("add", '{"a": "3"}')]),
    ("llama3_json", None, '{"name": "add", "parameters": {"a": "1 2"}}', {"content": ""}, ONE_TWO),
]


@pytest.mark.parametrize(("tool", "reasoning", "text", "says", "calls"), READ)
def test_a_reply_is_read(
    tool: str, reasoning: str | None, text: str, says: Mapping[str, Any], calls: list[dict[str, Any]]
) -> None:
    known = tokenizer()
    parser = reply_parser(known, tool_parser=tool, reasoning_parser=reasoning)
    ids = known(f"{text}<|end|>")["input_ids"]
    for reply in (text, f"{text}<|end|>", ids):
        parsed = parser.parse(reply, known("ab")["input_ids"], [ADD])
        found = dict(parsed.message)
        assert [one["function"] for one in found.pop("tool_calls", [])] == calls
        assert found == {"role": "assistant", **says} and parsed.malformed == ""
    assert parser.parse(ids, "ab", [ADD]) == parser.parse(ids, "ab", [ADD])


UNREAD: list[tuple[str, str | None, str, str]] = [
    ("hermes", None, '<tool_call>{"name": "add", "arg', "JSONDecodeError: Unterminated string"),
    ("hermes", None, "<tool_call>3</tool_call>", "TypeError: 'int' object is not subscriptable"),
    ("hermes", None, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments of add are a list"),
    ("pythonic", None, "[add(a=)]", "SyntaxError: invalid syntax"),
    ("llama3_json", None, '{"name": "add", "parameters": {"a": 1', "JSONDecodeError: Expecting ',' delimiter"),
    ("llama3_json", None, "<|python_tag|>add", "the text has '<|python_tag|>', and no call that could be read"),
    ("qwen3_coder", None, "hm <tool_call>\n<func", 'the call "<tool_call>\\n<func" is incomplete'),
    ("qwen3_coder", "qwen3", "why</think><tool_call><fu", 'the call "<tool_call><fu" is incomplete'),
]


@pytest.mark.parametrize(("tool", "reasoning", "text", "why"), UNREAD)
def test_a_call_that_cannot_be_read_says_why_and_is_not_logged(
    tool: str, reasoning: str | None, text: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parser = reply_parser(tokenizer(), tool_parser=tool, reasoning_parser=reasoning)
    capfd.readouterr()
    parsed = parser.parse(text, "", [ADD])
    assert parsed.malformed.startswith(why) and parsed.message == {"role": "assistant", "content": text}
    assert parser.parse(text, "", ()).malformed == ""
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("vllm.tool_parsers.hermes_tool_parser").filters == []


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"tool_parser": "herms"}, "vLLM has no tool_parser 'herms'; it has apertus, .*Did you mean hermes?"),
        ({"reasoning_parser": "r2"}, "vLLM has no reasoning_parser 'r2'; it has .*deepseek_r1"),
        ({"tool_parser": "hf"}, "tool_parser=hf is the tokenizer's response_template, which is the default"),
        ({"tool_parser": "openai"}, "do not parse a text .*; use a tokenizer with a response_template"),
        ({"tool_parser": "llama3_json"}, "cannot be used with this tokenizer .*could not locate the bot token"),
        ({"reasoning_parser": "deepseek_r1"}, "cannot be used with this tokenizer .*could not locate think"),
    ],
)
def test_a_parser_that_cannot_be_used_is_refused(names: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        reply_parser(character_tokenizer(), **names)


@pytest.mark.parametrize(
    ("name", "parser", "other"),
    [("qwen3", "hermes", "pythonic"), ("qwen2_5", "hermes", "qwen3_coder"), ("llama3_1", "llama3_json", "hermes")],
)
def test_preflight_renders_a_call_and_reads_it_back(name: str, parser: str, other: str) -> None:
    known = with_template(characters(), templates()[name])
    known.add_tokens(TOKENS)
    assert examine(known, [ADD], reply_parser(known, tool_parser=parser)).no_parsing == ""
    assert "add" in examine(known, [ADD], reply_parser(known, tool_parser=other)).no_parsing


@pytest.mark.timeout(600)  # vLLM takes long to import
def test_a_run_tries_the_generators_parsers_in_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parser_trial, "sys", SimpleNamespace(executable=warm.python()))
    with_template(tokenizer(), templates()["qwen2_5"]).save_pretrained(tmp_path)

    def tried(tool: str) -> str:
        return str(examine_with_parsers(Policy(str(tmp_path)), [ADD], tool_parser=tool, reasoning_parser=None))

    assert tried("hermes").endswith("A rendered tool call was parsed back by vLLM's tool_parser=hermes.")
    with pytest.raises(ConfigError, match="vLLM has no tool_parser 'herms'"):
        tried("herms")
    reading = parsers_that_read(Policy(str(tmp_path)), [ADD])
    assert reading[0] == "hermes" and "pythonic" not in reading


def test_the_names_that_are_read_from_the_source_are_those_that_vllm_registers() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert {*parser_names("tool_parser"), "hf"} == set(ToolParserManager.list_registered())
    assert {*parser_names("reasoning_parser"), "hf"} == {*ReasoningParserManager.list_registered(), "hf"}


def test_smollm2s_template_goes_with_no_call_and_its_tokenizer_with_hermes() -> None:
    known = load_tokenizer(resolve(Policy("smollm2")))
    ids = known(f"{HERMES}{known.eos_token}")["input_ids"]
    (found,) = reply_parser(known, tool_parser="hermes").parse(ids, "", [ADD]).message["tool_calls"]
    assert found["function"] == call("add", '{"a": "1 2"}')


@pytest.fixture(scope="module")
def parsers() -> dict[str, ReplyParser]:
    """All of vLLM's that this tokenizer can be parsed with."""
    from vllm.tool_parsers import ToolParserManager

    found = {}
    for name in ToolParserManager.list_registered():
        try:
            found[name] = reply_parser(tokenizer(), tool_parser=name)
        except ConfigError:
            continue
    assert len(found) >= 30 and {"hermes", "pythonic", "qwen3_coder", "kimi_k2"} <= found.keys()
    return found


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=add>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<arg_key>",
        "a",
        '{"name": ',
        '"add"',
        ', "arguments": ',
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "add(a=",
        "\\ud800",
        "1",
        "\n",
        "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>",
        "<|tool_calls_section_begin|>",
        "</think>",
    ]
)


@settings(max_examples=60, deadline=None)
@given(text=st.lists(PIECES | st.text(max_size=3), max_size=15).map("".join))
def test_parsing_never_raises_and_what_it_gives_can_be_sent(parsers: dict[str, ReplyParser], text: str) -> None:
    for parser in parsers.values():
        parsed = parser.parse(text, "", [ADD])
        assert not (parsed.malformed and "tool_calls" in parsed.message)
        for made in Action.of_message(parsed.message).tool_calls:
            made.name.encode() and json.dumps(made.arguments, ensure_ascii=False).encode()

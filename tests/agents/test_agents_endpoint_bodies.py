"""Bodies of calls: whatever a client sends is read, or refused with a 400 that names the field."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl.agents.endpoint.apis import AnthropicMessages, ApiCall, ChatCompletions, OpenAIResponses, TextCompletions
from flowrl.agents.endpoint.apis.api import ApiProblem
from flowrl.models.tokens.chat import Messages
from tests.agents.chat_templates import ADD
from tests.agents.endpoint_fuzz import fuzz
from tests.agents.endpoint_rig import an_endpoint

CALL = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": '{"a": "1 2"}'}}
BLOCKS = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "text", "text": "so"},
    {"type": "tool_use", "id": "call1", "name": "add", "input": {"a": "1 2"}},
]
RESULT = {"type": "tool_result", "tool_use_id": "call1", "content": [{"type": "text", "text": "3"}], "is_error": False}
INPUT = [
    {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
    {"type": "function_call", "call_id": "call1", "name": "add", "arguments": '{"a": "1 2"}'},
    {"type": "function_call_output", "call_id": "call1", "output": "3"},
]
SHARED = {"model": "policy", "temperature": 1, "top_p": 0.5, "stream": True, "metadata": {"a": "b"}}
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (
        ChatCompletions(),
        {
            **SHARED,
            "messages": [
                {"role": "developer", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [CALL]},
                {"role": "tool", "content": "3", "tool_call_id": "call1"},
            ],
            "tools": [ADD],
            "tool_choice": "auto",
            "n": 2,
            "stop": ["x"],
            "max_tokens": 5,
            "logprobs": True,
            "stream_options": {"include_usage": True},
            "logit_bias": {},
            "response_format": {"type": "text"},
        },
    ),
    "completions": (
        TextCompletions(),
        {**SHARED, "prompt": ["a", [1, 2]], "n": 2, "best_of": 2, "stop": "x", "logprobs": 0, "echo": False},
    ),
    "anthropic": (
        AnthropicMessages(),
        {
            **SHARED,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": BLOCKS},
                {"role": "user", "content": [RESULT, {"type": "text", "text": "well?"}]},
            ],
            "tools": [{"name": "add", "description": "d", "input_schema": ADD["function"]["parameters"]}],
            "tool_choice": {"type": "auto"},
            "max_tokens": 5,
            "stop_sequences": ["x"],
            "thinking": {"type": "disabled"},
        },
    ),
    "responses": (
        OpenAIResponses(),
        {
            **SHARED,
            "input": INPUT,
            "instructions": "s",
            "tools": [{"type": "function", "strict": None, **ADD["function"]}],
            "include": ["message.output_text.logprobs"],
            "previous_response_id": "resp_a",
            "text": {"format": {"type": "text"}},
            "max_output_tokens": 5,
        },
    ),
}


RESPONSES: Mapping[str, Messages] = {"a": [{"role": "user", "content": "before"}]}


def read(name: str, body: Mapping[str, Any]) -> ApiCall:
    api, _ = BODIES[name]
    return api.read_call(body, RESPONSES)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("prompt", "param"), [([], "prompt"), ([""], "prompt[0]"), (["a", []], "prompt[1]")])
def test_a_completion_without_a_prompt_names_it(prompt: Any, param: str) -> None:
    with pytest.raises(ApiProblem) as refused:
        read("completions", {"model": "policy", "prompt": prompt})
    assert (refused.value.status, refused.value.param) == (400, param)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """To every value within `value`."""
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from paths(inner, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    inner: Any = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


ANY = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.floats(allow_nan=False), st.text(max_size=3),
    st.lists(st.one_of(st.text(max_size=2), st.integers()), max_size=2),
    st.dictionaries(st.sampled_from(["type", "text", "role", "a"]), st.text(max_size=3), max_size=2),
)  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused(name: str, data: st.DataObject) -> None:
    _, body = BODIES[name]
    path = data.draw(st.sampled_from(list(paths(body))))
    try:
        call = read(name, changed(body, path, data.draw(ANY)))
    except ApiProblem as problem:
        assert problem.status in (400, 404) and problem.param
        assert problem.param.partition("[")[0].partition(".")[0] in {*body, "messages"}
    else:
        json.dumps([call.messages, call.tools])


@pytest.mark.parametrize("name", BODIES)
def test_every_field_that_is_not_known_is_refused_by_its_name(name: str) -> None:
    _, body = BODIES[name]
    with pytest.raises(ApiProblem, match="repetition_penalty is not known here; leave it out"):
        read(name, {**body, "repetition_penalty": 1.1})


def test_the_apis_read_the_same_conversation_alike() -> None:
    chat, anthropic, responses = (read(name, BODIES[name][1]) for name in ("chat", "anthropic", "responses"))
    system, user, assistant, tool = chat.messages
    assert system == {"role": "system", "content": "s"} and tool["content"] == "3"
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": "1 2"}
    assert anthropic.messages == [*chat.messages, {"role": "user", "content": "well?"}]
    assert responses.messages == [system, {"role": "user", "content": "before"}, user, assistant, tool]
    assert responses.kept == responses.messages[1:]
    assert chat.tools == responses.tools == [ADD]


@pytest.mark.parametrize("wrong", [None, [], True, "a", {"a": None}, {"a": "string"}])
def test_a_tool_whose_arguments_are_not_described_as_json_schema_is_named(wrong: Any) -> None:
    schema = {"type": "object", "properties": wrong}
    asked = {"model": "policy", "messages": [{"role": "user", "content": "q"}], "max_tokens": 5}
    function = {"name": "add", "parameters": schema}
    bodies = {
        "chat/completions": ({**asked, "tools": [{"type": "function", "function": function}]}, "function.parameters"),
        "messages": ({**asked, "tools": [{"name": "add", "input_schema": schema}]}, "input_schema"),
        "responses": ({"model": "policy", "input": "q", "tools": [{"type": "function", **function}]}, "parameters"),
    }

    async def scenario() -> None:
        async with an_endpoint() as rig, aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {rig.access.api_key}"}
            for path, (body, field) in bodies.items():
                async with http.post(f"{rig.endpoint.url}/v1/{path}", json=body, headers=headers) as answer:
                    text = await answer.text()
                assert answer.status == 400, text
                where = f"tools[0].{field}.properties" + (".a" if isinstance(wrong, dict) else "")
                assert f"{where} is " in text and "it needs an object" in text

    asyncio.run(scenario())


def test_no_damaged_request_is_answered_with_a_500() -> None:
    """`python -m tests.agents.endpoint_fuzz` sends more."""
    statuses, bad = asyncio.run(fuzz(1200, seed=20))
    assert not bad, bad[0]
    assert {200, 400} <= set(statuses) <= {200, 400, 404, 409, 413, 422} and statuses.total() == 1200

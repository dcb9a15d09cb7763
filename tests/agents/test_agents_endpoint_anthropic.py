"""The endpoint with Anthropic's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.agents.chat_templates import ADD
from tests.agents.endpoint_rig import EndpointRig, an_endpoint

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic  # 3,000 modules, imported by the tests that need them

pytestmark = pytest.mark.timeout(30)
ASK: list[Any] = [{"role": "user", "content": "7+5="}]
FUNCTION: Any = ADD["function"]
TOOL: Any = {
    "name": "add",
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
    "cache_control": {"type": "ephemeral"},
}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@asynccontextmanager
async def a_client(*answers: Any, **settings: Any) -> AsyncIterator[tuple[EndpointRig, AsyncAnthropic]]:
    from anthropic import AsyncAnthropic

    async with an_endpoint(*answers, **settings) as rig:
        access = rig.access
        async with AsyncAnthropic(base_url=access.anthropic_base_url, api_key=access.api_key, max_retries=0) as client:
            yield rig, client


async def message(client: AsyncAnthropic, messages: Any = ASK, **more: Any) -> Any:
    return await client.messages.create(model="policy", messages=messages, max_tokens=50, **more)


def thought(backend: Any) -> Any:
    calls = backend.called({"a": "7 5"}).message["tool_calls"]
    said = {"content": "so ", "reasoning_content": "hm", "tool_calls": calls}
    return backend.said("<think>hm</think>so CALL add", message=said, cached_tokens=3)


def test_a_tool_goes_round_with_the_sampled_ids() -> None:
    async def work() -> None:
        async with a_client(thought, "12") as (rig, client):
            first = await message(client, system=[{"type": "text", "text": "be short"}], tools=[TOOL])
            thinking, text, use = first.content
            assert (thinking.thinking, text.text, use.input, first.stop_reason) == (
                "hm",
                "so ",
                {"a": "7 5"},
                "tool_use",
            )
            asked = rig.backend.requests[0]
            assert asked.tools == [ADD] and asked.context.endswith(
                "<|system|>be short<|end|><|user|>7+5=<|end|><|assistant|>"
            )
            assert asked.max_tokens == 50
            assert first.usage.input_tokens + first.usage.cache_read_input_tokens == asked.context_ids.size
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "12"}]}
            answer = {"role": "user", "content": [result, {"type": "text", "text": "well?"}]}
            sent = [*ASK, {"role": "assistant", "content": [text.to_dict(), use.to_dict()]}, answer]
            second = await message(client, sent, system="be short", tools=[TOOL])
            assert (second.content[0].text, second.stop_reason) == ("12", "end_turn")
            added = "<think>hm</think>so CALL add<|end|><|user|>12<|end|><|user|>well?<|end|><|assistant|>"
            assert rig.backend.requests[1].context == asked.context + added
            assert len(rig.end().sequences) == 1

    run(work())


def test_a_stream_is_what_the_whole_message_is() -> None:
    async def work() -> None:
        async with a_client(thought) as (_, client):
            whole = await message(client, tools=[TOOL])
            async with client.messages.stream(model="policy", messages=ASK, max_tokens=50, tools=[TOOL]) as stream:
                streamed = await stream.get_final_message()
            assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
            assert [b.to_dict() for b in streamed.content[:2]] == [b.to_dict() for b in whole.content[:2]]
            assert streamed.content[2].input == whole.content[2].input == {"a": "7 5"}
            assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)

    run(work())


def test_a_stream_shows_signs_of_life_and_then_an_error() -> None:
    import anthropic

    async def work() -> None:
        async with a_client(RuntimeError("no such luck"), keep_alive_s=0.01) as (rig, client):
            rig.backend.gate = asyncio.Event()
            stream = await message(client, stream=True)
            rig.backend.gate.set()
            with pytest.raises(anthropic.APIStatusError, match="no such luck"):
                await anext(aiter(stream))

    run(work())


def test_how_a_message_ends() -> None:
    async def work() -> None:
        stopped = lambda b: b.said("12.", ended=False, stop_text=".")  # noqa: E731
        async with a_client(stopped, lambda b: b.said("1", ended=False)) as (rig, client):
            first = await message(client, stop_sequences=["."])
            assert (first.stop_reason, first.stop_sequence, first.content[0].text) == ("stop_sequence", ".", "12")
            assert rig.backend.requests[0].stop == (".",)
            assert (await message(client)).stop_reason == "max_tokens"

    run(work())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"extra_body": {"top_k": 5}}, "top_k=5 is not possible here"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking="),
    ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "tool_choice="),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config="),
    ({"extra_body": {"min_p": 0.1}}, "min_p is not known here"),
    ({"messages": [*ASK, {"role": "assistant", "content": "12"}]}, "flowrl does not continue a reply"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, r"content\[0\].type is 'image'"),
]


@pytest.mark.parametrize(("more", "told"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_trained_is_refused(more: dict[str, Any], told: str) -> None:
    import anthropic

    async def work() -> None:
        async with a_client() as (rig, client):
            with pytest.raises(anthropic.BadRequestError, match=told) as caught:
                await message(client, **{"messages": ASK, **more})
            assert caught.value.type == "invalid_request_error" and rig.backend.requests == []

    run(work())


def test_models_and_keys() -> None:
    import anthropic

    async def work() -> None:
        async with a_client() as (rig, client):
            assert [model.id async for model in client.models.list()] == ["policy"]
            with pytest.raises(anthropic.NotFoundError, match="'claude' is not served here; use policy"):
                await client.messages.create(model="claude", messages=ASK, max_tokens=5)
            other = client.copy(api_key="mine.wrong")
            with pytest.raises(anthropic.AuthenticationError, match="this key is not known"):
                await message(other)
            rig.end()
            with pytest.raises(anthropic.ConflictError, match="the session mine has ended"):
                await message(client)

    run(work())

"""The endpoint with OpenAI's own client: chat, tools, streams, completions and responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.agents.chat_templates import ADD
from tests.agents.endpoint_rig import EndpointRig, an_endpoint

pytestmark = pytest.mark.timeout(30)
ASK: list[Any] = [{"role": "user", "content": "7+5="}]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@asynccontextmanager
async def a_client(*answers: Any, **settings: Any) -> AsyncIterator[tuple[EndpointRig, AsyncOpenAI]]:
    async with an_endpoint(*answers, **settings) as rig:
        access = rig.access
        async with AsyncOpenAI(base_url=access.openai_base_url, api_key=access.api_key, max_retries=0) as client:
            yield rig, client


async def chat(client: AsyncOpenAI, messages: Any = ASK, **more: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **more)


def test_a_chat_goes_on_with_the_sampled_ids_and_trains_them_once() -> None:
    async def work() -> None:
        async with a_client(lambda b: b.said("12 "), "right") as (rig, client):
            first = await chat(client)
            said = first.choices[0].message
            assert (said.content, first.choices[0].finish_reason) == ("12 ", "stop")
            assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (7, 4)
            await chat(client, [*ASK, {"role": "assistant", "content": "12"}, {"role": "user", "content": "sure?"}])
            assert (
                rig.backend.requests[1].context
                == "<|user|>7+5=<|end|><|assistant|>12 <|end|><|user|>sure?<|end|><|assistant|>"
            )
            finished = rig.end()
            (sequence,) = finished.sequences
            assert rig.text(sequence.token_ids[sequence.policy_mask]) == "12 <|end|>right<|end|>"
            assert finished.request_ids == ("request-1", "request-2") and finished.reward == 1.0
            assert rig.sessions.done == [finished]

    run(work())


def test_a_tool_call_goes_round() -> None:
    async def work() -> None:
        async with a_client(lambda b: b.called({"a": "7 5"}, {"a": "1 2"}, text="so "), "12") as (rig, client):
            first = await chat(client, tools=[ADD])
            said = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls" and said.content == "so "
            assert [json.loads(call.function.arguments) for call in said.tool_calls] == [{"a": "7 5"}, {"a": "1 2"}]
            results = [{"role": "tool", "content": "12", "tool_call_id": call.id} for call in said.tool_calls]
            second = await chat(client, [*ASK, said.to_dict(), *results], tools=[ADD])
            assert second.choices[0].message.content == "12"
            first_asked, second_asked = rig.backend.requests
            assert second_asked.tools == [ADD] and "Adds two numbers." in second_asked.context
            assert second_asked.context.startswith(f"{first_asked.context}so CALL add {{'a': '7 5'}}")
            (sequence,) = rig.end().sequences
            assert sequence.policy_mask.sum() == len("so CALL add {'a': '7 5'}CALL add {'a': '1 2'}") + 1 + 3

    run(work())


def test_a_stream_is_what_the_whole_answer_is() -> None:
    async def work() -> None:
        answers = (lambda b: b.called({"a": "7 5"}, text="so "),)
        async with a_client(*answers) as (_, client):
            whole = await chat(client, tools=[ADD], logprobs=True)
            async with client.chat.completions.stream(
                model="policy", messages=ASK, tools=[ADD], logprobs=True, stream_options={"include_usage": True}
            ) as stream:
                streamed = await stream.get_final_completion()
            assert streamed.usage == whole.usage
            one, other = streamed.choices[0], whole.choices[0]
            assert one.finish_reason == other.finish_reason and one.logprobs.content == other.logprobs.content
            assert one.message.content == other.message.content
            assert one.message.tool_calls[0].function.arguments == other.message.tool_calls[0].function.arguments

    run(work())


def test_a_stream_shows_signs_of_life_until_its_reply_is_complete() -> None:
    async def work() -> None:
        async with a_client(keep_alive_s=0.01) as (rig, client):
            rig.backend.gate = asyncio.Event()
            async with client.chat.completions.with_streaming_response.create(
                model="policy", messages=ASK, stream=True
            ) as response:
                lines = response.iter_lines()
                assert await anext(lines) == ": waiting for the reply"
                rig.backend.gate.set()
                data = [line async for line in lines if line.startswith("data: ")]
            assert json.loads(data[0][6:])["choices"][0]["delta"]["content"] == "yes" and data[-1] == "data: [DONE]"

    run(work())


def test_an_error_after_the_first_sign_of_life_is_an_event() -> None:
    async def work() -> None:
        async with a_client(RuntimeError("no such luck"), keep_alive_s=0.01) as (rig, client):
            rig.backend.gate = asyncio.Event()
            stream = await chat(client, stream=True)
            rig.backend.gate.set()
            with pytest.raises(openai.APIError, match="sampling failed: RuntimeError: no such luck"):
                await anext(aiter(stream))

    run(work())


def test_several_replies_are_siblings() -> None:
    async def work() -> None:
        async with a_client("a", "b", "c") as (rig, client):
            answer = await chat(client, n=3)
            assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
            assert answer.usage.prompt_tokens == 7 and answer.usage.completion_tokens == 6
            await chat(client, [*ASK, answer.choices[1].message.to_dict(), {"role": "user", "content": "on"}])
            masked = [rig.text(s.token_ids[s.policy_mask]) for s in rig.end().sequences]
            assert masked == ["a<|end|>", "b<|end|>c<|end|>", "c<|end|>"]

    run(work())


def test_stop_limits_and_logprobs() -> None:
    async def work() -> None:
        async with a_client(
            lambda b: b.said("12.", ended=False, stop_text="."), lambda b: b.said("1", ended=False)
        ) as (
            rig,
            client,
        ):
            first = await chat(client, stop=["."], logprobs=True, max_completion_tokens=9)
            assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("12", "stop")
            content = first.choices[0].logprobs.content
            assert [(one.token, one.logprob) for one in content] == [("1", -0.125), ("2", -0.25), (".", -0.375)]
            assert (rig.backend.requests[0].stop, rig.backend.requests[0].max_tokens) == ((".",), 9)
            raw = await client.chat.completions.with_raw_response.create(
                model="policy", messages=ASK, max_tokens=5000, temperature=0.1, top_p=0.2
            )
            assert raw.parse().choices[0].finish_reason == "length" and rig.backend.requests[1].max_tokens == 100
            assert raw.headers["x-flowrl-sampling"] == "temperature=1.0, top_p=1.0"
            assert raw.headers["x-flowrl-max-tokens"] == "100"
            long = [{"role": "user", "content": "x" * 1953}]
            await chat(client, long)
            assert rig.backend.requests[2].context_ids.size == 1956 and rig.backend.requests[2].max_tokens == 44

    run(work())


def test_completions_go_on_from_text_and_from_ids() -> None:
    async def work() -> None:
        async with a_client("ab", lambda b: b.said("cd;", ended=False, stop_text=";"), "ef", "gh") as (rig, client):
            first = await client.completions.create(model="policy", prompt=["x", "y"], logprobs=0)
            assert [choice.text for choice in first.choices] == ["ab", "cd"] and first.usage.prompt_tokens == 2
            assert first.choices[0].logprobs.tokens == ["a", "b", "<|end|>"]
            await client.completions.create(model="policy", prompt="ycd;more", stop=";")
            ids = rig.backend.requests[2].context_ids.tolist()
            assert rig.backend.requests[2].context == "ycd;more"
            await client.completions.create(
                model="policy", prompt=[*ids, *rig.backend.said("ef").token_ids.tolist(), 40]
            )
            masked = [rig.text(s.token_ids[s.policy_mask]) for s in rig.end().sequences]
            assert masked == ["ab<|end|>", "cd;ef<|end|>gh<|end|>"]

    run(work())


def test_a_stream_of_a_completion() -> None:
    async def work() -> None:
        async with a_client("ab") as (_, client):
            stream = await client.completions.create(model="policy", prompt="x", stream=True)
            chunks = [chunk async for chunk in stream]
            assert [(c.choices[0].text, c.choices[0].finish_reason) for c in chunks] == [("ab", "stop")]

    run(work())


RESPONSE_TOOL: Any = {"type": "function", "strict": None, **ADD["function"]}


def test_responses_with_tools_and_items_sent_back() -> None:
    async def work() -> None:
        answers = (lambda b: b.called({"a": "7 5"}, text="so "), "12")
        async with a_client(*answers) as (rig, client):
            first = await client.responses.create(
                model="policy", input="7+5=", instructions="be short", tools=[RESPONSE_TOOL]
            )
            text, call = first.output
            assert first.output_text == "so " and (call.name, json.loads(call.arguments)) == ("add", {"a": "7 5"})
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
            sent = [{"role": "user", "content": "7+5="}, text.to_dict(), call.to_dict(), result]
            second = await client.responses.create(
                model="policy", input=sent, instructions="be short", tools=[RESPONSE_TOOL]
            )
            assert second.output_text == "12" and second.status == "completed"
            assert second.usage.output_tokens == 3
            assert rig.backend.requests[1].context.startswith(rig.backend.requests[0].context)
            assert len(rig.end().sequences) == 1

    run(work())


def test_a_response_is_gone_on_from_by_its_id() -> None:
    async def work() -> None:
        async with a_client(lambda b: b.said("12", ended=False), "sure") as (rig, client):
            first = await client.responses.create(model="policy", input="7+5=")
            assert first.status == "incomplete" and first.incomplete_details.reason == "max_output_tokens"
            await client.responses.create(model="policy", input="sure?", previous_response_id=first.id)
            assert (
                rig.backend.requests[1].context
                == "<|user|>7+5=<|end|><|assistant|>12<|end|><|user|>sure?<|end|><|assistant|>"
            )
            with pytest.raises(openai.NotFoundError, match="has no response resp_other"):
                await client.responses.create(model="policy", input="sure?", previous_response_id="resp_other")

    run(work())


def test_a_stream_of_a_response() -> None:
    async def work() -> None:
        message = {"content": "so ", "reasoning_content": "hm", "tool_calls": []}

        def thought(backend: Any) -> Any:
            called = backend.called({"a": "7 5"}, text="so ").message["tool_calls"]
            return backend.said("x", message={**message, "tool_calls": called})

        async with a_client(thought) as (_, client):
            include: Any = ["message.output_text.logprobs"]
            whole = await client.responses.create(model="policy", input="a", tools=[RESPONSE_TOOL], include=include)
            async with client.responses.stream(
                model="policy", input="a", tools=[RESPONSE_TOOL], include=include
            ) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
            assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
            assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
            assert final.output_text == whole.output_text == "so "
            assert final.output[1].content[0].logprobs == whole.output[1].content[0].logprobs
            assert [event.sequence_number for event in events if hasattr(event, "sequence_number")]
            assert events[0].type == "response.created" and events[-1].type == "response.completed"

    run(work())


def test_models() -> None:
    async def work() -> None:
        async with a_client(models=("policy", "gpt-5")) as (_, client):
            assert [model.id async for model in client.models.list()] == ["policy", "gpt-5"]
            assert (await client.models.retrieve("gpt-5")).id == "gpt-5"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("gpt-4")

    run(work())

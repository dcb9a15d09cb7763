"""What harnesses send and expect beyond the plain use of an SDK: each once broke, or could not be served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.agents.chat_templates import ADD
from tests.agents.endpoint_rig import EndpointRig, an_endpoint

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic  # 3,000 modules, imported by the tests that need them

pytestmark = pytest.mark.timeout(30)
ASK: list[Any] = [{"role": "user", "content": "7+5="}]
STRICT_RESPONSE_TOOL: Any = {"type": "function", **ADD["function"], "strict": True}


def with_openai(work: Callable[[EndpointRig, AsyncOpenAI], Awaitable[None]], *answers: Any, **settings: Any) -> None:
    async def life() -> None:
        async with an_endpoint(*answers, **settings) as rig:
            access = rig.access
            async with AsyncOpenAI(base_url=access.openai_base_url, api_key=access.api_key, max_retries=0) as client:
                await work(rig, client)

    asyncio.run(life())


def with_anthropic(
    work: Callable[[EndpointRig, AsyncAnthropic], Awaitable[None]], *answers: Any, **settings: Any
) -> None:
    from anthropic import AsyncAnthropic

    async def life() -> None:
        async with an_endpoint(*answers, **settings) as rig:
            url, key = rig.access.anthropic_base_url, rig.access.api_key
            async with AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
                await work(rig, client)

    asyncio.run(life())


@pytest.mark.parametrize("as_blocks", [True, False])
def test_a_billing_header_that_changes_with_every_call_is_no_prompt(as_blocks: bool) -> None:
    async def work(rig: EndpointRig, client: AsyncAnthropic) -> None:
        messages: list[Any] = list(ASK)
        for number in range(3):
            header = f"x-anthropic-billing-header: cc_version=2; cch={number};"
            blocks: Any = [{"type": "text", "text": header}, {"type": "text", "text": "be short"}]
            system = blocks if as_blocks else f"{header}\nbe short"
            said = await client.messages.create(model="policy", messages=messages, max_tokens=9, system=system)
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "on"}]
        assert rig.backend.requests[0].context.startswith("<|system|>be short<|end|><|user|>7+5=")
        assert len(rig.end().sequences) == 1

    with_anthropic(work, "one", "two", "three")


def test_tools_that_ask_to_be_followed_strictly_are_served_and_a_header_says_that_they_need_not_be() -> None:
    async def work(rig: EndpointRig, client: AsyncOpenAI) -> None:
        strict: Any = {"type": "function", "function": {**ADD["function"], "strict": True}}
        chat = await client.chat.completions.with_raw_response.create(model="policy", messages=ASK, tools=[strict])
        assert chat.headers["x-flowrl-strict-tools"] == "not enforced" and rig.backend.requests[0].tools == [ADD]
        plain = await client.chat.completions.with_raw_response.create(model="policy", messages=ASK, tools=[ADD])
        assert "x-flowrl-strict-tools" not in plain.headers
        response = await client.responses.with_raw_response.create(
            model="policy", input="a", tools=[STRICT_RESPONSE_TOOL]
        )
        assert response.headers["x-flowrl-strict-tools"] == "not enforced"
        wrong: Any = {"type": "function", "function": {**ADD["function"], "strict": "yes"}}
        with pytest.raises(
            openai.BadRequestError, match=r"tools\[0\].function.strict is 'yes'; it needs true or false"
        ):
            await client.chat.completions.create(model="policy", messages=ASK, tools=[wrong])

    with_openai(work)


def test_anthropics_tool_runner_goes_on_without_conversations_kept_by_the_server() -> None:
    from anthropic import beta_async_tool

    @beta_async_tool
    async def add(a: str) -> str:
        """Adds two numbers.

        Args:
            a: Both of them.
        """
        return str(sum(int(one) for one in a.split()))

    async def work(rig: EndpointRig, client: AsyncAnthropic) -> None:
        runner = client.beta.messages.tool_runner(model="policy", messages=ASK, max_tokens=50, tools=[add])
        last = await runner.until_done()
        assert last.content[0].text == "12"  # type: ignore[union-attr]
        assert "<|user|>12<|end|>" in rig.backend.requests[-1].context
        assert len(rig.end().sequences) == 1

    with_anthropic(work, lambda backend: backend.called({"a": "7 5"}), "12")


@pytest.mark.parametrize("known_by", ["prompt is too long", "this model's maximum context length is 12 tokens"])
def test_a_full_context_is_told_in_the_words_that_harnesses_look_for(known_by: str) -> None:
    import anthropic

    async def with_chat(rig: EndpointRig, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=known_by) as caught:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "12345678901"}])
        assert caught.value.code == "context_length_exceeded"

    async def with_messages(rig: EndpointRig, client: AsyncAnthropic) -> None:
        with pytest.raises(anthropic.BadRequestError, match=known_by):
            await client.messages.create(
                model="policy", max_tokens=5, messages=[{"role": "user", "content": "12345678901"}]
            )

    with_openai(with_chat, context_tokens=12)
    with_anthropic(with_messages, context_tokens=12)


def test_of_replies_that_say_the_same_the_one_with_the_reasoning_sent_back_goes_on() -> None:
    def thought(reasoning: str) -> Any:
        message = {"content": "12", "reasoning_content": reasoning}
        return lambda backend: backend.said(f"<think>{reasoning}</think>12", message=message)

    async def work(rig: EndpointRig, client: AsyncOpenAI) -> None:
        first, second = [await client.responses.create(model="policy", input="7+5=") for _ in range(2)]
        for response, reasoning in ((second, "B"), (first, "A")):
            await client.responses.create(model="policy", input="sure?", previous_response_id=response.id)
            assert f"<think>{reasoning}</think>12<|end|>" in rig.backend.requests[-1].context
        back = {"role": "assistant", "content": "12", "reasoning_content": "B"}
        messages: list[Any] = [*ASK, back, {"role": "user", "content": "go"}]
        await client.chat.completions.create(model="policy", messages=messages)
        assert "<think>B</think>12<|end|>" in rig.backend.requests[-1].context
        without = [*ASK, {"role": "assistant", "content": "12"}, {"role": "user", "content": "go"}]
        await client.chat.completions.create(model="policy", messages=without)  # type: ignore[arg-type]
        assert "<think>A</think>12<|end|>" in rig.backend.requests[-1].context

    with_openai(work, thought("A"), thought("B"), "yes")


def test_a_reply_that_comes_back_with_its_stop_text_is_the_same_reply() -> None:
    async def work(rig: EndpointRig, client: AsyncOpenAI) -> None:
        first = await client.chat.completions.create(model="policy", messages=ASK, stop=["</code>"])
        assert first.choices[0].message.content == "print(1)"
        back = {"role": "assistant", "content": "print(1)</code>"}
        messages: list[Any] = [*ASK, back, {"role": "user", "content": "Observation: 1"}]
        await client.chat.completions.create(model="policy", messages=messages)
        assert "print(1)</code><|user|>" in rig.backend.requests[1].context.replace("<|end|>", "")
        assert len(rig.end().sequences) == 1

    with_openai(work, lambda backend: backend.said("print(1)</code>", ended=False, stop_text="</code>"), "two")


def test_what_stateless_clients_of_responses_ask_for_is_taken() -> None:
    async def work(rig: EndpointRig, client: AsyncOpenAI) -> None:
        include: Any = ["reasoning.encrypted_content"]
        reasoning: Any = {"effort": None, "summary": "auto"}
        text: Any = {"format": {"type": "text"}, "verbosity": None}
        said = await client.responses.create(
            model="policy", input="7+5=", store=False, include=include, reasoning=reasoning, text=text, instructions=""
        )
        assert said.output_text == "yes" and rig.backend.requests[0].context.startswith("<|user|>7+5=")
        with pytest.raises(openai.BadRequestError, match="include has 'everything', which is not known here"):
            await client.responses.create(model="policy", input="a", include=["everything"])  # type: ignore[list-item]
        with pytest.raises(openai.BadRequestError, match="reasoning="):
            await client.responses.create(model="policy", input="a", reasoning={"effort": "low"})

    with_openai(work)


def test_tokens_are_counted_without_a_trace_in_the_session() -> None:
    import anthropic

    async def work(rig: EndpointRig, client: AsyncAnthropic) -> None:
        tool: Any = {"name": "add", "input_schema": ADD["function"]["parameters"]}  # type: ignore[index]
        few = await client.messages.count_tokens(model="policy", messages=ASK)
        more = await client.messages.count_tokens(model="policy", messages=ASK, tools=[tool], system="be short")
        await client.messages.create(model="policy", messages=ASK, max_tokens=5)
        assert few.input_tokens == rig.backend.requests[0].context_ids.size < more.input_tokens
        with pytest.raises(anthropic.NotFoundError, match="'claude' is not served here"):
            await client.messages.count_tokens(model="claude", messages=ASK)
        assert len(rig.end().sequences) == 1

    with_anthropic(work)

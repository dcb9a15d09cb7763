"""The endpoint in front of the table that nodes with agents have, whose replies a script gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from flowrl import Graph
from flowrl.agents.endpoint import AgentEndpoint, EndpointSettings, SessionAccess
from flowrl.environments import EnvironmentFailed
from flowrl.errors import LaneFailed, OutOfService
from flowrl.messages.episode import Reply, Turn
from flowrl.models import Policy
from flowrl.nodes import AgentProgram, Generator, Sampling
from flowrl.nodes.episodes.agent_calls import AgentCalls, AgentCallTable, CallLog
from flowrl.nodes.episodes.attempt import AskedTurn
from flowrl.testing.rollouts import prompt
from tests.agents.endpoint_rig import tool_tokenizer

ASK = {"model": "policy", "messages": [{"role": "user", "content": "7+5="}]}
TOKENIZER = tool_tokenizer()
Ask = Callable[[Turn], Awaitable[Reply]]


def turn(asked: AskedTurn) -> Turn:
    return Turn(
        request_id=f"g:0/0.{asked.turn}",
        sample_id="g:0",
        group_id="g",
        turn=asked.turn,
        attempt=0,
        ticket=3,
        seed=1,
        token_ids=asked.token_ids,
        max_tokens=asked.max_tokens,
        stop=asked.stop,
        tools=asked.tools,
    )


async def answered(asked: Turn) -> Reply:
    ids = np.array(TOKENIZER("12<|end|>")["input_ids"], np.int32)
    return Reply(
        request_id=asked.request_id,
        token_ids=ids,
        behavior_logprobs=np.zeros(ids.size, np.float32),
        versions=np.zeros(ids.size, np.int32),
        finish_reason="stop",
        message={"role": "assistant", "content": "12"},
        malformed="",
        cached_tokens=0,
        queued_s=0.0,
        generated_s=0.0,
        generator="generator/0",
    )


def calls(ask: Ask, **more: Any) -> AgentCalls:
    chosen = {"log": CallLog(observation_bytes=64), "abandon": lambda *_: None} | more
    return AgentCalls(most_turns=99, turn=turn, ask=ask, **chosen)


@asynccontextmanager
async def an_endpoint(**settings: Any) -> AsyncIterator[tuple[AgentCallTable, AgentEndpoint]]:
    table = AgentCallTable(TOKENIZER)
    chosen = EndpointSettings(context_tokens=2000, turn_tokens=100, **settings)
    async with AgentEndpoint(table, table, TOKENIZER, chosen) as endpoint:
        yield table, endpoint


async def chat(client: httpx.AsyncClient, access: SessionAccess, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {access.api_key}"}
    return await client.post(f"{access.openai_base_url}/chat/completions", json={**ASK, **body}, headers=headers)


def resumed(log: CallLog) -> CallLog:
    """The log of a run that goes on from a checkpoint of `log`."""
    return CallLog(log.make_record(), observation_bytes=64)


def context(*ids: int) -> np.ndarray[Any, Any]:
    return np.array(ids, np.int32)


async def called(own: AgentCalls, *ids: int) -> Reply:
    return await own.reply_to_call(context(*ids), 5, (), ())


def test_a_program_of_a_resumed_run_gets_the_replies_that_it_had_and_the_open_call_its_tokens() -> None:
    async def life() -> None:
        asked: list[Turn] = []

        async def note(turn: Turn) -> Reply:
            asked.append(turn)
            return await answered(turn)

        async def never(turn: Turn) -> Reply:
            await asyncio.Event().wait()
            raise AssertionError

        log = CallLog(observation_bytes=64)
        before = calls(note, log=log)
        first = await called(before, 1, 2)
        second = asyncio.ensure_future(called(calls_after(before, never), 1, 2, 3))
        await asyncio.sleep(0.01)  # until the call is open
        record = replace(log.make_record(), prefix_token_ids=context(7))
        second.cancel()
        assert (record.asked, record.request_ids) == ("g:0/0.1", ("g:0/0.0",))

        again = calls(note, log=resumed(CallLog(record, observation_bytes=64)))  # which ended before a call, too
        del asked[:]
        assert (await called(again, 1, 2)).token_ids.tolist() == first.token_ids.tolist() and not asked
        assert again.replies.keys() == {"g:0/0.0"} == again.figures.keys()
        await called(again, 1, 2, 3)
        assert [(turn.request_id, turn.prefix_token_ids.tolist()) for turn in asked] == [("g:0/0.1", [7])]

        third = calls(note, log=resumed(again._log))
        del asked[:]
        for ids in ((1, 2), (1, 2, 3), (5,)):
            await called(third, *ids)
        assert [turn.request_id for turn in asked] == ["g:0/0.2"]

    def calls_after(own: AgentCalls, ask: Ask) -> AgentCalls:
        own._ask = ask
        return own

    asyncio.run(life())


def test_the_replies_of_calls_that_overlap_are_known_by_their_numbers() -> None:
    async def life() -> None:
        gates = [asyncio.Event(), asyncio.Event()]

        async def gated(turn: Turn) -> Reply:
            await gates[turn.turn].wait()
            return replace(await answered(turn), generator=f"of {turn.turn}")

        log = CallLog(observation_bytes=64)
        own = calls(gated, log=log)
        both = [asyncio.ensure_future(called(own, 1)), asyncio.ensure_future(called(own, 2))]
        await asyncio.sleep(0.01)  # until both are open
        gates[1].set()
        await both[1]
        assert (log.make_record().request_ids, log.make_record().asked) == (("g:0/0.1",), "")
        gates[0].set()
        await both[0]

        again = calls(answered, log=resumed(log))
        assert [(await called(again, n)).generator for n in (1, 2)] == ["of 0", "of 1"]

    asyncio.run(life())


def test_a_call_with_another_limit_is_another_call_and_ends_the_attempt_for_all_others() -> None:
    async def life() -> None:
        log = CallLog(observation_bytes=64)
        await called(calls(answered, log=log), 1, 2)
        again = calls(answered, log=resumed(log))
        for _ in range(2):
            with pytest.raises(EnvironmentFailed, match="call 0 of the program is not the one that it was before"):
                await again.reply_to_call(context(1, 2), 6, (), ())
        assert not again.replies and resumed(log).calls_left == 1

    asyncio.run(life())


@pytest.mark.parametrize("what", ["a call that was answered", "the open call", "a call that was given up"])
def test_a_program_that_goes_on_otherwise_than_before_voids_the_attempt(what: str) -> None:
    async def life() -> None:
        async def never(turn: Turn) -> Reply:
            await asyncio.Event().wait()
            raise AssertionError

        log = CallLog(observation_bytes=64)
        own = calls(answered if what == "a call that was answered" else never, log=log)
        call = asyncio.ensure_future(called(own, 1, 2))
        await asyncio.sleep(0.01)  # until it is open or answered
        if what == "a call that was given up":
            next(iter(own._open)).cancel()
        if what != "the open call":
            await asyncio.wait({call})
        after = resumed(log)
        call.cancel()
        given_up = what == "a call that was given up"
        async with an_endpoint() as (table, endpoint), httpx.AsyncClient() as client:
            again = calls(answered, log=after)
            access = endpoint.open_session(table.begin_session(again))
            if given_up:
                with pytest.raises(EnvironmentFailed, match="call 0 of the program was given up"):
                    await called(again, 1, 2)
            else:
                response = await chat(client, access)  # another context than 1, 2
                assert response.status_code == 503 and "is not the one that it was before" in response.text
            failure = again.broken.exception()
            assert isinstance(failure, EnvironmentFailed)
            assert failure.cause == ("resumed" if given_up else "replay_differs")

    asyncio.run(life())


@pytest.mark.parametrize("gone", [OutOfService("no replica left"), LaneFailed("generator.turns failed")])
def test_a_call_that_no_generator_can_answer_is_unavailable(gone: Exception) -> None:
    async def life() -> None:
        async def nobody(asked: Turn) -> Reply:
            raise gone

        async with an_endpoint() as (table, endpoint), httpx.AsyncClient() as client:
            own = calls(nobody)
            response = await chat(client, endpoint.open_session(table.begin_session(own)))
            assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
            assert f"no generator can answer, and the run ends: {gone}" in response.json()["error"]["message"]
            assert own.broken.exception() is gone, "the attempt, and so the run, ends with it"

    asyncio.run(life())


def test_a_session_with_as_many_calls_as_it_may_have_is_told_to_wait() -> None:
    async def life() -> None:
        arrived, gate = asyncio.Semaphore(0), asyncio.Event()

        async def late(asked: Turn) -> Reply:
            arrived.release()
            await gate.wait()
            return await answered(asked)

        async with an_endpoint(session_calls=2) as (table, endpoint), httpx.AsyncClient() as client:
            access = endpoint.open_session(table.begin_session(calls(late)))
            open_calls = [asyncio.ensure_future(chat(client, access, max_tokens=size)) for size in (5, 6)]
            for _ in open_calls:
                await arrived.acquire()
            third = await chat(client, access, max_tokens=7)
            assert (third.status_code, third.headers["Retry-After"]) == (429, "1")
            gate.set()
            assert [one.status_code for one in await asyncio.gather(*open_calls)] == [200, 200]
            assert (await chat(client, access, max_tokens=7)).status_code == 200

    asyncio.run(life())


def program(**more: Any) -> AgentProgram:
    """One whose calls a generator answers that samples with 0.7 in training, and with a top_p of 0.5 for evaluation."""
    training, held_out = Sampling(temperature=0.7, max_tokens=9), Sampling(temperature=0.25, max_tokens=9, top_p=0.5)
    graph = Graph("agents")
    agents = graph.add("agents", AgentProgram(Policy("tiny"), agent="a.py:f", **more))
    graph.call(
        agents.generate, graph.add("generator", Generator(Policy("tiny"), sampling=training, evaluation=held_out)).turns
    )
    return agents


@pytest.mark.parametrize("stream", [False, True])
def test_agents_are_told_how_their_own_session_is_sampled(stream: bool) -> None:
    agents: Any = program()
    agents.generate.ask_turn = answered
    agents.context = type("Context", (), {"ledger": type("Ledger", (), {"abandoned": None})})

    async def told(ticket: int) -> str:
        settings = {"temperature": agents.sampling.temperature, "top_p": agents.sampling.top_p}
        async with an_endpoint(**settings) as (table, endpoint), httpx.AsyncClient() as client:
            access = endpoint.open_session(
                table.begin_session(agents._new_calls(prompt(0), CallLog(observation_bytes=64), ticket))
            )
            return str((await chat(client, access, stream=stream)).headers["x-flowrl-sampling"])

    assert asyncio.run(told(3)) == "temperature=0.7, top_p=1.0"
    assert asyncio.run(told(-1)) == "temperature=0.25, top_p=0.5", "a held-out episode"


def test_a_sampling_that_is_not_the_generators_is_refused() -> None:
    assert program().check(None) == program(sampling=Sampling(temperature=0.7, max_tokens=9)).check(None) == []
    problems = program(sampling=Sampling(temperature=1.0, max_tokens=9)).check(None)
    assert problems == [
        "sampling has temperature=1.0, but generator, which answers, has 0.7; leave sampling out; agents then get "
        "the generator's"
    ]

"""Turns of episodes at a generator; vLLM is a function that answers with letters."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from flowrl.agents import reply_parser
from flowrl.errors import OutOfService
from flowrl.messages.episode import Reply, Turn
from flowrl.messages.sampling import Sampling
from flowrl.models import Policy
from flowrl.models.tokens.characters import tool_tokenizer
from flowrl.nodes.generation.completions import Completion
from flowrl.nodes.generation.generator import Generator, Standby
from flowrl.nodes.generation.responses import Responses
from flowrl.nodes.generation.vllm_processes import EngineDied, engine_died
from flowrl.nodes.generation.vllm_sampler import EVALUATION, priority_of
from tests.nodes.generation.generator_rig import RecordingContext, make_prompt
from tests.rigs.ticks import ticks

TOKENIZER = tool_tokenizer()
CONTEXT = np.array(TOKENIZER("<|user|>5+7=<|end|><|assistant|>")["input_ids"], np.int32)
CALCULATOR = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}


class Letters:
    """Stands for the sampler."""

    tokenizer = TOKENIZER

    def __init__(self, text: str) -> None:
        self.ids = TOKENIZER(text)["input_ids"]
        self.death: EngineDied | None = None
        self.asked: list[tuple[str, list[int], Sampling, dict[str, Any]]] = []

    async def complete(self, key: str, token_ids: Sequence[int], sampling: Sampling, **more: Any) -> Completion:
        self.asked.append((key, list(token_ids), sampling, more))
        ids = self.ids[: sampling.max_tokens]
        if self.death is not None:
            raise self.death
        reason = "stop" if len(ids) == len(self.ids) else "length"
        return Completion.copy_of(ids, [-0.5] * len(ids), [7] * len(ids), reason, 3)

    def required(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def decode_text(self, token_ids: Any) -> str:
        return ""


class Booked(RecordingContext):
    """Keeps the requests that are reported."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[Turn, Reply]] = []
        self.lost: list[tuple[Turn, Reply, str]] = []

    def request(self, turn: Turn, reply: Reply) -> None:
        self.requests.append((turn, reply))

    def request_lost(self, turn: Turn, reply: Reply, reason: str) -> None:
        self.lost.append((turn, reply, reason))


class Updates:
    version = 7


def generator(sampler: Letters) -> tuple[Generator, Booked]:
    made = Generator(Policy("tiny"), sampling=Sampling(max_tokens=16, min_tokens=2, stop=("!",)))
    internals: Any = made
    context = Booked()
    internals.name, internals.context = "generator", context
    internals._sampler, internals._parser = sampler, reply_parser(TOKENIZER)
    updates: Any = Updates()
    internals._responses = Responses(internals._sampler, updates, made._gate, internals.context)
    made._gate.open_for("weights")
    return made, context


def turn(**fields: Any) -> Turn:
    given = Turn("s/0.0", "s", "g", 0, 0, 5, 11, CONTEXT, 8)
    return dataclasses.replace(given, **fields)


def reply_to(asked: Turn, text: str = "12<|end|>") -> tuple[Reply, Letters, Booked]:
    sampler = Letters(text)
    made, context = generator(sampler)
    return asyncio.run(made._generate_reply(asked)), sampler, context


def test_a_turn_is_sampled_as_training_is_within_its_own_limits() -> None:
    reply, sampler, context = reply_to(turn(max_tokens=8, stop=("?",)))
    ((key, ids, sampling, more),) = sampler.asked
    assert key.startswith("s/0.0#") and ids == CONTEXT.tolist()
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop) == (8, 2, ("!", "?"))
    assert (more["seed"], more["salt"], more["priority"]) == (11, "7", 5)
    assert reply.message == {"role": "assistant", "content": "12"}
    assert (reply.finish_reason, reply.cached_tokens, reply.generator) == ("stop", 3, "generator/0")
    assert TOKENIZER.decode(reply.token_ids.tolist()) == "12<|end|>"
    assert reply.versions.tolist() == [7, 7, 7] and reply.behavior_logprobs.dtype == np.float32
    assert [booked.request_id for booked, _ in context.requests] == ["s/0.0"]


def test_the_oldest_ticket_comes_first_and_held_out_turns_last() -> None:
    assert priority_of(3) < priority_of(4) < priority_of(1 << 40) < EVALUATION
    _, sampler, _ = reply_to(turn(ticket=-1))
    assert sampler.asked[0][3]["priority"] == EVALUATION
    assert sampler.asked[0][2].temperature == 0, "as evaluation is sampled"


def test_a_call_is_one_only_where_there_are_tools() -> None:
    text = '<|call|>calculator{"expression":"1+1"}<|end|>'
    with_tools, *_ = reply_to(turn(max_tokens=16, tools=(CALCULATOR,)), '<|call|>c{"e":1}<|end|>')
    (call,) = with_tools.message["tool_calls"]
    assert call["function"]["name"] == "c" and with_tools.malformed == ""
    without, *_ = reply_to(turn(), text)
    assert "tool_calls" not in without.message and without.malformed == ""


@pytest.mark.parametrize("text", ['<|call|>c{"e":<|end|>', "<|call|><|end|>"])
def test_a_call_that_cannot_be_read_is_said_to_be_so(text: str) -> None:
    reply, *_ = reply_to(turn(max_tokens=16, tools=(CALCULATOR,)), text)
    assert reply.malformed and "tool_calls" not in reply.message


def test_a_turn_is_continued_after_a_checkpoint_and_its_tokens_are_not_in_it() -> None:
    """An episode that a resume finds begins again, so a checkpoint needs no prefix of its replies."""

    async def body() -> None:
        made, _ = generator(Letters("12<|end|>"))
        assert await made.snapshot() == {}
        waiting = asyncio.create_task(made._generate_reply(turn()))
        sample = asyncio.create_task(made._sample_prompt(make_prompt(1), made.sampling, 0))
        await ticks(3)
        assert not waiting.done()
        await made.resume()
        assert (await waiting).finish_reason == "stop" and (await sample).response_tokens == 3

    asyncio.run(body())


def dying(text: str) -> Letters:
    """A sampler whose engine dies when this much of a reply has arrived."""
    sampler = Letters("12<|end|>")
    sampler.death = engine_died()
    ids = TOKENIZER(text)["input_ids"]
    sampler.death.arrived = Completion.copy_of(ids, [-0.5] * len(ids), [7] * len(ids), "")
    return sampler


def test_what_had_arrived_of_a_turn_is_booked_when_the_engine_dies_without_what_a_checkpoint_had() -> None:
    before = np.array(TOKENIZER("1")["input_ids"], np.int32)
    asked = turn(prefix_token_ids=before, prefix_logprobs=np.zeros(1, np.float32), prefix_versions=before * 0 + 6)
    made, context = generator(dying("2"))
    with pytest.raises(EngineDied):
        asyncio.run(made._generate_reply(asked))
    ((lost, reply, reason),) = context.lost
    assert (reason, context.requests) == ("generator_died", [])
    assert lost.request_id == "s/0.0" and lost.token_ids.tolist() == [*CONTEXT, *before]
    assert TOKENIZER.decode(reply.token_ids.tolist()) == "2" and reply.versions.tolist() == [7]
    assert context.counted == {"tokens_generated": 1.0}


class Replicas(RecordingContext):
    def __init__(self, *, others_stand_in: bool) -> None:
        super().__init__()
        self.others_stand_in = others_stand_in
        self.told: list[str] = []

    def progress(self, text: str) -> None:
        self.told.append(text)


async def dies(request: Turn) -> Reply:
    raise engine_died()


def test_a_replica_whose_engine_died_answers_nothing_more_and_leaves_versions_out() -> None:
    async def body() -> None:
        context: Any = Replicas(others_stand_in=True)
        standby = Standby(context, "generator/1")
        for _ in range(2):
            with pytest.raises(OutOfService, match=r"generator/1: vLLM's engine process died"):
                await standby.guard_body(dies)(turn())
        assert standby.has_left and not await standby.goes_on(dies(turn()))
        assert len(context.told) == 1 and context.counted == {"generators_lost": 1.0}

    asyncio.run(body())


def test_a_replica_that_no_other_can_stand_in_for_ends_the_run() -> None:
    async def body() -> None:
        context: Any = Replicas(others_stand_in=False)
        standby = Standby(context, "generator/0")
        with pytest.raises(EngineDied):
            await standby.guard_body(dies)(turn())
        with pytest.raises(EngineDied):
            await standby.goes_on(dies(turn()))

    asyncio.run(body())


def test_a_request_at_the_gate_ends_with_the_engine() -> None:
    class Dead(Letters):
        @asynccontextmanager
        async def required(self) -> AsyncIterator[None]:
            if self.death is not None:
                raise self.death
            yield

    async def body() -> None:
        sampler = Dead("12<|end|>")
        made, context = generator(sampler)
        made._gate.close_for("weights")
        sampler.death = engine_died()
        with pytest.raises(EngineDied):
            await made._generate_reply(turn())
        assert [reply.token_ids.size for _, reply, _ in context.lost] == [0]

    asyncio.run(body())

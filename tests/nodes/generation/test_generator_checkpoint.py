"""A checkpoint at a generator whose requests are in every state; vLLM is a table of futures here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import pytest

from flowrl.messages import Sample
from flowrl.messages.sampling import Sampling
from flowrl.models import Policy
from flowrl.nodes.generation.completions import Completion
from flowrl.nodes.generation.generator import Generator
from flowrl.nodes.generation.responses import Responses
from flowrl.nodes.generation.vllm_sampler import EVALUATION, TRAINING
from tests.nodes.generation.generator_rig import RecordingContext, make_prompt
from tests.rigs.ticks import ticks


def part(*token_ids: int, reason: str = "") -> Completion:
    return Completion.copy_of(token_ids, [-1.0] * len(token_ids), [3] * len(token_ids), reason)


class Table:
    """Stands for the sampler: a test ends requests and says what they have come to."""

    def __init__(self) -> None:
        self.ends: dict[str, asyncio.Future[Completion]] = {}
        self.parts: dict[str, Completion | None] = {}

    async def complete(self, request_id: str, token_ids: Sequence[int], sampling: Sampling, **_: Any) -> Completion:
        return await self.ends.setdefault(request_id, asyncio.get_running_loop().create_future())

    def required(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def so_far(self, request_id: str) -> Completion | None:
        return self.parts.get(request_id, part())

    def decode_text(self, token_ids: Any) -> str:
        return ""


class Updates:
    version = 3


async def begun(count: int) -> tuple[Generator, Table, list[asyncio.Task[Sample]]]:
    """A generator with `count` training samples and one of evaluation under way, each in its first request."""
    generator, table = Generator(Policy("tiny"), sampling=Sampling(max_tokens=8)), Table()
    internals: Any = generator
    internals.name, internals._sampler, internals._updates = "generator", table, Updates()
    internals.context = RecordingContext()
    internals._responses = Responses(internals._sampler, internals._updates, generator._gate, internals.context)
    generator._gate.open_for("weights")
    prompts = [*(make_prompt(number) for number in range(count)), make_prompt(99)]
    kinds = [TRAINING] * count + [EVALUATION]
    samples = [
        asyncio.create_task(generator._sample_prompt(prompt, generator.sampling, kind))
        for prompt, kind in zip(prompts, kinds, strict=True)
    ]
    await ticks(10)  # all that can go on has gone on
    return generator, table, samples


def test_what_a_request_has_come_to_is_told_and_its_end_is_looked_at_afterwards() -> None:
    async def body() -> None:
        generator, table, samples = await begun(2)
        first, second, evaluation = table.ends
        table.parts = {first: part(5, 6), second: part(), evaluation: part(7)}
        prefixes = await generator.snapshot()
        assert {key: tokens.tolist() for key, (tokens, _, _) in prefixes.items()} == {"s0/0": [5, 6]}
        await ticks(10)  # all that can go on has gone on
        for end in table.ends.values():
            end.set_result(part(5, 6, 7, reason="stop"))
        await ticks(10)  # all that can go on has gone on
        assert not any(sample.done() for sample in samples), "the checkpoint has them unfinished"
        await generator.resume()
        assert [(await sample).token_ids[12:].tolist() for sample in samples] == [[5, 6, 7]] * 3
        assert len(table.ends) == 3, "nothing was asked again"

    asyncio.run(body())


def test_how_long_it_stood_for_a_checkpoint_is_told() -> None:
    async def body() -> None:
        generator, table, samples = await begun(1)
        before_s = time.monotonic()
        await generator.snapshot()
        await ticks(10)
        await generator.resume()
        (pause_s,) = internal(generator).context.gauges["checkpoint_pause_s"]
        assert 0 < pause_s <= time.monotonic() - before_s
        for end in table.ends.values():
            end.set_result(part(5, reason="stop"))
        await asyncio.gather(*samples)

    asyncio.run(body())


def internal(generator: Generator) -> Any:
    return generator


def test_a_request_that_has_ended_in_vllm_ends_before_the_checkpoint_goes_on() -> None:
    async def body() -> None:
        generator, table, samples = await begun(2)
        first, second, evaluation = table.ends
        table.parts = {first: None, second: part(4), evaluation: part()}
        snapshot = asyncio.create_task(generator.snapshot())
        await ticks(10)  # all that can go on has gone on
        assert not snapshot.done()
        table.ends[first].set_result(part(9, reason="stop"))
        prefixes = await snapshot
        await ticks(10)  # all that can go on has gone on
        assert (await samples[0]).token_ids[12:].tolist() == [9], "its turn ends; the checkpoint keeps what it sends"
        assert prefixes.keys() == {"s1/0"}
        assert not samples[1].done() and not samples[2].done()

    asyncio.run(body())


def test_what_begins_during_a_checkpoint_waits_and_what_is_cancelled_ends_its_request() -> None:
    async def body() -> None:
        generator, table, samples = await begun(1)
        await generator.snapshot()
        late = asyncio.create_task(generator._sample_prompt(make_prompt(1), generator.sampling, TRAINING))
        samples[0].cancel()
        await ticks(10)  # all that can go on has gone on
        assert samples[0].cancelled() and next(iter(table.ends.values())).cancelled()
        assert len(table.ends) == 2 and not late.done()
        await generator.resume()
        await ticks(10)  # all that can go on has gone on
        assert len(table.ends) == 3
        table.ends["s1/0#3"].set_result(part(1, reason="stop"))
        assert (await late).token_ids[12:].tolist() == [1]

    asyncio.run(body())


def test_a_later_checkpoint_knows_what_an_earlier_one_kept() -> None:
    async def body() -> None:
        generator, table, samples = await begun(1)
        for so_far in (part(5), part(5, 6)):
            table.parts = dict.fromkeys(table.ends, so_far)
            prefixes = await generator.snapshot()
            assert prefixes["s0/0"][0].tolist() == so_far.token_ids.tolist()
            await generator.resume()
            await ticks(10)  # all that can go on has gone on
        next(iter(table.ends.values())).set_exception(ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            await samples[0]

    asyncio.run(body())

"""A generator's engine sleeps and wakes by parts; vLLM's calls are recorded, and fail where the real ones would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from flowrl.nodes.generation.vllm_sampler import VllmSampler
from tests.rigs.ticks import ticks
from tests.wire.channel_rig import play

PARTS = {"weights", "kv_cache"}


class SleepingEngine:
    """vLLM's allocator maps what is asleep, and unmaps what is awake: anything else fails there."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.calls: list[str] = []
        self.engine_core = self
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype="torch.float32", max_model_len=64))

    def get_tokenizer(self) -> None:
        return None

    async def sleep(self, level: int) -> None:  # vLLM's
        assert not self.asleep, "unmapped twice"
        await ticks(2)
        self.asleep = set(PARTS)
        self.calls.append("sleep")

    async def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep, f"{tags} mapped twice"
        await ticks(2)
        self.asleep -= set(tags)
        self.calls.append(f"wake {tags[0]}")

    async def pause_scheduler_async(self, **options: Any) -> None:
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        assert not self.asleep
        self.calls.append("resume")

    async def add_request(self, request_id: str, *arguments: Any, **options: Any) -> Any:
        assert not self.asleep
        self.calls.append(f"request {request_id}")
        flat = SimpleNamespace(logprobs=[0.0, -0.5, -0.25], start_indices=[0, 1, 2])
        output = SimpleNamespace(finished=True, prompt_logprobs=flat)
        return SimpleNamespace(request_id=request_id, get_nowait=lambda: output, close=lambda: None)

    async def collective_rpc(self, method: str, **options: Any) -> list[float]:
        assert "weights" not in self.asleep
        self.calls.append("apply")
        return [0.0]


@asynccontextmanager
async def alive() -> AsyncIterator[None]:
    yield


def made() -> tuple[SleepingEngine, VllmSampler]:
    engine = SleepingEngine()
    processes: Any = SimpleNamespace(required=alive)
    return engine, VllmSampler(engine, processes)


def test_an_update_is_applied_before_the_cache_takes_its_room() -> None:
    async def main() -> None:
        engine, sampler = made()
        await sampler.sleep()  # vLLM's
        await sampler.wake()
        await sampler.pause()
        assert engine.asleep == {"kv_cache"}
        await sampler.load_version({}, None)  # type: ignore[arg-type]
        await sampler.resume()
        assert engine.calls == ["sleep", "wake weights", "pause", "apply", "wake kv_cache", "resume"]

    play(main())


def test_of_many_requests_the_first_wakes_the_cache_and_a_cancel_does_not_stop_it() -> None:
    async def main() -> None:
        engine, sampler = made()
        for _ in range(2):
            await sampler.sleep()  # vLLM's
            await sampler.wake()
            requests = [asyncio.ensure_future(sampler.wake_cache()) for _ in range(4)]
            await ticks(1)
            requests[0].cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            assert requests[0].cancelled() and not engine.asleep
        assert engine.calls == ["sleep", "wake weights", "wake kv_cache"] * 2

    play(main())


def test_a_turn_without_any_work_ends_awake_and_then_asleep() -> None:
    """What vLLM has given back already it must not be asked to give back again."""

    async def main() -> None:
        engine, sampler = made()
        await sampler.sleep()  # vLLM's
        await sampler.wake()
        await sampler.sleep()  # vLLM's
        assert engine.calls == ["sleep", "wake weights", "wake kv_cache", "sleep"]
        await sampler.wake()
        waking = asyncio.ensure_future(sampler.wake_cache())
        await ticks(1)
        waking.cancel()
        await sampler.sleep()  # vLLM's
        assert engine.asleep == PARTS

    play(main())


def test_an_engine_that_never_sleeps_is_never_woken() -> None:
    async def main() -> None:
        engine, sampler = made()
        await sampler.wake_cache()
        await sampler.resume()
        assert engine.calls == ["resume"]

    play(main())


def test_a_request_wakes_the_cache() -> None:
    async def main() -> None:
        engine, sampler = made()
        await sampler.sleep()  # vLLM's
        await sampler.wake()
        assert await sampler.score_sequences([[5, 6, 7]]) == [[-0.5, -0.25]]
        assert engine.calls == ["sleep", "wake weights", "wake kv_cache", "request score-1"]

    play(main())

"""A generator and its GPUs: what vLLM and the probe are told, sleep between turns, and nothing before weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from flowrl.messages import Weights
from flowrl.models import Policy
from flowrl.nodes.engine_options import Engine
from flowrl.nodes.generation.generator import Generator
from flowrl.weights.probe import ProbeCheck
from tests.nodes.generation.generator_rig import RecordingContext
from tests.rigs.ticks import ticks


class Sampler:
    """Stands for vLLM, started with `options`."""

    dtype, max_model_len, tokenizer = "bfloat16", 64, None

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.calls: list[str] = []

    def required(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def listen(self) -> None:
        """Nothing listens."""

    async def sleep(self) -> None:  # vLLM's
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")


class Context(RecordingContext):
    """Of a generator whose process has these GPUs, alone or in turns."""

    cores, weight_routes, run_id, seed, max_staleness, longest_asked = (0,), (), "unit", 3, 1, None
    others_stand_in = False

    def __init__(self, gpus: tuple[int, ...], *, time_shared: bool) -> None:
        super().__init__()
        self.gpus, self.time_shared = gpus, time_shared

    def progress(self, text: str) -> None:
        """Nobody reads it."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What headers of Python were asked for. vLLM is not started."""
    asked: list[str] = []
    monkeypatch.setattr("flowrl.nodes.generation.generator.check_python_headers", asked.append)
    monkeypatch.setattr("flowrl.nodes.generation.generator.resolve", lambda policy, progress: policy.model)
    monkeypatch.setattr(
        "flowrl.nodes.generation.generator.VllmSampler.start", lambda model_dir, **options: Sampler(options)
    )
    return asked


def placed(gpus: tuple[int, ...], *, time_shared: bool = False, **options: Any) -> Any:
    """A generator that has been set up; its internals are looked at."""
    made: Any = Generator(Policy("tiny"), **options)
    made.name, made.context = "generator", Context(gpus, time_shared=time_shared)
    asyncio.run(made.setup())
    return made


@pytest.mark.parametrize(("gpus", "time_shared"), [((0, 1), True), ((2,), False), ((), False)])
def test_vllm_is_told_its_gpus_and_whether_it_has_to_sleep(
    gpus: tuple[int, ...], time_shared: bool, compiled: list[str]
) -> None:
    started = placed(gpus, time_shared=time_shared)._sampler.options
    assert (started["num_gpus"], started["sleeps"]) == (len(gpus), time_shared)


def test_headers_are_asked_for_beside_a_gpu_alone(compiled: list[str]) -> None:
    placed(())
    assert compiled == []
    placed((0,))
    assert compiled == ["what Triton starts vLLM's kernels with"]


def test_the_probe_is_told_device_dtype_tolerance_and_quantization(compiled: list[str]) -> None:
    on_cpu = placed((), probe_tolerance=0.5)
    assert on_cpu._updates._probes == ProbeCheck("generator/0", "bfloat16", on_gpu=False, tolerance=0.5)
    on_gpu = placed((0,), engine=Engine(quantization="fp8"))
    assert on_gpu._updates._probes == ProbeCheck("generator/0", "bfloat16", on_gpu=True, quantization="fp8")


@pytest.mark.parametrize(("gpus", "calls"), [((0,), ["sleep", "wake", "sleep", "wake"]), ((), [])])
def test_a_generator_in_turns_sleeps_between_them(gpus: tuple[int, ...], calls: list[str], compiled: list[str]) -> None:
    made = placed(gpus, time_shared=True)

    async def turns() -> None:
        await made.on_acquire()  # awake already
        for _ in range(2):
            await made.on_release()
            await made.on_acquire()

    asyncio.run(turns())
    assert made._sampler.calls == calls


class Waiting:
    """Stands for the ports: prompts are there at once, weights do not come."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def iterate(self) -> AsyncIterator[Weights]:
        async def none() -> AsyncIterator[Weights]:
            await asyncio.Event().wait()
            yield  # type: ignore[misc]

        return none()

    async def each(self, body: Callable[[Any], Awaitable[Any]], concurrency: int) -> None:
        self.taken.append(body.__name__)
        await asyncio.Event().wait()

    serve = each


def test_nothing_is_taken_before_the_first_weights(compiled: list[str]) -> None:
    """An invocation would hold the GPU that the trainer needs to publish them."""

    async def life() -> tuple[list[str], list[str]]:
        ports = made.prompts.live = made.weights.live = made.requests.live = Waiting()
        made.weights.connected = True
        running = asyncio.create_task(made.run())
        await ticks(20)
        before = list(ports.taken)
        made._gate.open_for("weights")
        await ticks(20)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return before, ports.taken

    made = placed((0,), time_shared=True)
    before, after = asyncio.run(life())
    assert before == [] and sorted(after) == ["_generate_sample", "answer_request"]


@pytest.mark.slow
@pytest.mark.parametrize("sleeps", [False, True])
def test_vllm_gets_parallel_sizes_and_sleeps_in_turns_alone(tmp_path: Path, sleeps: bool) -> None:
    """The arguments of its AsyncEngineArgs."""
    from flowrl.nodes.generation.vllm_processes import engine_arguments
    from flowrl.weights.receive import NCCL_ENGINE

    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    wanted: Any = {"seed": 0, "transfer": NCCL_ENGINE, "slots": None}
    engine = Engine(pipeline_parallel_size=2)
    found = engine_arguments(str(tmp_path), num_gpus=4, sleeps=sleeps, engine=engine, **wanted)
    assert (found["tensor_parallel_size"], found["pipeline_parallel_size"]) == (2, 2)
    assert found["distributed_executor_backend"] == "mp" and found["enable_sleep_mode"] is sleeps
    on_cpu = engine_arguments(str(tmp_path), num_gpus=0, sleeps=sleeps, engine=Engine(), **wanted)
    assert on_cpu["distributed_executor_backend"] == "uni" and "enable_sleep_mode" not in on_cpu

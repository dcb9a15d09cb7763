"""The end of an engine's process is reported to whoever needs it: at once, once, and not if it was expected."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl import In, Node
from flowrl.errors import FlowrlError
from flowrl.messages import Prompt
from flowrl.nodes import engine_options
from flowrl.nodes.engine_options import Engine, Runner
from flowrl.nodes.generation.vllm_processes import (
    CONSEQUENCE,
    DID_NOT_START,
    DIED,
    EngineDied,
    EngineProcesses,
    error_in,
    prepare_environment,
    reported_start,
)
from flowrl.testing import NodeRig
from flowrl.weights.vllm_process.engine_process import interpret_triton
from tests.nodes.generation.generator_rig import make_prompt
from tests.rigs.run_process import ROOT

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(("sleep", "1000")) as process:
        yield process
        process.kill()


async def never_answered(processes: EngineProcesses) -> None:
    async with processes.required():
        await asyncio.Event().wait()


def test_a_call_that_is_never_answered_ends_with_the_process(engine: subprocess.Popen[bytes]) -> None:
    async def check() -> None:
        processes = EngineProcesses((engine.pid,))
        processes.listen()
        with pytest.raises(FlowrlError, match="vLLM's engine process died"):
            async with processes.required():
                engine.kill()
                await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()

    asyncio.run(check())


def test_every_block_is_ended_and_each_later_one(engine: subprocess.Popen[bytes]) -> None:
    async def check() -> None:
        processes = EngineProcesses((engine.pid,))
        processes.listen()

        calls = [asyncio.ensure_future(never_answered(processes)) for _ in range(3)]
        await asyncio.sleep(0)  # all three have begun
        engine.kill()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in ended] == [EngineDied] * 3
        with pytest.raises(FlowrlError):
            await never_answered(processes)

    asyncio.run(check())


@pytest.mark.parametrize("further_tasks", [0, 1, 3])
def test_a_task_group_whose_task_waits_for_the_process_too_is_not_cancelled(
    engine: subprocess.Popen[bytes], further_tasks: int
) -> None:
    """Whichever of the two tasks is told first."""

    async def check() -> None:
        processes = EngineProcesses((engine.pid,))
        processes.listen()

        async def wait(further: int) -> None:
            if further:
                await asyncio.ensure_future(wait(further - 1))  # each one is a tick before the cancel arrives
            await asyncio.Event().wait()

        with pytest.raises((EngineDied, BaseExceptionGroup)) as raised:
            async with processes.required(), asyncio.TaskGroup() as tasks:
                tasks.create_task(never_answered(processes))
                await asyncio.sleep(0)  # it has begun
                engine.kill()
                await wait(further_tasks)
        errors = raised.value.exceptions if isinstance(raised.value, BaseExceptionGroup) else (raised.value,)
        assert [type(error) for error in errors] == [EngineDied]
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()

    asyncio.run(check())


class Serving(Node):
    """As a generator in an update: its requests and a task of its own wait for the process, which dies."""

    prompts: In[Prompt]

    def __init__(self, pid: int) -> None:
        self.pid = pid

    async def run(self) -> None:
        self.processes = EngineProcesses((self.pid,))
        self.processes.listen()
        async with self.processes.required(), asyncio.TaskGroup() as tasks:
            tasks.create_task(never_answered(self.processes))
            await self.prompts.each(self._answer, concurrency=4)

    async def _answer(self, prompt: Prompt) -> None:
        if prompt.prompt_id == "p2":
            os.kill(self.pid, signal.SIGKILL)
        await never_answered(self.processes)


def test_a_node_whose_engine_died_in_an_update_has_failed(engine: subprocess.Popen[bytes]) -> None:
    async def check() -> None:
        with pytest.raises(FlowrlError, match="vLLM's engine process died"):
            async with NodeRig(Serving(engine.pid)) as rig:
                rig.feed("prompts", *map(make_prompt, range(3)))
                await rig.finished(leftovers=True)

    asyncio.run(check())


def test_a_block_that_ends_in_the_same_tick_as_the_process_is_not_cancelled_later(
    engine: subprocess.Popen[bytes],
) -> None:
    async def check() -> None:
        processes, loop, answered = EngineProcesses((engine.pid,)), asyncio.get_running_loop(), asyncio.Event()
        processes.listen()
        async with processes.required():
            loop.call_soon(answered.set)
            loop.call_soon(processes._report_end)
            await answered.wait()
        assert processes.have_ended
        await asyncio.sleep(0.01)  # where a cancel would arrive

    asyncio.run(check())


def test_a_block_that_ends_first_leaves_nothing_behind(engine: subprocess.Popen[bytes]) -> None:
    async def check() -> None:
        processes = EngineProcesses((engine.pid,))
        processes.listen()
        async with processes.required():
            pass
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor := os.pidfd_open(engine.pid), ended.set)
        engine.kill()
        await ended.wait()
        await asyncio.sleep(0)  # a second callback of the same tick
        os.close(descriptor)

    asyncio.run(check())


def test_a_cancelled_block_stays_cancelled(engine: subprocess.Popen[bytes]) -> None:
    async def check() -> None:
        processes = EngineProcesses((engine.pid,))
        processes.listen()

        task = asyncio.ensure_future(never_answered(processes))
        await asyncio.sleep(0)  # it has begun
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(check())


def test_an_expected_end_is_not_reported(engine: subprocess.Popen[bytes]) -> None:
    async def check() -> None:
        processes = EngineProcesses((engine.pid,))
        processes.listen()
        processes.expect_end()
        async with processes.required():
            engine.send_signal(signal.SIGKILL)
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(descriptor := os.pidfd_open(engine.pid), ended.set)
            await ended.wait()
            await asyncio.sleep(0)  # a second callback of the same tick
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    asyncio.run(check())


def test_a_process_that_is_gone_already() -> None:
    with subprocess.Popen(("true",)) as process:
        process.wait()

    async def check() -> None:
        processes = EngineProcesses((process.pid,))
        processes.listen()
        with pytest.raises(FlowrlError, match="vLLM's engine process died"):
            async with processes.required():
                await asyncio.Event().wait()

    asyncio.run(check())


def test_an_engine_that_does_not_start_is_told_in_a_sentence() -> None:
    with pytest.raises(FlowrlError, match="ended before it was ready"), reported_start():
        raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    with pytest.raises(RuntimeError, match="another"), reported_start():
        raise RuntimeError("another")


AT = "ERROR 11-26 14:25:22 [core.py:1510]"
LOG = f"""\
(EngineCore pid=2302) {AT} Invocation of collective_rpc method failed
(EngineCore pid=2302) {AT} KeyError: 'of a call, after which the engine goes on'
(EngineCore pid=2302) {AT} EngineCore failed to start.
(EngineCore pid=2302) {AT} Traceback (most recent call last):
(EngineCore pid=2302) {AT}     raise ValueError("Free memory: too little")
(EngineCore pid=2302) {AT} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
(EngineCore_DP0 pid=2303) {AT} Exception: WorkerProc initialization failed due to an exception in a background process.
ValueError: a line of somebody else
"""


def test_what_has_ended_the_engine_is_quoted_and_nothing_else() -> None:
    assert error_in(LOG, DID_NOT_START) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert error_in(LOG, DIED) == "", "an engine that was killed has logged nothing about it"
    worker = f"(Worker_TP1 pid=7) {AT} WorkerProc {DID_NOT_START}\n(Worker_TP1 pid=7) {AT} ValueError: of a worker\n"
    lost = f"(EngineCore pid=6) {AT} EngineCore {DID_NOT_START}\n(EngineCore pid=6) {AT} Exception: its {CONSEQUENCE}\n"
    assert error_in(worker + lost, DID_NOT_START) == "ValueError: of a worker"
    long = f"EngineCore {DIED}\n(Worker_TP1 pid=7) {AT} ValueError: " + "long " * 1000
    assert error_in(long, DIED) == ("ValueError: " + "long " * 1000)[:400]


def test_the_message_of_a_failed_start_has_the_engines_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from flowrl.nodes.generation.vllm_processes import reported_start\n"
        f"print({LOG!r}, flush=True)\n"
        "try:\n"
        "    with reported_start():\n"
        "        raise RuntimeError('Engine core initialization failed. See root cause above.')\n"
        "except Exception as problem:\n"
        f"    open({str(tmp_path / 'told')!r}, 'w').write(str(problem))\n"
    )
    with (tmp_path / "log").open("w") as log:
        subprocess.run(
            [sys.executable, program], stdout=log, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}
        )
    assert (tmp_path / "told").read_text() == (
        f"vLLM's engine process ended before it was ready; the last lines of {tmp_path / 'log'} say why "
        "(torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.)"
    )


@pytest.mark.parametrize(("given", "found"), [(None, "0"), ("1", "1")])
def test_a_sampler_that_no_request_uses_is_not_imported(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {"VLLM_USE_FLASHINFER_SAMPLER": given})
    prepare_environment(cores=(), on_gpu=True)
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == found


@pytest.mark.parametrize(("runner", "found"), [("auto", None), ("v1", "0"), ("v2", "1")])
def test_the_runner_is_chosen_before_vllm_is_imported(
    runner: Runner, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    prepare_environment(cores=(), on_gpu=True, runner=runner)
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == found
    assert "TRITON_INTERPRET" not in os.environ


def test_vllm_finds_triton_on_a_cpu_only_where_it_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "triton.backends", SimpleNamespace(backends=backends))
    monkeypatch.setattr(os, "environ", {})
    interpret_triton()
    prepare_environment(cores=(), on_gpu=False, runner="v1")
    assert not backends
    prepare_environment(cores=(), on_gpu=False, runner="v2")
    assert os.environ["TRITON_INTERPRET"] == "1" and backends["cpu"].driver.is_active()


def test_the_second_runner_needs_gpus_or_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_options, "find_spec", lambda name: None)
    assert Engine(runner="v2").find_problems(1) == [] and Engine().find_problems(0) == []
    (told,) = Engine(runner="v2").find_problems(0)
    assert told.startswith("--engine.runner is v2, whose kernels are Triton's, but the generator has no GPUs")
    monkeypatch.setattr(engine_options, "find_spec", lambda name: object())
    assert Engine(runner="v2").find_problems(0) == []

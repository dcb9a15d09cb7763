"""vLLM's engine process: its death ends the calls that wait for it, and it ends with its generator."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.errors import FlowrlError
from tests.models.tiny_policy import make_policy
from tests.stack.live_generator import CORE, Live

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(300)]

HOST = """
import sys
from multiprocessing.process import BaseProcess
from flowrl.nodes.engine_options import Engine
from flowrl.nodes.generation.vllm_sampler import VllmSampler
start = BaseProcess.start
def told(process):
    start(process)
    print("started", process.pid, flush=True)
if __name__ == "__main__":
    BaseProcess.start = told
    VllmSampler.start(sys.argv[1], engine=Engine(max_model_len=64), cores=({core},))
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_the_death_of_vllms_process_ends_a_call_that_it_would_have_answered(tmp_path: Path) -> None:
    """vLLM itself would leave the caller waiting. Stopped first, so that the call is under way when it is killed."""
    live = Live(tmp_path, tied=True, cold=True)
    try:
        live.do(live.held(live.train()))
        sampler = live.generator._sampler
        (pid,) = sampler._processes._pids

        async def pause() -> None:
            os.kill(pid, signal.SIGSTOP)
            # Until it has stopped it may still answer.
            await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            task = asyncio.ensure_future(sampler.pause())
            await asyncio.wait((task,), timeout=0.5)
            assert not task.done()
            os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(task, 5.0)

        with pytest.raises(FlowrlError, match="vLLM's engine process died"):
            live.do(pause())
    finally:
        with pytest.raises(FlowrlError, match="vLLM's engine process died"):  # without a request, too
            live.close()


@pytest.mark.parametrize("when", ["while it loads", "when it has loaded"])
def test_vllms_process_ends_with_a_generator_that_is_killed(tmp_path: Path, when: str) -> None:
    make_policy(tmp_path, tied=True)
    script = tmp_path / "host.py"
    script.write_text(HOST.format(core=CORE[0]))
    with started(script, tmp_path) as host:
        child = engine_process(host)
        if when == "when it has loaded":
            assert host.stdout is not None and "ready\n" in host.stdout
        host.send_signal(signal.SIGKILL)
        assert ended(child, timeout_s=40.0)


def started(script: Path, model: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )


def engine_process(host: subprocess.Popen[str]) -> int:
    """A pidfd of the process that vLLM spawns, as soon as it is there."""
    assert host.stdout is not None
    for line in host.stdout:
        if line.startswith("started "):
            return os.pidfd_open(int(line.split()[1]))
    raise AssertionError(f"the generator ended before vLLM's process began: {host.stderr and host.stderr.read()}")


def ended(pidfd: int, *, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))

"""A reward that starts processes of its own: no wait outlasts its limit, and nothing is left, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.machine.orphans import child_pids, has_ended, run_program
from flowrl.nodes import Reward
from flowrl.nodes.held_out_answers import HeldOutScores, ScoredBy
from flowrl.tasks import Task, load_rows, reward_parts
from flowrl.tasks.reward_calls.judge import BadReward
from flowrl.tasks.reward_calls.reward_client import RewardWorker
from flowrl.tasks.rewards import check_reward, open_reward
from flowrl.testing import NodeRig, sample

pytestmark = pytest.mark.slow

REWARD = """
import multiprocessing, os, subprocess, sys, threading, time
from concurrent.futures import ProcessPoolExecutor

KEPT = []

def executor(hang):
    KEPT.append(ProcessPoolExecutor(1))
    called = KEPT[-1].submit(time.sleep, 1000 if hang else 0)
    if hang: called.result()

def pool(hang):
    KEPT.append(multiprocessing.Pool(1))
    if hang: KEPT[-1].apply(time.sleep, (1000,))

def manager(hang):
    KEPT.append(multiprocessing.Manager())
    if hang:
        lock = KEPT[-1].Lock()
        lock.acquire()
        lock.acquire()

def fork(hang):
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)  # stands for work that takes this long
        os._exit(0)
    if hang: os.waitpid(pid, 0)

def popen(hang):
    KEPT.append(subprocess.Popen(["sleep", "1000"]))
    if hang: KEPT[-1].wait()

def thread(hang):
    KEPT.append(threading.Thread(target=time.sleep, args=(1000,)))
    KEPT[-1].start()
    if hang: KEPT[-1].join()

def double_fork(hang):
    told, tells = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.write(tells, b"x")
        time.sleep(1000)  # stands for work that takes this long
        os._exit(0)
    os.read(told, 1)
    if hang: os.read(told, 1)

def score(prompt, response, **columns):
    kind, outcome = os.environ["REWARD_CASE"].split()
    globals()[kind](outcome == "hangs")
    if outcome == "dies":
        os._exit(3)
    while outcome == "times_out":
        pass
    print("chatter", flush=True)
    return 1.0
"""
KINDS = ("executor", "pool", "manager", "fork", "popen", "thread", "double_fork")
REASONS = {"returns": "", "hangs": "reward_timed_out", "times_out": "reward_timed_out", "dies": "reward_died"}
MOMENTS = ("trial", "training", "evaluation", "close")
LIMIT_S = 2.0
WITHIN_S = 60.0
"""No cell takes longer: it loads the function once or twice, on a machine that may be busy."""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A variable that everything inherits which the test starts."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("REWARD_MARK", value)
    yield value
    for pid in of_mark(value):
        os.kill(pid, signal.SIGKILL)


def of_mark(mark: str) -> list[int]:
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"REWARD_MARK={mark}".encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
        except OSError:  # it has ended
            continue
    return found


def require_gone(mark: str) -> None:
    """Fail unless all of them end; for those that nobody is left to wait for."""
    until_s = time.monotonic() + WITHIN_S
    while of_mark(mark):
        assert time.monotonic() < until_s


def written(tmp_path: Path, source: str = REWARD) -> str:
    path = tmp_path / f"reward_{uuid.uuid4().hex}.py"
    path.write_text(textwrap.dedent(source))
    return f"{path}:score"


def trial(task: Task, limit_s: float) -> str:
    try:
        Reward(task, timeout_s=limit_s).preflight()
    except ConfigError as problem:
        assert "the trial reward failed" in str(problem)
        return "reward_timed_out" if f"took more than {limit_s} s" in str(problem) else "reward_died"
    return ""


def training(task: Task, limit_s: float) -> str:
    async def scenario() -> str:
        async with NodeRig(Reward(task, timeout_s=limit_s), name="reward", timeout_s=WITHIN_S, preflight=False) as rig:
            rig.feed("rollouts", sample(response_text="2"))
            record = await rig.finished()
        return record.lost[0].reason if record.lost else ""

    return asyncio.run(scenario())


def evaluation(task: Task, limit_s: float) -> str:
    counted: list[str] = []

    async def scenario() -> None:
        parts = check_reward(reward_parts(task), ())
        score: Any = None  # no reward model is asked
        scores = HeldOutScores(
            ScoredBy(parts),
            task,
            score,
            open_client=lambda parts: open_reward(parts, timeout_s=limit_s),
            count=lambda name, value: counted.append(name),
        )
        try:
            await scores.score_answer(sample(response_text="2"), load_rows(task).train[0])
        finally:
            await scores.close()

    asyncio.run(scenario())
    return counted[0].removeprefix("evaluation_") if counted else ""


def close(task: Task, limit_s: float) -> str:
    """The client is closed while a call may be in progress."""

    async def scenario() -> None:
        client = open_reward(check_reward(reward_parts(task), ()), timeout_s=WITHIN_S)
        call = asyncio.ensure_future(client.ask(["p"], ["r"], [{}]))
        await asyncio.wait({call}, timeout=limit_s)
        await client.close()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    asyncio.run(scenario())
    return "closed"


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("outcome", REASONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_with_processes_of_its_own(
    kind: str, outcome: str, moment: str, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_CASE", f"{kind} {outcome}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    begin_s = time.monotonic()
    found = globals()[moment](
        Task(str(rows), reward=written(tmp_path)),
        LIMIT_S if "timed" in REASONS[outcome] or moment == "close" else WITHIN_S / 2,
    )
    assert found == ("closed" if moment == "close" else REASONS[outcome])
    assert time.monotonic() - begin_s < WITHIN_S
    assert of_mark(mark) == []


DAEMONS = """
import os, subprocess, sys, time
def score(prompt, response, **columns):
    told, tells = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        subprocess.Popen(["setsid", "sleep", "1000"])
        os.write(tells, b"x")
        time.sleep(1000)  # stands for work that takes this long
    os.read(told, 1)
    if response == "pid":
        return os.getpid()
    if response == "keeper":
        return os.getppid()
    time.sleep(1000)  # stands for work that takes this long
"""


async def asked(worker: RewardWorker, response: str) -> float:
    return (await worker.ask(["p"], [response], [{}])).rewards[0]


def test_what_daemons_of_a_killed_worker_leave_is_ended(tmp_path: Path, mark: str) -> None:
    """The worker itself is killed from outside, as for want of memory: its keeper has adopted the daemons."""

    async def scenario() -> None:
        worker = RewardWorker(written(tmp_path, DAEMONS), timeout_s=30.0)
        killed = int(await asked(worker, "pid"))
        assert len(of_mark(mark)) == 4, "a keeper, a worker, a daemon and its program"
        call = asyncio.ensure_future(asked(worker, "hang"))
        await asyncio.sleep(0)  # the call is sent
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(BadReward, match="ended its process \\(SIGKILL\\)"):
            await call
        assert of_mark(mark) == []
        assert await asked(worker, "pid") != killed
        await worker.close()
        assert of_mark(mark) == []

    asyncio.run(scenario())


def test_a_worker_whose_keeper_is_killed_ends(tmp_path: Path, mark: str) -> None:
    async def scenario() -> None:
        worker = RewardWorker(
            written(tmp_path, "import os\ndef score(prompt, response): return os.getppid()"), timeout_s=30
        )
        keeper = int(await asked(worker, ""))
        handle = os.pidfd_open(keeper)
        os.kill(keeper, signal.SIGKILL)
        assert has_ended(handle, WITHIN_S)
        os.close(handle)
        with contextlib.suppress(BadReward):  # if this call is begun before the end is known
            await asked(worker, "")
        assert await asked(worker, "") != keeper
        await worker.close()
        require_gone(mark)

    asyncio.run(scenario())


def test_nothing_outlives_a_caller_that_is_killed(tmp_path: Path, mark: str) -> None:
    code = f"""
        import asyncio, os
        from flowrl.tasks.reward_calls.reward_client import RewardWorker
        async def main():
            worker = RewardWorker({written(tmp_path, DAEMONS)!r}, timeout_s=100.0)
            await worker.ask(["p"], ["pid"], [{{}}])
            os.kill(os.getpid(), 9)
        asyncio.run(main())
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == -signal.SIGKILL
    require_gone(mark)


def test_orphans_are_reaped_while_a_worker_lives(tmp_path: Path, mark: str) -> None:
    """As short-lived daemons of every call would otherwise fill the table of processes."""
    source = """
    import os, subprocess
    from pathlib import Path
    def score(prompt, response):
        for _ in range(20):
            subprocess.run(["sh", "-c", "sleep 0.05 &"])
        keeper = os.getppid()
        while len(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()) > 1: pass
        return 1.0
    """

    async def scenario() -> None:
        worker = RewardWorker(written(tmp_path, source), timeout_s=WITHIN_S)
        assert await asked(worker, "") == 1.0
        await worker.close()

    asyncio.run(scenario())


def test_programs_of_a_reward_have_no_input_and_not_the_protocol(tmp_path: Path) -> None:
    """Neither those that it starts, nor those that it forks; what they print does not disturb the protocol."""
    source = """
    import os, socket, subprocess, sys
    def score(prompt, response):
        if response == "input":
            program = "import sys; print(repr(sys.stdin.read()))"
            print("noise" * 1000, flush=True)
            os.write(1, b"noise")
            return float(subprocess.run([sys.executable, "-c", program], stdout=-1).stdout == b"''\\n")
        if response == "system":
            return os.system("for fd in /proc/self/fd/*; do case $(readlink $fd) in socket:*) exit 1;; esac; done")
        pid = os.fork()
        if pid == 0:
            links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                     if os.path.exists(f"/proc/self/fd/{fd}")]
            os._exit(sum(link.startswith("socket:") for link in links))
        return os.waitpid(pid, 0)[1]
    """

    async def scenario() -> None:
        worker = RewardWorker(written(tmp_path, source), timeout_s=30.0)
        assert [await asked(worker, one) for one in ("input", "system", "fork", "input")] == [1.0, 0.0, 0.0, 1.0]
        await worker.close()

    asyncio.run(scenario())


ASYNC = """
import asyncio, os, subprocess, time
BEGUN = None
async def score(prompt, response, **columns):
    if response == "block":
        time.sleep(1000)  # stands for work that takes this long
    if response == "wait":
        await asyncio.Event().wait()
    if response == "program":
        program = await asyncio.create_subprocess_exec("setsid", "sleep", "1000")
        await program.wait()
    if response == "thread":
        await asyncio.to_thread(time.sleep, 1000)
    if response == "stubborn":
        while True:
            try:
                await asyncio.sleep(1000)  # stands for work that takes this long
            except asyncio.CancelledError:
                pass
    if response == "later":
        await asyncio.sleep(0.1)  # stands for work that takes this long
    return os.getpid()
"""


def test_a_blocking_call_of_an_async_reward_is_named_and_ended(tmp_path: Path, mark: str) -> None:
    """The calls beside it are asked again in a new process."""
    reports: list[str] = []

    async def scenario() -> None:
        place = written(tmp_path, ASYNC)
        worker = RewardWorker(place, timeout_s=3.0, is_async=True, report=reports.append)
        first = await asked(worker, "")
        begin_s = time.monotonic()
        blocks = asyncio.ensure_future(asked(worker, "block"))
        await asyncio.sleep(0.5)  # the call blocks meanwhile
        beside = asyncio.ensure_future(worker.ask(["p"], ["later"], [{}]))
        with pytest.raises(BadReward, match=r"took more than 3.0 s: a call stands still at \S+:6 in score") as error:
            await blocks
        assert error.value.reason == "reward_timed_out"
        assert time.monotonic() - begin_s < WITHIN_S
        (there,) = await asyncio.gather(beside, return_exceptions=True)
        if isinstance(there, BaseException):  # its own time was over too
            assert isinstance(there, BadReward) and there.reason == "reward_timed_out"
        assert await asked(worker, "") != first
        await worker.close()
        assert len(reports) == 1 and f"{place} blocks all its calls at" in reports[0]
        assert "await such calls, or make them in asyncio.to_thread" in reports[0]

    asyncio.run(scenario())
    assert of_mark(mark) == []


@pytest.mark.parametrize("left", ["wait", "program", "thread", "stubborn"])
def test_an_async_call_that_is_over_its_time(left: str, tmp_path: Path, mark: str) -> None:
    """One that only waited leaves its process to others; what others have left ends with the process."""

    async def scenario() -> None:
        worker = RewardWorker(written(tmp_path, ASYNC), timeout_s=1.0, is_async=True)
        first = await asked(worker, "")
        with pytest.raises(BadReward, match=r"took more than 1.0 s$"):
            await asked(worker, left)
        assert (await asked(worker, "") == first) is (left == "wait")
        assert len(of_mark(mark)) == 2, "a keeper and a worker"
        await worker.close()
        assert of_mark(mark) == []

    asyncio.run(scenario())


def test_calls_of_an_async_reward_share_a_process(tmp_path: Path, mark: str) -> None:
    async def scenario() -> None:
        parts = check_reward(reward_parts(Task("arithmetic", reward=written(tmp_path, ASYNC))), ())
        client = open_reward(parts, timeout_s=30.0, concurrency=8)
        found = await asyncio.gather(*(client.ask(["p"], ["later"], [{}]) for _ in range(16)))
        assert len({one.rewards for one in found}) == 1
        await client.close()
        assert of_mark(mark) == []

    asyncio.run(scenario())


def test_a_program_is_waited_for_and_not_its_helpers(tmp_path: Path, mark: str) -> None:
    began_s = time.monotonic()
    done = run_program(["sh", "-c", "sleep 1000 & cat; echo said >&2; exit 3"], text="given\n", within_s=30.0)
    assert (done.returncode, done.stdout, done.stderr) == (3, "given\n", "said\n")
    with pytest.raises(subprocess.TimeoutExpired):
        run_program(["sh", "-c", "sleep 1000 & sleep 1000"], within_s=0.5)
    assert time.monotonic() - began_s < 20.0


def test_children_of_all_threads_are_known() -> None:
    started: list[Any] = []
    ends = threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "1000"]))
        ends.wait()

    thread = threading.Thread(target=start)
    thread.start()
    while not started:
        pass
    try:
        assert started[0].pid in child_pids()
    finally:
        started[0].kill()
        started[0].wait()
        ends.set()
        thread.join()

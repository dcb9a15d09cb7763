"""Episodes with a process each: what each fault is called, and that nothing is left of any."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flowrl.environments import (
    Action,
    EnvironmentFailed,
    EnvironmentRow,
    Episodes,
    OpenEpisode,
    ZygoteFailed,
    environment_rows,
)
from flowrl.environments.episode_processes import zygote
from flowrl.errors import ConfigError
from tests.rigs.ticks import ticks, ticks_until

ROOT = Path(__file__).parents[2]
CASES = f"{ROOT}/tests/environments/environment_cases.py"
OBEDIENT = f"{CASES}:Obedient"
MEMORY = 128 << 20
pytestmark = pytest.mark.timeout(60)


def row(seed: int = 0) -> EnvironmentRow:
    return EnvironmentRow(OBEDIENT, {}, seed)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def pool(runner: asyncio.Runner) -> Iterator[Episodes]:
    """One zygote for the tests that do it no harm."""
    entered = Episodes(OBEDIENT, memory_bytes=MEMORY)
    runner.run(entered.__aenter__())
    yield entered
    assert entered.zygote_pid is not None
    left = family(entered.zygote_pid)
    runner.run(entered.__aexit__(None, None, None))
    assert not running([entered.zygote_pid, *left])


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def run(runner: asyncio.Runner) -> Run:
    return runner.run


def running(pids: list[int]) -> list[int]:
    """Those that have not ended."""
    return [pid for pid in pids if state(pid) not in "ZX"]


def state(pid: int) -> str:
    """A letter, "X" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return "X"


def family(pid: int) -> list[int]:
    """The pids of its children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def ended(pids: list[int]) -> None:
    """Wait until all have ended, however they do: the kernel says when."""
    for pid in pids:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            await asyncio.to_thread(select.select, [handle], [], [], 30)
            os.close(handle)
    assert not running(pids)


def pid_of(episode: OpenEpisode) -> int:
    return int(json.loads(episode.observation.text)["pid"])


async def failing(pool: Episodes, order: str) -> tuple[EnvironmentFailed, int]:
    """What an order fails with, after the episode is closed, and the pid that it had."""
    episode = await pool.reset(row())
    with pytest.raises(EnvironmentFailed) as error:
        await episode.step(Action(order))
    await episode.close()
    return error.value, pid_of(episode)


def test_an_episode_is_played_in_a_process_of_its_own(run: Run, pool: Episodes) -> None:
    async def scenario() -> None:
        episode = await pool.reset(row(seed=7))
        seen = json.loads(episode.observation.text)
        assert seen == {"pid": pid_of(episode), "name": OBEDIENT, "options": {}, "seed": 7}
        assert pid_of(episode) != os.getpid() and state(pid_of(episode)) in "SR"
        step = await episode.step(Action("echo abc"))
        assert (step.observation, step.reward, step.metrics) == (step.observation, 1.5, {"length": 3.0})
        assert (step.max_tokens, step.stop, step.over) == (7, ("\n",), False)
        assert (await episode.step(Action("end"))).terminated
        with pytest.raises(AssertionError, match="was asked for one more step"):
            await episode.step(Action("echo"))
        await episode.close()
        assert not running([pid_of(episode)])

    run(scenario())


@pytest.mark.parametrize(
    ("order", "cause", "says"),
    [
        ("raise", "env_raised", "LookupError: no such move"),
        ("cancelled", "env_raised", "CancelledError"),
        ("late", "env_raised", "TimeoutError: of its own"),
        ("unknown", "env_raised", "has no attribute 'do_unknown'"),
        ("refused", "env_unreachable", "nobody listens"),
        ("exit", "env_died", "its process ended during step (status 3)"),
        ("sysexit", "env_died", "called sys.exit(4)"),
        ("kill", "env_died", "(signal SIGKILL)"),
        ("objects", "env_out_of_memory", "ran out of memory"),
        ("array", "env_out_of_memory", "ran out of memory: Unable to allocate 2.00 GiB"),
        ("none", "env_malformed", "Obedient.step returned None; it needs a Step"),
        ("nan", "env_malformed", "Obedient.step: a reward is nan; it needs a finite number"),
        ("text", "env_malformed", "a step's observation is 'text'; it needs an Observation"),
        ("garbage", "env_malformed", "a message of 4294967295 bytes was announced"),
        ("nonsense", "env_malformed", "3 bytes are no message"),
        ("stranger", "env_malformed", "neither a result nor a cause"),
        ("half", "env_malformed", "an observation's text is 3"),
    ],
)
def test_each_fault_has_its_cause_and_nothing_is_left(
    run: Run, pool: Episodes, order: str, cause: str, says: str
) -> None:
    failed, pid = run(failing(pool, order))
    assert failed.cause == cause
    assert says in str(failed)
    assert not running([pid])


def test_what_seeding_loads_is_loaded_before_the_fork(run: Run, pool: Episodes) -> None:
    async def body() -> None:
        episode = await pool.reset(row())
        assert (await episode.step(Action("loaded_here"))).observation.text == "False"
        await episode.close()

    run(body())


def test_a_traceback_begins_in_the_environment(run: Run, pool: Episodes) -> None:
    failed, _ = run(failing(pool, "raise"))
    frames = [line for line in str(failed).splitlines() if line.startswith("  File ")]
    assert len(frames) == 3 and all("environment_cases.py" in line for line in frames)


def test_the_end_of_the_output_is_told_and_no_more(run: Run, pool: Episodes) -> None:
    failed, _ = run(failing(pool, "print"))
    lines = str(failed).splitlines()
    assert lines[-1] == "to stderr" and lines[-2] == "line 199999"
    assert len(str(failed)) < 4000


@pytest.mark.parametrize(
    ("at_reset", "cause"),
    [
        ("raise", "env_raised"),
        ("objects", "env_out_of_memory"),
        ("exit", "env_died"),
        ("none", "env_malformed"),
        ("hang", "env_timed_out"),
    ],
)
def test_a_fault_at_reset_leaves_nothing_and_frees_its_place(run: Run, at_reset: str, cause: str) -> None:
    async def scenario() -> None:
        name = f"{OBEDIENT}:at_reset={at_reset}"
        limit_s = 0.5 if at_reset == "hang" else 30.0
        async with Episodes(name, processes=1, memory_bytes=MEMORY) as pool:
            pool._reset_s = limit_s
            for _ in range(2):
                with pytest.raises(EnvironmentFailed) as error:
                    await pool.reset(row())
                assert error.value.cause == cause
                assert pool.zygote_pid is not None and family(pool.zygote_pid) == []

    run(scenario())


@pytest.mark.parametrize("order", ["hang", "await"])
def test_a_step_that_hangs_is_killed(run: Run, order: str) -> None:
    async def scenario() -> None:
        async with Episodes(OBEDIENT, step_s=0.3) as pool:
            failed, pid = await failing(pool, order)
            assert failed.cause == "env_timed_out" and "step took more than 0.3 s" in str(failed)
            assert not running([pid])

    run(scenario())


def test_processes_of_an_environment_end_with_it(run: Run, pool: Episodes) -> None:
    async def scenario() -> None:
        episode, other = await pool.reset(row()), await pool.reset(row())
        pids = [int(pid) for pid in (await episode.step(Action("processes"))).observations[0].text.split()]
        assert len(set(pids)) == 4 and running(pids) == pids
        await episode.close()
        assert not running(pids)
        assert (await other.step(Action("echo still here"))).observations[0].text == "still here"
        await other.close()

    run(scenario())


def test_processes_that_double_end_with_their_episode(run: Run) -> None:
    async def scenario() -> None:
        async with Episodes(OBEDIENT, step_s=0.5) as pool:
            failed, pid = await failing(pool, "bomb")
            assert failed.cause == "env_timed_out"
            assert not running([pid])
            assert not [one for one in map(int, filter(str.isdigit, os.listdir("/proc"))) if group(one) == pid]

    run(scenario())


def group(pid: int) -> int:
    try:
        return os.getpgid(pid) if state(pid) not in "ZX" else 0
    except ProcessLookupError:
        return 0


# Cancelled


async def read_when_written(fifo: Path) -> int:
    return int(await asyncio.to_thread(fifo.read_text))


async def cancelled(waiting: Awaitable[Any]) -> None:
    task = asyncio.ensure_future(waiting)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancelled_step_leaves_nothing(run: Run, pool: Episodes, tmp_path: Path) -> None:
    async def scenario(order: str) -> None:
        fifo = tmp_path / order
        os.mkfifo(fifo)
        episode = await pool.reset(row())
        step = asyncio.create_task(episode.step(Action(f"{order} {fifo}")))
        assert await read_when_written(fifo) == pid_of(episode)
        await cancelled(step)
        await episode.close()
        assert not running([pid_of(episode)])

    for order in ("hang", "await"):
        run(scenario(order))


def test_a_cancelled_reset_leaves_nothing(run: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        async with Episodes(f"{OBEDIENT}:at_reset=hang {fifo}", processes=1) as pool:
            for _ in range(2):
                reset = asyncio.create_task(pool.reset(row()))
                pid = await read_when_written(fifo)
                await cancelled(reset)
                assert not running([pid])
                assert pool.zygote_pid is not None and family(pool.zygote_pid) == []

    run(scenario())


def test_a_cancelled_close_leaves_nothing(run: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        file = tmp_path / "own.py"
        file.write_text(
            "from tests.environments.environment_cases import Obedient\n"
            "class Own(Obedient):\n"
            "    async def close(self):\n"
            f"        if self.played: self.do_hang({str(fifo)!r})\n"
            "    played = False\n"
            "    def do_echo(self, text=''):\n"
            "        self.played = True\n"
            "        return super().do_echo(text)\n"
        )
        async with Episodes(f"{file}:Own") as pool:
            episode = await pool.reset(row())
            await episode.step(Action("echo"))
            close = asyncio.create_task(episode.close())
            assert await read_when_written(fifo) == pid_of(episode)
            await cancelled(close)
            assert not running([pid_of(episode)])

    run(scenario())


def test_a_reset_that_is_cancelled_at_any_moment_leaves_nothing(run: Run) -> None:
    """Some ticks of the event loop later each time, until the reset has been quicker."""

    async def scenario() -> None:
        async with Episodes(OBEDIENT, processes=1) as pool:
            rounds = 0
            while True:
                rounds = max(rounds + 1, rounds * 8 // 7)
                reset = asyncio.create_task(pool.reset(row()))
                await ticks(rounds)
                if reset.done():
                    await (await reset).close()
                    return
                await cancelled(reset)
                assert pool.zygote_pid is not None and family(pool.zygote_pid) == []

    run(scenario())


def test_entering_that_is_cancelled_leaves_no_zygote(run: Run) -> None:
    async def scenario() -> None:
        before = set(family(os.getpid()))
        for rounds in (1, 3, 10, 100):
            entering = asyncio.create_task(Episodes(OBEDIENT).__aenter__())
            await ticks(rounds)
            await cancelled(entering)
            assert not running([pid for pid in family(os.getpid()) if pid not in before])

    run(scenario())


# The zygote


def test_a_killed_zygote_ends_its_episodes_and_is_started_again(run: Run) -> None:
    async def scenario() -> None:
        async with Episodes(OBEDIENT, zygote_restarts=1) as pool:
            for _ in range(2):
                episode = await pool.reset(row())
                pids = [int(pid) for pid in (await episode.step(Action("processes"))).observations[0].text.split()]
                kill(zygote_pid := pool.zygote_pid)
                with pytest.raises(EnvironmentFailed) as error:
                    await episode.step(Action("hang"))
                assert error.value.cause == "env_died"
                assert "the process that starts episodes ended" in str(error.value)
                assert error.value.event == f"zygote {zygote_pid}"
                await episode.close()
                await ended(pids[:3])
                os.kill(pids[3], signal.SIGKILL)  # it has left its group, and who would have adopted it is dead
            with pytest.raises(ZygoteFailed, match="no restart is left"):
                await pool.reset(row())

    run(scenario())


def kill(pid: int | None, by: int = signal.SIGKILL) -> None:
    assert pid is not None
    os.kill(pid, by)


def test_a_stopped_zygote_is_replaced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(zygote, "KILLED_WITHIN_S", 0.2)
        async with Episodes(OBEDIENT) as pool:
            stopped = pool.zygote_pid
            kill(stopped, signal.SIGSTOP)
            pool._reset_s = 0.2
            with pytest.raises(EnvironmentFailed) as error:
                await pool.reset(row())
            assert error.value.cause == "env_timed_out"
            pool._reset_s = 30.0
            episode = await pool.reset(row())
            assert pool.zygote_pid != stopped
            await episode.close()

    run(scenario())


def test_many_episodes_may_begin_and_end_while_the_zygote_is_busy(run: Run) -> None:
    """Their messages wait for room in the socket; a zygote that is slow is not taken for dead."""

    async def scenario() -> None:
        async with Episodes(OBEDIENT, processes=40) as pool:
            client = pool._zygote
            assert client is not None
            client._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the least: a few messages
            kill(busy := pool.zygote_pid, signal.SIGSTOP)
            begun = [asyncio.create_task(pool.reset(row(seed))) for seed in range(40)]
            await ticks_until(lambda: len(client._births) == 40)
            assert client._unsent and not client.dead
            for task in begun[30:]:
                task.cancel()
            kill(busy, signal.SIGCONT)
            episodes = await asyncio.gather(*begun[:30])
            await asyncio.gather(*(episode.close() for episode in episodes), *begun[30:], return_exceptions=True)
            await asyncio.gather(*(birth.exited for birth in client._births.values()))
            assert pool.zygote_pid == busy
        assert len(os.listdir("/proc/self/fd")) <= before, "no descriptor that waited is left open"

    before = len(os.listdir("/proc/self/fd"))
    run(scenario())


def test_a_zygote_that_takes_no_messages_is_replaced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(zygote, "KILLED_WITHIN_S", 0.3)
        async with Episodes(OBEDIENT, processes=40) as pool:
            assert pool._zygote is not None
            pool._zygote._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            kill(stopped := pool.zygote_pid, signal.SIGSTOP)
            begun = [asyncio.create_task(pool.reset(row(seed))) for seed in range(20)]
            found = await asyncio.gather(*begun, return_exceptions=True)
            assert {one.cause for one in found if isinstance(one, EnvironmentFailed)} == {"env_died"}
            assert len([one for one in found if isinstance(one, EnvironmentFailed)]) == 20
            await (await pool.reset(row())).close()
            assert pool.zygote_pid != stopped

    run(scenario())


def test_an_episode_that_is_killed_from_outside_disturbs_no_other(run: Run, pool: Episodes) -> None:
    async def scenario() -> None:
        episode, other = await pool.reset(row()), await pool.reset(row())
        kill(pid_of(episode))
        with pytest.raises(EnvironmentFailed) as error:
            await episode.step(Action("echo"))
        assert error.value.cause == "env_died" and "SIGKILL" in str(error.value)
        assert error.value.event == "", "its own"
        assert (await other.step(Action("echo fine"))).observations[0].text == "fine"
        await episode.close()
        await other.close()

    run(scenario())


CALLER = """
import asyncio, sys
from flowrl.environments import Action, Episodes, EnvironmentRow
async def main():
    async with Episodes(sys.argv[1]) as pool:
        episode = await pool.reset(EnvironmentRow("", {}, 0))
        step = await episode.step(Action("processes"))
        print(pool.zygote_pid, step.observation.text, flush=True)
        await episode.step(Action("hang"))
asyncio.run(main())
"""


def test_a_caller_that_is_killed_leaves_nothing(run: Run) -> None:
    with subprocess.Popen([sys.executable, "-c", CALLER, OBEDIENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        pids = [int(pid) for pid in one.stdout.readline().split()]
        assert len(pids) == 5 and running(pids) == pids
        one.kill()
    run(ended(pids))


def test_an_episode_ends_with_a_zygote_that_could_not_see_to_it(run: Run) -> None:
    """Neither the zygote nor its caller can kill anything: the episode's parent-death signal has to."""
    with subprocess.Popen([sys.executable, "-c", CALLER, OBEDIENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        stopped, episode, *others = [int(pid) for pid in one.stdout.readline().split()]
        kill(stopped, signal.SIGSTOP)
        one.kill()
    kill(stopped)
    run(ended([stopped, episode]))
    for pid in others:
        kill(pid)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()", "1 thread(s) running"),
        (
            "import os, sys\nprint('gone')\nif sys.argv[0].endswith('zygote_child.py'): os._exit(9)",
            "ended while it imported the package; its last output:\ngone",
        ),
    ],
)
def test_a_package_that_no_process_can_be_forked_with_is_refused(
    run: Run, tmp_path: Path, source: str, says: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"from tests.environments.environment_cases import Counter\nclass Own(Counter): ...\n{source}\n")

    async def scenario() -> None:
        with pytest.raises(ConfigError) as error:
            await Episodes(f"{file}:Own").__aenter__()
        assert says in str(error.value)

    run(scenario())


def test_an_environment_that_refuses_its_options_does_so_when_the_pool_is_entered(run: Run) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="cannot be made: ValueError: size 2 is too small"):
            await Episodes(f"{CASES}:Refusing:size=2").__aenter__()

    run(scenario())


# Many


def test_no_more_processes_than_allowed_are_alive(run: Run) -> None:
    async def scenario() -> list[int]:
        async with Episodes(OBEDIENT, processes=3) as pool:

            async def one(seed: int) -> int:
                episode = await pool.reset(row(seed))
                assert pool.zygote_pid is not None
                alive = len(family(pool.zygote_pid))
                await episode.step(Action("echo"))
                await episode.close()
                return alive

            return await asyncio.gather(*map(one, range(12)))

    alive = run(scenario())
    assert max(alive) == 3


def test_the_same_seed_and_actions_give_the_same_episode_alone_and_among_others(run: Run, pool: Episodes) -> None:
    async def played(pool: Episodes, seed: int) -> list[str]:
        episode = await pool.reset(row(seed))
        seen = [(await episode.step(Action("random"))).observations[0].text for _ in range(5)]
        await episode.close()
        return seen

    async def scenario() -> None:
        alone = [await played(pool, seed) for seed in range(32)]
        assert len({tuple(one) for one in alone}) == 32
        assert await asyncio.gather(*(played(pool, seed) for seed in range(32))) == alone
        async with Episodes(OBEDIENT) as other:  # the order of a set is part of what is seen
            assert [await played(other, seed) for seed in range(3)] == alone[:3]

    run(scenario())


def test_two_episodes_step_by_step_do_not_disturb_each_other(run: Run, pool: Episodes) -> None:
    async def scenario() -> None:
        first, second = await pool.reset(row(1)), await pool.reset(row(1))
        for _ in range(5):
            both = [(await one.step(Action("random"))).observation for one in (first, second)]
            assert both[0] == both[1]
        await first.close()
        await second.close()

    run(scenario())


def test_leaving_the_pool_closes_open_episodes(run: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        note = tmp_path / "closed"
        async with Episodes(f"{OBEDIENT}:closed={note}") as pool:
            note.unlink()  # of the environment that was made to see whether it can be
            episode = await pool.reset(row())
            await (await pool.reset(row())).close()
            assert note.read_text() == "closed\n"
        assert note.read_text() == "closed\n" * 2
        assert not running([pid_of(episode)])
        await episode.close()
        assert note.read_text() == "closed\n" * 2

    run(scenario())


@pytest.mark.parametrize(("at_close", "cause"), [("raise", "env_raised"), ("exit", "env_died")])
def test_a_fault_at_close_is_told_and_leaves_nothing(run: Run, tmp_path: Path, at_close: str, cause: str) -> None:
    async def scenario() -> None:
        file = tmp_path / "own.py"
        file.write_text(
            "from tests.environments.environment_cases import Obedient\n"
            "class Own(Obedient):\n"
            "    async def close(self):\n"
            f"        if hasattr(self, 'played'): self.do_{at_close}()\n"
            "    def do_echo(self, text=''):\n"
            "        self.played = True\n"
            "        return super().do_echo(text)\n"
        )
        async with Episodes(f"{file}:Own") as pool:
            episode = await pool.reset(row())
            await episode.step(Action("echo"))
            with pytest.raises(EnvironmentFailed) as error:
                await episode.close()
            assert error.value.cause == cause
            assert not running([pid_of(episode)])

    run(scenario())


# Optional parts of the protocol


def test_a_saved_state_is_restored_in_a_new_process(run: Run) -> None:
    async def scenario() -> None:
        name = f"{CASES}:Counter"
        begin = environment_rows(name).train[1]
        async with Episodes(name) as pool:
            assert (pool.seats, pool.replays) == (1, True)
            episode = await pool.reset(begin)
            await episode.step(Action("3"))
            state = await episode.save_state()
            assert state is not None
            await episode.close()
            again = await pool.restore(begin, state)
            step = await again.step(Action("6"))
            assert step.reward == begin.seed + 9
            await again.close()

    run(scenario())


def test_seats_act_in_order_and_each_has_its_reward(run: Run) -> None:
    async def scenario() -> None:
        async with Episodes(f"{CASES}:Duel") as pool:
            assert (pool.seats, pool.replays) == (2, False)
            episode = await pool.reset(row())
            assert [one.text for one in episode.observations] == ["You are first.", "You are second."]
            assert (await episode.step(Action("3"), 0)).observations[1].text == "Bid."
            assert (await episode.step(Action("5"), 1)).rewards == (0.0, 1.0)
            await episode.close()
        async with Episodes(f"{CASES}:Lonely") as pool:
            with pytest.raises(EnvironmentFailed, match=r"Lonely.reset returned 1 observations; it has 2 seat\(s\)"):
                await pool.reset(row())

    run(scenario())

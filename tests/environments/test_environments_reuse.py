"""Processes that play several episodes: what the next one has of the one before, and when there is no next one."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.environments import Action, EnvironmentFailed, Episodes, OpenEpisode
from flowrl.environments.episodes import MOST_LEFT
from flowrl.errors import ConfigError
from tests.environments.test_environments_processes import (
    CASES,
    MEMORY,
    OBEDIENT,
    Run,
    ended,
    family,
    pid_of,
    row,
    running,
)
from tests.rigs.ticks import ticks, ticks_until

pytestmark = pytest.mark.timeout(60)
EPISODES = 3


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def run(runner: asyncio.Runner) -> Run:
    return runner.run


@pytest.fixture(scope="module")
def pool(runner: asyncio.Runner) -> Iterator[Episodes]:
    entered = Episodes(OBEDIENT, memory_bytes=MEMORY, episodes_per_process=EPISODES)
    runner.run(entered.__aenter__())
    yield entered
    assert entered.zygote_pid is not None
    left = family(entered.zygote_pid)
    runner.run(entered.__aexit__(None, None, None))
    assert not running([entered.zygote_pid, *left])


async def played(pool: Episodes, *orders: str, seed: int = 0) -> tuple[int, list[str]]:
    """One episode of these orders, from reset to close: its pid, and what it said."""
    episode = await pool.reset(row(seed))
    said = [(await episode.step(Action(order))).observations[0].text for order in orders]
    await episode.close()
    return pid_of(episode), said


async def fresh(pool: Episodes) -> None:
    """End the processes that have played, so that the next episode has a new one."""
    for process in list(pool._waiting):
        process.kill_process()
        await process.wait_gone()


def test_a_process_plays_so_many_episodes_and_ends(run: Run, pool: Episodes) -> None:
    async def scenario() -> None:
        await fresh(pool)
        pids = [(await played(pool))[0] for _ in range(2 * EPISODES)]
        first, second = pids[0], pids[EPISODES]
        assert pids == [first] * EPISODES + [second] * EPISODES and first != second
        assert not running([first, second])

    run(scenario())


def test_the_next_episode_has_only_what_modules_keep(run: Run, pool: Episodes) -> None:
    async def scenario() -> None:
        await fresh(pool)
        pid, before = await played(pool, "kept", "random", seed=5)
        around = ast.literal_eval(before[0])[3:]
        assert before[0] == str([[], "", None, *around]) and around[0] == os.getcwd() and around[3] is False
        await played(pool, "keep this", "to_thread")
        again, after = await played(pool, "kept", "random", seed=5)
        assert again == pid
        assert after == [str([["this"], "", None, *around]), before[1]]

    run(scenario())


def test_the_text_of_an_error_has_only_what_its_own_episode_printed(run: Run, pool: Episodes) -> None:
    async def scenario() -> None:
        await fresh(pool)
        pid, _ = await played(pool, "print_line of the first")
        episode = await pool.reset(row())
        assert pid_of(episode) == pid
        await episode.step(Action("print_line of the second"))
        with pytest.raises(EnvironmentFailed) as error:
            await episode.step(Action("raise"))
        assert "of the second" in str(error.value) and "of the first" not in str(error.value)
        await episode.close()

    run(scenario())


def test_what_an_episode_leaves_in_its_event_loop_is_not_called_in_the_next_one(run: Run, pool: Episodes) -> None:
    async def scenario() -> None:
        await fresh(pool)
        pid, (descriptor,) = await played(pool, "leave_in_loop")
        assert await played(pool, f"write_and_sleep {descriptor}") == (pid, ["[]"])

    run(scenario())


def test_garbage_of_an_episode_does_not_count_for_the_next_one(run: Run, pool: Episodes) -> None:
    async def scenario() -> None:
        await fresh(pool)
        size = MEMORY * 2 // 3 >> 20
        pids = [(await played(pool, f"fill {size}"))[0] for _ in range(EPISODES)]
        assert pids == pids[:1] * EPISODES

    run(scenario())


def test_a_process_that_keeps_much_memory_plays_no_other_episode(run: Run, pool: Episodes) -> None:
    async def scenario() -> None:
        for part, again in ((8, True), (3, False)):
            await fresh(pool)
            pid, _ = await played(pool, f"cache {(MEMORY >> 20) // part}")
            assert ((await played(pool))[0] == pid) is again

    run(scenario())


@pytest.mark.parametrize("order", ["to_thread", "last_moment", "end", "foreign_thread", "ended_child"])
def test_what_ends_by_itself_does_not_end_the_process(run: Run, pool: Episodes, order: str) -> None:
    async def scenario() -> None:
        await fresh(pool)
        assert (await played(pool, order))[0] == (await played(pool))[0]

    run(scenario())


@pytest.mark.parametrize("order", ["thread", "task", "processes"])
def test_a_process_in_which_something_still_runs_plays_no_other_episode(run: Run, pool: Episodes, order: str) -> None:
    async def scenario() -> None:
        await fresh(pool)
        pid, (said,) = await played(pool, order)
        pids = [pid, *(map(int, said.split()) if order == "processes" else ())]
        assert not running(pids)
        assert (await played(pool))[0] != pid

    run(scenario())


@pytest.mark.parametrize("order", ["raise", "none", "objects", "kill", "cancelled"])
def test_a_process_that_failed_plays_no_other_episode(run: Run, pool: Episodes, order: str) -> None:
    async def scenario() -> None:
        await fresh(pool)
        episode = await pool.reset(row())
        with pytest.raises(EnvironmentFailed):
            await episode.step(Action(order))
        await episode.close()
        assert not running([pid_of(episode)])
        assert (await played(pool))[0] != pid_of(episode)

    run(scenario())


def test_a_cancelled_step_ends_the_process(run: Run, pool: Episodes) -> None:
    async def scenario() -> None:
        await fresh(pool)
        episode = await pool.reset(row())
        step = asyncio.create_task(episode.step(Action("await")))
        await ticks_until(lambda: episode._over)
        step.cancel()
        await asyncio.wait({step})
        await episode.close()
        assert not running([pid_of(episode)])

    run(scenario())


def test_a_directory_that_is_gone_is_left(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an episode, and that of the whole run."""

    async def scenario() -> None:
        async with Episodes(OBEDIENT, episodes_per_process=EPISODES) as pool:
            pid, _ = await played(pool, "remove_directory")
            assert (await played(pool, "print_line x"))[0] == pid
            os.rmdir(tmp_path)
            for episodes in (1, 2):  # the processes of before, and new ones
                assert (await played(pool, "print_line x"))[0] != pid or episodes == 1

    monkeypatch.chdir(tmp_path)
    run(scenario())


def test_where_each_episode_leaves_something_none_is_asked_to_play_another(run: Run) -> None:
    async def scenario() -> None:
        told: list[str] = []
        async with Episodes(OBEDIENT, episodes_per_process=EPISODES, progress=told.append) as pool:
            for number in range(MOST_LEFT - 1):
                await played(pool, "thread")
                assert not told, number
            await played(pool)
            for _ in range(MOST_LEFT):
                await fresh(pool)
                assert not told
                await played(pool, "thread")
            assert len(told) == 1 and "left a task, a thread, a process or much memory" in told[0]
            assert (await played(pool))[0] != (await played(pool))[0]
        assert len(told) == 1

    run(scenario())


def test_those_that_wait_are_among_the_processes_that_may_be_alive(run: Run) -> None:
    async def scenario() -> None:
        async with Episodes(OBEDIENT, processes=2, episodes_per_process=EPISODES) as pool:
            assert pool.zygote_pid is not None
            pids: set[int] = set()
            alive = []

            async def one(seed: int) -> None:
                episode: OpenEpisode = await pool.reset(row(seed))
                pids.add(pid_of(episode))
                alive.append(len(family(pool.zygote_pid or 0)))
                await episode.close()

            await asyncio.gather(*map(one, range(4 * EPISODES)))
            assert max(alive) <= 2
            assert len(pids) in (4, 5), "twelve episodes, three for each process but the last two"
            await pool.reset(row())  # it is open when the pool ends
        assert not running(list(pids))

    run(scenario())


def test_processes_of_a_dead_zygote_are_not_used_any_more(run: Run) -> None:
    async def scenario() -> None:
        async with Episodes(OBEDIENT, processes=1, zygote_restarts=1, episodes_per_process=EPISODES) as pool:
            pid, _ = await played(pool)
            assert pool.zygote_pid is not None
            (waiting,) = pool._waiting
            os.kill(pool.zygote_pid, signal.SIGKILL)
            await ended([pid])
            await waiting.exited
            for _ in range(EPISODES + 1):
                assert (await played(pool))[0] != pid

    run(scenario())


def test_a_waiting_process_that_is_killed_makes_room_for_another(run: Run) -> None:
    async def scenario() -> None:
        async with Episodes(OBEDIENT, processes=1, episodes_per_process=EPISODES) as pool:
            pid, _ = await played(pool)
            (waiting,) = pool._waiting
            os.kill(pid, signal.SIGKILL)
            await waiting.exited
            await ticks()
            assert not pool._waiting
            first, second = await pool.reset(row()), asyncio.create_task(pool.reset(row()))
            await ticks(10)
            assert not second.done(), "one process is alive, and plays"
            await first.close()
            await (await second).close()

    run(scenario())


def test_a_cooperative_environment_has_no_processes(run: Run) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="has no processes, so episodes_per_process has no effect"):
            await Episodes(f"{CASES}:Cooperative", episodes_per_process=2).__aenter__()

    run(scenario())

"""Episodes of cooperative environments, which share the caller's event loop."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from flowrl.environments import Action, EnvironmentFailed, EnvironmentRow, Episodes

COOPERATIVE = f"{Path(__file__).parent}/environment_cases.py:Cooperative"
ROW = EnvironmentRow(COOPERATIVE)
pytestmark = pytest.mark.timeout(30)


def played(scenario: Callable[[Episodes], Awaitable[None]], options: str = "", *, step_s: float = 30.0) -> None:
    async def whole() -> None:
        async with Episodes(f"{COOPERATIVE}{options}", step_s=step_s) as pool:
            assert pool.zygote_pid is None
            await scenario(pool)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())


def test_it_is_played_in_this_process() -> None:
    async def scenario(pool: Episodes) -> None:
        episode = await pool.reset(ROW)
        assert json.loads(episode.observation.text)["pid"] == os.getpid()
        step = await episode.step(Action("echo abc"))
        assert (step.observations[0].text, step.reward) == ("abc", 1.5)
        assert (await episode.step(Action("end"))).over
        await episode.close()

    played(scenario)


@pytest.mark.parametrize(
    ("order", "cause", "says"),
    [
        ("raise", "env_raised", "LookupError: no such move"),
        ("cancelled", "env_raised", "CancelledError"),
        ("late", "env_raised", "TimeoutError: of its own"),
        ("refused", "env_unreachable", "nobody listens"),
        ("sysexit", "env_died", "called sys.exit(4)"),
        ("none", "env_malformed", "Cooperative.step returned None; it needs a Step"),
        ("await", "env_timed_out", "step took more than 0.2 s"),
    ],
)
def test_each_fault_has_its_cause_and_close_is_called_once(tmp_path: Path, order: str, cause: str, says: str) -> None:
    note = tmp_path / "closed"

    async def scenario(pool: Episodes) -> None:
        note.unlink()  # of the environment that was made to see whether it can be
        episode = await pool.reset(ROW)
        with pytest.raises(EnvironmentFailed) as error:
            await episode.step(Action(order))
        assert error.value.cause == cause and says in str(error.value)
        await episode.close()
        await episode.close()
        assert note.read_text() == "closed\n"

    played(scenario, f":closed={note}", step_s=0.2)


def test_a_fault_at_reset_closes_the_environment(tmp_path: Path) -> None:
    note = tmp_path / "closed"

    async def scenario(pool: Episodes) -> None:
        note.unlink()
        with pytest.raises(EnvironmentFailed, match="no such move"):
            await pool.reset(ROW)
        assert note.read_text() == "closed\n"

    played(scenario, f":closed={note},at_reset=raise")


def test_a_cancelled_step_passes_its_cancellation_on(tmp_path: Path) -> None:
    async def scenario(pool: Episodes) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        episode = await pool.reset(ROW)
        step = asyncio.create_task(episode.step(Action(f"await {fifo}")))
        assert int(await asyncio.to_thread(fifo.read_text)) == os.getpid()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await episode.close()

    played(scenario)


def test_leaving_the_pool_closes_open_episodes(tmp_path: Path) -> None:
    note = tmp_path / "closed"

    async def scenario(pool: Episodes) -> None:
        note.unlink()
        await pool.reset(ROW)
        await pool.reset(ROW)

    played(scenario, f":closed={note}")
    assert note.read_text() == "closed\n" * 2

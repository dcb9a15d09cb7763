"""When checkpoints are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.runtime.driver import run_checkpoints
from flowrl.runtime.driver.driver import Driver
from flowrl.runtime.driver.job import RunOptions
from flowrl.runtime.driver.run_checkpoints import CheckpointClock
from flowrl.testing import run_graph
from tests.rigs.in_process import seeing_the_driver

WAYS = Path(__file__).parent / "graphs_branches" / "ways.py"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """[the time], to be moved."""
    time = [0.0]
    monkeypatch.setattr(run_checkpoints.time, "monotonic", lambda: time[0])
    return time


def test_one_is_due_after_minutes_without_any(now: list[float]) -> None:
    clock = CheckpointClock(RunOptions(save_minutes=10))
    assert not clock.is_due(1)
    now[0] = 599.0
    assert not clock.is_due(2)
    now[0] = 600.0
    assert clock.is_due(3)
    now[0] = 630.0
    assert clock.note_saved(600.0) == "in 30.0 s, 4.8% of the time since the one before"
    assert not clock.is_due(4)
    now[0] = 1230.0
    assert clock.is_due(5)


def test_all_ranks_get_one_answer(now: list[float]) -> None:
    clock = CheckpointClock(RunOptions(save_minutes=10))
    assert not clock.is_due(7)
    now[0] = 601.0
    assert not clock.is_due(7), "the rank that asked first has gone on"
    assert clock.is_due(8) and clock.is_due(8)


def test_steps_time_and_none_at_the_last_step(now: list[float]) -> None:
    clock = CheckpointClock(RunOptions(steps=6, save_every=3, save_minutes=0))
    now[0] = 1e6
    assert [version for version in range(1, 7) if clock.is_due(version)] == [3]
    clock = CheckpointClock(RunOptions(steps=6, save_minutes=0))
    clock.make_due()
    assert [version for version in range(1, 7) if clock.is_due(version)] == [1, 2, 3, 4, 5], "until one is saved"


def test_a_run_makes_checkpoints_by_time(tmp_path: Path) -> None:
    ran = run_graph(WAYS, tmp_path / "run", {"kind": "plain", "ranks": 2}, steps=4, save_minutes=1e-9, keep=0)
    assert ran.audit().ok
    assert checkpoints(tmp_path) == ["step_000001", "step_000002", "step_000003", "step_000004"]


def test_a_terminated_run_has_a_checkpoint_of_the_batch_at_hand(tmp_path: Path) -> None:
    def terminate_at_two(driver: Driver) -> None:
        on_step = driver.records.on_step

        def stepped(record: dict[str, object]) -> None:
            on_step(record)
            if record["step"] == 2:
                driver.terminate()

        driver.records.on_step = stepped  # type: ignore[method-assign]

    with seeing_the_driver(terminate_at_two):
        ran = run_graph(WAYS, tmp_path / "run", {"kind": "plain"}, keep=0)
    assert ran.outcome is not None and ran.outcome.interrupted
    assert "step_000002" in checkpoints(tmp_path)
    assert checkpoints(tmp_path)[-1] == f"step_{ran.outcome.steps:06d}"
    assert any("terminated; a checkpoint follows the current batch" in line for line in ran.view.lines)


def checkpoints(tmp_path: Path) -> list[str]:
    return [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step_*"))]

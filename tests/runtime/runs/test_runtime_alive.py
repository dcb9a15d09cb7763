"""Slow is not dead, and dead is found: graphs whose driver looks every hundredth of a second."""

from __future__ import annotations

import json
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import Stalled
from flowrl.runtime.checkpoints import checkpoint
from flowrl.testing import GraphRun, run_graph
from tests.rigs.in_process import looking_every, over_sockets
from tests.runtime.runs.graphs_alive.odd import SLOW

GRAPHS = Path(__file__).parent / "graphs_alive"
LOOK_EVERY_S = 0.01
"""A graph that stands for half a second is looked at some dozens of times meanwhile."""


def looked_at(name: str, directory: Path, config: dict[str, Any], **options: Any) -> GraphRun:
    with looking_every(LOOK_EVERY_S):
        return run_graph(GRAPHS / f"{name}.py", directory, config, timeout_s=30, **options)


@pytest.mark.parametrize("where", SLOW)
def test_a_node_with_something_of_its_own_pending_is_never_dead(tmp_path: Path, where: str) -> None:
    done = looked_at("odd", tmp_path, {"where": where, "seconds": 0.3}, steps=2)
    assert done.steps == [1, 2] and done.audit().ok and not done.view.warnings


def test_a_slow_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, synced = checkpoint.sync_file, threading.Event()

    def slowly(path: Path) -> None:
        if path.name == "state.msgpack":
            time.sleep(0.3)  # under test: a slow disk
            synced.set()
        sync(path)

    monkeypatch.setattr(checkpoint, "sync_file", slowly)
    done = looked_at("odd", tmp_path, {}, steps=4, save_every=2)
    assert synced.is_set() and done.steps == [1, 2, 3, 4]
    assert len(list((tmp_path / "checkpoints").glob("step_*"))) == 2


@pytest.mark.parametrize("gang", [True, False])
def test_a_trainer_beside_an_evaluation_makes_its_steps_and_its_checkpoint(tmp_path: Path, gang: bool) -> None:
    done = looked_at("evaluated", tmp_path, {"gang": gang, "seconds": 0.2}, steps=6)
    assert done.steps == [1, 2, 3, 4, 5, 6] and done.states() == {"trained": 48} and done.audit().ok
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000006"]
    assert done.outcome is not None and list(done.outcome.evaluations) == ["before", "after"]


@pytest.mark.parametrize("gang", [True, False])
def test_evaluations_between_batches_and_checkpoints_go_together(tmp_path: Path, gang: bool) -> None:
    config = {"gang": gang, "every": (2, 3)}
    done = looked_at("evaluated", tmp_path, config, steps=7, save_every=2, keep_best=True, keep=1)
    assert done.steps == [1, 2, 3, 4, 5, 6, 7]
    during = [line.split(":")[0] for line in done.view.lines if line.startswith("evaluation during")]
    assert during == [f"evaluation during at {step}" for step in (2, 3, 4, 6, 6)]
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["step"] == 7, "the first evaluation decides, whenever the other one is due"


@pytest.mark.parametrize(
    ("how", "cycle"),
    [
        ("credit", ["source waits for credit of source.lefts -> pairs.lefts, held up by pairs"]),
        ("lock", ["source waits for credit of source.lefts -> pairs.lefts, held up by pairs"]),
        ("beside", ["source waits for credit of source.lefts -> pairs.lefts, held up by pairs"]),
        ("reply", ["asker waits for reply of asker.ask, held up by answerer"]),
    ],
)
@pytest.mark.parametrize("link", ["objects", "ipc"])
def test_a_deadlock_is_found_with_its_cycle(tmp_path: Path, how: str, cycle: list[str], link: Any) -> None:
    with over_sockets() if link == "ipc" else nullcontext():
        done = looked_at("stuck", tmp_path, {"how": how}, must_succeed=False)
    assert isinstance(done.error, Stalled), repr(done.error)
    for line in ("the run is deadlocked", "wait-for cycle:", *cycle):
        assert line in str(done.error), str(done.error)


def test_tickets_that_nobody_can_return_are_a_deadlock(tmp_path: Path) -> None:
    """The odd node holds what it has got until eight more come, and there are tickets for sixteen samples in all."""
    done = looked_at("odd", tmp_path, {"where": "forgets"}, steps=6, must_succeed=False)
    assert isinstance(done.error, Stalled), repr(done.error)
    assert "prompts/0 waits: ticket of prompts.prompts" in str(done.error)
    assert "odd/0 waits: item of odd.samples" in str(done.error)

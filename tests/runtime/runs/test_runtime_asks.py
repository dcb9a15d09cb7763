"""Runs of a graph that asks, in one process and in virtual time: what trains, what is proven, what is resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flowrl.testing import GraphRun, VirtualClock, run_graph

ASKED = Path(__file__).parent / "graphs_episodes" / "asked.py"
STEPS = 6


def play(run_dir: Path, *, steps: int = STEPS, resume: bool = False, **config: Any) -> GraphRun:
    options: dict[str, Any] = {"steps": steps, "resume": resume, "save_every": 2, "keep": 0}
    return run_graph(ASKED, run_dir, config, clock=VirtualClock(), timeout_s=3600, **options)


def test_what_is_asked_is_trained_and_proven(tmp_path: Path) -> None:
    ran = play(tmp_path / "run")
    assert ran.audit().ok, str(ran.audit())
    trained = ran.rows(
        "SELECT COUNT(*), SUM(trained_tokens), SUM(response_tokens) FROM samples WHERE state = 'trained'"
    )
    ((number, tokens, sampled),) = trained
    assert number > STEPS * 10 and tokens == sampled
    counted = "SELECT COUNT(*), SUM(tokens) FROM requests JOIN samples USING (sample_id) WHERE state = 'trained' AND"
    assert ran.rows(f"{counted} abandoned IS NULL") == [(3 * number, tokens)]
    ((left_out, redone),) = ran.rows(f"{counted} abandoned = 'not_used'")
    assert left_out == number
    assert ran.rows("SELECT SUM(redone_tokens) FROM samples WHERE state = 'trained'") == [(redone,)]
    assert {who for (who,) in ran.rows("SELECT DISTINCT generator FROM requests")} == {"generator/0"}, "no judge's"
    assert ran.rows("SELECT DISTINCT environment FROM episodes WHERE cause IS NULL") == [("solver",)]


def test_what_a_failed_sample_asked_is_redone(tmp_path: Path) -> None:
    ran = play(tmp_path / "run")
    failed = ran.rows("SELECT sample_id, redone_tokens, response_tokens FROM samples WHERE reason = 'no_idea'")
    assert failed
    for sample_id, redone, counted in failed:
        requests = ran.rows("SELECT COUNT(*), SUM(tokens) FROM requests WHERE sample_id = ?", sample_id)
        assert requests == [(2, redone)] and counted == 0


def test_a_changed_token_of_a_branch_is_named(tmp_path: Path) -> None:
    report = play(tmp_path / "run", meddle=True).audit()
    assert not report.ok and "a node has changed ids" in str(report)


@pytest.mark.parametrize("slow_s", [0.3, 3.0])
def test_asks_go_on_after_a_resume(tmp_path: Path, slow_s: float) -> None:
    play(tmp_path / "run", slow_s=slow_s)
    for later in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    again = play(tmp_path / "run", resume=True, slow_s=slow_s)
    assert again.audit().ok, str(again.audit())
    in_force = again.rows("SELECT COUNT(*) FROM requests WHERE abandoned IS NULL AND incarnation = 0")
    assert in_force[0][0] > 0
    resumed = again.rows("SELECT COUNT(*) FROM requests WHERE abandoned = 'resumed'")[0][0]
    assert resumed < 40, "only what was asked after the checkpoint"
    assert again.rows("SELECT MAX(step) FROM steps") == [(STEPS,)]

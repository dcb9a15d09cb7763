"""Runs of agents' programs in one process, with real agents and the real endpoint: the books close."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl.testing import GraphRun, run_graph

PLAYED = Path(__file__).parent / "graphs_episodes" / "agents_played.py"
STEPS = 4
pytestmark = pytest.mark.timeout(120)


def play(run_dir: Path, *, steps: int = STEPS, resume: bool = False, **config: Any) -> GraphRun:
    options: dict[str, Any] = {"steps": steps, "resume": resume, "save_every": 2}
    return run_graph(PLAYED, run_dir, config, timeout_s=100, **options).raise_for_error()


def test_every_trained_token_was_sampled_in_the_session_of_its_agent(tmp_path: Path) -> None:
    ran = play(tmp_path / "run", evaluate=4)
    report = ran.audit()
    assert report.ok, str(report)
    assert ran.states() == {"trained": STEPS * 6}
    assert report.figures["requests"] == report.figures["policy spans proven"] == STEPS * 6 * 2
    assert ran.rows("SELECT phase, COUNT(*) FROM evaluations GROUP BY 1 ORDER BY 1") == [("after", 4), ("before", 4)]


def test_one_id_changed_between_endpoint_and_trainer_fails_the_audit(tmp_path: Path) -> None:
    report = play(tmp_path / "run", steps=2, meddle=True).audit()
    assert not report.ok and report.figures["policy spans proven"] < report.figures["policy spans"]


def test_what_agents_do_wrong_is_redone_or_abandoned_and_resumed(tmp_path: Path) -> None:
    first = play(tmp_path / "run", agent="unsteady")
    assert first.audit().ok, str(first.audit())
    reasons = {reason for (reason,) in first.rows("SELECT DISTINCT abandoned FROM requests WHERE abandoned NOT NULL")}
    assert reasons & {"agent_raised", "agent_died"} and reasons & {"cancelled", "not_received"}
    failures = {"failed: agent_raised", "failed: agent_died", "failed: branches"}
    assert first.states().keys() <= failures | {"trained", "filtered: group_too_small", "dropped: run_end"}
    redone = first.rows("SELECT SUM(redone_tokens) FROM samples")[0][0]
    assert redone == first.rows("SELECT SUM(tokens) FROM requests WHERE abandoned NOT NULL")[0][0] > 0
    assert first.rows("SELECT COUNT(*) FROM samples WHERE state = 'failed' AND reward NOT NULL") == [(0,)]
    again = play(tmp_path / "run", agent="unsteady", steps=STEPS + 2, resume=True)
    assert again.audit().ok, str(again.audit())
    assert again.steps == [STEPS + 1, STEPS + 2]

"""Runs of agents' programs in one process, with real agents and the real endpoint: the books close."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.channels.machines import free_ports
from flowrl.testing import GraphRun, run_graph
from tests.agents.agent_programs import MARKS
from tests.runtime.checkpoints.test_runtime_half_done import killed
from tests.runtime.runs.graphs_episodes.agents_played import HELD

ROOT = Path(__file__).parents[3]
PLAYED = ROOT / "tests" / "runtime" / "runs" / "graphs_episodes" / "agents_played.py"
STEPS = 4
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def play(run_dir: Path, *, steps: int = STEPS, resume: bool = False, save_every: int = 2, **config: Any) -> GraphRun:
    options: dict[str, Any] = {"steps": steps, "resume": resume, "save_every": save_every}
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


@pytest.mark.parametrize(
    ("agent", "replies", "credit"), [("branches", 3, "turn"), ("continues_the_text", 2, "episode")]
)
def test_every_reply_of_an_agent_with_branches_is_proven(tmp_path: Path, agent: str, replies: int, credit: str) -> None:
    ran = play(tmp_path / "run", agent=agent, credit=credit)
    report = ran.audit()
    assert report.ok, str(report)
    assert ran.states() == {"trained": STEPS * 6}
    assert report.figures["requests"] == report.figures["policy spans proven"] == STEPS * 6 * replies
    used = ran.rows("SELECT SUM(tokens) FROM uses")
    assert used == ran.rows("SELECT SUM(tokens) FROM requests") == ran.rows("SELECT SUM(response_tokens) FROM samples")
    assert ran.rows("SELECT COUNT(*) FROM uses") == [(STEPS * 6,)]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run whose programs leave marks."""
    (tmp_path / "marks").mkdir()
    monkeypatch.setenv(MARKS, str(tmp_path / "marks"))
    return tmp_path / "run"


def resumed_in_the_middle(run_dir: Path, agent: str) -> tuple[GraphRun, set[str], set[str]]:
    """The run, resumed from its first checkpoint; the samples of half-done agents, and those that had replies."""
    config: dict[str, Any] = {"agent": agent, "retries": 0, "in_the_middle": True}
    play(run_dir, steps=2, save_every=1, **config)
    records = killed(run_dir, after=1)
    ran = play(run_dir, resume=True, **config)
    assert ran.audit().ok, str(ran.audit())
    assert ran.states() == {"trained": STEPS * 6}
    half_done = {sample_id for sample_id, record in records.items() if record.first is not None}
    replied = {sample_id for sample_id, record in records.items() if record.request_ids}
    assert len(half_done & replied) >= HELD, "programs wait with a reply until there is a checkpoint"
    return ran, half_done, replied


@pytest.mark.parametrize("agent", ["takes_its_time", "several_answers"])
def test_half_done_agents_get_the_replies_that_they_had_in_a_resumed_run(run_dir: Path, agent: str) -> None:
    ran, _, _ = resumed_in_the_middle(run_dir, agent)
    assert ran.rows("SELECT * FROM attempts WHERE cause NOT NULL") == []
    assert ran.rows("SELECT sample_id FROM episodes WHERE attempts > 1") == []
    assert ran.rows("SELECT SUM(redone_tokens) FROM samples") == [(0,)]
    assert ran.rows("SELECT COUNT(*) FROM requests WHERE abandoned NOT NULL") == [(0,)]


@pytest.mark.parametrize("agent", ["ends_early", "fails_early"])
def test_half_done_agents_that_make_fewer_calls_begin_anew_and_use_up_no_retry(run_dir: Path, agent: str) -> None:
    ran, half_done, replied = resumed_in_the_middle(run_dir, agent)
    void = {name for (name,) in ran.rows("SELECT sample_id FROM attempts WHERE cause = 'replay_differs'")}
    assert len(void) == HELD and void <= half_done & replied


def test_half_done_agents_that_ask_something_else_begin_anew_and_use_up_no_retry(run_dir: Path) -> None:
    ran, half_done, replied = resumed_in_the_middle(run_dir, "asks_the_time")
    void = {name for (name,) in ran.rows("SELECT sample_id FROM attempts WHERE cause = 'replay_differs'")}
    assert replied & half_done <= void <= half_done
    assert {name for (name,) in ran.rows("SELECT sample_id FROM episodes WHERE attempts = 2")} == void
    redone = ran.rows("SELECT SUM(redone_tokens) FROM samples")
    assert redone == ran.rows("SELECT SUM(tokens) FROM requests WHERE abandoned = 'replay_differs'") != [(0,)]


def test_what_agents_do_wrong_is_redone_or_abandoned_and_resumed(tmp_path: Path) -> None:
    first = play(tmp_path / "run", agent="unsteady")
    assert first.audit().ok, str(first.audit())
    reasons = {reason for (reason,) in first.rows("SELECT DISTINCT abandoned FROM requests WHERE abandoned NOT NULL")}
    assert reasons & {"agent_raised", "agent_died"} and reasons & {"cancelled", "not_received"}
    failures = {"failed: agent_raised", "failed: agent_died"}
    assert first.states().keys() <= failures | {"trained", "filtered: group_too_small", "dropped: run_end"}
    redone = first.rows("SELECT SUM(redone_tokens) FROM samples")[0][0]
    assert redone == first.rows("SELECT SUM(tokens) FROM requests WHERE abandoned NOT NULL")[0][0] > 0
    assert first.rows("SELECT COUNT(*) FROM samples WHERE state = 'failed' AND reward NOT NULL") == [(0,)]
    again = play(tmp_path / "run", agent="unsteady", steps=STEPS + 2, resume=True)
    assert again.audit().ok, str(again.audit())
    assert again.steps == [STEPS + 1, STEPS + 2]


@contextmanager
def outside_workers(run_dir: Path, port: int) -> Iterator[None]:
    """Four of them in a process of their own, which ends with the run."""
    (run_dir / "agents-0.key").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "tests.agents.outside_workers",
        f"http://127.0.0.1:{port}",
        str(run_dir / "agents-0.key"),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.wait()


def test_the_books_close_over_outside_workers_that_come_and_go(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    config: dict[str, Any] = {"agent": "outside", "port": port, "idle_s": 2.0, "retries": 5, "evaluate": 4}
    with outside_workers(tmp_path / "run", port):
        first = play(tmp_path / "run", **config)
    assert first.audit().ok, str(first.audit())
    assert first.states()["trained"] > STEPS * 3
    causes = {cause for (cause,) in first.rows("SELECT DISTINCT cause FROM attempts")}
    assert causes and causes <= {"session_idle", "no_reward"}
    redone = first.rows("SELECT SUM(redone_tokens) FROM samples")[0][0]
    assert redone == first.rows("SELECT SUM(tokens) FROM requests WHERE abandoned NOT NULL")[0][0] > 0
    assert first.rows("SELECT phase, COUNT(*) FROM evaluations GROUP BY 1 ORDER BY 1") == [("after", 4), ("before", 4)]
    records = killed(tmp_path / "run", after=2)
    half_done = {sample_id for sample_id, record in records.items() if record.first is not None}
    with outside_workers(tmp_path / "run", port):
        ran = play(tmp_path / "run", resume=True, **config)
    assert ran.audit().ok, str(ran.audit())
    resumed = {name for (name,) in ran.rows("SELECT sample_id FROM attempts WHERE cause = 'resumed'")}
    sent = {name for (name,) in ran.rows("SELECT sample_id FROM episodes WHERE incarnation = 0")}
    assert resumed == half_done - sent, "a record is kept until the episode has arrived where it was sent"

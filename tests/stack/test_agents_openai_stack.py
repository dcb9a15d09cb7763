"""An agent that knows OpenAI's library alone, on the real stack: vLLM answers it over HTTP, ZeRO trains.

One run of graphs/agent_openai.py serves all tests here.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowrl.runtime.audit.audit import audit
from tests import warm

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(500)]
ROOT = Path(__file__).parents[2]
STEPS, GROUPS, MEMBERS = 4, 4, 4
OPTIONS = ("--groups-per-step", str(GROUPS), "--group-size", str(MEMBERS), "--look-ahead", "4", "--evaluate", "16")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, ray: dict[str, str]) -> tuple[Path, str]:
    """A finished run: its directory and what it printed."""
    run_dir = tmp_path_factory.mktemp("agents") / "run"
    command = [warm.python(), "-m", "flowrl.cli", "run", "graphs/agent_openai.py"]
    options = ["--run-dir", str(run_dir), "--plain", *OPTIONS, "--steps", str(STEPS)]
    env = {**os.environ, **ray}
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, done.stdout


def rows(run_dir: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        return db.execute(query).fetchall()


def test_what_was_trained_is_what_vllm_sampled(ran: tuple[Path, str]) -> None:
    run_dir, printed = ran
    report = audit(run_dir)
    assert "audit: ok" in printed and report.ok, str(report)
    assert report.figures["samples"] == STEPS * GROUPS * MEMBERS
    turns = rows(run_dir, "SELECT SUM(turns) FROM episodes")[0][0]
    assert report.figures["policy spans proven"] == report.figures["requests"] == turns


def test_the_agent_calls_its_tool_and_is_right_with_it(ran: tuple[Path, str]) -> None:
    turns = dict(rows(ran[0], "SELECT turns, COUNT(*) FROM episodes GROUP BY 1"))
    assert turns.get(1, 0) > 0 and turns.get(2, 0) > 0
    right = dict(rows(ran[0], "SELECT turns, AVG(reward) FROM episodes JOIN samples USING (sample_id) GROUP BY 1"))
    assert right[2] > 0.7 > 0.4 > right[1], "the calculator is right, and the policy alone is not"


def test_held_out_questions_are_asked_before_and_after(ran: tuple[Path, str]) -> None:
    run_dir, _ = ran
    assert rows(run_dir, "SELECT phase, COUNT(*) FROM evaluations GROUP BY 1 ORDER BY 1") == [
        ("after", 64),
        ("before", 64),
    ]


def test_nothing_of_the_agents_is_left(ran: tuple[Path, str]) -> None:
    assert not list(ran[0].glob("*.key"))
    assert rows(ran[0], "SELECT COUNT(*) FROM attempts") == [(0,)]

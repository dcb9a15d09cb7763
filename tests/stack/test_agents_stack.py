"""Episodes on the real stack: tiny_agent calls a calculator, vLLM answers, ZeRO trains, the tokens are proven.

One run of graphs/agent_tools.py and its resumption serve all tests here.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowrl.runtime.audit.audit import audit
from flowrl.training.engine.requirements import SHARDS
from tests import warm

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(500)]
ROOT = Path(__file__).parents[2]
STEPS, GROUPS, MEMBERS = 4, 4, 4
OPTIONS = ("--groups-per-step", str(GROUPS), "--group-size", str(MEMBERS), "--look-ahead", "4", "--evaluate", "32")
TWO_RANKS = ("--trainer.replicas", "2")
"""Of the first run; it goes on with one."""


def agent_tools(run_dir: Path, ray: dict[str, str], *args: str) -> str:
    """What the run printed."""
    command = [warm.python(), "-m", "flowrl.cli", "run", "graphs/agent_tools.py", "--run-dir", str(run_dir), "--plain"]
    env = {**os.environ, **ray}
    done = subprocess.run(
        [*command, *OPTIONS, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, ray: dict[str, str]) -> tuple[Path, str]:
    """A finished run: its directory and what it printed."""
    run_dir = tmp_path_factory.mktemp("agents") / "run"
    return run_dir, agent_tools(run_dir, ray, "--steps", str(STEPS), "--save-every", "4", "--keep", "0", *TWO_RANKS)


def num_shards(run_dir: Path, step: int) -> int:
    """Files of the checkpoint of that step in which a rank has saved its part of the trainer's state."""
    return len([*(run_dir / "checkpoints" / f"step_{step:06d}").rglob(SHARDS.format(rank="*"))])


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


def test_some_episodes_call_the_tool_and_some_do_not(ran: tuple[Path, str]) -> None:
    turns = dict(rows(ran[0], "SELECT turns, COUNT(*) FROM episodes GROUP BY 1"))
    assert turns.get(1, 0) > 0 and turns.get(2, 0) > 0
    right = dict(rows(ran[0], "SELECT turns, AVG(reward) FROM episodes JOIN samples USING (sample_id) GROUP BY 1"))
    assert right[2] > 0.7 > 0.4 > right[1], "the calculator is right, and the policy alone is not"


def test_the_context_of_a_later_turn_is_in_the_prefix_cache(ran: tuple[Path, str]) -> None:
    """Of the same version: the cache is salted by it, so the first turn after an update has to begin anew."""
    found = rows(ran[0], "SELECT SUM(cached_tokens), SUM(context_tokens) FROM requests WHERE turn > 0")[0]
    assert 0 <= found[0] < found[1]


def test_held_out_episodes_are_played_before_and_after(ran: tuple[Path, str]) -> None:
    run_dir, printed = ran
    assert rows(run_dir, "SELECT phase, COUNT(*) FROM evaluations GROUP BY 1 ORDER BY 1") == [
        ("after", 32),
        ("before", 32),
    ]
    assert "held-out" in printed
    trained = {prompt_id for (prompt_id,) in rows(run_dir, "SELECT prompt_id FROM samples")}
    asked = {prompt_id for (prompt_id,) in rows(run_dir, "SELECT prompt_id FROM evaluations")}
    assert not trained & asked


def test_every_step_says_how_its_episodes_went(ran: tuple[Path, str]) -> None:
    records = [json.loads(line) for line in (ran[0] / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record["staleness_max"] <= 2 and record["turns"] >= 0 for record in records)
    assert any(record.get("episode_turns", 0) > 1 for record in records)


def test_a_resumed_run_goes_on_and_its_tokens_are_proven_too(ran: tuple[Path, str], ray: dict[str, str]) -> None:
    run_dir, _ = ran
    assert num_shards(run_dir, STEPS) == 2
    printed = agent_tools(run_dir, ray, "--resume", "--steps", str(STEPS + 2))
    assert "audit: ok" in printed and f"resumed from step_{STEPS:06d}" in printed
    assert audit(run_dir).figures["steps"] == STEPS + 2
    assert num_shards(run_dir, STEPS + 2) == 1, "one rank goes on with the state of two"

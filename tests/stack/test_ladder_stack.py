"""Two steps of every graph on the real stack, and their records.

graphs/grpo.py has tests/stack/test_stack_run.py to itself, graphs/ppo.py tests/stack/test_ppo_stack.py,
graphs/agent_tools.py tests/stack/test_agents_stack.py, and graphs/agent_openai.py
tests/stack/test_agents_openai_stack.py. The settings are as small as the graphs allow.
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowrl.models import Policy, resolve
from flowrl.runtime.audit.audit import audit
from flowrl.tasks import Task
from tests import warm

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
STEPS, PROMPTS, ANSWERS = 2, 4, 2
SMALL = ("--group-size", "4", "--groups-per-step", "4")
BOTH = {"before": PROMPTS * ANSWERS, "after": PROMPTS * ANSWERS}
EVALUATED = ("--evaluate", str(PROMPTS), "--evaluate-samples", str(ANSWERS))

ONLINE = {
    "agent_game": (*SMALL, *EVALUATED, "--task", "arithmetic", "--look-ahead", "4"),
    "dapo": (*SMALL, *EVALUATED, "--on-limit", "mask"),
    "distill": (*SMALL, *EVALUATED, "--teacher", "tiny", "--trainer.replicas", "2", "--exact", "--epochs", "2"),
    "iterative_dpo": (*SMALL, *EVALUATED, "--reference.weights", "initial", "--optimizer-steps", "2"),
    "judge": (*SMALL, *EVALUATED, "--rubric", "default"),
    "raft": (*SMALL, *EVALUATED, "--evaluate-also", "arithmetic:max_value=12", "--look-ahead", "2"),
    "reinforce_pp": (*SMALL, *EVALUATED, "--kl-target", "0.5"),
    "self_play": (*SMALL, *EVALUATED, "--opponent-every", "0", "--look-ahead", "4"),
    "teachers": (*SMALL, *EVALUATED, "--look-ahead", "2"),
    "rloo": (*SMALL, *EVALUATED, "--normalise-rewards", "--optimizer-steps", "2", "--epochs", "2"),
    "custom_node": (*SMALL, "--on-limit", "mask"),
    "planner_executor": (*SMALL, *EVALUATED),
    "proposer": (*SMALL, *EVALUATED),
    "replay": (*SMALL, *EVALUATED),
    "step_groups": (*SMALL, *EVALUATED, "--task", "arithmetic", "--look-ahead", "4"),
    "tree_rollouts": (*SMALL, *EVALUATED),
}
OFFLINE = {
    "dpo": ("--batch", "4", "--held-out", "4", *EVALUATED),
    "kto": ("--batch", "4", "--held-out", "4", "--evaluate", "0"),
    "process_reward_model": ("--batch", "4", "--held-out", "8"),
    "reward_model": ("--batch", "4", "--held-out", "8"),
    "sft": ("--batch", "8", *EVALUATED),
}
FEW_ROWS = {"kto", "process_reward_model"}
"""Graphs that read all rows before the first step: they get few, from a file."""
ELSEWHERE = {"agent_openai", "agent_tools", "grpo", "ppo"}
NO_TRAINER = {"pairs", "generate", "score", "evaluate"}


def run(graph: str, options: tuple[str, ...], run_dir: Path, ray: dict[str, str], *, steps: int | None = STEPS) -> str:
    """What the run printed."""
    command = [warm.python(), "-m", "flowrl.cli", "run", f"graphs/{graph}.py", *options]
    command += ["--run-dir", str(run_dir), "--plain", *(() if steps is None else ("--steps", str(steps)))]
    env = {**os.environ, **ray}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def asked(run_dir: Path) -> dict[str, int]:
    """Answers to held-out prompts by phase, as many for every task."""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        return dict(db.execute("SELECT DISTINCT phase, COUNT(*) FROM evaluations GROUP BY phase, task"))


def policy_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of the policy's trainer, checked for what all of them have."""
    records = lines(run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(math.isfinite(record["loss"]) and record["tokens_trained"] > 0 for record in records)
    assert (run_dir / "checkpoints" / f"step_{STEPS:06d}" / "model.safetensors").is_file()
    return records


def test_every_graph_is_run_somewhere() -> None:
    assert {path.stem for path in (ROOT / "graphs").glob("*.py")} == {*ONLINE, *OFFLINE, *ELSEWHERE, *NO_TRAINER}


@pytest.mark.parametrize("graph", ONLINE)
def test_two_steps_of_an_online_graph(graph: str, tmp_path: Path, ray: dict[str, str]) -> None:
    printed = run(graph, ONLINE[graph], tmp_path / "run", ray)
    assert "audit: ok" in printed
    report = audit(tmp_path / "run")
    assert report.ok and report.figures["steps"] == STEPS
    for record in policy_lines(tmp_path / "run"):
        assert 0 <= record["staleness_max"] <= 1 and record["behavior_gap"] < 0.5
    assert asked(tmp_path / "run") == (BOTH if EVALUATED[0] in ONLINE[graph] else {})
    if graph == "raft":
        told = re.search(rf"after training \({PROMPTS * ANSWERS} answers, arithmetic:max_value=12, (.*)\)", printed)
        assert told and re.search(r"mean@2 [01]\.\d+, pass@2 [01]\.\d+$", told[1])
    if graph == "self_play":
        assert sum(record["tokens_of_opponents"] for record in lines(tmp_path / "run")) > 0
        assert report.figures["policy spans proven"] == report.figures["requests"] > 0


@pytest.fixture(scope="module")
def calculating() -> tuple[str, str]:
    """The option for the `tiny` of arithmetic."""
    return "--policy", resolve(Policy("tiny", task=Task("arithmetic")))


@pytest.mark.parametrize("graph", OFFLINE)
def test_two_steps_of_an_offline_graph(
    graph: str, tmp_path: Path, ray: dict[str, str], calculating: tuple[str, str]
) -> None:
    options = OFFLINE[graph]
    if graph in FEW_ROWS:
        options += ("--task", str(few_rows(graph, tmp_path / "rows.jsonl")), *calculating)
    run(graph, options, tmp_path / "run", ray)
    policy_lines(tmp_path / "run")
    if set(EVALUATED) <= {*options}:
        assert audit(tmp_path / "run").ok
        assert asked(tmp_path / "run") == BOTH


def few_rows(graph: str, file: Path) -> Path:
    """Rows of sums: responses with labels, or two steps of which the second is wrong in every second row."""
    shapes: dict[str, Callable[[int], list[dict[str, Any]]]] = {
        "kto": lambda n: [{"completion": f"{n + 1}", "label": True}, {"completion": f"{n}", "label": False}],
        "process_reward_model": lambda n: [{"steps": [f"{n}+1", f"{n + n % 2}"], "labels": [1, n % 2]}],
    }
    rows = [{"prompt": f"{n}+1=", **row} for n in range(64) for row in shapes[graph](n)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_answers_are_written_and_scored_without_a_trainer(tmp_path: Path, ray: dict[str, str]) -> None:
    written, scored = tmp_path / "answers.jsonl", tmp_path / "scored.jsonl"
    options = ("--part", "held_out", "--num-prompts", "8", "--group-size", "2", "--score", "--out", str(written))
    run("generate", options, tmp_path / "generate", ray, steps=None)
    options = ("--task", str(written), "--task.reward", "verifier", "--out", str(scored))
    run("score", options, tmp_path / "score", ray, steps=None)
    answers, scores = ([json.loads(line) for line in file.read_text().splitlines()] for file in (written, scored))
    assert len(answers) == len(scores) == 16
    assert sorted(row["reward"] for row in answers) == sorted(row["reward"] for row in scores)


def test_a_model_is_evaluated_without_a_trainer(tmp_path: Path, ray: dict[str, str]) -> None:
    printed = run("evaluate", ("--prompts", "8"), tmp_path / "run", ray, steps=None)
    assert "held-out" in printed and re.search(r"^score +\d", printed, re.M)
    assert set(asked(tmp_path / "run").values()) == {8}


def test_pairs_of_a_policys_own_answers_are_written(tmp_path: Path, ray: dict[str, str]) -> None:
    file = tmp_path / "pairs.jsonl"
    options = ("--pairs", str(file), "--part", "held_out", "--num-prompts", "128")
    run("pairs", options, tmp_path / "run", ray, steps=None)
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    assert 10 <= len(pairs) <= 128
    for pair in pairs:
        assert pair["chosen"].strip() == pair["answer"] != pair["rejected"].strip() and pair["margin"] == 1.0

"""The whole real stack in one run: Ray, vLLM, two ZeRO-3 ranks, checkpoint and resume, books that close.

One run of graphs/grpo.py on `tiny` and its resumption serve all tests here.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flowrl.runtime.audit.audit import audit
from flowrl.runtime.checkpoints import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
STEPS, INTERRUPTED_AT, SAVE_EVERY = 5, 8, 3
SETTINGS = ("--trainer.replicas", "2", "--evaluate", "64", "--groups-per-step", "8", "--objective.kl-coef", "0.01")


def flowrl(*args: str, timeout_s: float = 240, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowrl.cli", *args]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def grpo(run_dir: Path, *args: str, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    return flowrl("run", "graphs/grpo.py", "--run-dir", str(run_dir), *SETTINGS, *args, env=env)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, ray: dict[str, str]) -> tuple[Path, str]:
    """A finished run of STEPS steps: its directory and what it printed."""
    run_dir = tmp_path_factory.mktemp("stack") / "run"
    done = grpo(run_dir, "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--keep", "0", env=ray)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, done.stdout


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_run_proves_itself(first: tuple[Path, str]) -> None:
    run_dir, printed = first
    assert "audit: ok" in printed
    report = audit(run_dir)
    assert report.ok and report.figures["samples"] == STEPS * 8 * 8


def test_every_step_has_a_line_with_the_promised_names(first: tuple[Path, str]) -> None:
    records = lines(first[0])
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        measured = ("loss", "kl", "entropy", "grad_norm", "clip_fraction", "reward_mean", "response_tokens_mean")
        assert all(isinstance(record[name], float) for name in measured)
        assert 0 <= record["staleness_max"] <= 1
        assert record["trainer_busy_s"] > 0 and record["behavior_gap"] < 0.5
    assert records[0]["staleness_max"] == 0 and records[0]["logprob_mismatch"] < 0.002
    assert max(record["staleness_max"] for record in records) == 1, "asynchronous, so some batch is one version old"


def test_the_ledger_agrees_with_the_lines(first: tuple[Path, str]) -> None:
    run_dir = first[0]
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        tokens = dict(db.execute("SELECT step, SUM(trained_tokens) FROM samples GROUP BY step"))
        phases = dict(db.execute("SELECT phase, COUNT(*) FROM evaluations GROUP BY phase"))
    assert tokens == {record["step"]: record["tokens_trained"] for record in lines(run_dir)}
    assert phases == {"before": 64, "after": 64}


def test_the_records_are_there(first: tuple[Path, str]) -> None:
    run_dir = first[0]
    graph = json.loads((run_dir / "graph.json").read_text())
    assert (graph["tickets"], graph["window"], graph["max_staleness"]) == (16, 1, 1)
    assert json.loads((run_dir / "config.json").read_text())["packages"]["ray"]
    trace = json.loads((run_dir / "trace.json").read_text())
    assert {event["ph"] for event in trace} >= {"X", "s", "f", "M"}
    tracks = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    arrived = {tracks[event["pid"]] for event in trace if event["ph"] == "f"}
    assert arrived >= {"generator/0", "reward/0", "advantage/0", "batcher/0", "trainer/0"}


def test_a_checkpoint_is_a_model_that_loads(first: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = first[0] / "checkpoints" / f"step_{STEPS:06d}"
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], return_tensors="pt", return_dict=True)
    assert model(**ids).logits.isfinite().all()


def test_a_run_goes_on_from_its_newest_checkpoint_and_an_interrupt_finishes_what_is_in_flight(
    first: tuple[Path, str],
) -> None:
    run_dir = first[0]
    before = lines(run_dir)
    args = ["run", "graphs/grpo.py", "--run-dir", str(run_dir), *SETTINGS, "--steps", "100000", "--resume"]
    args += ["--save-every", "1", "--keep", "2"]  # the third one is written when what it was resumed from is gone
    args += ["--trainer.sequence-parallel-size", "2"]  # both ranks train on every batch from now on
    command = [sys.executable, "-m", "flowrl.cli", *args, "--plain"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if f"step {INTERRUPTED_AT}/" in line:
            process.send_signal(signal.SIGINT)
            break
    printed.extend(process.stdout)
    assert process.wait(60) == 0, "".join(printed)
    assert f"resumed from step_{STEPS:06d}" in "".join(printed) and "audit: ok" in printed[-1]
    records, report = lines(run_dir), audit(run_dir)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)) and len(records) >= INTERRUPTED_AT
    assert records[:STEPS] == before
    assert report.ok and report.figures["  in flight"] == 0 and report.figures["samples"] >= INTERRUPTED_AT * 8 * 8
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == [f"step_{step:06d}" for step in (len(records) - 1, len(records))]
    for name in kept:
        files = checkpoint.verify_files(run_dir / "checkpoints" / name)["files"]
        assert {"tokenizer.json", "chat_template.jinja"} <= files.keys()

"""The demo's job with trainer and vLLM on machines of their own: what it learns, and what its records prove.

`benchmarks.channels.clusters --learn STEPS` runs it on one machine and on two.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.channels.machines import ROOT
from benchmarks.training.gain import Gain, gain

JOB = ("--lr", "1e-4", "--plain")
HELD_OUT = 1024
START_LIMIT_S = 200
STEP_LIMIT_S = 3.0
STOP_LIMIT_S = 10.0


@dataclass(frozen=True)
class Learned:
    """What one run shows."""

    gain: Gain
    samples_per_s: float
    machines: Mapping[str, str]
    """Trainer and generator -> host of the plan."""
    weights: str
    """Transport of the weights."""
    audit: str
    """Last line of `flowrl audit`."""

    def __str__(self) -> str:
        where = ", ".join(f"{node} on {machine}" for node, machine in self.machines.items())
        return f"{self.gain}; {self.samples_per_s:.0f} samples/s; {where}; weights over {self.weights}; {self.audit}"


def learned(environment: Mapping[str, str], *, cores: int, steps: int, evaluate: int = HELD_OUT) -> Learned:
    """Run the job with `cores` for each of trainer and generator. Raises SystemExit with its output if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        asked = ["grpo", *JOB, f"--steps={steps}", f"--evaluate={evaluate}"]
        asked += [f"--generator.cpus={cores}", f"--trainer.cpus={cores}"]
        _flowrl(["run", *asked, "--run-dir", str(run_dir)], environment, START_LIMIT_S + STEP_LIMIT_S * steps)
        audited = _flowrl(["audit", str(run_dir)], environment, START_LIMIT_S)
        return read(run_dir, audited)


def read(run_dir: Path, audited: str) -> Learned:
    """What a run's directory and the output of its audit show."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((run_dir / "graph.json").read_text())
    machines = {
        node.partition("/")[0]: str(host["machine"])
        for host in plan["hosts"]
        for node in host["nodes"]
        if node in ("trainer/0", "generator/0")
    }
    return Learned(
        gain=gain(run_dir),
        samples_per_s=sum(line["num_samples"] for line in lines[1:]) / (lines[-1]["time_s"] - lines[0]["time_s"]),
        machines=machines,
        weights=" and ".join(sorted({way["transport"] for way in plan["weights"]})),
        audit=" ".join(re.findall(r"audit: .*", audited)[-1:]),
    )


def _flowrl(arguments: list[str], environment: Mapping[str, str], limit_s: float) -> str:
    command = [sys.executable, "-m", "flowrl.cli", *arguments]
    env = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    ) as process:
        try:
            told, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # it tells what every node waits for
            try:
                told, _ = process.communicate(timeout=STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                told, _ = process.communicate()
            raise SystemExit(f"it has not ended within {limit_s:g} s:\n{told}") from None
    if process.returncode:
        raise SystemExit(told)
    return told

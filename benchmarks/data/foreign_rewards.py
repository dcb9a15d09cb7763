"""Reward files as users of OpenRLHF, TRL and verl write them, unedited, each trains `tiny` some steps.

    python -m benchmarks.data.foreign_rewards [--steps 5] [--graph grpo]

Prints a line for each: the mean rewards of its steps, whether the audit is ok, and how the run says it is called.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

FILES = Path(__file__).parents[2] / "tests" / "tasks" / "foreign_rewards"
REWARDS = {"OpenRLHF": "openrlhf_reward.py", "TRL": "trl_reward.py:correct", "verl": "verl_reward.py"}


@dataclass(frozen=True)
class Options:
    """Options of the comparison."""

    steps: int = 5
    """Steps of each run."""
    graph: str = "grpo"
    """The graph, by name or file."""


def main(options: Options) -> int:
    """The number of runs that did not end well."""
    return sum(not _runs(title, str(FILES / place), options) for title, place in REWARDS.items())


def _runs(title: str, reward: str, options: Options) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "flowrl.cli", "run", options.graph, "--steps", str(options.steps)]
        command += ["--task.reward", reward, "--evaluate", "0", "--plain", "--run-dir", str(run_dir)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        told = next((line.split("] ", 1)[1] for line in ran.stdout.splitlines() if "is called as" in line), "nothing")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines() if ran.returncode == 0 else []
        rewards = [json.loads(line)["reward_mean"] for line in lines]
        shown = " ".join(f"{reward:.3f}" for reward in rewards)
        ended = "audit: ok" if "audit: ok" in ran.stdout else ran.stderr.strip()[-300:]
        print(f"{title:<9} rewards {shown or 'none'}  {ended}  ({told})", flush=True)
        return ran.returncode == 0 and len(rewards) == options.steps


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

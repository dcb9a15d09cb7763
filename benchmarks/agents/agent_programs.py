"""An agent's own program against the built-in tools on one task: what each learns, and episodes/s.

    python -m benchmarks.agents.agent_programs [--steps 50] [--seeds 0 1 2] [--episodes-per-process 16]

A pair is two runs of one seed, one after the other: graphs/agent_tools.py, whose calculator is an environment, and
graphs/agent_openai.py, whose calculator is in a program that knows OpenAI's library alone. Both have the task of
agent_tools, a rate of learning that decays, as many episodes in a process, and sampled held-out answers. Of odd seeds
agent_openai is the first, so that a machine which gets slower or faster favours neither. The defaults are those of the
table in docs/agents.md; those of the graphs are a constant rate and a process for each episode, with which agent_openai
misses the ratio: `--decay constant --episodes-per-process 1`.

There is a line for each run: held-out score before and after, seconds of the whole command, and episodes/s from the end
of step `skip` to the last step but two; and one for each pair, with the difference of the scores after and the ratio of
episodes/s. Below are the median, least and greatest of both. The exit status is 1 unless every run audits well, the
median ratio is at least WANTED_RATIO, and the mean difference at most WANTED_APART either way.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from benchmarks.runs.overlap import pace
from benchmarks.training.gain import gain
from flowrl.errors import FlowrlError
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.telemetry.metrics import read_lines

ROOT = Path(__file__).parents[2]
TOOLS, PROGRAM = "agent_tools", "agent_openai"
TASK = ("--task.name", "arithmetic:min_value=30")
WANTED_RATIO, WANTED_APART = 0.7, 0.05
TAIL = 2
"""Last steps that are not measured: nothing is generated beside them."""


@dataclass(frozen=True)
class Ran:
    """One finished run."""

    graph: str
    seed: int
    before: float
    after: float
    error: float
    """Standard error of after less before."""
    wall_s: float
    episodes_per_s: float
    audit_ok: bool

    def __str__(self) -> str:
        audited = "ok" if self.audit_ok else "FAILED"
        scores = f"{self.before:.3f} -> {self.after:.3f}"
        return f"{self.graph:13} {self.seed:4}  {scores}  {self.wall_s:7.0f} s  {self.episodes_per_s:8.2f}/s  {audited}"


@dataclass(frozen=True)
class Pair:
    """The runs of one seed."""

    tools: Ran
    program: Ran

    @property
    def ratio(self) -> float:
        """The program's episodes/s over those of the tools."""
        return self.program.episodes_per_s / self.tools.episodes_per_s

    @property
    def apart(self) -> float:
        """The program's held-out score after, less that of the tools."""
        return self.program.after - self.tools.after

    def __str__(self) -> str:
        return f"{'difference':13} {self.tools.seed:4}  {self.apart:+.3f}, {self.ratio:.3f} of the episodes/s"


def run(graph: str, seed: int, run_dir: Path, told: argparse.Namespace) -> Ran:
    """One `flowrl run`, its output in RUN_DIR.log. Raises FlowrlError with the end of that if it fails."""
    run_dir = run_dir.absolute()
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_name(f"{run_dir.name}.log")
    began_s = time.monotonic()
    with log.open("w") as output:
        command = command_of(graph, seed, run_dir, told)
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    wall_s = time.monotonic() - began_s
    if status:
        end = "\n".join(log.read_text().splitlines()[-20:])
        raise FlowrlError(f"{graph} ended with status {status}; the end of {log}:\n{end}")
    learnt, here = gain(run_dir), pace(read_lines(run_dir / "metrics.jsonl"), skip=told.skip, tail=TAIL)
    scores = (learnt.before, learnt.after, learnt.error)
    return Ran(graph, seed, *scores, wall_s, here.samples_per_s, audit(run_dir).ok)


def command_of(graph: str, seed: int, run_dir: Path, told: argparse.Namespace) -> list[str]:
    """What is run."""
    learning = ["--steps", str(told.steps), "--schedule.decay", told.decay, "--seed", str(seed)]
    held_out = ["--evaluate", str(told.evaluate), "--evaluate-samples", str(told.evaluate_samples)]
    shared = ["--episodes-per-process", str(told.episodes_per_process), "--run-dir", str(run_dir), "--plain"]
    return [sys.executable, "-m", "flowrl.cli", "run", f"graphs/{graph}.py", *TASK, *learning, *held_out, *shared]


def pair(seed: int, told: argparse.Namespace) -> Pair:
    """Both graphs, one after the other; prints a line for each, and what they differ by."""
    found = {}
    for graph in (TOOLS, PROGRAM) if seed % 2 == 0 else (PROGRAM, TOOLS):
        found[graph] = run(graph, seed, told.run_dir / f"{graph}-{seed}", told)
        print(found[graph], flush=True)
    both = Pair(found[TOOLS], found[PROGRAM])
    print(both, flush=True)
    return both


def report(pairs: Sequence[Pair]) -> bool:
    """Print the comparison over pairs, and every run as a line of JSON. Whether all is as it is wanted."""
    ratios, apart = [one.ratio for one in pairs], [one.apart for one in pairs]
    print(f"episodes/s of {PROGRAM} over {TOOLS}: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"held-out of {PROGRAM} less {TOOLS}: {median(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f})")
    runs = [ran for one in pairs for ran in (one.tools, one.program)]
    for ran in runs:
        print(json.dumps({"benchmark": "agent_programs", **asdict(ran)}))
    as_wanted = median(ratios) >= WANTED_RATIO and abs(fmean(apart)) <= WANTED_APART
    print(f"wanted: {WANTED_RATIO} and more, {WANTED_APART} at most either way: {'reached' if as_wanted else 'MISSED'}")
    return as_wanted and all(ran.audit_ok for ran in runs)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--skip", type=int, default=4, help="first steps whose episodes/s are not measured")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--decay", default="linear", help="of the rate of learning")
    parser.add_argument("--episodes-per-process", type=int, default=16)
    parser.add_argument("--evaluate", type=int, default=128, help="held-out questions")
    parser.add_argument("--evaluate-samples", type=int, default=4, help="episodes of each")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs") / f"agent_programs-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        pairs = [pair(seed, options) for seed in options.seeds]
    except (FlowrlError, ValueError) as problem:
        print(f"agent_programs: {problem}", file=sys.stderr)
        return 2
    return 0 if report(pairs) else 1


if __name__ == "__main__":
    sys.exit(main())

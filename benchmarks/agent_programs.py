"""An agent's own program against the built-in tools on one task: what each learns, and episodes/s.

    python -m benchmarks.agent_programs [--steps 40] [--seeds 0 1 2]

A pair is two runs of one seed, one after the other: graphs/agent_tools.py, whose calculator is an environment, and
graphs/agent_openai.py, whose calculator is in a program that knows OpenAI's library alone. Both have the task of
agent_tools, and held-out answers are sampled. Of odd seeds agent_openai is the first, so that a machine which gets
slower or faster favours neither.

The table has a line for each run: held-out score before and after, seconds of the whole command, and episodes/s from
the end of step `skip` to the last step but two. Below are, over the pairs, the median with the least and greatest of
the ratio of episodes/s and of the difference of the scores after. Wanted: 0.7, and 0.05 at most either way.
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
from statistics import median

from benchmarks.gain import gain
from benchmarks.overlap import pace
from flowrl.errors import FlowrlError
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.telemetry.metrics import read

TOOLS, PROGRAM = "agent_tools", "agent_openai"
COMMON = ("--task.name", "arithmetic:min_value=30", "--evaluate", "128", "--evaluate-samples", "2")
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


def run(graph: str, seed: int, run_dir: Path, steps: int, skip: int) -> Ran:
    """One `flowrl run`, its output in RUN_DIR.log. Raises FlowrlError with the end of that if it fails."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_name(f"{run_dir.name}.log")
    options = ["--steps", str(steps), "--seed", str(seed), "--run-dir", str(run_dir), "--plain", *COMMON]
    command = [sys.executable, "-m", "flowrl.cli", "run", f"graphs/{graph}.py", *options]
    began_s = time.monotonic()
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    wall_s = time.monotonic() - began_s
    if status:
        end = "\n".join(log.read_text().splitlines()[-20:])
        raise FlowrlError(f"{graph} ended with status {status}; the end of {log}:\n{end}")
    learnt, here = gain(run_dir), pace(read(run_dir / "metrics.jsonl"), skip=skip, tail=TAIL)
    scores = (learnt.before, learnt.after, learnt.error)
    return Ran(graph, seed, *scores, wall_s, here.samples_per_s, audit(run_dir).ok)


def pair(seed: int, options: argparse.Namespace) -> dict[str, Ran]:
    """Both graphs, one after the other; prints a line for each."""
    found = {}
    for graph in (TOOLS, PROGRAM) if seed % 2 == 0 else (PROGRAM, TOOLS):
        found[graph] = run(graph, seed, options.run_dir / f"{graph}-{seed}", options.steps, options.skip)
        print(found[graph], flush=True)
    return found


def report(pairs: Sequence[dict[str, Ran]]) -> None:
    """The comparison over pairs, and every run as a line of JSON."""
    ratios = [one[PROGRAM].episodes_per_s / one[TOOLS].episodes_per_s for one in pairs]
    apart = [one[PROGRAM].after - one[TOOLS].after for one in pairs]
    print(f"episodes/s of {PROGRAM} over {TOOLS}: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"held-out of {PROGRAM} less {TOOLS}: {median(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f})")
    for one in pairs:
        for ran in one.values():
            print(json.dumps({"benchmark": "agent_programs", **asdict(ran)}))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=4, help="first steps whose episodes/s are not measured")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs") / f"agent_programs-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    options = parser.parse_args(argv)
    try:
        pairs = [pair(seed, options) for seed in options.seeds]
    except (FlowrlError, ValueError) as problem:
        print(f"agent_programs: {problem}", file=sys.stderr)
        return 2
    report(pairs)
    return 0 if all(ran.audit_ok for one in pairs for ran in one.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

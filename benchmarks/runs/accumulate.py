"""What it saves to train while the batch forms: one graph with and without, in turns with each other.

    python -m benchmarks.runs.accumulate benchmarks/runs/stages.py --generate-s 4 --train-s 4 --groups-per-step 8 \
        --uneven 0.75
    python -m benchmarks.runs.accumulate graphs/grpo.py --policy smollm2 --evaluate 0 --steps 8

Each case is one `flowrl run` a repetition, with `--staleness 0` unless told otherwise. Options that are not listed
below go to the graph.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runs.sync_vs_async import Case, run
from flowrl.errors import FlowrlError
from flowrl.graph.analysis.check import check
from flowrl.graph.load import load_file
from flowrl.runtime.telemetry.metrics import read_lines

CASES = ("off", "auto")


def main(argv: Sequence[str] | None = None) -> int:
    options, graph_args = _parser().parse_known_args(argv)
    options.run_dir = options.run_dir or Path("runs") / f"accumulate-{time.strftime('%Y%m%d-%H%M%S')}"
    given = ("--staleness", str(options.staleness), *graph_args)
    try:
        file = load_file(options.graph)
        for name in CASES:
            check(file.build(file.parse(("--accumulate", name, *given), prog="accumulate"))).raise_for_problems()
        for repetition in range(options.repeat):
            for name in CASES[:: -1 if repetition % 2 else 1]:
                case = Case(name, options.staleness, ("--accumulate", name, *given))
                run(file.path, case, repetition, options.run_dir / f"{name}-{repetition}", options.steps)
                show(options, name, repetition)
    except (FlowrlError, ValueError) as error:
        print(f"accumulate: {error}", file=sys.stderr)
        return 2
    for name in CASES:
        steps = [figures(options, name, repetition)["step_s"] for repetition in range(options.repeat)]
        print(f"{name:>5}: {statistics.median(steps):.3f} s a step ({min(steps):.3f}-{max(steps):.3f})")
    return 0


def show(options: argparse.Namespace, name: str, repetition: int) -> None:
    """One JSON object for a finished run."""
    found = figures(options, name, repetition)
    print(json.dumps({"benchmark": "accumulate", "case": name, "repetition": repetition, **found}), flush=True)


def figures(options: argparse.Namespace, name: str, repetition: int) -> dict[str, float]:
    """Median seconds of a step and mean busy seconds of both sides, without the first steps."""
    lines = read_lines(options.run_dir / f"{name}-{repetition}" / "metrics.jsonl")
    times = [line["time_s"] for line in lines]
    steps = [after - before for before, after in itertools.pairwise(times)][options.skip - 1 :]
    measured = lines[options.skip :]
    busy = {
        f"{side}_busy_s": round(statistics.mean(line[f"{side}_busy_s"] for line in measured), 3)
        for side in ("generator", "trainer")
    }
    return {"step_s": round(statistics.median(steps), 3), **busy}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accumulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graph", type=Path, help="a graph file with the fields staleness and accumulate")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10, help="batches of each run")
    parser.add_argument("--skip", type=int, default=2, help="first steps that are not measured, at least 1")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case")
    parser.add_argument("--run-dir", type=Path, default=None, help="default: runs/accumulate-TIME")
    return parser


if __name__ == "__main__":
    sys.exit(main())

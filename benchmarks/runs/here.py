"""How long it takes from a saved file to the first trained step: `flowrl run --here` and `flowrl run`, in turn.

python -m benchmarks.runs.here [--repetitions 5] [--graph grpo]

Each repetition runs the same command twice, with and without --here, and takes the time from the start of the command
to the line of the first step. The order alternates. Evaluation is off, so nothing comes between set-up and training.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

OPTIONS = ("--policy", "tiny", "--evaluate", "0", "--steps", "1", "--plain")
COPY = "edited.py"
"""The name of a graph of one's own: flowrl's graphs are not tried before a run."""


def seconds_to_first_step(graph: Path, *options: str) -> float:
    """Seconds from the start of the command to the line of its first step; the command is then run to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "flowrl.cli",
            "run",
            str(graph),
            *OPTIONS,
            *options,
            "--run-dir",
            f"{folder}/r",
        ]
        began_s, first_s = time.monotonic(), None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
            assert process.stdout is not None
            for line in process.stdout:
                if first_s is None and "step 1/1" in line:
                    first_s = time.monotonic() - began_s
        if process.returncode or first_s is None:
            raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
        return first_s


def describe_times(name: str, found: Sequence[float]) -> str:
    return f"{name:<18}{statistics.median(found):6.1f} s  ({min(found):.1f} to {max(found):.1f}, {len(found)} runs)"


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds from a saved file to the first trained step.")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--graph", default="grpo", help="a graph of flowrl, of which a copy is run")
    asked = parser.parse_args()
    ways: dict[str, tuple[str, ...]] = {"flowrl run": (), "flowrl run --here": ("--here",)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / COPY
        subprocess.run([sys.executable, "-m", "flowrl.cli", "new", str(graph), "--from", asked.graph], check=True)
        for repetition in range(asked.repetitions):
            for name in [*ways][:: 1 if repetition % 2 else -1]:
                times[name].append(seconds_to_first_step(graph, *ways[name]))
                load = os.getloadavg()[0]
                print(f"{repetition + 1}: {name:<18}{times[name][-1]:6.1f} s, load {load:.1f}", flush=True)
    for name, found in times.items():
        print(describe_times(name, found))
    ratios = [here / usual for usual, here in zip(*times.values(), strict=True)]
    print(f"--here takes {statistics.median(ratios):.2f} of the time ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()

"""Messages and weights between two machines, over tcp with CURVE, against the same between two processes of one.

    python -m benchmarks.channels.clusters [--messages 20000] [--megabytes 128] [--repeat 3] [--learn 300] [--json FILE]

The second machine is a second Ray on this one, with a host name and a /dev/shm of its own
(`benchmarks.channels.machines`). Both use this machine's cores and its loopback, so the figures tell what tcp and
encryption cost, not what a network does. On one machine each process has one core, on two both share the cores. Needs
the right to make namespaces.

The table has medians of the repetitions, which take turns, and the least and most of each. With `--learn` the demo's
job runs for so many steps on one machine and on two, with trainer and vLLM apart
(`benchmarks.channels.learning_apart`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.channels.learning_apart import learned
from benchmarks.channels.machines import ROOT, are_possible, machines

Rates = Mapping[str, float]
"""Rates of one run by name."""
GRAPH = ROOT / "benchmarks" / "channels" / "across.py"
STEPS = 12
TIME_LIMIT_S = 150
LEAST_MESSAGES = 20_000
"""A hundredth of them are large, and have to be several times what is in flight at once."""


def measured(environment: Mapping[str, str], *, cores: int, messages: int, megabytes: int) -> Rates:
    """What one run prints: rates by name."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "flowrl.cli", "run", str(GRAPH), "--steps", str(STEPS)]
        command += ["--run-dir", str(Path(directory) / "run"), f"--cores={cores}"]
        command += [f"--messages={messages}", f"--megabytes={megabytes}"]
        env = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=TIME_LIMIT_S)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return rates(done.stdout)


def rates(told: str) -> Rates:
    """The rates in a run's output; of several versions the median, without the first, which maps its memory."""
    small = re.search(r"measured 1024 bytes: (\d+) messages/s", told)
    large = re.search(r"measured 4194304 bytes: \d+ messages/s, (\d+) MB/s", told)
    weights = [float(rate) for rate in re.findall(r"fetched at (\d+) MB/s", told)][1:]
    if small is None or large is None or not weights:
        raise SystemExit(f"the run did not print what it measures:\n{told}")
    return {
        "messages/s, 1 KB": float(small[1]),
        "MB/s, messages of 4 MB": float(large[1]),
        "MB/s, weights": median(weights),
    }


def table(one: Sequence[Rates], two: Sequence[Rates]) -> str:
    """Medians of both columns with their spread, and what is left."""
    lines = [f"{'':24}{'one machine':>26}{'two machines':>26}{'left':>8}"]
    for name in one[0]:
        columns = [[rates[name] for rates in repetitions] for repetitions in (one, two)]
        left = median(columns[1]) / median(columns[0])
        lines.append(f"{name:24}{spread(columns[0]):>26}{spread(columns[1]):>26}{left:8.0%}")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=LEAST_MESSAGES)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each of both; 0: none")
    parser.add_argument(
        "--learn", type=int, default=0, metavar="STEPS", help="steps of the demo's job on each; 0: none"
    )
    parser.add_argument("--json", default="", help="write the rates of all runs here")
    options = parser.parse_args()
    if options.messages < LEAST_MESSAGES:
        parser.error(f"--messages is {options.messages}; give {LEAST_MESSAGES} or more, or most are in flight at once")
    if options.repeat < 0 or options.learn < 0:
        parser.error("--repeat and --learn are numbers of runs and steps; give 0 or more")
    if not are_possible():
        print("this user may not make namespaces (unshare --uts --mount)", file=sys.stderr)
        return 2
    sizes = {"messages": options.messages, "megabytes": options.megabytes}
    one: list[Rates] = []
    two: list[Rates] = []
    for _ in range(options.repeat):
        one.append(measured({}, cores=1, **sizes))
        with machines(shm=f"{8 * options.megabytes + 256}m") as environment:
            two.append(measured(environment, cores=2, **sizes))
    if options.repeat:
        print(table(one, two), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"one machine": one, "two machines": two}, indent=1) + "\n")
    if options.learn:
        print(f"one machine:  {learned({}, cores=1, steps=options.learn)}", flush=True)
        with machines(shm="1g") as environment:
            print(f"two machines: {learned(environment, cores=2, steps=options.learn)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

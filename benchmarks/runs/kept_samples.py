"""What keeping samples costs: paired runs of a graph, and the time that `flowrl samples` takes on many of them.

    python -m benchmarks.runs.kept_samples [--repeat 3] [--steps 60] [--within 3] [--gigabytes 1]

Runs take turns, without and with the default share, and are compared in pairs: the time of all steps, and the median
step, which a moment of other work on the machine moves less. Runs of the same settings differ by several percent, so
`--within` compares inside of runs, which keep samples in every other window of some seconds. Then files of that size
are written, and the command is timed on them, the start of Python included.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import tyro

from benchmarks.runs.keeping_by_windows import BEGAN, SITE, CpuMeter, pairs_of
from flowrl.runtime.samples.rollout_files import rollout_files, write_rollouts

ROOT = Path(__file__).parents[2]
ASKED = (["--limit", "3"], ["--step", "7"], ["--best"], ["--worst"], ["--failed"], ["--diff", "1", "--step", "2"])


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    repeat: int = 3
    """Pairs of runs; 0: none."""
    steps: int = 60
    """Steps of each run."""
    within: int = 0
    """Runs that keep samples in every other window; 0: none."""
    within_steps: int = 1000
    """Steps of each of them."""
    keep: str = "auto"
    """--keep-samples of those runs. What `all` costs, divided by how many more are kept, tells small costs better."""
    window_s: float = 4.0
    """Seconds of a window."""
    graph: str = "grpo"
    """The graph, by name or file."""
    gigabytes: float = 1.0
    """Size of the files that are read; 0: none are."""


@dataclass(frozen=True)
class Steps:
    """How long the steps of a run took, after the first."""

    total_s: float
    median_s: float


def main(options: Options) -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as folder:
        if options.repeat:
            _costs(options, Path(folder))
        if options.within:
            _costs_within(options, Path(folder))
        if options.gigabytes:
            _reads(Path(folder) / "many", int(options.gigabytes * 2**30))


def _costs(options: Options, folder: Path) -> None:
    pairs: list[tuple[Steps, Steps]] = []
    for number in range(options.repeat):
        steps = {}
        for keep in ("off", "auto") if number % 2 else ("auto", "off"):
            run_dir = folder / f"{keep}-{number}"
            steps[keep] = _run(options, run_dir, keep)
        rows = _num_rows(folder / f"auto-{number}")
        pairs.append((steps["auto"], steps["off"]))
        print(
            json.dumps({"pair": number, **{name: asdict(one) for name, one in steps.items()}, "kept": rows}), flush=True
        )
    for what in ("total_s", "median_s"):
        ratios = compared([(getattr(kept, what), getattr(off, what)) for kept, off in pairs])
        print(f"{what} with the default share / without: {ratios}")


def _costs_within(options: Options, folder: Path) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE.format(window_s=options.window_s))
    search = os.pathsep.join([str(folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": search}
    pairs: dict[str, list[tuple[float, float]]] = {"seconds": [], "CPU seconds": []}
    for number in range(options.within):
        run_dir = folder / f"within-{number}"
        process = psutil.Popen(
            _command(options, run_dir, options.keep, options.within_steps), env=env, stdout=subprocess.DEVNULL
        )
        meter = CpuMeter(process, options.window_s)
        meter.watch()
        if process.wait() != 0:
            raise SystemExit(f"a run has failed; see {run_dir}")
        began_s = float((run_dir / BEGAN).read_text())
        ends_s = [began_s + time_s for time_s in _times(run_dir)]
        found = {
            "seconds": pairs_of(ends_s, options.window_s),
            "CPU seconds": pairs_of(ends_s, options.window_s, meter.spent_s),
        }
        told = {what: compared(some) for what, some in found.items()}
        windows = (ends_s[-1] - ends_s[0]) / options.window_s
        kept = {"kept": _num_rows(run_dir), "of": _num_trained(run_dir), "windows": round(windows)}
        print(json.dumps({"run": number, **kept, **told}), flush=True)
        for what, some in found.items():
            pairs[what] += some
    for what, some in pairs.items():
        print(f"{what} of a step with --keep-samples {options.keep} / in windows without: {compared(some)}")


def compared(pairs: Sequence[tuple[float, float]]) -> str:
    """The ratio of the first to the second: its median over the pairs, with a 95% interval and the spread.

    The interval is that of the median by order statistics, which assumes no distribution; six pairs or more have one.
    """
    ratios = sorted(first / second for first, second in pairs)
    number = len(ratios)
    told = f"{statistics.median(ratios):.4f}"
    inside = sum(1 for k in range(number // 2) if _at_most(k, number) <= 0.025)
    if inside:
        told += f" [{ratios[inside - 1]:.4f}, {ratios[number - inside]:.4f}]"
    return f"{told}, {number} pairs from {ratios[0]:.3f} to {ratios[-1]:.3f}"


def _at_most(k: int, number: int) -> float:
    """How likely at most `k` of `number` fair coins show heads."""
    return float(sum(math.comb(number, i) for i in range(k + 1)) / 2**number)


def _run(options: Options, run_dir: Path, keep: str) -> Steps:
    subprocess.run(_command(options, run_dir, keep, options.steps), capture_output=True, check=True)
    times = _times(run_dir)
    return Steps(round(times[-1] - times[0], 3), round(statistics.median(b - a for a, b in pairwise(times)), 5))


def _command(options: Options, run_dir: Path, keep: str, steps: int) -> list[str]:
    command = [sys.executable, "-m", "flowrl.cli", "run", options.graph, "--steps", str(steps), "--plain"]
    return [*command, "--evaluate", "0", "--keep-samples", keep, "--run-dir", str(run_dir)]


def _times(run_dir: Path) -> list[float]:
    """The ends of the steps of a run, in seconds from its start."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["time_s"] for line in lines]


def _num_trained(run_dir: Path) -> int:
    """Samples of the whole run, also in windows in which none are kept."""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        return int(db.execute("SELECT COUNT(*) FROM samples").fetchone()[0])


def _num_rows(run_dir: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(file.path).num_rows for file in rollout_files(run_dir))


def _reads(run_dir: Path, num_bytes: int) -> None:
    run_dir.mkdir()
    (run_dir / "config.json").write_text("{}")
    size = _write(run_dir, num_bytes)
    print(f"{size / 2**30:.2f} GiB in {len(rollout_files(run_dir))} files, {_num_rows(run_dir)} samples")
    for asked in ASKED:
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "flowrl.cli", "samples", str(run_dir), *asked]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        took_s = time.perf_counter() - began
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime
        print(
            json.dumps(
                {
                    "asked": " ".join(asked),
                    "seconds": round(took_s, 2),
                    "cpu_s": round(cpu_s, 2),
                    "bytes": len(done.stdout),
                }
            )
        )


def _write(run_dir: Path, num_bytes: int) -> int:
    """Files as a long run has them, of words that do not compress well; their size."""
    source = random.Random(0)
    words = [f"{source.getrandbits(40):010x}" for _ in range(50_000)]
    size, step, number = 0, 0, 1
    while size < num_bytes:
        rows = []
        for _ in range(8):
            step += 1
            rows += [_row(step, member, " ".join(source.choices(words, k=120)), source) for member in range(256)]
        number = write_rollouts(run_dir, rows, number)
        size = sum(file.path.stat().st_size for file in rollout_files(run_dir))
    return size


def _row(step: int, member: int, text: str, source: random.Random) -> dict[str, Any]:
    failed = source.random() < 0.001
    return {
        "sample_id": f"prompts:0:{step}:{member}",
        "group_id": f"prompts:0:{step}",
        "prompt_id": f"{member // 8}",
        "epoch": step,
        "member": member,
        "phase": "train",
        "step": step,
        "state": "failed" if failed else "trained",
        "reason": "reward_raised" if failed else None,
        "prompt": text[:200],
        "response": text,
        "reward": None if failed else source.random(),
        "closed_s": float(step),
    }


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""What asynchrony buys: one graph run synchronously and with growing staleness, in turns with each other.

    python -m benchmarks.runs.sync_vs_async benchmarks/runs/stages.py --repeat 5
    python -m benchmarks.runs.sync_vs_async graphs/grpo.py --staleness 1 4 --evaluate 0 --groups-per-step 128

Cases: `sync` (staleness 0, generator and trainer on cores of their own, batches whole), `sync, time share` (the same
two on all cores, one after the other; for graphs with a field `time_share`), and `async S` for every S above 0. Each
case is one `flowrl run` a repetition, the cases of a repetition one after another. Options that are not
listed below go to the graph.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.runs.overlap import Gain, Lines, Pace, Spread, pace, rewards
from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.analysis.check import check
from flowrl.graph.load import GraphFile, load_file
from flowrl.graph.machine import Cluster
from flowrl.graph.option_types import options_of
from flowrl.runtime.telemetry.metrics import read_lines

SYNC = "sync"
MOMENTS = 5
"""Columns of the reward table."""


@dataclass(frozen=True)
class Case:
    """One way to run the graph."""

    name: str
    staleness: int
    args: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """One finished run of a case. `gain` is against the synchronous run of the same repetition."""

    case: Case
    repetition: int
    lines: Lines
    pace: Pace
    gain: Gain


def main(argv: Sequence[str] | None = None) -> int:
    options, graph_args = _parser().parse_known_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way ends too
    done: list[Done] = []
    try:
        file = load_file(options.graph)
        cases = make_cases(file, options.staleness, graph_args)
        for repetition in range(options.repeat):
            done.extend(repeat(file, cases, repetition, options))
    except (FlowrlError, ValueError) as error:
        print(f"sync_vs_async: {error}", file=sys.stderr)
        if not done:
            return 2
        print(f"sync_vs_async: {len(done) // len(cases)} repetitions are complete:", file=sys.stderr)
    report(cases, done, options)
    return 0 if len(done) == options.repeat * len(cases) else 2


def report(cases: Sequence[Case], done: Sequence[Done], options: argparse.Namespace) -> None:
    """The tables, the JSON lines, the plot."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(pace_table(cases, done))
    if any(line["reward_mean"] is not None for run in done for line in run.lines):
        console.print(reward_table(cases, done))
    for record in records(done, options.graph):
        print(json.dumps(record))
    if options.plot:
        plot(cases, done, options.plot)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sync_vs_async", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graph", type=Path, help="a graph file with a field staleness")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4], help="0 (sync) always runs")
    parser.add_argument("--steps", type=int, default=20, help="batches of each run")
    parser.add_argument("--skip", type=int, default=3, help="first steps that are not measured")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case")
    parser.add_argument("--run-dir", type=Path, default=None, help="default: runs/sync_vs_async-TIME")
    parser.add_argument("--plot", type=Path, default=None, help="draw reward against wall clock (needs matplotlib)")
    return parser


IN_TURNS = ("--time-share", "generator", "trainer")

# Running


def make_cases(file: GraphFile, staleness: Sequence[int], args: Sequence[str]) -> list[Case]:
    """The cases that the graph's fields allow. Raises ConfigError for wrong options, before anything runs."""
    names = {*options_of(file.config_type)}
    if "staleness" not in names:
        raise ConfigError(
            f"{file.path} has no field staleness; the comparison needs a graph that passes one to g.admit"
        )
    apart = ("--accumulate", "off") if "accumulate" in names and "--accumulate" not in args else ()
    cases = [Case(SYNC, 0, ("--staleness", "0", *apart, *args))]
    if "time_share" in names:
        cases.append(
            Case("sync, time share", 0, ("--staleness", "0", *IN_TURNS, *_all_cores(file, names, args), *args))
        )
    cases += [
        Case(f"async {bound}", bound, ("--staleness", str(bound), *args)) for bound in sorted(set(staleness) - {0})
    ]
    for case in cases:
        check(file.build(file.parse(case.args, prog="sync_vs_async"))).raise_for_problems()
    return cases


def _all_cores(file: GraphFile, names: set[str], args: Sequence[str]) -> tuple[str, ...]:
    """The option that gives all cores of this machine to the nodes that take turns."""
    if not {"generator", "trainer"} <= names:
        return ()
    graph = file.build(file.parse([*IN_TURNS, *args], prog="sync_vs_async"))
    replicas = max(graph.placed[name].replicas for sharing in graph.time_shared for name in sharing)
    cores = str(Cluster.here().num_cores // replicas)
    return ("--generator.cpus", cores, "--trainer.cpus", cores)


def repeat(file: GraphFile, cases: Sequence[Case], repetition: int, options: argparse.Namespace) -> list[Done]:
    """One repetition: every case once, `sync` first."""
    options.run_dir = options.run_dir or Path("runs") / f"sync_vs_async-{time.strftime('%Y%m%d-%H%M%S')}"
    done: list[Done] = []
    for case in cases:
        run_dir = options.run_dir / f"{case.name.replace(' ', '_')}-{repetition}"
        run(file.path, case, repetition, run_dir, options.steps)
        lines = read_lines(run_dir / "metrics.jsonl")
        generators, ranks = _replicas(run_dir)
        here = pace(lines, skip=options.skip, tail=case.staleness, generators=generators, ranks=ranks)
        done.append(Done(case, repetition, lines, here, Gain.of(done[0].pace if done else here, here)))
        told = f"{here.step_s:.3f} s a step, overlap {done[-1].gain.overlap:.3f}"
        print(f"{case.name}, repetition {repetition}: {told}", file=sys.stderr)
    return done


def run(graph: Path, case: Case, seed: int, run_dir: Path, steps: int) -> None:
    """One `flowrl run`, its output in RUN_DIR.log. Raises FlowrlError with the end of that if it fails."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_name(f"{run_dir.name}.log")
    own = ("--steps", str(steps), "--run-dir", str(run_dir), "--seed", str(seed), "--plain")
    command = [sys.executable, "-m", "flowrl.cli", "run", str(graph), *own, *case.args]
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        end = "\n".join(log.read_text().splitlines()[-20:])
        raise FlowrlError(f"{case.name} ended with status {status}; the end of {log}:\n{end}")


def _replicas(run_dir: Path) -> tuple[int, int]:
    """(generators, ranks), whose busy times a metrics line sums up."""
    nodes = json.loads((run_dir / "graph.json").read_text())["nodes"]
    num_generators, num_ranks = (
        sum(node["replicas"] for node in nodes if node["type"].endswith(role)) for role in ("Generator", "Trainer")
    )
    return num_generators, num_ranks


# Telling


def pace_table(cases: Sequence[Case], done: Sequence[Done]) -> Table:
    """Pace and gain of every case, as median and range of the repetitions."""
    table = Table(title="pace in the steady state: median, least-greatest of the repetitions", show_lines=True)
    table.add_column("case")
    for title in ("s a step", "samples/s", "tokens/s", "Tg s", "Tt s", "speed-up", "bound", "overlap", "of ideal"):
        table.add_column(title, justify="right")
    for case in cases:
        runs = [run for run in done if run.case is case]
        table.add_row(
            case.name, *(str(Spread.of([_figures(run)[key][0] for run in runs])) for key in _figures(runs[0]))
        )
    return table


def _figures(run: Done) -> dict[str, tuple[float, str]]:
    """name: (value, unit), in the order of the table's columns."""
    here, gain = run.pace, run.gain
    return {
        "step": (here.step_s, "s"),
        "samples": (here.samples_per_s, "samples/s"),
        "tokens": (here.tokens_per_s, "tokens/s"),
        "generator_busy": (here.generator_s, "s"),
        "trainer_busy": (here.trainer_s, "s"),
        "speedup": (gain.speedup, "x"),
        "bound": (gain.bound, "x"),
        "overlap": (gain.overlap, "of the bound"),
        "of_ideal": (gain.of_ideal, "of max(Tg, Tt) / step"),
    }


def records(done: Sequence[Done], graph: Path) -> Iterator[dict[str, Any]]:
    """One JSON object for every figure of every run."""
    for run in done:
        for name, (value, unit) in _figures(run).items():
            yield {
                "benchmark": "sync_vs_async",
                "case": name,
                "system": run.case.name,
                "value": round(value, 6),
                "unit": unit,
                "repetition": run.repetition,
                "graph": str(graph),
            }


def reward_table(cases: Sequence[Case], done: Sequence[Done]) -> Table:
    """Reward against wall clock, mean of the repetitions that were still running."""
    longest_s = max(run.lines[-1]["time_s"] - run.lines[0]["time_s"] for run in done)
    moments = [longest_s * part / MOMENTS for part in range(1, MOMENTS + 1)]
    table = Table(title="mean reward of the last batches, by seconds since the first batch was trained")
    table.add_column("case")
    for moment_s in moments:
        table.add_column(f"{moment_s:.0f} s", justify="right")
    for case in cases:
        curves = [rewards(run.lines, moments) for run in done if run.case is case]
        table.add_row(case.name, *map(_mean_cell, zip(*curves, strict=True)))
    return table


def _mean_cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.3f}" if known else "ended"


def plot(cases: Sequence[Case], done: Sequence[Done], path: Path) -> None:
    """Reward against wall clock, one curve a run, one colour a case."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 4.5), layout="constrained")).subplots()
    for number, case in enumerate(cases):
        for run in (run for run in done if run.case is case):
            times_s = [line["time_s"] - run.lines[0]["time_s"] for line in run.lines]
            label = case.name if run.repetition == 0 else None
            axes.plot(times_s, [line["reward_mean"] for line in run.lines], color=f"C{number}", alpha=0.7, label=label)
    axes.set(xlabel="seconds since the first batch was trained", ylabel="mean reward")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())

"""What faults of environments cost: runs on Ray, vLLM and ZeRO, clean and faulty ones by turns.

    python -m benchmarks.agents.agent_faults [--steps 120] [--repetitions 2]

In the faulty runs each attempt at an episode hangs, raises, kills its process or answers garbage, with a chance of
`chance` each, drawn anew for each attempt. A hanging step is given up after 5 s. Without retries the figure is healthy
episodes a second against the clean run before it; with retries, which share of samples trains, and how mean reward and
mean length differ from the clean run's. The learning rate is 0, so all runs play the same policy.

A batch cannot wait for an episode longer than the staleness allows, so `staleness` steps have to last longer than a
hanging step; in half of them the batcher may train other groups. With the graph's 2 steps of less than a second each
the bound on staleness, and not the faults, would decide how fast a run is. The runs of a repetition have the same seed,
so they play the same rows, and each group is compared with itself.

Wanted are, as medians, healthy episodes/s of at least 0.85 of the healthy share of a clean run's, and at least 0.95 of
the samples trained; and 0 in both intervals. The exit status is 1 otherwise.
"""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from benchmarks.agents import faulty_env

ROOT = Path(__file__).parents[2]
GROUPS_PER_STEP = 8
SIZES = ("--groups-per-step", str(GROUPS_PER_STEP), "--group-size", "8")
POLICY = ("--policy", "tiny_agent", "--task.name", "arithmetic:min_value=30")
FIXED = (*POLICY, "--evaluate", "0", "--lr", "0", "--max-tokens", "12", "--limits.step-s", "5")
LEAST_RATE, LEAST_TRAINED = 0.85, 0.95
SKIPPED = 2
"""Steps at the beginning of a run that are not timed. At its end, those are not for which nothing more is begun."""
TWO_SIDED = 1.96
"""Standard errors on each side of a 95% interval."""


@dataclass(frozen=True)
class Options:
    steps: int = 120
    """Steps of each run, with 64 episodes a step."""
    repetitions: int = 2
    chance: float = 0.05
    """Chance of each of the four faults, in each attempt."""
    step_s: float = 0.2
    """Seconds of a step of the environment."""
    staleness: int = 16
    """Steps that a group may be old when it is trained."""


@dataclass(frozen=True)
class Case:
    name: str
    chance: float
    retries: int


@dataclass(frozen=True)
class Played:
    """What the records of one run say."""

    rate: float
    """Finished episodes a second."""
    failed: float
    """Share of attempts."""
    trained: float
    """Share of samples."""
    rewards: Mapping[str, list[float]]
    """Group -> of its episodes."""
    lengths: Mapping[str, list[float]]


def play(case: Case, options: Options, seed: int) -> Played:
    name = f"{faulty_env.__file__}:Faulty:step_s={options.step_s}"
    variables = os.environ | {faulty_env.CHANCE: str(case.chance)}
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        graph = ("graphs/agent_game.py", "--plain", "--environment", name)
        bounds = ("--staleness", options.staleness, "--look-ahead", options.staleness // 2 * GROUPS_PER_STEP)
        more = ("--limits.retries", case.retries, "--steps", options.steps, "--seed", seed, "--run-dir", run_dir)
        told = (*FIXED, *SIZES, *map(str, (*bounds, *more)))
        command = [sys.executable, "-m", "flowrl.cli", "run", *graph, *told]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables, check=False)
        if done.returncode or "audit: ok" not in done.stdout:
            sys.exit(f"{case.name}: {done.stdout}{done.stderr}")
        return read(run_dir, tail=options.staleness)


def read(run_dir: Path, tail: int) -> Played:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = lines[SKIPPED:-tail]
    seconds = timed[-1]["time_s"] - lines[SKIPPED - 1]["time_s"]
    attempts = sum(line.get("attempts", 0) for line in lines)
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        offered = dict(db.execute("SELECT state, COUNT(*) FROM samples WHERE reason IS NOT 'run_end' GROUP BY 1"))
        found = db.execute(
            "SELECT prompt_id, reward, response_tokens FROM samples WHERE state = 'trained' ORDER BY sample_id"
        ).fetchall()
    rewards: dict[str, list[float]] = {}
    lengths: dict[str, list[float]] = {}
    for prompt_id, reward, tokens in found:
        rewards.setdefault(prompt_id, []).append(reward)
        lengths.setdefault(prompt_id, []).append(float(tokens))
    return Played(
        rate=sum(line["num_samples"] for line in timed) / seconds,
        failed=sum(line.get("attempts_failed", 0) for line in lines) / max(attempts, 1),
        trained=offered["trained"] / sum(offered.values()),
        rewards=rewards,
        lengths=lengths,
    )


@dataclass(frozen=True)
class Difference:
    """The mean difference of groups from themselves in another run, with its 95% interval; groups are independent."""

    middle: float
    low: float
    high: float
    clean: float
    num_groups: int

    def __str__(self) -> str:
        interval = f"95% [{self.low:+.4f}, {self.high:+.4f}]"
        return f"{self.middle:+.4f}  {interval} of {self.clean:.4f}, {self.num_groups} groups"


def difference(ours: Sequence[Mapping[str, list[float]]], clean: Sequence[Mapping[str, list[float]]]) -> Difference:
    """What the groups differ by that both runs of a repetition have trained."""
    pairs = [
        (statistics.mean(mine[group]), statistics.mean(theirs[group]))
        for mine, theirs in zip(ours, clean, strict=True)
        for group in mine.keys() & theirs.keys()
    ]
    apart = [mine - theirs for mine, theirs in pairs]
    middle, error = statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5
    low, high = middle - TWO_SIDED * error, middle + TWO_SIDED * error
    return Difference(middle, low, high, statistics.mean(theirs for _, theirs in pairs), len(pairs))


def main(options: Options) -> int:
    if options.steps <= (untimed := SKIPPED + options.staleness):
        sys.exit(f"--steps is {options.steps}; with --staleness {options.staleness}, {untimed} steps are not timed")
    clean = Case("clean", 0.0, 2)
    without, retried = (Case(f"retries={retries}", options.chance, retries) for retries in (0, 2))
    cases = (clean, without, replace(clean, name="clean again"), retried)
    found: dict[str, list[Played]] = {case.name: [] for case in cases}
    print(f"{'':14}{'episodes/s':>12}{'of clean':>10}{'failed':>10}{'trained':>10}")
    for seed in range(options.repetitions):
        for case in cases:
            played = play(case, options, seed)
            found[case.name].append(played)
            share = (
                played.rate / found["clean" if case.retries == 0 else "clean again"][-1].rate if case.chance else 1.0
            )
            print(
                f"{case.name:14}{played.rate:12.2f}{share:10.3f}{played.failed:10.4f}{played.trained:10.4f}", flush=True
            )
    return 0 if report(found, options) else 1


def report(found: Mapping[str, list[Played]], options: Options) -> bool:
    """Print the figures over all repetitions, with their spread; whether they are as wanted."""
    healthy = 1 - 4 * options.chance
    shares = [
        ours.rate / others.rate / healthy for ours, others in zip(found["retries=0"], found["clean"], strict=True)
    ]
    again, clean = found["retries=2"], found["clean again"]
    trained = [played.trained for played in again]
    spread: Mapping[str, list[float]] = {
        f"retries=0: healthy episodes/s, of {healthy:.2f} x clean": shares,
        "retries=2: share of samples that train": trained,
        "two clean runs: episodes/s of the second, of the first": [
            second.rate / first.rate for first, second in zip(found["clean"], clean, strict=True)
        ],
    }
    for what, values in spread.items():
        print(f"{what:58}{statistics.median(values):8.4f}  ({min(values):.4f} to {max(values):.4f})")
        line: dict[str, Any] = {"benchmark": "agent_faults", "figure": what, "value": statistics.median(values)}
        print(json.dumps(line | {"runs": values}))
    reached = statistics.median(shares) >= LEAST_RATE and statistics.median(trained) >= LEAST_TRAINED
    for what in ("rewards", "lengths"):
        for name, ours in (("retries=2", again), ("two clean runs", found["clean"])):
            apart = difference([getattr(one, what) for one in ours], [getattr(one, what) for one in clean])
            print(f"{name}: mean {what.rstrip('s')} less that of clean  {apart}")
            reached = reached and (name != "retries=2" or apart.low <= 0 <= apart.high)
    wanted = f"{LEAST_RATE} and {LEAST_TRAINED} at least, and 0 in the intervals of retries=2"
    print(f"wanted: {wanted}: {'reached' if reached else 'MISSED'}")
    return reached


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

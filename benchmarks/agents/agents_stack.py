"""Affinity, load and staleness of episodes on the real stack: `python -m benchmarks.agents.routing --real`.

Runs of graphs/agent_game.py on Ray, vLLM and ZeRO, whose episodes have a few turns and every tenth ten times as many:
with one generator, and with two for each of the margins. The learning rate is 0, so all of them play the same policy.
What is printed comes from the ledgers and metrics, and every run has to audit well.

"cached" is the share of the context tokens of turns after the first that vLLM's prefix cache had; "busiest / idlest"
compares the generators' tokens, those of contexts that were not cached and sampled ones; "stayed" is the share of
those turns that the generator of the turn before answered; "tokens/s" counts sampled ones from the end of the second
step on. Wanted of two generators with the given margin are at least 0.9 of the cached share of one, and a busiest one
that does at most 1.3 times the work of the idlest; the exit status is 1 otherwise. Of the runs with the given margin,
tokens by turn and age, and the lengths of the episodes that were offered and trained, by their turns.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.agents import uneven_env
from benchmarks.runs.overlap import pace
from flowrl.errors import FlowrlError
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.telemetry.metrics import read_lines

ROOT = Path(__file__).parents[2]
POLICY = ("--policy", "tiny_agent", "--task.name", "arithmetic:min_value=30")
FIXED = (*POLICY, "--evaluate", "0", "--lr", "0", "--max-tokens", "12", "--limits.turns", "64")
GROUPS = 4
SIZES = ("--groups-per-step", str(GROUPS), "--group-size", "8", "--look-ahead", str(GROUPS), "--staleness", "4")
ONE = "one generator"
NEVER = 1 << 20
"""A margin that no load exceeds."""
LEAST_CACHED, MOST_BALANCE = 0.9, 1.3
SKIPPED = 2
LATER = "abandoned IS NULL AND turn > 0"
CACHED = f"SELECT SUM(cached_tokens) * 1.0 / SUM(context_tokens) FROM requests WHERE {LATER}"
WORK = "SELECT SUM(context_tokens - COALESCE(cached_tokens, 0) + tokens) FROM requests GROUP BY generator"
STAYED = (
    "SELECT AVG(r.generator = b.generator) FROM requests r JOIN requests b ON b.sample_id = r.sample_id"
    " AND b.attempt = r.attempt AND b.turn = r.turn - 1 AND b.abandoned IS NULL WHERE r.abandoned IS NULL"
)
AGES = (
    "SELECT turn, trained_version - oldest_version, SUM(r.tokens) FROM requests r JOIN"
    " (SELECT sample_id, trained_version FROM samples WHERE state = 'trained') USING (sample_id)"
    " WHERE abandoned IS NULL AND r.tokens > 0 GROUP BY 1, 2"
)
VERSIONS = (
    "SELECT MAX(newest_version) - MIN(oldest_version) + 1 FROM requests WHERE abandoned IS NULL GROUP BY sample_id"
)
TURNS = "SELECT e.turns, s.state FROM episodes e JOIN samples s USING (sample_id) WHERE e.cause IS NULL"


@dataclass(frozen=True)
class Case:
    name: str
    generators: int
    margin: int | None


@dataclass(frozen=True)
class Played:
    """What the records of one run say."""

    cached: float
    balance: float
    stayed: float
    tokens_per_s: float
    max_staleness: int
    ages: Sequence[tuple[int, int, int]]
    """(turn, age, tokens)"""
    versions: Sequence[int]
    """For each episode, the number of versions from its first to its last."""
    turns: Sequence[tuple[int, str]]
    """(number of turns, what became of it) for each episode."""

    def figures(self) -> dict[str, float]:
        return {
            "cached": self.cached,
            "busiest / idlest": self.balance,
            "stayed": self.stayed,
            "tokens/s": self.tokens_per_s,
        }


def play(case: Case, steps: int, seed: int) -> Played:
    name = f"{uneven_env.__file__}:Uneven"
    size = ("--generator.replicas", str(case.generators), "--generator.cpus", str(1 / case.generators))
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "flowrl.cli", "run", "graphs/agent_game.py", "--plain", "--environment", name]
        more = ("--affinity-margin", str(case.margin), "--steps", str(steps), "--seed", str(seed))
        options = [*FIXED, *SIZES, *size, *more, "--run-dir", str(run_dir)]
        done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            raise FlowrlError(f"{case.name}: {done.stdout}{done.stderr}")
        return found(run_dir, case)


def found(run_dir: Path, case: Case) -> Played:
    """The figures of a finished run. Raises FlowrlError if it does not audit well."""
    if not (report := audit(run_dir)).ok:
        raise FlowrlError(f"{case.name}: {report}")
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        work = [tokens for (tokens,) in db.execute(WORK)]
        return Played(
            cached=db.execute(CACHED).fetchone()[0],
            balance=max(work) / min(work) if len(work) == case.generators else float("inf"),
            stayed=db.execute(STAYED).fetchone()[0],
            tokens_per_s=pace(read_lines(run_dir / "metrics.jsonl"), skip=SKIPPED).tokens_per_s,
            max_staleness=int(report.figures["max staleness"] or 0),
            ages=db.execute(AGES).fetchall(),
            versions=[number for (number,) in db.execute(VERSIONS) if number is not None],
            turns=db.execute(TURNS).fetchall(),
        )


def measure(*, repetitions: int, margin: int, steps: int) -> bool:
    """Play all cases by turns, and print the tables and a line of JSON for each figure. Whether all is as wanted."""
    ours = f"margin {margin}"
    cases = (
        Case(ONE, 1, margin),
        Case(ours, 2, margin),
        Case("no bound", 2, NEVER),
        Case("no affinity", 2, None),
    )
    runs: dict[str, list[Played]] = {case.name: [] for case in cases}
    for repetition in range(repetitions):
        for case in cases:
            runs[case.name].append(play(case, steps, repetition))
            told = "  ".join(f"{what} {value:.4g}" for what, value in runs[case.name][-1].figures().items())
            print(f"{case.name:15}{told}", flush=True)
    for line in (*table(runs), *staleness(runs[ours])):
        print(line)
    return as_wanted(runs[ONE], runs[ours])


def as_wanted(one: Sequence[Played], two: Sequence[Played]) -> bool:
    """Print what two generators do with the margin against what is wanted of them; whether they do it."""
    cached = median(run.cached for run in two) / median(run.cached for run in one)
    balance = median(run.balance for run in two)
    reached = cached >= LEAST_CACHED and balance <= MOST_BALANCE
    print(f"\ncached share over that of one generator {cached:.3f}, wanted {LEAST_CACHED} and more")
    print(f"busiest / idlest {balance:.3f}, wanted {MOST_BALANCE} at most: {'reached' if reached else 'MISSED'}")
    return reached


def table(runs: dict[str, list[Played]]) -> Iterator[str]:
    """The figures of each case: median, least and greatest; then the same as lines of JSON."""
    yield f"\n{'':15}{'':18}{'median':>10}{'least':>10}{'most':>10}"
    lines = []
    for name, played in runs.items():
        for what in played[0].figures():
            values = [one.figures()[what] for one in played]
            yield f"{name:15}{what:18}{median(values):10,.4g}{min(values):10,.4g}{max(values):10,.4g}"
            line = {"benchmark": "agents_stack", "system": name, "value": median(values), "unit": what}
            lines.append(json.dumps(line | {"min": min(values), "max": max(values), "repetitions": len(values)}))
    yield from lines


def staleness(runs: Sequence[Played]) -> Iterator[str]:
    """Trained tokens by turn and age, how many versions episodes lasted, and lengths as offered and as trained."""
    versions = [number for one in runs for number in one.versions]
    long = sum(number >= 3 for number in versions)
    lasted = f"{long} of {len(versions)} episodes lasted three versions or more, the longest {max(versions)}"
    yield f"\nmax staleness {max(one.max_staleness for one in runs)}; {lasted}"
    oldest = max(age for one in runs for _, age, _ in one.ages)
    yield f"{'share of trained tokens by age':32}" + "".join(f"{age:8}" for age in range(oldest + 1))
    for first, last in ((1, 1), (2, 3), (4, 10), (11, 64)):
        tokens = [0] * (oldest + 1)
        for turn, age, number in (row for one in runs for row in one.ages):
            tokens[age] += number if first <= turn + 1 <= last else 0
        shares = "".join(f"{number / max(1, sum(tokens)):8.3f}" for number in tokens)
        yield f"{f'turns {first} to {last}, {sum(tokens)} tokens':32}{shares}"
    for what, wanted in (("offered", None), ("trained", "trained")):
        turns = [number for one in runs for number, state in one.turns if wanted in (None, state)]
        counts = {number: turns.count(number) / len(turns) for number in sorted(set(turns))}
        shown = "  ".join(f"{number} turns {share:.3f}" for number, share in counts.items())
        yield f"{what}, {len(turns)} episodes: {shown}"

"""What a run gained on its held-out prompts: `python -m benchmarks.training.gain RUN_DIR`.

Before and after are compared prompt by prompt. The interval is the paired 95% one, mean ± 1.96 standard
errors of the differences (normal approximation).
"""

from __future__ import annotations

import argparse
import json
import math
import sqlite3
import statistics
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Shares = Mapping[str, float]
"""Share of right answers by prompt."""


@dataclass(frozen=True)
class Gain:
    """Scores are means over prompts of the share of answers that are right."""

    prompts: int
    before: float
    after: float
    error: float
    """Standard error of the mean of the paired differences."""

    @property
    def gain(self) -> float:
        return self.after - self.before

    def __str__(self) -> str:
        return f"{self.before:.3f} -> {self.after:.3f}, {self.gain:+.3f} ± {self.error:.3f}"

    @property
    def low(self) -> float:
        return self.gain - 1.96 * self.error

    @property
    def high(self) -> float:
        return self.gain + 1.96 * self.error


@dataclass(frozen=True)
class Preference:
    """What a run changed on held-out pairs."""

    accuracy: float
    """How often the chosen completion's implicit reward is the higher one. Before training both are 0."""
    chosen_change: float
    """Mean change of the chosen completions' logprob, in nats."""
    rejected_change: float

    def __str__(self) -> str:
        change = f"logprob of the chosen {self.chosen_change:+.2f} nats, of the rejected {self.rejected_change:+.2f}"
        return f"{self.accuracy:.3f}; {change}"


def preference(run_dir: Path) -> Preference | None:
    """Read a run's metrics; None if it trained no policy on preferences."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    last = (json.loads(lines[-1]) if lines else {}) | _end_of_data(run_dir)
    chosen, rejected = (
        ("chosen", "rejected") if "held_out/chosen_logprob_change" in last else ("desirable", "undesirable")
    )
    if f"held_out/{chosen}_logprob_change" not in last:
        return None
    return Preference(
        accuracy=last["held_out/preference_accuracy"],
        chosen_change=last[f"held_out/{chosen}_logprob_change"],
        rejected_change=last[f"held_out/{rejected}_logprob_change"],
    )


def _end_of_data(run_dir: Path) -> dict[str, Any]:
    """What a trainer measured after its last batch, if its data ended before the steps; else {}."""
    if not (file := run_dir / "evaluations.jsonl").exists():
        return {}
    found = [line for line in map(json.loads, file.read_text().splitlines()) if line["phase"] == "end"]
    return found[-1] if found else {}


def gain(run_dir: Path) -> Gain:
    """Read a run's ledger. Raises ValueError if it has no pair of evaluations."""
    before, after = shares(run_dir, "before"), shares(run_dir, "after")
    if not before or before.keys() != after.keys():
        raise ValueError(f"{run_dir} holds no evaluation of the same prompts before and after training")
    return paired(before, after)


def shares(run_dir: Path, phase: str) -> Shares:
    """What one evaluation found on its first task; empty if there was none."""
    query = (
        "SELECT prompt_id, AVG(correct) FROM evaluations WHERE phase = ?"
        " AND task = (SELECT task FROM evaluations ORDER BY rowid LIMIT 1) GROUP BY 1"
    )
    with closing(sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        return dict(db.execute(query, (phase,)).fetchall())


def paired(before: Shares, after: Shares) -> Gain:
    """Two evaluations of the same prompts, compared prompt by prompt."""
    differences = [after[prompt] - before[prompt] for prompt in before]
    spread = statistics.stdev(differences) if len(differences) > 1 else math.inf
    return Gain(
        prompts=len(before),
        before=statistics.fmean(before.values()),
        after=statistics.fmean(after.values()),
        error=spread / math.sqrt(len(differences)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, nargs="+")
    for run_dir in parser.parse_args().run_dir:
        try:
            found = gain(run_dir)
        except (ValueError, sqlite3.Error) as error:
            print(f"gain: {error}", file=sys.stderr)
            return 2
        print(
            f"{run_dir}: {found.before:.3f} -> {found.after:.3f} on {found.prompts} prompts, "
            f"gain {found.gain:+.3f}, paired 95% interval [{found.low:+.3f}, {found.high:+.3f}]"
        )
        figures = asdict(found) | {"low": found.low, "high": found.high}
        print(json.dumps({"benchmark": "gain", "case": str(run_dir), "system": "flowrl", **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

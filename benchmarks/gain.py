"""What a run gained on its held-out prompts: `python -m benchmarks.gain RUN_DIR`.

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
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gain:
    """Scores are means over prompts of the share of answers that are right."""

    prompts: int
    before: float
    after: float
    low: float
    high: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def gain(run_dir: Path) -> Gain:
    """Read a run's ledger. Raises ValueError if it has no pair of evaluations."""
    query = "SELECT phase, prompt_id, AVG(correct) FROM evaluations WHERE phase IN ('before', 'after') GROUP BY 1, 2"
    with sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True) as db:
        rows = db.execute(query).fetchall()
    before = {prompt: share for phase, prompt, share in rows if phase == "before"}
    after = {prompt: share for phase, prompt, share in rows if phase == "after"}
    if not before or before.keys() != after.keys():
        raise ValueError(f"{run_dir} holds no evaluation of the same prompts before and after training")
    differences = [after[prompt] - before[prompt] for prompt in before]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return Gain(
        prompts=len(before),
        before=statistics.fmean(before.values()),
        after=statistics.fmean(after.values()),
        low=mean - 1.96 * error,
        high=mean + 1.96 * error,
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
        print(json.dumps({"benchmark": "gain", "case": str(run_dir), "system": "flowrl", **asdict(found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

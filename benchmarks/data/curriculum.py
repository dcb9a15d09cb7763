"""What a curriculum costs a source: microseconds of a choice, a group asked and an outcome, by the prompts known.

    python -m benchmarks.data.curriculum

Each number of prompts is known completely before; then groups are asked and answered, half of them chosen by pass rate.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence

from flowrl.nodes import Curriculum
from flowrl.nodes.curriculum import GroupOutcome, PassRates

SETTINGS = Curriculum(chosen=0.5, replayed=0.3, replay_after=8)


def known(prompts: int, levels: int) -> tuple[PassRates, list[str], float]:
    """(the pass rates of so many prompts, all asked once; their names; seconds that it took)."""
    names = [f"prompt {number}" for number in range(prompts)]
    buckets = [f"level {number % levels}" for number in range(prompts)] if levels else None
    start = time.perf_counter()
    rates = PassRates(SETTINGS, names, buckets, seed=0)
    for row, name in enumerate(names):
        rates.note_asked(row)
        rates.note_outcome(GroupOutcome(name, 0, (0.0, float(row % 3 > 0), float(row % 3 > 1))))
    return rates, names, time.perf_counter() - start


def group_us(rates: PassRates, names: Sequence[str], groups: int) -> float:
    """Microseconds of one group: its choice, its start and its outcome."""
    rng, start = random.Random(0), time.perf_counter()
    for number in range(groups):
        found = rates.choose_row()
        row = number % len(names) if found is None else found.row
        rates.note_asked(row)
        rates.note_outcome(GroupOutcome(names[row], rates.num_visits(row) - 1, (0.0, float(rng.random() < 0.5))))
    return (time.perf_counter() - start) / groups * 1e6


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[10, 10_000, 1_000_000])
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args(argv)
    lines = ["| prompts known | pass rates | a group µs, median (range) | to know them s |", "|---|---|---|---|"]
    for prompts in options.prompts:
        for levels in (0, 10):
            rates, names, seconds = known(prompts, levels)
            found = [group_us(rates, names, options.groups) for _ in range(options.times)]
            print(json.dumps({"prompts": prompts, "levels": levels, "us": found, "seconds": seconds}), flush=True)
            spread = f"{statistics.median(found):.0f} ({min(found):.0f} to {max(found):.0f})"
            lines.append(f"| {prompts:,} | {'10 levels' if levels else 'each its own'} | {spread} | {seconds:.1f} |")
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()

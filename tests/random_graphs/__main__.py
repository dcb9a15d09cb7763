"""Many random graphs: `python -m tests.random_graphs --graphs 2000 --seed 0`; one alone: `--only SEED`.

A seed that fails is told with its graph, and the features without which it still fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

from tests.random_graphs.run import judge, smaller
from tests.random_graphs.shape import FEATURES


def main() -> int:
    options = _options()
    began_s, done, kinds = time.monotonic(), Counter(), Counter()
    for verdict in _verdicts(options):
        done[verdict.outcome] += 1
        done["lives"] += verdict.lives
        done["crashes"] += verdict.crashes
        if verdict.outcome == "failed":
            kinds.update({violation.kind for violation in verdict.violations})
            print(verdict.told(smaller(verdict) if options.shrink else None), flush=True)
    summary = ", ".join(f"{count} {what}" for what, count in done.items())
    print(f"{summary}; {time.monotonic() - began_s:.0f} s{'; failures by kind: ' + str(dict(kinds)) if kinds else ''}")
    return int(bool(kinds))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.random_graphs", description=__doc__)
    parser.add_argument("--graphs", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="this seed alone")
    parser.add_argument("--without", default="", help=f"features to leave out, with commas: {', '.join(FEATURES)}")
    parser.add_argument("--shrink", action="store_true", help="find the features that a failure does not need")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    return parser.parse_args()


def _verdicts(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    first, count = (options.seed, options.graphs) if options.only is None else (options.only, 1)
    seeds = range(first, first + count)
    if options.jobs == 1:
        yield from (judge(seed, options.without) for seed in seeds)
        return
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(judge, seeds, repeat(options.without), chunksize=8)


if __name__ == "__main__":
    sys.exit(main())

"""How often the alarm `failing_by_length` rings without a reason, and how often with one.

Each run plays groups of episodes whose attempts fail in one of several ways, and feeds the scores to the alarm as a run
does: a line a step, the mean over five lines. A run counts if any of its lines rings.

    python -m benchmarks.agents.failing_by_length --runs 500
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

from flowrl.nodes.episodes.episode_reports import FailingByLength
from flowrl.runtime.telemetry.metrics import Alarms, AlarmThresholds

GROUPS_A_LINE = 8
RETRIES = 2

Fate = Callable[[random.Random, int, float], int | None]
"""(draws, length of the episode, chance) -> the turns after which the attempt fails; None if it does not."""


def at_reset(draws: random.Random, length: int, chance: float) -> int | None:
    return 0 if draws.random() < chance else None


def at_first_step(draws: random.Random, length: int, chance: float) -> int | None:
    return 1 if draws.random() < chance else None


def at_last_step(draws: random.Random, length: int, chance: float) -> int | None:
    return length if draws.random() < chance else None


def anywhere(draws: random.Random, length: int, chance: float) -> int | None:
    return draws.randint(0, length) if draws.random() < chance else None


def at_each_step(draws: random.Random, length: int, chance: float) -> int | None:
    return next((step for step in range(1, length + 1) if draws.random() < chance / 4), None)


def beyond_eight_turns(draws: random.Random, length: int, chance: float) -> int | None:
    return 9 if length > 8 and draws.random() < 3 * chance else None


INDEPENDENT: dict[str, Fate] = {
    "at the reset": at_reset,
    "at the first step": at_first_step,
    "at the last step": at_last_step,
    "anywhere": anywhere,
}
DEPENDENT: dict[str, Fate] = {"at each step": at_each_step, "beyond eight turns": beyond_eight_turns}


def rings(
    fate: Fate,
    seed: int,
    *,
    lines: int,
    chance: float = 0.1,
    group_size: int = 8,
    alike: bool = False,
    broken: float = 0.0,
) -> bool:
    """Whether the alarm rings in one run. `alike`: all tasks have the same lengths; else each has its own mean.

    A share `broken` of the tasks fails in three of four attempts, whatever their length.
    """
    draws, test, alarms = random.Random(seed), FailingByLength(), Alarms(AlarmThresholds())
    for line in range(lines):
        for number in range(GROUPS_A_LINE):
            mean = 6.0 if alike else draws.choice((2.0, 4.0, 8.0, 12.0))
            own = 0.75 if draws.random() < broken else chance
            for _ in range(group_size):
                play(test, fate, draws, f"{line}.{number}", group_size, mean, own)
        if alarms.look_at_line({"step": line, "failing_by_length": test.score}):
            return True
    return False


def play(
    test: FailingByLength, fate: Fate, draws: random.Random, group: str, size: int, mean: float, chance: float
) -> None:
    """One member of a group, with its retries; lengths are geometric."""
    for _ in range(RETRIES + 1):
        length = 1
        while draws.random() > 1 / mean and length < 32:
            length += 1
        if (failed_after := fate(draws, length, chance)) is None:
            test.add_finished(group, size, length)
            return
        test.add_failed(group, size, failed_after)
    test.end_member(group, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--lines", type=int, default=100)
    options = parser.parse_args()
    for title, fates in (("independent", INDEPENDENT), ("dependent", DEPENDENT)):
        for name, fate in fates.items():
            for what, settings in VARIANTS.items():
                num_rang = sum(rings(fate, seed, lines=options.lines, **settings) for seed in range(options.runs))
                print(f"{title:<12} {name:<20} {what:<24} {num_rang:>5} of {options.runs} runs", flush=True)


VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "fails 0.4": {"chance": 0.4},
    "no groups": {"group_size": 1},
    "alike": {"alike": True},
    "a tenth of tasks broken": {"broken": 0.1},
}


if __name__ == "__main__":
    main()

"""What `benchmarks.runs.kept_samples` says of its pairs."""

from __future__ import annotations

import random

import pytest

from benchmarks.runs.keeping_by_windows import pairs_of
from benchmarks.runs.kept_samples import compared


def test_few_pairs_have_a_spread_and_no_interval() -> None:
    assert compared([(1.0, 2.0), (3.0, 2.0), (2.0, 2.0)]) == "1.0000, 3 pairs from 0.500 to 1.500"


def test_the_interval_is_between_the_third_and_the_tenth_of_twelve() -> None:
    pairs = [(1 + n / 100, 1.0) for n in range(12)]
    random.Random(0).shuffle(pairs)
    assert compared(pairs) == "1.0550 [1.0200, 1.0900], 12 pairs from 1.000 to 1.110"
    assert "[0.9000, 1.1000]" in compared([(0.9, 1.0), *[(1.0, 1.0)] * 4, (1.1, 1.0)]), "six: all of them"


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    rng, inside = random.Random(1), 0
    for _ in range(2_000):
        told = compared([(rng.lognormvariate(0, 0.1), 1.0) for _ in range(10)])
        low, high = (float(number) for number in told.partition("[")[2].partition("]")[0].split(", "))
        inside += low <= 1 <= high
    assert 0.95 <= inside / 2_000 < 1


def ends(*, kept: float, other: float) -> list[float]:
    """The ends of steps from 4 s to 32 s, whose lengths depend on the window of 4 s in which they are."""
    found, now, done = [], 4.0, 0.0
    while now < 32.0:
        now += 0.001
        done += 0.001 / (kept if int(now / 4) % 2 else other)
        if done >= 1.0:
            found.append(now)
            done -= 1.0
    return found


def test_a_window_with_kept_samples_is_compared_with_its_neighbours() -> None:
    found = pairs_of(ends(kept=0.33, other=0.3), 4.0)
    assert len(found) == 2
    for with_samples, without in found:
        assert (with_samples, without) == pytest.approx((0.33, 0.3), rel=0.02)
    assert pairs_of(ends(kept=0.3, other=0.3), 4.0) == [pytest.approx((0.3, 0.3), rel=0.002)] * 2


def test_what_was_spent_in_a_window_may_be_another_clocks() -> None:
    spent = {window: 1.0 + 0.1 * (window % 2) for window in range(1, 9)}
    for with_samples, without in pairs_of(ends(kept=0.3, other=0.3), 4.0, spent):
        assert with_samples / without == pytest.approx(1.1, rel=0.002)
    assert pairs_of(ends(kept=0.3, other=0.3), 4.0, {3: 1.0}) == []


def test_windows_of_few_steps_are_not_compared() -> None:
    assert pairs_of(ends(kept=1.3, other=1.3), 4.0) == []

"""What `benchmarks.kept_samples` says of its pairs."""

from __future__ import annotations

import random

import pytest

from benchmarks.keeping_by_windows import pairs_of
from benchmarks.kept_samples import compared


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


def test_a_window_with_kept_samples_is_compared_with_its_neighbours() -> None:
    """Steps of 0.33 s in windows 3 and 5, of 0.3 s in the others; those at a border are left out."""
    ends_s, now = [], 8.0
    while now < 28.0:
        ends_s.append(now)
        now += 0.33 if int(now / 4) % 2 else 0.3
    (first, without), (second, also_without) = pairs_of(ends_s, 4.0)
    assert (first, second) == pytest.approx((0.33, 0.33)) and (without, also_without) == pytest.approx((0.3, 0.3))


def test_windows_of_few_steps_are_not_compared() -> None:
    assert pairs_of([8.0 + 1.3 * n for n in range(20)], 4.0) == []

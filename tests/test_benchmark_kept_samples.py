"""What `benchmarks.kept_samples` says of its pairs."""

from __future__ import annotations

import random

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

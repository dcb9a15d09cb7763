"""The alarm for failures that depend on length: seldom without a reason, soon with one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.agents.failing_by_length import DEPENDENT, INDEPENDENT, VARIANTS, rings
from flowrl.nodes.episodes.episode_reports import (
    LEAST_FAILED,
    LEAST_GROUPS,
    MOST_OPEN,
    FailingByLength,
    between_groups,
    ranks,
    within_groups,
)


def test_ranks_share_their_places() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_scores_by_hand() -> None:
    lengths = np.arange(10.0)
    assert between_groups(lengths**2, lengths) == pytest.approx(3.0)
    assert between_groups(-lengths, lengths) == pytest.approx(-3.0)
    assert between_groups(np.ones(10), lengths) == 0.0
    differences = np.array([1.0, 3.0, 1.0, 3.0])
    assert within_groups(differences) == pytest.approx(2.0 / (math.sqrt(4 / 3) / 2))
    assert within_groups(np.full(4, -1.0)) == pytest.approx(-4.0), "the least spread is half a turn"


def test_there_is_no_score_before_enough_groups_failed() -> None:
    test = FailingByLength()
    for number in range(LEAST_GROUPS):
        assert test.score is None
        if number < LEAST_FAILED:
            test.add_failed(f"{number}", 1, 1)
        test.add_finished(f"{number}", 1, 2)
    assert test.score is not None


def test_a_group_counts_when_its_members_have_ended_or_when_too_many_are_open() -> None:
    test = FailingByLength()
    for number in range(LEAST_GROUPS):
        test.add_failed(f"{number}", 2, 1)
        test.add_finished(f"{number}", 2, 2 + number)
    assert test.score is None
    for number in range(MOST_OPEN):
        test.add_finished(f"more {number}", 2, 3)
    assert test.score is not None


@pytest.mark.parametrize("name", INDEPENDENT)
def test_failing_without_regard_to_length_is_silent(name: str) -> None:
    rung = [rings(INDEPENDENT[name], seed, lines=40, **settings) for seed in range(3) for settings in VARIANTS.values()]
    assert not any(rung)


@pytest.mark.parametrize("name", DEPENDENT)
def test_failing_by_length_rings(name: str) -> None:
    assert all(rings(DEPENDENT[name], seed, lines=60, chance=0.2) for seed in range(4))

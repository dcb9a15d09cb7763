"""Advantages against hand-computed values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import ConfigError
from flowrl.messages import Scored
from flowrl.training.advantages import (
    BASELINE_ESTIMATORS,
    GROUP_ESTIMATORS,
    Estimate,
    all_equal,
    compute_advantages,
    compute_gae,
    discounted_sums,
    group_rewards,
    normalise_parts,
    pass_rewards,
    returns_to_go,
    whiten_advantages,
)
from tests.training import objective_rig

REWARDS = [1.0, 0.0, 0.5, 2.0, 2.5]
GROUPS = ["a", "a", "a", "b", "b"]
MASK = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 1], [1, 1, 0]], bool)


def last_tokens(values: np.ndarray) -> list[float]:
    return [float(row[np.flatnonzero(mask)[-1]]) for row, mask in zip(values, MASK, strict=True)]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("reinforce", REWARDS),
        ("reinforce_baseline", [0.5, -0.5, 0.0, -0.25, 0.25]),
        ("dr_grpo", [0.5, -0.5, 0.0, -0.25, 0.25]),
        ("rloo", [0.75, -0.75, 0.0, -0.5, 0.5]),
        ("group_norm", [1.0, -1.0, 0.0, -(0.5**0.5), 0.5**0.5]),
    ],
)
def test_estimators(estimator: str, expected: list[float]) -> None:
    found, returns = compute_advantages(REWARDS, GROUPS, MASK, estimator=estimator, whiten=False)
    assert last_tokens(found) == pytest.approx(expected, abs=1e-8)
    assert np.array_equal(found, np.where(MASK, np.array(last_tokens(found))[:, None], 0.0))
    assert np.array_equal(found, returns)


@pytest.mark.parametrize("estimator", BASELINE_ESTIMATORS)
def test_equal_rewards_give_exactly_zero(estimator: str) -> None:
    rewards = np.full(8, 0.1, np.float32)
    assert group_rewards(rewards, estimator).tolist() == [0.0] * 8
    assert group_rewards(rewards * 1e6 + np.arange(8) * 1e-2, estimator).tolist() == [0.0] * 8
    assert np.abs(group_rewards(rewards + np.arange(8, dtype=np.float32) * 1e-3, estimator)).max() > 0


@pytest.mark.parametrize("scale", [1e-9, 1e-7, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("estimator", BASELINE_ESTIMATORS)
def test_what_counts_as_equal_is_relative_to_the_rewards(estimator: str, scale: float) -> None:
    rewards = np.array([1.0, 0.0, 0.25, 1.0]) * scale
    found = group_rewards(rewards, estimator)
    if estimator == "group_norm":
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-9)
    else:
        expected = group_rewards(rewards / scale, estimator) * scale
    assert found == pytest.approx(expected, rel=1e-9, abs=0)
    assert np.count_nonzero(found) == np.count_nonzero(expected) > 0
    assert not all_equal(rewards) and all_equal(scale + rewards * 1e-7)


def test_a_spread_below_the_floor_is_rounding() -> None:
    assert all_equal([1e-13, 0.0]) and all_equal([0.0, 0.0]) and all_equal([-5e-13, 5e-13])
    assert not all_equal([1e-11, 0.0])


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_group_of_one_is_refused(estimator: str) -> None:
    with pytest.raises(ValueError, match="needs two, got 1"):
        group_rewards([1.0], estimator)


def test_kl_is_taken_off_every_policy_token_and_summed_to_go() -> None:
    kl = np.arange(15, dtype=float).reshape(5, 3) / 10
    found, _ = compute_advantages(REWARDS, GROUPS, MASK, estimator="dr_grpo", kl_BT=kl, kl_coef=0.5)
    assert found[0].tolist() == pytest.approx([0.5 - 0.5 * 0.1, 0.5 - 0.5 * 0.1, 0.0])
    assert found[3].tolist() == pytest.approx([-0.25 - 0.5 * (0.9 + 1.1), 0.0, -0.25 - 0.5 * 1.1])


def test_kl_before_baseline_enters_the_groups_mean() -> None:
    kl = np.ones((5, 3))
    found, _ = compute_advantages(
        REWARDS, GROUPS, MASK, estimator="rloo", kl_BT=kl, kl_coef=0.1, kl_before_baseline=True
    )
    shaped = [1 - 0.2, 0 - 0.1, 0.5 - 0.3]
    assert found[0, 0] == pytest.approx(shaped[0] - (shaped[1] + shaped[2]) / 2)


def test_gamma_discounts_over_policy_tokens_alone() -> None:
    found, _ = compute_advantages(
        [4.0], ["a"], np.array([[1, 0, 1, 1]], bool), estimator="reinforce", gamma=0.5, whiten=False
    )
    assert found.tolist() == [[1.0, 0.0, 2.0, 4.0]]
    with pytest.raises(ValueError, match="gamma"):
        compute_advantages(REWARDS, GROUPS, MASK, estimator="rloo", gamma=0.9)


def test_gae_by_hand() -> None:
    mask = np.array([[1, 0, 1]], bool)
    values = np.array([[0.5, 99.0, 0.25]])
    found, returns = compute_advantages(
        [1.0], ["a"], mask, estimator="gae", values_BT=values, gamma=0.9, lam=0.8, whiten=False
    )
    last = 1.0 - 0.25
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last
    assert found.tolist() == [[pytest.approx(first), 0.0, pytest.approx(last)]]
    assert returns.tolist() == [[pytest.approx(first + 0.5), 0.0, pytest.approx(1.0)]]
    with pytest.raises(ValueError, match="values_BT"):
        compute_advantages([1.0], ["a"], mask, estimator="gae")


def test_whitening_is_over_all_masked_tokens_with_the_population_variance() -> None:
    values = np.arange(15, dtype=float).reshape(5, 3)
    found = whiten_advantages(values, MASK)
    chosen = values[MASK]
    assert found[MASK] == pytest.approx((chosen - chosen.mean()) / chosen.std())
    assert (found[~MASK] == 0).all()
    assert whiten_advantages(values, MASK, mean_only=True)[MASK] == pytest.approx(chosen - chosen.mean())
    assert whiten_advantages(np.full((5, 3), 0.3), MASK)[MASK] == pytest.approx(0.0)


def test_returns_are_not_whitened_and_group_estimators_neither() -> None:
    found, returns = compute_advantages(REWARDS, GROUPS, MASK, estimator="reinforce")
    assert found[MASK].mean() == pytest.approx(0.0) and found[MASK].std() == pytest.approx(1.0)
    assert last_tokens(returns) == REWARDS
    normed, _ = compute_advantages(REWARDS, GROUPS, MASK, estimator="group_norm")
    assert last_tokens(normed) == pytest.approx([1.0, -1.0, 0.0, -(0.5**0.5), 0.5**0.5], abs=1e-8)


def test_tensors_in_tensors_out() -> None:
    found, returns = compute_advantages(
        torch.tensor(REWARDS, dtype=torch.float32), torch.tensor([0, 0, 0, 1, 1]), torch.tensor(MASK), estimator="rloo"
    )
    assert found.dtype == returns.dtype == torch.float32
    expected, _ = compute_advantages(REWARDS, GROUPS, MASK, estimator="rloo")
    assert found.numpy() == pytest.approx(expected)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_group_baselines_sum_to_zero(rewards: list[float]) -> None:
    for estimator in BASELINE_ESTIMATORS:
        assert float(group_rewards(rewards, estimator).sum()) == pytest.approx(0.0, abs=1e-6)


# max_rl, pass_at_k, gdpo


@given(st.lists(st.floats(0, 100), min_size=2, max_size=8))
def test_max_rl_divides_by_the_mean(rewards: list[float]) -> None:
    mean = sum(rewards) / len(rewards)
    expected = [0.0 if all_equal(rewards) else (one - mean) / mean for one in rewards]
    assert group_rewards(rewards, "max_rl").tolist() == pytest.approx(expected, abs=1e-9)


def test_max_rl_refuses_a_reward_below_0() -> None:
    with pytest.raises(ConfigError, match=r"a reward is -0\.5; give it rewards of 0 and more"):
        group_rewards([1.0, -0.5], "max_rl")


def of_best(passes: Sequence[bool], k: int) -> list[float]:
    """By every choice of k samples: its reward is 1 if one of them passes; a sample has the mean of its choices."""
    chosen = list(combinations(range(len(passes)), k))
    rewards = {one: float(any(passes[n] for n in one)) for one in chosen}
    mean = sum(rewards.values()) / len(chosen)
    spread = math.sqrt(mean * (1 - mean)) + 1e-6
    own = [[reward for one, reward in rewards.items() if n in one] for n in range(len(passes))]
    return [(sum(mine) / len(mine) - mean) / spread for mine in own]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("passing", range(6))
def test_pass_at_k_is_the_mean_over_all_choices_of_k(passing: int, k: int) -> None:
    passes = np.array([n < passing for n in (2, 0, 4, 1, 3)])
    assert pass_rewards(passes, k).tolist() == pytest.approx(of_best(passes.tolist(), k), abs=1e-9)
    rewards = np.where(passes, 0.75, 0.5)
    found = group_rewards(rewards, "pass_at_k", pass_k=k, pass_at=0.75)
    assert found.tolist() == pytest.approx(of_best(passes.tolist(), k), abs=1e-9)


def test_the_published_numbers_of_pass_at_k() -> None:
    """Four of eight samples pass, k = 4: the mean is 1 - 1/70, and the others have its formula for failing samples."""
    found = pass_rewards(np.array([1, 1, 1, 1, 0, 0, 0, 0], bool), 4)
    mean = 1 - 1 / 70
    spread = math.sqrt(mean / 70) + 1e-6
    assert found[0] == pytest.approx((1 - mean) / spread)
    assert found[-1] == pytest.approx((1 - mean - 1 / 35) / spread)


def test_whole_batches_have_those_of_their_groups() -> None:
    """Of two groups: one sample of three passes, and both of two."""
    found, _ = compute_advantages(REWARDS, GROUPS, MASK, estimator="pass_at_k", pass_k=2, pass_at=0.6)
    expected = [*of_best([True, False, False], 2), *of_best([True, True], 2)]
    assert last_tokens(found) == pytest.approx(expected, abs=1e-9)
    with pytest.raises(ValueError, match="which normalise_parts takes"):
        compute_advantages(REWARDS, GROUPS, MASK, estimator="gdpo")


@pytest.mark.parametrize("k", [None, 0, 6])
def test_pass_at_k_needs_as_many_members(k: int | None) -> None:
    with pytest.raises(ValueError, match="pass_k from 1 to the 5 members"):
        group_rewards([0.0] * 5, "pass_at_k", pass_k=k)


PARTS = [[1.0, 0.0, 5.0], [0.0, 3.0, 5.0], [1.0, 1.0, 5.0], [0.0, -2.0, 5.0]]
WEIGHTS = [1.0, 0.5, 2.0]


def by_parts() -> list[float]:
    found = [0.0] * len(PARTS)
    for column, weight in zip(zip(*PARTS, strict=True), WEIGHTS, strict=True):
        mean = sum(column) / len(column)
        spread = math.sqrt(sum((one - mean) ** 2 for one in column) / (len(column) - 1))
        if spread:
            found = [x + weight * (one - mean) / (spread + 1e-9) for x, one in zip(found, column, strict=True)]
    return found


def test_gdpo_normalises_each_part_by_itself() -> None:
    assert normalise_parts(PARTS, WEIGHTS).tolist() == pytest.approx(by_parts(), abs=1e-12)
    assert normalise_parts([[0.1, 0.2]] * 4, [1.0, 1.0]).tolist() == [0.0] * 4


def scored_parts(**changes: Any) -> list[Scored]:
    made = []
    for sample, parts in zip(objective_rig.samples(), PARTS, strict=False):
        kept = {field.name: getattr(sample, field.name) for field in fields(Scored)}
        kept |= {"group_id": "g", "reward_parts": dict(zip("abc", parts, strict=True)), "reward": 9.0}
        made.append(Scored(**{**kept, **changes}))
    return made


def test_gdpo_reads_the_parts_of_samples() -> None:
    estimate = Estimate("gdpo", part_weights=(("a", 1.0), ("b", 0.5), ("c", 2.0)))
    assert estimate.list_problems() == []
    for sample, expected in zip(estimate.make_trainables(scored_parts()), by_parts(), strict=True):
        assert sample.advantages[sample.policy_mask].tolist() == pytest.approx([expected] * sample.response_tokens)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward_parts": {"a": 1.0, "c": 1.0}}, "compares the part 'b' of rewards, and that of sample s0 has a, c"),
        ({"turn_rewards": ((3, 1.0),)}, "has rewards of turns"),
        ({"seat_rewards": ((0, 1.0),), "seats": (0,)}, ""),
    ],
)
def test_gdpo_refuses_samples_without_these_parts(changes: dict[str, Any], says: str) -> None:
    estimate = Estimate("gdpo", part_weights=(("a", 1.0), ("b", 0.5)))
    if not says:  # one seat is a whole sample
        assert estimate.make_trainables(scored_parts(**changes))
        return
    with pytest.raises(ConfigError, match=says):
        estimate.make_trainables(scored_parts(**changes))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"estimator": "pass_at_k"}, "pass_k is None; estimator 'pass_at_k' needs it"),
        ({"pass_k": 2}, "pass_k and pass_at are for estimator 'pass_at_k', not 'group_norm'"),
        ({"estimator": "max_rl", "pass_at": 0.5}, "pass_k and pass_at are for estimator 'pass_at_k'"),
        ({"estimator": "gdpo", "part_weights": (("a", 1.0),)}, "this reward has no two; give it a sum"),
        ({"estimator": "gdpo", "part_weights": (("a", 1.0), ("b", 1.0)), "shuffle_rewards": True}, "whole rewards"),
        ({"estimator": "max_rl", "kl_coef": 0.1, "kl_before_baseline": True}, "subtracted token by token"),
        ({"estimator": "max_rl", "credit": "turn"}, "estimator has to be one of reinforce_baseline, dr_grpo"),
    ],
)
def test_settings_that_an_estimator_cannot_have(settings: dict[str, Any], says: str) -> None:
    problems = Estimate(**settings).list_problems()
    assert len(problems) == 1 and says in problems[0]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 255, 256, 257, 5000])
@pytest.mark.parametrize("discount", [0.0, 0.5, 0.95, 0.9999, 1.0])
def test_sums_in_blocks_are_those_of_a_loop(length: int, discount: float) -> None:
    terms = np.random.default_rng(length).normal(size=length)
    expected, running = np.zeros(length), 0.0
    for t in reversed(range(length)):
        running = terms[t] + discount * running
        expected[t] = running
    np.testing.assert_allclose(discounted_sums(terms, discount), expected, rtol=1e-10, atol=1e-10)


def test_only_the_policys_own_tokens_are_time_steps() -> None:
    rng = np.random.default_rng(1)
    rewards, values, mask = rng.normal(size=(3, 400)), rng.normal(size=(3, 400)), rng.random((3, 400)) < 0.4
    mask[1] = False
    returns = returns_to_go(rewards, mask, gamma=0.9)
    advantages, targets = compute_gae(rewards, values, mask, gamma=0.9, lam=0.8)
    for b, places in enumerate([np.flatnonzero(row) for row in mask]):
        running = advantage = following = 0.0
        for t in places[::-1]:
            running = rewards[b, t] + 0.9 * running
            advantage = rewards[b, t] + 0.9 * following - values[b, t] + 0.9 * 0.8 * advantage
            following = values[b, t]
            assert returns[b, t] == pytest.approx(running, abs=1e-10)
            assert advantages[b, t] == pytest.approx(advantage, abs=1e-10)
            assert targets[b, t] == pytest.approx(advantage + values[b, t], abs=1e-10)
    assert not returns[~mask].any() and not advantages[~mask].any() and not targets[~mask].any()

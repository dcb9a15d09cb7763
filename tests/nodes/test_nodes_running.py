"""Rewards normalised by running statistics and the adaptive KL: one step a batch, in the batcher."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flowrl.messages import Batch, Branch, Group
from flowrl.nodes import AdaptiveKL, GroupAdvantage, TokenBatch
from flowrl.nodes.groups.batch import Moments, RunningEstimate
from flowrl.testing import run_node, scored
from flowrl.training.advantages import Estimate, Scale
from tests.nodes.groups import members

D = 0.1
"""log π − log π_ref at every policy token: behavior −0.5, reference −0.6."""


def group(name: str, estimate: Estimate, *rewards: float) -> Group:
    reference = np.array([0, 0, 0, -0.5 - D, -0.5 - D], np.float32)
    items = [scored(m, reward, group=name, ref_logprobs=reference) for m, reward in enumerate(rewards)]
    return GroupAdvantage(estimate, size=len(items)).make_group(members(items, size=len(items)))


def batches(node: TokenBatch, *groups: Group) -> list[Batch]:
    return run_node(node, {"groups": groups}, window=0, max_staleness=1).sent("batches")


def last_advantages(batch: Batch) -> list[float]:
    return [float(sample.advantages[-1]) for sample in batch.samples]


def test_moments_are_those_of_all_values_so_far() -> None:
    moments, values = Moments(), np.random.default_rng(0).normal(3.0, 2.0, 100)
    for part in np.split(values, [1, 7, 50]):
        moments.add_values(part.tolist())
    assert (moments.count, moments.mean) == (100, pytest.approx(values.mean()))
    assert moments.scale.std == pytest.approx(values.std())


def test_rewards_are_normalised_with_the_batches_so_far() -> None:
    estimate = Estimate("reinforce")
    node = TokenBatch(1, estimate=estimate, normalise_rewards=True)
    first, second = batches(node, group("a", estimate, 1.0, 3.0), group("b", estimate, 5.0, 7.0))
    assert last_advantages(first) == pytest.approx([-1.0, 1.0])
    std = np.std([1, 3, 5, 7])
    assert last_advantages(second) == pytest.approx([1.0 / std, 3.0 / std])
    assert second.metrics["reward_running_mean"] == 4.0
    assert second.metrics["reward_mean"] == 6.0, "the line tells rewards as they were given"


def test_equal_rewards_do_not_blow_up() -> None:
    estimate = Estimate("reinforce")
    (batch,) = batches(TokenBatch(1, estimate=estimate, normalise_rewards=True), group("a", estimate, 0.1, 0.1))
    assert last_advantages(batch) == pytest.approx([0.0, 0.0], abs=1e-6)


def test_the_controller_moves_towards_its_target_within_its_limit() -> None:
    controller = AdaptiveKL(target=2.0)
    assert controller.next_coef(0.5, 2.0) == 0.5
    assert controller.next_coef(0.5, 2.2) == pytest.approx(0.5 * 1.01)
    assert controller.next_coef(0.5, 9.0) == pytest.approx(0.5 * 1.02)
    assert controller.next_coef(0.5, 0.0) == pytest.approx(0.5 * 0.98)


@pytest.mark.parametrize("further", [0, 1, 3])
def test_the_kl_of_an_episode_is_that_of_all_its_sequences(further: int) -> None:
    estimate = Estimate("reinforce", kl_coef=1.0)
    (one,) = group("a", estimate, 1.0).samples
    branch = Branch(one.token_ids, one.policy_mask, one.behavior_logprobs, one.versions)
    whole = dataclasses.replace(one, branches=(branch,) * further, ref_logprobs=np.tile(one.ref_logprobs, 1 + further))
    running = RunningEstimate(estimate, normalise_rewards=False, adaptive_kl=AdaptiveKL(target=0.1))
    running.estimate_batch([Group("a", (whole,), 1)])
    assert running.metrics["reward_kl"] == pytest.approx(2 * D * (1 + further))


def test_the_kl_coefficient_steps_once_a_batch() -> None:
    estimate = Estimate("reinforce", kl_coef=1.0)
    node = TokenBatch(1, estimate=estimate, adaptive_kl=AdaptiveKL(target=0.1))
    first, second = batches(node, *(group(name, estimate, 1.0, 2.0) for name in "ab"))
    assert first.metrics["reward_kl"] == pytest.approx(2 * D)
    assert (first.metrics["kl_coef"], second.metrics["kl_coef"]) == (1.0, pytest.approx(1.02))
    assert last_advantages(first) == pytest.approx([1.0 - D, 2.0 - D])
    assert last_advantages(second) == pytest.approx([1.0 - 1.02 * D, 2.0 - 1.02 * D])


def test_statistics_and_coefficient_survive_a_checkpoint() -> None:
    estimate = Estimate("reinforce", kl_coef=1.0)
    nodes = [
        TokenBatch(1, estimate=estimate, normalise_rewards=True, adaptive_kl=AdaptiveKL(target=0.1)) for _ in range(3)
    ]
    groups = [group(name, estimate, *rewards) for name, rewards in (("a", (1.0, 2.0)), ("b", (4.0, 9.0)))]
    _, whole = batches(nodes[0], *groups)
    batches(nodes[1], groups[0])
    nodes[2].load_state(nodes[1].state())
    (resumed,) = batches(nodes[2], groups[1])
    assert resumed.metrics == whole.metrics
    assert last_advantages(resumed) == last_advantages(whole)


def test_kl_may_be_taken_before_the_baseline() -> None:
    reference = [np.array([0, 0, 0, -0.5 - d, -0.5 - d], np.float32) for d in (0.1, 0.3)]
    items = [scored(m, 1.0, ref_logprobs=ref) for m, ref in enumerate(reference)]
    found = Estimate("rloo", kl_coef=1.0, kl_before_baseline=True).make_trainables(items)
    assert [float(s.advantages[3]) for s in found] == pytest.approx([0.4, -0.4]), "0.8 − 0.4 and back"
    assert [float(s.advantages[4]) for s in found] == pytest.approx([0.4, -0.4])
    by_token = Estimate("rloo", kl_coef=1.0).make_trainables(items)
    assert [float(s.advantages[4]) for s in by_token] == pytest.approx([-0.1, -0.3])


def test_gae_over_the_policys_own_tokens() -> None:
    values = np.array([0, 0, 0, 0.5, 0.25], np.float32)
    (found,) = Estimate("gae", gamma=0.9, lam=0.8).make_trainables([scored(0, 1.0, values=values)])
    last, first = 1.0 - 0.25, 0.9 * 0.25 - 0.5
    np.testing.assert_allclose(found.advantages[3:], [first + 0.72 * last, last], rtol=1e-6)
    assert found.returns is not None
    np.testing.assert_allclose(found.returns, np.where(found.policy_mask, found.advantages + values, 0), rtol=1e-6)


def test_turns_are_normalised_with_the_whole_reward() -> None:
    turned = scored(0, 3.0, turn_rewards=((3, 1.0),))
    (found,) = Estimate("reinforce").make_trainables([turned], scale=Scale(mean=2.0, std=2.0))
    np.testing.assert_allclose(found.advantages[3:], [1.0, 0.5])


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (TokenBatch(1, normalise_rewards=True), "need estimate="),
        (TokenBatch(1, adaptive_kl=AdaptiveKL(1.0)), "need estimate="),
        (TokenBatch(1, estimate=Estimate(), adaptive_kl=AdaptiveKL(1.0)), "needs a kl_coef above 0"),
        (TokenBatch(1, estimate=Estimate(kl_coef=1.0), adaptive_kl=AdaptiveKL(0.0)), "target is 0.0"),
        (GroupAdvantage(Estimate("reinforce", kl_before_baseline=True, kl_coef=1.0), size=2), "with a baseline"),
        (GroupAdvantage(Estimate(kl_coef=-1.0), size=2), "kl_coef is -1.0"),
        (GroupAdvantage(Estimate(lam=0.9), size=2), "belongs to estimator 'gae'"),
    ],
)
def test_settings_that_cannot_work_are_problems(node: TokenBatch | GroupAdvantage, says: str) -> None:
    (problem,) = node.check(None)
    assert says in problem

"""Credit by turn against its definition in Python floats, and at the tokens of episodes with branches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import ConfigError
from flowrl.nodes import GroupAdvantage, TokenBatch
from flowrl.nodes.scoring.shaping import Shaping
from flowrl.testing import scored
from flowrl.training.advantages import BASELINE_ESTIMATORS, Estimate, Estimator, turn_advantages
from tests.nodes.episodes.branching_episodes import episode
from tests.nodes.groups import members

UNEVEN = ((1.0, 0.0, 0.5), (0.0,), (0.25, 1.0), (0.0, 0.0, 0.0, 2.0))
rewards_of_groups = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0, 3.0]), min_size=1, max_size=5), min_size=2, max_size=6
)


def plain(rewards: Sequence[Sequence[float]], estimator: str, gamma: float) -> list[list[float]]:
    """The definition, member by member and turn by turn."""
    returns = [[sum(gamma ** (u - t) * r[u] for u in range(t, len(r))) for t in range(len(r))] for r in rewards]
    n, whole = len(rewards), [g[0] for g in returns]
    mean = sum(whole) / n
    spread = math.sqrt(sum((g - mean) ** 2 for g in whole) / (n - 1))
    equal = max(whole) - min(whole) <= 1e-6 * max(1.0, *map(abs, whole))
    found = []
    for own in returns:
        line = []
        for t, value in enumerate(own):
            all_of_turn = [g[t] if t < len(g) else 0.0 for g in returns]
            others = (sum(all_of_turn) - value) / (n - 1)
            a = value - (others if estimator == "rloo" else sum(all_of_turn) / n)
            if estimator == "group_norm":
                a = 0.0 if equal else a / (spread + 1e-9)
            line.append(a)
        found.append(line)
    return found


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("estimator", BASELINE_ESTIMATORS)
def test_advantages_of_turns_are_their_definition(estimator: Estimator, gamma: float) -> None:
    found = turn_advantages(UNEVEN, estimator, gamma=gamma)
    for ours, theirs in zip(found, plain(UNEVEN, estimator, gamma), strict=True):
        assert ours.tolist() == pytest.approx(theirs, rel=1e-9)


@given(rewards_of_groups, st.sampled_from(BASELINE_ESTIMATORS), st.sampled_from([1.0, 0.95, 0.5, 0.0]))
def test_any_group_has_the_advantages_of_the_definition(
    rewards: list[list[float]], estimator: Estimator, gamma: float
) -> None:
    found = turn_advantages(rewards, estimator, gamma=gamma)
    assert [len(a) for a in found] == [len(r) for r in rewards]
    for ours, theirs in zip(found, plain(rewards, estimator, gamma), strict=True):
        assert ours.tolist() == pytest.approx(theirs, rel=1e-6, abs=1e-9)


@given(rewards_of_groups, st.sampled_from(("dr_grpo", "reinforce_baseline", "group_norm")))
def test_the_first_turn_has_what_the_whole_episode_would_have(rewards: list[list[float]], estimator: Estimator) -> None:
    """The baseline does not know who goes on: over all members, ended ones too, each turn's advantages sum to 0."""
    samples = [episode(m, [[2] * len(r)], r) for m, r in enumerate(rewards)]
    whole = Estimate(estimator).make_trainables(samples)
    for ours, theirs in zip(turn_advantages(rewards, estimator), whole, strict=True):
        assert ours[0] == pytest.approx(theirs.advantages[theirs.policy_mask][0], rel=1e-5, abs=1e-6)


def test_equal_returns_give_exactly_nothing() -> None:
    assert [a.tolist() for a in turn_advantages([[0.1, 0.1]] * 8, "dr_grpo")] == [[0.0, 0.0]] * 8
    # whole returns are equal, those of the second turn are not: no spread to divide by
    assert [a.tolist() for a in turn_advantages([[1.0, 0.0], [0.0, 1.0]], "group_norm")] == [[0.0, 0.0]] * 2
    assert [a.tolist() for a in turn_advantages([[1.0, 0.0], [0.0, 1.0]], "dr_grpo")] == [[0.0, -0.5], [0.0, 0.5]]


def test_a_turns_advantage_is_that_of_all_its_tokens_through_all_sequences() -> None:
    samples = [
        episode(0, [[2, 3], [1], [4, 2]], [1.0, 0.0, 0.5, 0.0, 2.0]),
        episode(1, [[3]], [0.5]),
        episode(2, [[2], [2]], [0.0, 1.0]),
    ]
    rewards = [[r for _, r in s.rewards_by_turn] for s in samples]
    group = GroupAdvantage(Estimate(credit="turn", gamma=0.9), size=3).make_group(members(samples, size=3))
    for sample, advantages, sizes in zip(
        group.samples, plain(rewards, "group_norm", 0.9), ([2, 3, 1, 4, 2], [3], [2, 2]), strict=True
    ):
        assert sample.advantages.size == sample.num_tokens == sample.whole_mask.size
        expected = np.repeat(advantages, sizes)
        np.testing.assert_allclose(sample.advantages[sample.whole_mask], expected, rtol=1e-6, atol=1e-7)
        assert not sample.advantages[~sample.whole_mask].any()


def test_an_episode_that_stays_out_of_the_loss_is_in_the_baseline() -> None:
    samples = [episode(0, [[2], [2]], [1.0, 0.0], masked=True), episode(1, [[2]], [0.0])]
    masked, trained = GroupAdvantage(Estimate(credit="turn"), size=2).make_group(members(samples, size=2)).samples
    assert masked.loss_mask is not None and masked.loss_mask.size == masked.num_tokens and not masked.loss_mask.any()
    assert trained.advantages[trained.policy_mask][0] == pytest.approx(-0.5 / math.sqrt(0.5))


def test_shaping_keeps_the_sum_and_negates_every_turn() -> None:
    assert Shaping().rewards_by_turn([0.1, 0.2, 0.3], 0.1 + 0.2 + 0.3) == [0.1, 0.2, 0.3]
    assert Shaping(negate=True).rewards_by_turn([1.0, -2.0], 1.0) == [-1.0, 2.0]
    assert Shaping(stop_penalty=0.5).rewards_by_turn([1.0, 1.0], 1.0) == [1.0, 0.0]
    assert Shaping().rewards_by_turn([], 0.0) == []


def test_samples_without_turns_are_refused_in_a_sentence() -> None:
    node = GroupAdvantage(Estimate(credit="turn"), size=2)
    with pytest.raises(ConfigError, match=r"has no rewards by turn; connect .* Environment, or set credit='episode'"):
        node.make_group(members([scored(0, 1.0), scored(1, 0.0)], size=2))
    late = episode(0, [[2], [2]], [1.0, 0.0])
    cut = type(late)(**{**vars(late), "rewards_by_turn": late.rewards_by_turn[:1]})
    with pytest.raises(ConfigError, match="policy tokens after its last turn"):
        node.make_group(members([cut, episode(1, [[2]], [0.0])], size=2))


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate("reinforce", credit="turn"), "estimator has to be one of reinforce_baseline"),
        (Estimate(credit="turn", kl_coef=0.1), "set kl_coef=0 and use the objective's"),
        (Estimate(credit="turn", shuffle_rewards=True), "shuffle_rewards shuffles rewards of episodes"),
        (Estimate(credit="turns"), "credit is 'turns'; it has to be one of episode, turn"),  # type: ignore[arg-type]
        (Estimate(gamma=0.9), "gamma is 0.9; estimator 'group_norm' needs 1"),
        (Estimate(credit="turn", gamma=1.5), "gamma is 1.5; it has to be in"),
    ],
)
def test_what_does_not_go_together_is_said_by_check(estimate: Estimate, text: str) -> None:
    (problem,) = GroupAdvantage(estimate, size=4).check(None)
    assert text in problem


def test_normalised_rewards_and_credit_by_turn_exclude_each_other() -> None:
    batcher = TokenBatch(4, estimate=Estimate(credit="turn"), normalise_rewards=True)
    assert "with credit='turn' set it to False" in batcher.check(None)[0]
    assert not Estimate(credit="turn", gamma=0.9).list_problems()

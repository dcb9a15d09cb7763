"""Credit by seat: advantages by hand, views of one seat, and what cannot take several seats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.messages import Group
from flowrl.messages.episode import Episode
from flowrl.nodes import BestOfN, DynamicSampling, GroupAdvantage, PairMaker
from flowrl.nodes.groups.batch import RunningEstimate, value_question
from flowrl.nodes.groups.group_filter import GroupFilter
from flowrl.testing import run_node
from flowrl.training.advantages import Estimate, reduce_to_seat, require_one_seat
from tests.nodes.episodes.branching_episodes import episode

SHAPE = [[1, 2], [3]]
"""Seat 0 has two turns, seat 1 has one."""


def game(member: int, rewards: tuple[float, float], *, shape: list[list[int]] = SHAPE) -> Episode:
    """A game whose seats get `rewards`, each at its last turn."""
    turns = [
        0.0 if turn + 1 < len(one) else rewards[seat] for seat, one in enumerate(shape) for turn in range(len(one))
    ]
    made = episode(member, shape, turns)
    mean = sum(rewards) / 2
    return replace(
        made, reward=mean, raw_reward=mean, seats=tuple(range(len(shape))), seat_rewards=tuple(enumerate(rewards))
    )


def by_seat(made: Episode, advantages: np.ndarray) -> list[list[float]]:
    """The advantages of the sampled tokens of each seat."""
    ends = np.cumsum([one.token_ids.size for one in made.sequences])[:-1]
    parts = zip(np.split(advantages, ends), made.sequences, strict=True)
    return [part[one.policy_mask].tolist() for part, one in parts]


def test_each_seat_is_compared_with_the_same_seat_of_the_others() -> None:
    games = [game(0, (1.0, 0.0)), game(1, (0.0, 1.0)), game(2, (1.0, 0.5))]
    made = Estimate("dr_grpo").make_trainables(games)
    expected = [(1 / 3, -0.5), (-2 / 3, 0.5), (1 / 3, 0.0)]
    for one, trainable, (first, second) in zip(games, made, expected, strict=True):
        seats = by_seat(one, trainable.advantages)
        assert seats == [pytest.approx([first] * 3), pytest.approx([second] * 3)]
        assert not trainable.advantages[~one.whole_mask].any()
        assert trainable.reward == one.reward and trainable.seat_rewards == one.seat_rewards


def test_rewards_that_add_up_to_the_same_still_teach() -> None:
    games = [game(0, (1.0, 0.0)), game(1, (0.0, 1.0))]
    assert {one.reward for one in games} == {0.5}
    first, second = Estimate("group_norm").make_trainables(games)
    assert by_seat(games[0], first.advantages)[0][0] == pytest.approx(0.5**0.5)
    assert by_seat(games[1], second.advantages)[0][0] == pytest.approx(-(0.5**0.5))


def test_a_seat_without_a_turn_is_in_the_baseline_of_the_others() -> None:
    games = [game(0, (0.0, 1.0), shape=[[2]]), game(1, (1.0, 0.0)), game(2, (1.0, 0.2))]
    made = Estimate("dr_grpo").make_trainables(games)
    assert by_seat(games[0], made[0].advantages) == [pytest.approx([-2 / 3] * 2)]
    assert by_seat(games[1], made[1].advantages)[1] == pytest.approx([-0.4] * 3)


def test_credit_by_turn_looks_at_the_turns_of_a_seat() -> None:
    shape = [[1, 1], [1, 1]]
    one, other = game(0, (1.0, 0.0), shape=shape), game(1, (0.0, 1.0), shape=shape)
    early = replace(
        one, rewards_by_turn=tuple((p, r) for (p, _), r in zip(one.rewards_by_turn, (1, 0, 0, 0), strict=True))
    )
    made, _ = Estimate("dr_grpo", credit="turn").make_trainables([early, other])
    assert by_seat(one, made.advantages) == [pytest.approx([0.5, 0.0]), pytest.approx([-0.5, -0.5])]


def test_credit_by_turn_of_a_seat_without_a_turn() -> None:
    games = [game(0, (0.0, 1.0), shape=[[2]]), game(1, (1.0, 0.0))]
    made = Estimate("dr_grpo", credit="turn").make_trainables(games)
    assert by_seat(games[0], made[0].advantages) == [pytest.approx([-0.5] * 2)]
    assert by_seat(games[1], made[1].advantages)[1] == pytest.approx([-0.5] * 3)


def test_a_view_has_the_tokens_and_turns_of_one_seat() -> None:
    made = game(0, (1.0, 0.25))
    views = [reduce_to_seat(made, seat) for seat, _ in made.seat_rewards]
    assert [view.response_tokens for view in views] == [3, 3] and [view.reward for view in views] == [1.0, 0.25]
    assert np.array_equal(views[0].whole_mask | views[1].whole_mask, made.whole_mask)
    assert all(isinstance(view, Episode) and view.num_tokens == made.num_tokens for view in views)
    assert [len(view.rewards_by_turn) for view in views if isinstance(view, Episode)] == [2, 1]


def test_advantages_that_the_batcher_computes_again_are_the_same() -> None:
    games = [game(0, (1.0, 0.0)), game(1, (0.0, 1.0))]
    estimate = Estimate("dr_grpo")
    once = estimate.make_trainables(games)
    for before, after in zip(once, estimate.make_trainables(once), strict=True):
        assert np.array_equal(before.advantages, after.advantages)


def test_the_advantage_node_takes_games() -> None:
    games = [game(0, (1.0, 0.0)), game(1, (0.0, 1.0))]
    (group,) = run_node(GroupAdvantage("dr_grpo", size=2), {"scored": games}).sent("groups")
    assert by_seat(games[0], group.samples[0].advantages) == [[0.5] * 3, [-0.5] * 3]


def test_what_compares_one_reward_of_a_sample_says_so() -> None:
    made = game(0, (1.0, 0.0))
    trainable = Estimate("dr_grpo").make_trainables([made, game(1, (0.0, 1.0))])
    text = r"has played 2 seats of sample 'g:0', .* connect the port opponent"
    with pytest.raises(ConfigError, match=text):
        GroupFilter(DynamicSampling(groups_per_step=1)).judge_group([made])
    with pytest.raises(ConfigError, match=text):
        PairMaker(size=2).choose_pair([made, made])
    with pytest.raises(ConfigError, match=text):
        run_node(BestOfN(size=2), {"scored": [made, game(1, (0.0, 1.0))]})
    with pytest.raises(ConfigError, match=text):
        value_question([Group("g", trainable, 2)])
    with pytest.raises(ConfigError, match=text):
        RunningEstimate(Estimate("rloo"), normalise_rewards=True, adaptive_kl=None).estimate_batch(
            [Group("g", trainable, 2)]
        )
    require_one_seat([replace(made, seats=(1,), seat_rewards=((1, 0.5),), branches=())], "a critic")

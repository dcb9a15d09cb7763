"""Replies to equal observations are compared: advantages by hand, and against a loop over all replies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowrl import Trainable
from flowrl.errors import ConfigError
from flowrl.messages.episode import Episode
from flowrl.nodes import GroupAdvantage
from flowrl.recipes.step_groups import StepEstimate, steps_of
from flowrl.testing import run_node
from tests.nodes.episodes.branching_episodes import episode

TOLD = ([1, 2, 3], [7, 7], [9, 9])
"""What the policy is told before its first, second and third reply."""


def play(member: int, told: list[list[int]], replies: list[list[int]], rewards: list[float]) -> Episode:
    """An episode of one sequence: what was told, a reply, and so on."""
    ids, mask, places = [], [], []
    for said, reply in zip(told, replies, strict=True):
        ids += [*said, *reply]
        mask += [False] * len(said) + [True] * len(reply)
        places.append(len(ids) - 1)
    shape = episode(member, [[1]], [0.0])
    return replace(
        shape,
        token_ids=np.array(ids, np.int32),
        policy_mask=np.array(mask),
        behavior_logprobs=np.zeros(len(ids), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_tokens=len(told[0]),
        reward=sum(rewards),
        raw_reward=sum(rewards),
        rewards_by_turn=tuple(zip(places, rewards, strict=True)),
        turns=len(rewards),
        group_size=2,
    )


def compare(episodes: list[Episode], **options: float) -> tuple[Trainable, ...]:
    estimate = StepEstimate("dr_grpo", **options)  # type: ignore[arg-type]
    (group,) = run_node(GroupAdvantage(estimate, size=len(episodes)), {"scored": episodes}).sent("groups")
    return tuple(group.samples)


def test_replies_to_one_observation_are_a_group() -> None:
    """Both second replies answer [7, 7]; the third observation is only one episode's."""
    first, middle, last = TOLD
    won = play(0, [first, middle], [[10, 11], [12]], [0.0, 1.0])
    lost = play(1, [first, last, middle], [[10], [13], [14]], [0.0, 0.0, 0.0])
    assert [(place.start, place.stop, gained) for _, place, gained in steps_of(won, 0.5)] == [(3, 5, 0.5), (7, 8, 1.0)]

    samples = compare([won, lost], step_weight=2.0, step_gamma=0.5)
    spread = np.sqrt(0.5)  # of two values that differ by 1, and half of it for those that differ by 0.5
    reply = 2.0 * 0.5 / spread
    np.testing.assert_allclose(samples[0].advantages[won.policy_mask], [0.5 + reply, 0.5 + reply, 0.5 + reply], 1e-6)
    np.testing.assert_allclose(samples[1].advantages[lost.policy_mask], [-0.5 - reply, -0.5, -0.5 - reply], 1e-6)
    assert not samples[0].advantages[~won.policy_mask].any()


def test_without_weight_only_episodes_are_compared() -> None:
    told = [TOLD[0], TOLD[1]]
    played = [play(n, told, [[10], [11 + n]], [0.0, float(n)]) for n in range(3)]
    for sample, expected in zip(compare(played, step_weight=0.0), (-1.0, 0.0, 1.0), strict=True):
        np.testing.assert_allclose(sample.advantages[sample.policy_mask], [expected] * 2, 1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_random_groups_agree_with_a_loop_over_all_replies(gamma: float) -> None:
    draw = np.random.default_rng(5)
    played = []
    for member in range(6):
        turns = int(draw.integers(1, 5))
        told = [list(TOLD[0]), *([int(state)] for state in draw.integers(20, 23, turns - 1))]
        replies = [draw.integers(30, 40, int(draw.integers(1, 4))).tolist() for _ in range(turns)]
        played.append(play(member, told, replies, draw.normal(size=turns).tolist()))
    samples = compare(played, step_weight=0.7, step_gamma=gamma)

    gains: dict[tuple[int, ...], list[float]] = {}
    of_reply = []
    for one in played:
        rewards, start = [reward for _, reward in one.rewards_by_turn], 0
        for turn, (place, _) in enumerate(one.rewards_by_turn):
            told = []
            while not one.policy_mask[start]:
                told.append(int(one.token_ids[start]))
                start += 1
            gained = sum(gamma**later * reward for later, reward in enumerate(rewards[turn:]))
            gains.setdefault(tuple(told), []).append(gained)
            of_reply.append((one.member, tuple(told), start, place + 1, gained))
            start = place + 1
    mean = np.mean([one.reward for one in played])
    for member, told, start, stop, gained in of_reply:
        group = gains[told]
        step = (gained - np.mean(group)) / np.std(group, ddof=1) if len(group) > 1 and np.ptp(group) > 0 else 0.0
        expected = played[member].reward - mean + 0.7 * step
        np.testing.assert_allclose(samples[member].advantages[start:stop], expected, rtol=1e-5, atol=1e-5)


def test_a_later_sequence_begins_with_an_observation_of_its_own() -> None:
    """With history="template" a later sequence repeats a part of the one before it; both are told from their start."""
    two = episode(0, [[2, 1], [3]], [0.0, 0.0, 1.0])
    ids, ends = np.concatenate([one.token_ids for one in two.sequences]), two.token_ids.size
    states = [state for state, _, _ in steps_of(two, 1.0)]
    last = two.rewards_by_turn[2][0]
    assert states[2] == ids[ends : last - 2].tobytes()


def test_several_seats_are_refused() -> None:
    seats = [replace(episode(n, [[1]], [0.0]), seat_rewards=((0, 1.0), (1, 0.0)), group_size=2) for n in range(2)]
    with pytest.raises(ConfigError, match="a step group takes samples with one"):
        compare(seats)

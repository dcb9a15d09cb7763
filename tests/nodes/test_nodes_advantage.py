"""The advantage node: values by hand, groups that are filtered, and KL inside the reward."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.messages import Group
from flowrl.nodes import DynamicSampling, GroupAdvantage
from flowrl.testing import run_node, scored
from flowrl.training.advantages import Estimate, kl_per_token
from tests.nodes.groups import arriving, members


def advantages(group: Group) -> list[list[float]]:
    return [[round(float(a), 4) for a in sample.advantages] for sample in group.samples]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("group_norm", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce", [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_every_policy_token_gets_its_members_advantage(estimator: str, expected: list[float]) -> None:
    node = GroupAdvantage(estimator, size=4)  # type: ignore[arg-type]
    group = node.make_group(members([scored(m, float(m == 0), response=m + 1) for m in range(4)]))
    for sample, value in zip(group.samples, expected, strict=True):
        assert sample.advantages.dtype == np.float32
        np.testing.assert_allclose(sample.advantages[~sample.policy_mask], 0.0)
        np.testing.assert_allclose(sample.advantages[sample.policy_mask], value, atol=1e-6)


def test_equal_rewards_give_exactly_nothing() -> None:
    group = GroupAdvantage(size=4).make_group(members([scored(m, 0.1) for m in range(4)]))
    assert advantages(group) == [[0.0] * 5] * 4


TURNED = scored(0, 1.0, turn_rewards=((3, 0.5), (4, 0.25)))


def test_rewards_of_turns_stand_at_their_turns() -> None:
    node = GroupAdvantage("reinforce", size=1)
    assert advantages(node.make_group(members([TURNED], size=1)))[0][3:] == [1.75, 1.25]


def test_group_estimators_sum_the_rewards_of_turns_up() -> None:
    group = GroupAdvantage("rloo", size=2).make_group(members([TURNED, scored(1, 0.0)], size=2))
    assert advantages(group)[0][3:] == [1.75, 1.75]


def test_kl_is_taken_out_of_the_reward_from_each_token_on() -> None:
    # d = -0.5 - ref, so 0.1, then 0.3: a token is charged for itself and for what follows it.
    reference = np.array([0, 0, 0, -0.6, -0.8], np.float32)
    node = GroupAdvantage(Estimate("reinforce", kl_coef=2.0), size=1)
    (values,) = advantages(node.make_group(members([scored(0, 1.0, ref_logprobs=reference)], size=1)))
    assert values == [0.0, 0.0, 0.0, pytest.approx(1.0 - 2 * 0.4), pytest.approx(1.0 - 2 * 0.3)]


def test_kl_without_reference_logprobs_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="put a Reference node"):
        GroupAdvantage(Estimate(kl_coef=0.1), size=2).make_group(members([scored(0, 1.0), scored(1, 0.0)], size=2))


def test_kl_estimators_by_hand() -> None:
    d = np.array([0.5, -1.0, 99.0, -4.0])
    np.testing.assert_allclose(kl_per_token(d, "k1"), [0.5, -1.0, 10.0, -4.0])
    np.testing.assert_allclose(kl_per_token(d, "k2"), [0.125, 0.5, 10.0, 8.0])
    np.testing.assert_allclose(kl_per_token(d, "k3"), [np.exp(-0.5) - 0.5, np.e - 2.0, 10.0, 10.0])


def test_groups_that_teach_nothing_are_filtered_with_a_reason() -> None:
    lonely = members([scored(0, 1.0, group="lonely")])
    equal = members([scored(m, 1.0, group="equal") for m in range(2)])
    good = members([scored(m, float(m), group="good") for m in range(3)])
    node = GroupAdvantage(size=4, dynamic=DynamicSampling(groups_per_step=1))
    record = run_node(node, {"scored": arriving(lonely, equal, good)})
    assert [(one.message.sample_id, one.state, one.reason) for one in record.lost] == [
        ("lonely:0", "filtered", "group_too_small"),
        ("equal:0", "filtered", "all_equal"),
        ("equal:1", "filtered", "all_equal"),
    ]
    (group,) = record.sent("groups")
    assert (group.group_id, group.group_size) == ("good", 4)
    assert record.made_from("groups") == [good.items]


def test_equal_groups_pass_unless_they_are_to_be_filtered() -> None:
    equal = [scored(m, 1.0) for m in range(4)]
    assert len(run_node(GroupAdvantage(size=4), {"scored": equal}).sent("groups")) == 1


def test_the_control_keeps_a_groups_rewards_but_not_their_places() -> None:
    node = GroupAdvantage(Estimate("reinforce", shuffle_rewards=True), size=4)
    placed = set()
    for n in range(40):
        group = node.make_group(members([scored(m, float(m == 0), group=f"g{n}") for m in range(4)]))
        values = [float(sample.advantages[-1]) for sample in group.samples]
        assert sorted(values) == [0.0, 0.0, 0.0, 1.0]
        placed.add(values.index(1.0))
    assert placed == {0, 1, 2, 3}
    assert group.samples[0].reward == 1.0


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (GroupAdvantage("nonsense", size=4), "it has to be one of"),  # type: ignore[arg-type]
        (GroupAdvantage(size=0), "group size is 0"),
        (GroupAdvantage(size=1), "compares the members"),
        (GroupAdvantage(Estimate(gamma=0.9), size=4), "gamma is 0.9"),
        (GroupAdvantage(Estimate(kl_estimator="k4"), size=4), "kl_estimator is 'k4'"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_work_are_problems(node: GroupAdvantage, says: str) -> None:
    (problem,) = node.check(None)
    assert says in problem

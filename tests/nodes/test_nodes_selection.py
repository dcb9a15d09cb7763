"""Best of n and the pair maker: who is passed on, who is filtered and why, and what the passed on carry."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.errors import FlowrlError
from flowrl.graph.node import Node
from flowrl.messages import Scored
from flowrl.nodes import BestOfN, DynamicSampling, PairMaker
from flowrl.nodes.groups.group_filter import GIVE_UP_AFTER, judged_metrics
from flowrl.testing import NodeRecord, run_node, scored
from tests.nodes.groups import arriving, members

REWARDS = (0.2, 0.9, 0.9, -0.5)


def through(node: Node, *rewards: float, size: int = 4) -> tuple[NodeRecord, dict[str, str]]:
    """What came of one group of these rewards, and the reason of each that was filtered."""
    group = members([scored(m, reward) for m, reward in enumerate(rewards)], size=size)
    record = run_node(node, {"scored": arriving(group)})
    assert {one.state for one in record.lost} <= {"filtered"}
    return record, {one.message.sample_id: one.reason for one in record.lost}  # type: ignore[attr-defined]


def test_the_first_of_the_best_is_imitated() -> None:
    record, lost = through(BestOfN(size=4), *REWARDS)
    (group,) = record.sent("groups")
    (best,) = group.samples
    assert (best.sample_id, group.group_id, group.group_size) == ("g:1", "g", 4)
    np.testing.assert_array_equal(best.advantages, [0, 0, 0, 1, 1])
    assert lost == dict.fromkeys(("g:0", "g:2", "g:3"), "not_best")
    assert [[sample.sample_id for sample in made] for made in record.made_from("groups")] == [["g:1"]]


def test_the_best_may_be_too_bad() -> None:
    record, lost = through(BestOfN(size=4, least_reward=1.0), *REWARDS)
    assert record.sent("groups") == []
    assert lost == {"g:0": "not_best", "g:1": "below_least", "g:2": "not_best", "g:3": "not_best"}
    assert len(through(BestOfN(size=4, least_reward=0.9), *REWARDS)[0].sent("groups")) == 1


def test_the_best_is_that_of_the_shaped_reward() -> None:
    items = [scored(0, 1.0, raw_reward=0.0), scored(1, 0.0, raw_reward=1.0)]
    (group,) = run_node(BestOfN(size=2), {"scored": items}).sent("groups")
    assert group.samples[0].sample_id == "g:0"


def test_the_best_against_the_worst() -> None:
    record, lost = through(PairMaker(size=4), *REWARDS)
    (group,) = record.sent("groups")
    assert [(s.sample_id, s.label, s.pair) for s in group.samples] == [("g:1", 1, "g"), ("g:3", -1, "g")]
    assert lost == dict.fromkeys(("g:0", "g:2"), "not_paired")
    assert [s.sample_id for s in record.made_from("groups")[0]] == ["g:1", "g:3"]


TIE = members([scored(m, 1.0, group="tie") for m in range(2)], size=2)
GOOD = members([scored(m, float(m), group="good", response=3) for m in range(2)], size=2)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (PairMaker(size=2), {"filtered_groups": 1, "filtered_share": 0.5, "filtered_tokens": 4}),
        (BestOfN(size=2), {"filtered_groups": 0, "filtered_share": 0.0, "filtered_tokens": 2 + 3}),
    ],
)
def test_a_batch_knows_all_that_was_judged_for_it(node: Node, expected: dict[str, float]) -> None:
    found = run_node(node, {"scored": arriving(TIE, GOOD)}).sent("groups")
    assert judged_metrics(found) == expected | {"raw_reward_unfiltered_mean": 0.75}


DYNAMIC = DynamicSampling(1, max_filtered_per_step=2)


@pytest.mark.parametrize("node", [PairMaker(size=2, dynamic=DYNAMIC), BestOfN(size=2, dynamic=DYNAMIC)])
def test_groups_without_a_signal_are_filtered_whole(node: Node) -> None:
    record = run_node(node, {"scored": arriving(TIE, GOOD)})
    assert [group.group_id for group in record.sent("groups")] == ["good"]
    lost = {one.message.sample_id: one.reason for one in record.lost}  # type: ignore[attr-defined]
    assert {lost[sample.sample_id] for sample in TIE.items} == {"all_equal"}
    assert judged_metrics(record.sent("groups"))["filtered_share"] == 0.5


@pytest.mark.parametrize("kind", [PairMaker, BestOfN])
def test_too_many_filtered_groups_end_the_run_also_after_a_resume(kind: type[PairMaker] | type[BestOfN]) -> None:
    def ties(*numbers: int) -> dict[str, list[Scored]]:
        return {"scored": [scored(m, 1.0, group=f"tie{n}") for n in numbers for m in range(2)]}

    before, after = kind(size=2, dynamic=DYNAMIC), kind(size=2, dynamic=DYNAMIC)
    run_node(before, ties(0, 1))
    after.load_state(before.state())
    with pytest.raises(FlowrlError, match="3 groups were filtered before a batch of 1 was full"):
        run_node(after, ties(2))
    unlike = kind(size=2, dynamic=DYNAMIC)
    unlike.load_state(kind(size=2).state())  # of a run without dynamic sampling
    run_node(unlike, ties(2))


@pytest.mark.parametrize("node", [PairMaker(size=2), BestOfN(size=2, least_reward=2.0)])
def test_a_run_in_which_nothing_is_passed_on_any_more_ends(node: Node) -> None:
    ties = [scored(m, 1.0, group=f"tie{n}") for n in range(GIVE_UP_AFTER + 1) for m in range(2)]
    with pytest.raises(FlowrlError, match=f"none of the last {GIVE_UP_AFTER} groups"):
        run_node(node, {"scored": ties})


@pytest.mark.parametrize("rewards", [(0.1, 0.1, 0.1), (0.0, 1e-13, 0.0), (1.0, 1.0 + 1e-9, 1.0)])
def test_without_a_difference_there_is_no_pair(rewards: tuple[float, ...]) -> None:
    record, lost = through(PairMaker(size=3), *rewards, size=3)
    assert record.sent("groups") == [] and set(lost.values()) == {"tie"} and len(lost) == 3


def test_what_is_left_of_a_group_may_be_too_small_for_a_pair() -> None:
    assert through(PairMaker(size=4), 1.0)[1] == {"g:0": "group_too_small"}
    assert len(through(PairMaker(size=4), 1.0, 0.0)[0].sent("groups")) == 1


def test_the_reference_is_the_round_or_comes_with_the_samples() -> None:
    reference = np.full(5, -0.25, np.float32)
    items = [scored(m, float(m), ref_logprobs=reference) for m in range(2)]
    for kind, expected in (("round", items[0].behavior_logprobs), ("initial", reference)):
        node = PairMaker(size=2, reference=kind)  # type: ignore[arg-type]
        (group,) = run_node(node, {"scored": items}).sent("groups")
        for sample in group.samples:
            np.testing.assert_array_equal(sample.ref_logprobs, expected)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (BestOfN(size=1), "needs at least 2"),
        (PairMaker(size=1), "needs at least 2"),
        (PairMaker(size=2, reference="first"), "it has to be round or initial"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_work_are_problems(node: Node, says: str) -> None:
    (problem,) = node.check(None)
    assert says in problem

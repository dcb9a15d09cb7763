"""Dynamic sampling: which groups are kept, what it costs, and where it gives up."""

from __future__ import annotations

import pytest

from flowrl.errors import FlowrlError
from flowrl.graph.ports import Members
from flowrl.messages import Group, Scored
from flowrl.nodes import DynamicSampling, GroupAdvantage, TokenBatch
from flowrl.testing import run_node, scored
from tests.nodes.groups import arriving, members


def group(name: str, *raw: float, response: int = 2) -> Members[Scored]:
    """Shaped rewards differ even where the raw ones do not."""
    items = [scored(m, r - m, raw_reward=r, group=name, response=response) for m, r in enumerate(raw)]
    return members(items, size=len(items))


def through(dynamic: DynamicSampling, *groups: Members[Scored]) -> tuple[list[Group], dict[str, str]]:
    record = run_node(GroupAdvantage(size=2, dynamic=dynamic), {"scored": arriving(*groups)})
    return record.sent("groups"), {one.message.group_id: one.reason for one in record.lost}  # type: ignore[attr-defined]


def test_raw_rewards_decide_before_any_shaping() -> None:
    kept, lost = through(DynamicSampling(2), group("a", 1.0, 1.0), group("b", 0.0, 1.0), group("c", 0.0, 0.0))
    assert [g.group_id for g in kept] == ["b"]
    assert lost == {"a": "all_equal", "c": "all_equal"}


def test_a_group_that_differs_by_rounding_alone_is_not_kept_for_nothing() -> None:
    close, small = group("close", 0.1, 0.1 + 1e-9), group("small", 1e-9, 3e-9)
    kept, lost = through(DynamicSampling(2), close, small)
    assert [g.group_id for g in kept] == ["small"] and lost == {"close": "all_equal"}


def test_the_mean_may_be_asked_to_lie_strictly_between() -> None:
    dynamic = DynamicSampling(2, mean_between=(0.0, 0.75))
    kept, lost = through(dynamic, group("a", 0.5, 1.0), group("b", 0.5, 0.5), group("c", 0.0, 0.0))
    assert [g.group_id for g in kept] == ["b"]
    assert lost == {"a": "mean_out_of_range", "c": "mean_out_of_range"}


def test_a_batch_tells_what_filtering_cost_it() -> None:
    groups = [
        group("a", 1.0, 1.0, response=3),
        group("b", 0.0, 1.0),
        group("c", 0.0, 0.0),
        group("d", 1.0, 1.0),
        group("e", 0.0, 1.0),
        group("f", 0.0, 1.0),
    ]
    kept, _ = through(DynamicSampling(2), *groups)
    batches = run_node(TokenBatch(2), {"groups": kept}, window=0).sent("batches")
    first, second = [batch.metrics for batch in batches]
    assert (first["filtered_groups"], first["filtered_share"], first["filtered_tokens"]) == (3, 0.6, 6 + 4 + 4)
    assert first["raw_reward_mean"] == 0.5
    assert first["raw_reward_unfiltered_mean"] == pytest.approx((1.0 + 0.5 + 0.0 + 1.0 + 0.5) / 5)
    assert (second["filtered_groups"], second["filtered_share"]) == (0, 0.0)


def test_too_many_filtered_groups_end_the_run() -> None:
    equal = [group(f"e{n}", 1.0, 1.0) for n in range(3)]
    good = [group(f"g{n}", 0.0, 1.0) for n in range(2)]
    dynamic = DynamicSampling(2, max_filtered_per_step=2)
    assert len(through(dynamic, *equal[:2], *good, equal[2])[0]) == 2, "the limit is one batch's"
    with pytest.raises(FlowrlError, match="3 groups were filtered before a batch of 2 was full, 1 were kept"):
        through(dynamic, equal[0], good[0], *equal[1:])


@pytest.mark.parametrize(("groups", "limit"), [(1, 256), (16, 256), (17, 272), (512, 8192)])
def test_the_limit_grows_with_the_batch_unless_it_is_given(groups: int, limit: int) -> None:
    """A batch of 512 of a task half of whose groups teach nothing filters about 512, twice the old limit."""
    assert DynamicSampling(groups).limit == limit
    (note,) = GroupAdvantage(size=2, dynamic=DynamicSampling(groups)).notes()
    assert note == f"the run ends if more than {limit} groups are filtered before a batch of {groups}"
    assert DynamicSampling(groups, max_filtered_per_step=7).limit == 7
    assert GroupAdvantage(size=2).notes() == []


def test_a_large_batch_survives_a_usual_share_of_filtered_groups() -> None:
    share = [group(f"e{n}", 1.0, 1.0) for n in range(300)]
    good = [group(f"g{n}", 0.0, 1.0) for n in range(2)]
    assert len(through(DynamicSampling(512), *share, *good)[0]) == 2


def test_counts_survive_a_checkpoint() -> None:
    first = GroupAdvantage(size=2, dynamic=DynamicSampling(2))
    run_node(first, {"scored": arriving(group("a", 1.0, 1.0))})
    resumed = GroupAdvantage(size=2, dynamic=DynamicSampling(2))
    resumed.load_state(first.state())
    (found,) = run_node(resumed, {"scored": arriving(group("b", 0.0, 1.0))}).sent("groups")
    assert found.metrics == {
        "judged_groups": 2,
        "filtered_groups": 1,
        "filtered_tokens": 4,
        "judged_raw_reward": 1.5,
    }


def test_settings_that_cannot_work_are_problems() -> None:
    dynamic = DynamicSampling(2, mean_between=(1.0, 0.0), max_filtered_per_step=0)
    problems = GroupAdvantage(size=2, dynamic=dynamic).check(None)
    assert [problem.split()[0] for problem in problems] == ["max_filtered_per_step", "mean_between"]

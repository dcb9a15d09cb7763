"""The batcher: whole groups in admission order, remainders at the end, denominators, whitening over the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flowrl.messages import Batch, Group, Message
from flowrl.nodes import GroupAdvantage, TokenBatch
from flowrl.testing import NodeRecord, NodeRig, lost, run_node, scored
from tests.nodes.groups import members


def group(name: str, *, rewards: tuple[float, ...] = (1.0, 0.0), response: int = 2) -> Group:
    items = [scored(m, reward, response=response, group=name) for m, reward in enumerate(rewards)]
    return GroupAdvantage("reinforce", size=len(items)).make_group(members(items, size=len(items)))


def batches(node: TokenBatch, arrivals: Sequence[tuple[int, Message]], *, window: int | None = 1) -> list[Batch]:
    record = run_node(node, {"groups": arrivals}, window=window, max_staleness=1)
    found: list[Any] = record.made_from("batches")
    assert [sorted({s.group_id for s in batch.samples}) for batch in record.sent("batches")] == [
        sorted(group.group_id for group in groups) for groups in found
    ]
    return record.sent("batches")


def names(found: list[Batch]) -> list[list[str]]:
    return [list(dict.fromkeys(sample.group_id for sample in batch.samples)) for batch in found]


def test_groups_leave_in_admission_order_and_the_rest_at_the_end() -> None:
    arrivals = [(t, group(f"g{t}")) for t in (1, 0, 3, 2, 4)]
    assert names(batches(TokenBatch(2), arrivals)) == [["g0", "g1"], ["g2", "g3"], ["g4"]]


def test_a_dropped_group_is_stepped_over() -> None:
    arrivals = [(1, group("g1")), (2, group("g2")), (0, lost(-1, group="g0"))]
    assert names(batches(TokenBatch(2), arrivals)) == [["g1", "g2"]]


def test_the_window_lets_finished_groups_overtake() -> None:
    arrivals = [(t, group(f"g{t}")) for t in (1, 2, 0, 3)]
    assert names(batches(TokenBatch(2), arrivals, window=3)) == [["g1", "g2"], ["g0", "g3"]]


@pytest.mark.parametrize(("window", "mask_staleness"), [(0, 1), (None, -1), (1, -1)])
def test_only_masking_tells_the_trainer_to_mask(window: int | None, mask_staleness: int) -> None:
    found = batches(TokenBatch(1), [(0, group("g0"))], window=window)
    assert [batch.mask_staleness for batch in found] == [mask_staleness]


def test_without_a_window_groups_leave_as_they_come() -> None:
    arrivals = [(t, group(f"g{t}")) for t in (5, 1, 3)]
    assert names(batches(TokenBatch(1), arrivals, window=0)) == [["g5"], ["g1"], ["g3"]]


def test_a_batch_carries_the_denominators_of_all_its_ranks() -> None:
    (batch,) = batches(TokenBatch(2, token_budget=64), [(0, group("a", response=3)), (1, group("b"))])
    assert (batch.num_groups, batch.num_sequences, batch.num_tokens, batch.token_budget) == (2, 4, 10, 64)
    parts = batch.split(2)
    assert sorted(s.sample_id for part in parts for s in part.samples) == ["a:0", "a:1", "b:0", "b:1"]
    assert {part.num_tokens for part in parts} == {10}


def test_metrics_are_those_of_the_whole_batch() -> None:
    (batch,) = batches(TokenBatch(2), [(0, group("a", response=4)), (1, group("b", rewards=(1.0, 1.0)))])
    assert batch.metrics == {
        "reward_mean": 0.75,
        "raw_reward_mean": 0.75,
        "response_tokens_mean": 3.0,
        "truncated_share": 0.0,
        "all_equal_groups_share": 0.5,
    }
    (batch,) = batches(
        TokenBatch(2), [(0, group("a", rewards=(1e-9, 3e-9))), (1, group("b", rewards=(0.1, 0.1 + 1e-9)))]
    )
    assert batch.metrics["all_equal_groups_share"] == 0.5, "by the rule of the advantages"


def test_whitening_is_over_the_trained_tokens_of_the_whole_batch() -> None:
    arrivals = [(0, group("a", response=4)), (1, group("b", rewards=(3.0, 1.0)))]
    (batch,) = batches(TokenBatch(2, whiten="full"), arrivals)
    values = np.concatenate([sample.advantages[sample.policy_mask] for sample in batch.samples])
    assert values.mean() == pytest.approx(0.0, abs=1e-6)
    assert values.var() == pytest.approx(1.0, abs=1e-5)
    assert all((sample.advantages[~sample.policy_mask] == 0).all() for sample in batch.samples)
    (centred,) = batches(TokenBatch(2, whiten="mean"), arrivals)
    raw = np.array([1.0] * 4 + [0.0] * 4 + [3.0] * 2 + [1.0] * 2)
    values = np.concatenate([sample.advantages[sample.policy_mask] for sample in centred.samples])
    np.testing.assert_allclose(values, raw - raw.mean(), atol=1e-6)


def test_tokens_that_are_too_old_do_not_enter_the_whitening() -> None:
    node = TokenBatch(1, whiten="mean")
    arrivals = [(t, group(f"g{t}", rewards=(4.0, 1.0), response=3)) for t in range(3)]
    for version, made in arrivals:
        for one in made.samples:
            one.versions[one.policy_mask] = version
    old = arrivals[2][1].samples[0]
    old.versions[3:5] = 0  # two of three tokens: staleness 2 in the third batch, which updates version 2
    first, _, second = batches(node, arrivals, window=0)
    assert [s.advantages[3:].tolist() for s in first.samples] == [[1.5] * 3, [-1.5] * 3]
    assert [s.advantages[3:].tolist() for s in second.samples] == [[0.0, 0.0, 2.25], [-0.75] * 3]


def test_the_window_goes_on_where_a_checkpoint_left_it() -> None:
    first = TokenBatch(2)
    assert names(batches(first, [(0, group("g0")), (1, group("g1"))])) == [["g0", "g1"]]
    resumed = TokenBatch(2)
    resumed.load_state(first.state())
    assert names(batches(resumed, [(3, group("g3")), (2, group("g2"))])) == [["g2", "g3"]]


def test_a_checkpoint_amid_a_send_knows_the_batch_as_not_yet_made() -> None:
    node = TokenBatch(2)
    states: list[Any] = []

    async def life() -> NodeRecord:
        async with NodeRig(node, start_version=5, window=1) as rig:
            send = node.batches.live.send

            async def watched(item: Message, made_from: Sequence[Message] | None) -> None:
                states.append(node.state())
                await send(item, made_from)

            node.batches.live.send = watched  # type: ignore[method-assign]
            rig.feed(node.groups, lost(-1, group="g0"), ticket=0)
            for ticket in (3, 4, 2, 1):
                rig.feed(node.groups, group(f"g{ticket}"), ticket=ticket)
            return await rig.finished()

    assert len(asyncio.run(life()).sent(node.batches)) == 2
    assert [(state["base"], state["version"]) for state in states] == [(1, 5), (3, 6)]
    assert (node.state()["base"], node.state()["version"]) == (5, 7)


def test_settings_out_of_range_are_problems() -> None:
    assert TokenBatch(2).check(None) == []
    problems = TokenBatch(0, token_budget=0, optimizer_steps=0, whiten="on").check(None)  # type: ignore[arg-type]
    assert [problem.split()[0] for problem in problems] == ["num_groups", "token_budget", "optimizer_steps", "whiten"]

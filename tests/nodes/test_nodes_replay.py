"""Replay: which groups a batch takes along, with what, and when `check` refuses that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flowrl.messages import Batch, Group
from flowrl.nodes import GroupAdvantage, Replay, TokenBatch
from flowrl.nodes.groups.batch import AdaptiveKL
from flowrl.nodes.groups.replay import ReplayBuffer, spread_out
from flowrl.testing import run_node, scored
from flowrl.training.advantages import Estimate
from flowrl.training.batch_stats import BatchStats
from tests.nodes.groups import members


def group(name: str, rewards: tuple[float, ...] = (1.0, 0.0)) -> Group:
    items = [scored(m, reward, response=2, group=name) for m, reward in enumerate(rewards)]
    return GroupAdvantage("reinforce", size=len(items)).make_group(members(items, size=len(items)))


def chosen(buffer: ReplayBuffer, version: int) -> list[str]:
    return [one.group_id for one in buffer.choose_groups(version)]


def test_a_group_is_taken_along_up_to_its_number_of_uses() -> None:
    buffer = ReplayBuffer(Replay(groups=2, max_uses=3, max_age=9), seed=0)
    buffer.add_groups([group("a")], 0)
    found = [buffer.choose_groups(version) for version in (1, 2, 3)]
    assert [[s.times_trained for one in groups for s in one.samples] for groups in found] == [[1, 1], [2, 2], []]


def test_a_group_is_taken_along_up_to_its_age() -> None:
    buffer = ReplayBuffer(Replay(groups=2, max_uses=9, max_age=2), seed=0)
    buffer.add_groups([group("a")], 5)
    assert [chosen(buffer, version) for version in (6, 7, 8)] == [["a"], ["a"], []]


def test_the_newest_groups_are_kept() -> None:
    buffer = ReplayBuffer(Replay(groups=9, keep=2, max_uses=9, max_age=9), seed=0)
    for version, name in enumerate("abc"):
        buffer.add_groups([group(name)], version)
    assert chosen(buffer, 3) == ["c", "b"]


def test_spread_prefers_groups_whose_rewards_differ_and_chance_any() -> None:
    groups = [group("flat", (1.0, 1.0)), group("wide", (4.0, 0.0)), group("some", (1.0, 0.0))]
    buffer = ReplayBuffer(Replay(groups=2, max_uses=9, prefer="spread"), seed=0)
    buffer.add_groups(groups, 0)
    assert chosen(buffer, 1) == ["wide", "some"]
    found = set()
    for seed in range(20):
        buffer = ReplayBuffer(Replay(groups=1, prefer="random"), seed=seed)
        buffer.add_groups(groups, 0)
        found |= set(chosen(buffer, 1))
    assert found == {"flat", "wide", "some"}


def test_kept_groups_are_copies_and_come_back_from_a_state() -> None:
    one = group("a")
    buffer = ReplayBuffer(Replay(groups=1, max_uses=3), seed=0)
    buffer.add_groups([one], 4)
    assert not np.shares_memory(buffer.choose_groups(5)[0].samples[0].token_ids, one.samples[0].token_ids)
    state = buffer.state()
    again = ReplayBuffer(Replay(groups=1, max_uses=3), seed=0)
    again.load_state(state)
    assert [s.times_trained for s in again.choose_groups(6)[0].samples] == [2, 2]
    assert again.choose_groups(7) == []
    assert [uses for *_, uses in state["kept"]] == [2], "a state does not change after it was taken"


def test_both_kinds_of_groups_are_mixed_evenly() -> None:
    fresh, again = [group(f"f{n}") for n in range(4)], [group(f"r{n}") for n in range(2)]
    assert [one.group_id for one in spread_out(fresh, again)] == ["f0", "r0", "f1", "f2", "r1", "f3"]
    assert spread_out(fresh, []) == fresh


def replaying(replay: Replay, **settings: Any) -> list[Batch]:
    arrivals = [(ticket, group(f"g{ticket}")) for ticket in range(6)]
    node = TokenBatch(2, replay=replay, **settings)
    return run_node(node, {"groups": arrivals}, window=1, max_staleness=1).sent("batches")


def test_a_batch_takes_older_groups_along_which_enter_the_loss_but_no_other_metric() -> None:
    first, second, third = replaying(Replay(groups=1, max_uses=2))
    plain = replaying(Replay())
    assert [batch.num_groups for batch in (first, second, third)] == [2, 2, 2]
    assert [len(batch.samples) for batch in (first, second, third)] == [4, 6, 6]
    assert second.num_tokens == 3 * plain[1].num_tokens // 2
    assert second.metrics == {**plain[1].metrics, "reused_groups": 1.0}
    again = [s for s in second.samples if s.times_trained]
    assert {(s.group_id, s.times_trained) for s in again} == {("g0", 1)}


def test_reused_tokens_have_figures_of_their_own() -> None:
    _, second, _ = replaying(Replay(groups=1, max_uses=2))
    masks = [sample.whole_mask for sample in second.samples]
    samples = [replace(s, versions=np.where(s.policy_mask, 1, -1).astype(np.int32)) for s in second.samples]
    stats = BatchStats.add_up([BatchStats.collect_stats(samples, masks, 3), BatchStats()])
    metrics = stats.make_metrics()
    assert (metrics["num_samples"], metrics["tokens_trained"]) == (4, 8)
    assert [metrics[f"reused_{name}"] for name in ("tokens", "age_mean", "age_max")] == [4, 2.0, 2]
    assert "reused_tokens" not in BatchStats().make_metrics()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replay": Replay(groups=1, max_uses=1)}, "replay.max_uses is 1; it has to be 2 or more"),
        ({"replay": Replay(groups=1, max_age=0)}, "replay.max_age is 0; it has to be 1 or more"),
        ({"replay": Replay(groups=1, keep=0)}, "replay.keep is 0; it has to be 1 or more"),
        ({"replay": Replay(groups=1, prefer="best")}, "replay.prefer is 'best'; choose one of fresh"),  # type: ignore[arg-type]
        ({"estimate": Estimate("gae")}, "a replayed group keeps the advantages of its first use"),
        ({"estimate": Estimate(kl_coef=0.1), "adaptive_kl": AdaptiveKL(1.0)}, "a replayed group keeps the advantages"),
        ({"estimate": Estimate(), "normalise_rewards": True}, "a replayed group keeps the advantages"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(settings: dict[str, Any], text: str) -> None:
    node = TokenBatch(2, **{"replay": Replay(groups=1), **settings})
    assert any(text in problem for problem in node.check(None)), node.check(None)


def test_no_groups_mean_no_replay() -> None:
    assert TokenBatch(2, replay=Replay()).facts() == TokenBatch(2).facts()

"""Groups without a gradient have no backward pass, and neither gradient nor figures change by that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.messages import Batch, Trainable
from flowrl.training.loss.objective import Objective
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.micro_batches import Passes, plan_passes
from tests.training.pieces import train_in_pieces
from tests.training.test_training_pieces import Engine, batch_of, engine_of, gradients, learner_of, whole
from tests.training.test_tree_objectives import OBJECTIVES, assert_close, model_dir

__all__ = ["model_dir"]
POLICY = PolicyObjective()


def equal_rewards(batch: Batch, groups: Sequence[str]) -> Batch:
    """The batch with advantage 0 in some groups."""
    return replace(
        batch,
        samples=tuple(
            replace(s, advantages=np.zeros_like(s.advantages)) if s.group_id in groups else s for s in batch.samples
        ),
    )


def groups_of(batch: Batch) -> list[str]:
    return list(dict.fromkeys(sample.group_id for sample in batch.samples))


def passes_of(batch: Batch, objective: Objective = POLICY) -> tuple[tuple[Passes, Passes], tuple[Trainable, ...]]:
    (part,) = batch.split(1)
    return plan_passes(part, [s.whole_mask for s in part.samples], part.micro_batches, objective), part.samples


@pytest.mark.parametrize("layout", ["rows", "tree"])
def test_groups_with_equal_rewards_have_a_forward_pass_only(layout: str) -> None:
    batch = replace(batch_of("ppo"), layout=layout)
    first, *others = groups_of(batch)
    (forward, both), samples = passes_of(equal_rewards(batch, [first]))
    assert {samples[i].group_id for one in forward for i in one} == {first}
    assert {samples[i].group_id for one in both for i in one} == set(others)
    assert sorted(i for one in (*forward, *both) for i in one) == list(range(len(samples)))


def test_all_stay_in_their_micro_batches_where_everything_has_a_gradient() -> None:
    (forward, both), _ = passes_of(batch_of("ppo"))
    assert not forward and both == batch_of("ppo").split(1)[0].micro_batches


@pytest.mark.parametrize("objective", [PolicyObjective(kl_coef=0.1), PolicyObjective(entropy_coef=0.1)])
def test_a_loss_with_a_term_without_advantage_has_all_backward_passes(objective: Objective) -> None:
    batch = batch_of("ppo")
    assert not passes_of(equal_rewards(batch, groups_of(batch)), objective)[0][0]


def test_a_group_with_one_token_that_counts_has_its_backward_pass_whole() -> None:
    batch = batch_of("ppo")
    first, *_ = groups_of(batch)
    flat = equal_rewards(batch, groups_of(batch))
    place = int(np.flatnonzero(flat.samples[0].policy_mask)[-1])
    advantages = np.where(np.arange(flat.samples[0].advantages.size) == place, 0.5, 0).astype(np.float32)
    lively = replace(flat, samples=(replace(flat.samples[0], advantages=advantages), *flat.samples[1:]))
    (_, both), samples = passes_of(lively)
    assert {samples[i].group_id for one in both for i in one} == {first}
    # The same token outside the loss.
    (part,) = lively.split(1)
    masks = [s.whole_mask & ~(s.advantages != 0) for s in part.samples]
    assert not plan_passes(part, masks, part.micro_batches, POLICY)[1]


def test_a_long_prefix_of_both_kinds_is_not_computed_twice() -> None:
    """100 tokens that all groups share, and 2 of their own."""
    draw = np.random.default_rng(0)
    shared = draw.integers(0, 9, 100)

    def longer(sample: Trainable) -> Trainable:
        tokens = np.concatenate([shared, draw.integers(0, 9, 2)]).astype(np.int32)
        mask = np.arange(102) >= 100
        return replace(
            sample,
            token_ids=tokens,
            policy_mask=mask,
            loss_mask=None,
            behavior_logprobs=np.zeros(102, np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            prompt_tokens=100,
            advantages=mask.astype(np.float32),
        )

    batch = batch_of("ppo")
    batch = replace(batch, samples=tuple(map(longer, batch.samples)), layout="tree", token_budget=0)
    first, *_ = groups_of(batch)
    assert not passes_of(equal_rewards(batch, [first]))[0][0]
    assert passes_of(equal_rewards(replace(batch, layout="rows"), [first]))[0][0], "rows share nothing"


@pytest.mark.parametrize("numbers", [(), (0,), (0, 1), None])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_and_figures_are_those_with_all_backward_passes(
    name: str, numbers: tuple[int, ...] | None, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, batch = OBJECTIVES[name], batch_of(name)
    groups = groups_of(batch)
    batch = equal_rewards(batch, groups if numbers is None else [groups[number] for number in numbers])
    found, ours = whole(objective, batch, model_dir)
    monkeypatch.setattr(type(objective), "has_gradient", Objective.has_gradient)
    expected, theirs = whole(objective, batch, model_dir)
    assert_close(ours, theirs)
    assert found.stats.keys() == expected.stats.keys()
    for figure, value in expected.stats.items():
        assert found.stats[figure] == (value if value is None else pytest.approx(value, abs=1e-5, rel=1e-5)), figure
    for figure in ("behavior_gap", "token_passes", "optimizer_steps", "skipped_steps"):
        assert getattr(found, figure) == pytest.approx(getattr(expected, figure)), figure


@pytest.mark.parametrize("sizes", [(4, 2), (2, 2, 2, 1), (7,)])
def test_pieces_make_the_same_step(sizes: tuple[int, ...], model_dir: Path) -> None:
    batch = batch_of("ppo")
    batch = equal_rewards(batch, groups_of(batch)[1:])
    expected, theirs = whole(POLICY, batch, model_dir)
    engine = engine_of(POLICY, model_dir)
    found = train_in_pieces(learner_of(POLICY, engine), batch, sizes, 0, 0.1)
    assert_close(gradients(engine), theirs)
    assert found.stats["entropy"] == pytest.approx(expected.stats["entropy"])
    assert engine.lasts.count(True) == 1 and engine.lasts[-1]


def test_a_step_without_any_gradient_has_one_backward_pass_and_is_made(model_dir: Path) -> None:
    """AdamW's moments and weight decay move the weights in it, too."""
    batch = batch_of("ppo")
    engine = engine_of(POLICY, model_dir)
    (part,) = equal_rewards(batch, groups_of(batch)).split(1)
    update = learner_of(POLICY, engine).train_piece(part, [s.whole_mask for s in part.samples], 0, 0.1)
    assert engine.lasts == [True] and engine.num_steps == 1 and update.changed
    assert all(not float(gradient.abs().max()) for gradient in gradients(engine))
    assert update.stats["entropy"] and update.stats["entropy"] > 1


class Uneven(Engine):
    """The first of two ranks, of which the other has passes of its own."""

    others = (2, 3)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.with_graph: list[bool] = []

    def compute_outputs(self, rows: Any, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        self.with_graph.append(torch.is_grad_enabled())
        return super().compute_outputs(rows, temperature, entropy_gradient)

    def gather_parts(self, value: object) -> list[object]:
        return [value, self.others] if isinstance(value, tuple) and len(value) == 2 else [value]


def test_every_rank_makes_as_many_passes_of_either_kind_as_the_one_with_most(model_dir: Path) -> None:
    engine = Uneven(engine_of(POLICY, model_dir).model)
    batch = replace(batch_of("ppo"), token_budget=0)
    (part,) = equal_rewards(batch, groups_of(batch)[:1]).split(1)
    learner_of(POLICY, engine).train_piece(part, [s.whole_mask for s in part.samples], 0, 0.1)
    assert engine.with_graph == [False, False, True, True, True]
    assert engine.lasts == [False, False, True]

"""A batch in pieces: gradient and figures are those of the whole batch, for every objective that allows it.

One process without DeepSpeed; `tests/stack/ranks/test_training_gang.py` and `tests/oracle/test_oracle.py` take real
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.errors import FlowrlError
from flowrl.messages import Batch
from flowrl.training.engine.zero import ZeroStep
from flowrl.training.learner import Learner, Update
from flowrl.training.loss.function_objective import FunctionObjective
from flowrl.training.loss.objective import LossInputs, Objective, loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.preference_objectives import DPOObjective, KTOObjective
from flowrl.training.loss.token_objectives import ReverseKL, SFTObjective
from flowrl.training.model.policy_model import OutputLayer
from tests.training.pieces import train_in_pieces
from tests.training.test_tree_objectives import (
    OBJECTIVES,
    TEACHER_SIZE,
    OneProcess,
    assert_close,
    furnished,
    loaded,
    model_dir,
)
from tests.training.training_cases import VOCABULARY, Case, make_batch

__all__ = ["model_dir"]
CUTS = ((4, 2), (2, 2, 2, 1), (7,))
"""Samples in each piece but the last, which has the rest: after `(7,)` nothing."""


class Engine(OneProcess):
    """Counts what the learner asks for, and divides as DeepSpeed does."""

    rank, size, ranks_per_part = 0, 1, 1

    def __init__(self, model: Any, layout: Any = "padded") -> None:
        super().__init__(model, layout)
        self.lasts: list[bool] = []
        self.num_steps = 0

    def add_gradient(self, loss: Tensor, *, last: bool) -> None:
        self.lasts.append(last)
        loss.backward()  # type: ignore[no-untyped-call]

    def step_optimizer(self, *, divide_by: float = 1.0) -> ZeroStep:
        self.num_steps += 1
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divide_by)
        norms = [p.grad.norm() for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.stack(norms).norm())
        return ZeroStep(math.isfinite(norm), norm)


def engine_of(objective: Objective, path: Path) -> Engine:
    model = loaded(path, objective.head)
    model.zero_grad()
    return Engine(model)


def learner_of(objective: Objective, engine: Engine, **settings: Any) -> Learner:
    teacher = OutputLayer(torch.randn(VOCABULARY, TEACHER_SIZE, generator=torch.Generator().manual_seed(1)), None)
    given = teacher if isinstance(objective, ReverseKL) else None
    return Learner(engine, objective, temperature=0.8, teacher=given, **settings)  # type: ignore[arg-type]


def gradients(engine: Engine) -> list[Tensor]:
    return [p.grad.clone() for p in engine.model.parameters() if p.grad is not None]


def whole(objective: Objective, batch: Batch, path: Path) -> tuple[Update, list[Tensor]]:
    engine = engine_of(objective, path)
    (part,) = batch.split(1)
    update = learner_of(objective, engine).train_piece(part, loss_masks(part.samples, part.mask_staleness, 0), 0, 0.1)
    return update, gradients(engine)


def in_pieces(objective: Objective, batch: Batch, sizes: Sequence[int], path: Path) -> tuple[Update, Engine]:
    engine = engine_of(objective, path)
    return train_in_pieces(learner_of(objective, engine), batch, sizes, 0, 0.1), engine


def batch_of(name: str, *, stale: int = -1) -> Batch:
    return furnished(make_batch(0, Case(name, mask_staleness=stale)))


def untrained(batch: Batch, numbers: Sequence[int]) -> Batch:
    """The batch with samples of which no token enters the loss."""
    none = {"loss_mask": np.zeros(0, np.bool_)}
    masked = [
        replace(sample, **(none | {"loss_mask": np.zeros_like(sample.policy_mask)})) if number in numbers else sample
        for number, sample in enumerate(batch.samples)
    ]
    return replace(batch, samples=tuple(masked))


SUMMED = FunctionObjective(
    lambda inputs: -(inputs.logprobs_BT * inputs.mask_BT).sum() / inputs.totals.num_tokens, mean_over="tokens"
)
ALLOWED = {name: one for name, one in OBJECTIVES.items() if one.mean_over} | {
    # gentle weights: this batch's behavior policy is far from the model
    "vespo": PolicyObjective(
        kind="vespo", old="behavior", correction=None, vespo_powers=(0.01, 0.01), vespo_decays=(1e-3, 1e-3)
    ),
    "sequence": PolicyObjective(aggregation="sequence"),
    "constant": PolicyObjective(aggregation="constant", length=7, kl_coef=0.2),
    "sft_sequence": SFTObjective(aggregation="sequence"),
    "summed": SUMMED,
}


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize(("name", "stale"), [("ppo", 1), ("sequence", 1), *((name, -1) for name in ALLOWED)])
def test_pieces_make_the_step_of_the_whole_batch(
    name: str, stale: int, sizes: tuple[int, ...], model_dir: Path
) -> None:
    objective, batch = ALLOWED[name], batch_of(name, stale=stale)
    if objective.mean_over == "pairs":
        batch = replace(batch, samples=batch.samples[:6])  # the seventh has no other
    expected, theirs = whole(objective, batch, model_dir)
    found, engine = in_pieces(objective, batch, sizes, model_dir)
    assert max(float(gradient.abs().max()) for gradient in theirs) > 1e-3, "a gradient of nothing proves nothing"
    assert_close(gradients(engine), theirs)
    assert found.stats.keys() == expected.stats.keys()
    for figure, value in expected.stats.items():
        assert found.stats[figure] == (value if value is None else pytest.approx(value, abs=1e-5, rel=1e-5)), figure
    assert found.token_passes == expected.token_passes
    assert found.behavior_gap == pytest.approx(expected.behavior_gap)
    assert found.behavior_gap_by_staleness == pytest.approx(expected.behavior_gap_by_staleness)
    assert (found.optimizer_steps, found.skipped_steps, found.changed) == (1, 0, True)
    assert (engine.num_steps, engine.lasts[-1], any(engine.lasts[:-1])) == (1, True, False)


def test_objectives_for_pieces_say_what_it_is_a_mean_over() -> None:
    choosing = {"clip_cov", "kl_cov"}  # tokens of the whole batch
    assert {name for name, one in OBJECTIVES.items() if one.mean_over is None} == {"kto", "own", *choosing}


def test_the_gradient_is_ready_at_the_last_piece_even_if_that_has_no_token_in_the_loss(model_dir: Path) -> None:
    batch = untrained(batch_of("ppo"), (5, 6))
    _, theirs = whole(PolicyObjective(), batch, model_dir)
    _, engine = in_pieces(PolicyObjective(), batch, (4, 1), model_dir)
    assert_close(gradients(engine), theirs)
    assert engine.lasts[-1] and engine.num_steps == 1


def test_a_piece_without_a_token_in_the_loss_is_not_computed(model_dir: Path) -> None:
    batch = replace(untrained(batch_of("ppo"), (0, 1)), token_budget=0)
    _, engine = in_pieces(PolicyObjective(), batch, (2, 3), model_dir)
    assert engine.lasts == [False, True]


def test_a_batch_without_a_token_in_the_loss_makes_no_step(model_dir: Path) -> None:
    batch = untrained(batch_of("ppo"), range(7))
    expected, _ = whole(PolicyObjective(), batch, model_dir)
    found, engine = in_pieces(PolicyObjective(), batch, (4, 2), model_dir)
    assert (found.changed, found.optimizer_steps, found.skipped_steps, engine.lasts) == (False, 0, 0, [])
    assert found.stats == expected.stats


def test_a_gradient_that_is_not_finite_skips_the_step_and_the_next_batch_begins_anew(model_dir: Path) -> None:
    engine, batch = engine_of(PolicyObjective(), model_dir), batch_of("ppo")
    learner = learner_of(PolicyObjective(), engine)
    nan = [replace(s, advantages=np.where(s.policy_mask, np.float32("nan"), 0)) for s in batch.samples[:2]]
    poisoned = replace(batch, samples=(*nan, *batch.samples[2:]))
    update = train_in_pieces(learner, poisoned, (4, 2), 0, 0.1)
    assert (update.changed, update.optimizer_steps, update.skipped_steps, update.grad_norm) == (False, 0, 1, None)
    engine.model.zero_grad()
    expected, theirs = whole(PolicyObjective(), batch, model_dir)
    engine.model.zero_grad()
    found = train_in_pieces(learner, batch, (4, 2), 1, 0.1)
    assert_close(gradients(engine), theirs)
    assert found.stats == pytest.approx(dict(expected.stats), abs=1e-5, rel=1e-5)


def mixed(inputs: LossInputs) -> Tensor:
    """A mean over tokens, and one over sequences."""
    summed = (inputs.logprobs_BT * inputs.mask_BT).sum()
    return -summed / inputs.totals.num_tokens - 0.1 * summed / inputs.totals.num_sequences


def test_a_loss_with_two_denominators_may_not_say_that_it_has_one(model_dir: Path) -> None:
    with pytest.raises(FlowrlError, match="mean over tokens, but a part of it is divided by the number of sequences"):
        in_pieces(FunctionObjective(mixed, mean_over="tokens"), batch_of("ppo"), (4, 2), model_dir)


@pytest.mark.parametrize(
    ("objective", "epochs"), [(KTOObjective(), 1), (FunctionObjective(mixed), 1), (DPOObjective(), 2)]
)
def test_pieces_are_refused_where_the_batch_is_needed_whole(objective: Objective, epochs: int, model_dir: Path) -> None:
    learner = learner_of(objective, engine_of(objective, model_dir), epochs=epochs)
    with pytest.raises(FlowrlError, match="a batch came in pieces"):
        train_in_pieces(learner, batch_of("ppo"), (4, 2), 0, 0.1)


def test_a_token_beyond_the_bound_is_refused_in_every_piece(model_dir: Path) -> None:
    learner = learner_of(PolicyObjective(), engine_of(PolicyObjective(), model_dir), max_staleness=2)
    batch = batch_of("ppo")
    old = [replace(s, versions=np.where(s.policy_mask, 0, -1).astype(np.int32)) for s in batch.samples]
    with pytest.raises(FlowrlError, match="a staleness of 3, but the graph allows 2"):
        train_in_pieces(learner, replace(batch, samples=tuple(old)), (4, 2), 3, 0.1)


@pytest.mark.parametrize(("reused", "allowed"), [(5, True), (4, True), (2, False), (None, False)])
def test_a_token_that_is_trained_again_has_a_bound_of_its_own(
    model_dir: Path, reused: int | None, *, allowed: bool
) -> None:
    engine = engine_of(PolicyObjective(), model_dir)
    learner = learner_of(PolicyObjective(), engine, max_staleness=2, max_reused_age=reused)
    batch = batch_of("ppo")
    old = [replace(s, versions=np.where(s.policy_mask, 0, -1).astype(np.int32), times_trained=1) for s in batch.samples]
    batch = replace(batch, samples=tuple(old))
    if allowed:
        train_in_pieces(learner, batch, (4, 2), 3, 0.1)
    else:
        with pytest.raises(FlowrlError, match=f"a staleness of 3, but the graph allows {reused} after 1 earlier uses"):
            train_in_pieces(learner, batch, (4, 2), 3, 0.1)

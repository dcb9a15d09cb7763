"""What a learner computes with other weights than those it trains: the gap before any step, an adapter's reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.messages import Batch
from flowrl.training.engine.zero import ZeroStep
from flowrl.training.learner import Update
from flowrl.training.loss.objective import Objective, loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.preference_objectives import DPOObjective
from flowrl.training.loss.token_objectives import ReverseKL
from flowrl.training.settings import LoRA
from tests.training.test_training_pieces import Engine, engine_of, learner_of
from tests.training.test_tree_objectives import OBJECTIVES, furnished, loaded, model_dir
from tests.training.training_cases import Case, make_batch

__all__ = ["model_dir"]


class MovingEngine(Engine):
    """Every step of it that is applied moves the weights far."""

    def __init__(self, model: Any, *, not_applied: int = 0) -> None:
        super().__init__(deepcopy(model))
        self._not_applied = not_applied

    def step_optimizer(self, *, divide_by: float = 1.0) -> ZeroStep:
        self.num_steps += 1
        if self.num_steps <= self._not_applied:
            return ZeroStep(False, float("nan"))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.5)
        return ZeroStep(True, 1.0)


class AdapterEngine(Engine):
    """Has an adapter that adds nothing, so that the policy is its own reference."""

    lora = LoRA(rank=4)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        yield


def in_steps(number: int) -> Batch:
    (part,) = furnished(make_batch(0, Case("steps", optimizer_steps=number))).split(1)
    assert len(part.step_ends) == number
    return part


def first(part: Batch, number: int) -> Batch:
    """The first steps of the part alone."""
    ends = part.step_ends[:number]
    return replace(part, step_ends=ends, micro_batches=part.micro_batches[: ends[-1]])


def update(objective: Objective, engine: Engine, part: Batch, **settings: Any) -> Update:
    return learner_of(objective, engine, **settings).train_piece(part, loss_masks(part.samples, -1, 0), 0, 0.1)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(
    ("objective", "not_applied", "measured"), [(PolicyObjective(), 0, 3), *((ReverseKL(), n, n + 1) for n in (0, 1))]
)
def test_the_gap_is_measured_before_the_weights_move(
    objective: Objective, not_applied: int, measured: int, epochs: int, model_dir: Path
) -> None:
    part, model = in_steps(3), loaded(model_dir, "lm")
    found = update(objective, MovingEngine(model, not_applied=not_applied), part, epochs=epochs)
    usual = PolicyObjective()  # measures all tokens
    still = update(usual, engine_of(usual, model_dir), first(part, measured))
    assert found.behavior_gap == pytest.approx(still.behavior_gap)
    assert found.behavior_gap_by_staleness == pytest.approx(still.behavior_gap_by_staleness)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_held_out_preferences_are_compared_with_the_base_of_an_adapter(name: str, model_dir: Path) -> None:
    objective = OBJECTIVES[name]
    (part,) = furnished(make_batch(0, Case("judged"))).split(1)
    bare = replace(part, samples=tuple(replace(sample, ref_logprobs=None) for sample in part.samples))
    engine = AdapterEngine(loaded(model_dir, objective.head))
    found = learner_of(objective, engine).judge_batch(bare)
    assert found["reward_margin"] == pytest.approx(0.0, abs=1e-5)
    if isinstance(objective, DPOObjective):
        assert found["loss"] == pytest.approx(0.6931472, abs=1e-5), "log 2, as before the first step"

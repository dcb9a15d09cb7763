"""Every objective on trees: loss, stats and gradients of an update equal those of the same samples in rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.messages import Batch, Mismatched, Trainable
from flowrl.training.engine.zero import ZeroStep
from flowrl.training.layouts import Placing
from flowrl.training.learner import Learner, Update
from flowrl.training.loss.function_objective import FunctionObjective
from flowrl.training.loss.objective import Objective, loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.preference_objectives import BradleyTerry, DPOObjective, KTOObjective
from flowrl.training.loss.token_objectives import ReverseKL, SFTObjective, ValueObjective
from flowrl.training.model.policy_model import OutputLayer, load_policy_model
from flowrl.training.model.value_model import load_scalar_model
from flowrl.training.settings import Head, LoRA
from tests.training.training_cases import VOCABULARY, Case, make_batch, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

TEACHER_SIZE = 6
OBJECTIVES: dict[str, Objective] = {
    "ppo": PolicyObjective(),
    "gspo": PolicyObjective(kind="gspo", aggregation="sequence", correction=None),
    "cispo": PolicyObjective(kind="cispo", clip_low=0.5, clip_high=1.5, correction=None),
    "gmpo": PolicyObjective(kind="gmpo", aggregation="sequence", correction=None),
    "vespo": PolicyObjective(kind="vespo", old="behavior", correction=None),
    "dppo": PolicyObjective(kind="dppo", old="behavior", correction=None, clip_low=0.001, clip_high=0.001),
    "clip_cov": PolicyObjective(kind="clip_cov", cov_share=0.1, cov_range=(0.01, 5.0)),
    "kl_cov": PolicyObjective(kind="kl_cov", cov_share=0.1),
    "kl_entropy": PolicyObjective(kl_coef=0.3, entropy_coef=0.1, kl_estimator="k3"),
    "own": FunctionObjective(lambda inputs: -inputs.logprobs_BT[inputs.mask_BT].sum()),
    "reverse_kl": ReverseKL(),
    "sft": SFTObjective(),
    "dpo": DPOObjective(),
    "kto": KTOObjective(),
    "value": ValueObjective(),
    "bradley_terry": BradleyTerry(),
}


class OneProcess:
    """What `Learner` needs of an engine, around a model of one process that is never changed."""

    size = ranks_per_part = 1
    rank = 0
    device = torch.device("cpu")
    lora = LoRA()

    def __init__(self, model: Any, layout: Placing) -> None:
        self.model, self.layout, self.gang = model, layout, self

    def num_computed(self, rows: Any) -> int:
        return int(rows.num_computed)

    def gather_parts(self, value: Any) -> list[Any]:
        return [value]

    def set_lr(self, lr: float) -> None: ...

    def forward(self, rows: Any, *, temperature: float) -> tuple[Tensor, Tensor]:
        return self.compute_outputs(rows, temperature, False)

    def compute_outputs(self, rows: Any, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.model(rows, temperature, entropy_gradient)
        return found

    def compute_values(self, rows: Any) -> Tensor:
        found: Tensor = self.model(rows)
        return found

    def add_gradient(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step_optimizer(self, *, divide_by: float = 1.0) -> ZeroStep:
        return ZeroStep(True, 1.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, tied=True, num_layers=1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pad_token_id": VOCABULARY - 1}))
    return path


def furnished(batch: Batch) -> Batch:
    """Samples with what every objective needs: pairs of neighbours, values, a teacher, mismatched completions."""
    draw = np.random.default_rng(2)

    def one(number: int, sample: Trainable) -> Trainable:
        size = sample.token_ids.size
        other = np.concatenate([sample.token_ids[: sample.prompt_tokens], draw.integers(0, VOCABULARY, 4)])
        mask = np.arange(other.size) >= sample.prompt_tokens
        mismatched = Mismatched(other.astype(np.int32), mask, np.where(mask, -3.0, 0).astype(np.float32))
        policy_tokens = int(sample.policy_mask[1:].sum())
        return replace(
            sample,
            label=1 - 2 * (number % 2),
            pair=f"p{number // 2}" if number < 6 else "",
            mismatched=mismatched,
            values=draw.normal(0, 1, size).astype(np.float32),
            returns=draw.normal(0, 1, size).astype(np.float32),
            teacher_hidden=draw.normal(0, 1, (policy_tokens, TEACHER_SIZE)).astype(np.float32),
        )

    return replace(batch, samples=tuple(one(n, sample) for n, sample in enumerate(batch.samples)), token_budget=90)


def updated(objective: Objective, model_dir: Path, batch: Batch, layout: Placing) -> tuple[Update, list[Tensor]]:
    model = loaded(model_dir, objective.head)
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    teacher = OutputLayer(torch.randn(VOCABULARY, TEACHER_SIZE, generator=generator), None)
    learner = Learner(
        OneProcess(model, layout),  # type: ignore[arg-type]
        objective,
        temperature=0.8,
        teacher=teacher if isinstance(objective, ReverseKL) else None,
    )
    (part,) = batch.split(1)
    update = learner.train_piece(part, loss_masks(part.samples, part.mask_staleness, 0), 0, 0.1)
    return update, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@cache
def loaded(model_dir: Path, head: Head) -> Any:
    return load_policy_model(model_dir) if head == "lm" else load_scalar_model(model_dir, start="policy", seed=5)


@pytest.mark.parametrize(("name", "stale"), [("ppo", 1), *((name, -1) for name in OBJECTIVES)])
def test_an_update_on_trees_equals_one_on_rows(name: str, stale: int, model_dir: Path) -> None:
    objective = OBJECTIVES[name]
    in_rows = furnished(make_batch(0, Case(name, layout="tree", mask_staleness=stale)))
    rows, expected = updated(objective, model_dir, replace(in_rows, layout="rows"), "padded")
    tree, found = updated(objective, model_dir, replace(in_rows, layout="tree"), "tree")
    assert tree.tokens_computed < 0.8 * rows.tokens_computed
    assert tree.token_passes == rows.token_passes
    compare_stats(rows.stats, tree.stats)
    assert len(found) == len(expected) > 3
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-3, "a gradient of nothing proves nothing"
    assert_close(found, expected)


def compare_stats(rows: Any, tree: Any) -> None:
    assert rows.keys() == tree.keys()
    for name, value in rows.items():
        assert tree[name] == (value if value is None else pytest.approx(value, abs=1e-5, rel=1e-5)), name


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * max(1.0, float(theirs.abs().max())))

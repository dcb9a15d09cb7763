"""Mixtures of experts: which layers ZeRO-3 gathers at once, and whose load-balancing loss can be trained.

What two ranks do with them is among the cases of `tests.stack.ranks.test_training_gang`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flowrl import Cluster, ConfigError, Machine, check
from flowrl.graph.load import load_file
from flowrl.models import Policy
from flowrl.models.model_layout import balance_problems
from flowrl.nodes import Trainer
from flowrl.training.engine.zero import expert_layers, gather_at_once
from flowrl.training.model.policy_model import PolicyModel, find_balance, load_policy_model
from flowrl.training.model.row_layout import lay_out
from flowrl.training.model.trainable import check_trainable
from tests.training.training_cases import Case, make_balanced, make_batch, make_mixture, make_model


def leaves(network: nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if getattr(module, "_z3_leaf", False)]


def test_layers_with_a_list_of_experts_are_gathered_at_once(tmp_path: Path) -> None:
    make_mixture(tmp_path)
    model = load_policy_model(tmp_path, trust_remote_code=True, layout="rows")
    gather_at_once(model)
    assert leaves(model.network) == ["model.layers.0.mlp", "model.layers.1.mlp"]


@pytest.fixture
def balanced(tmp_path: Path) -> PolicyModel:
    make_balanced(tmp_path)
    return load_policy_model(tmp_path, layout="rows")


def test_experts_in_one_tensor_need_nothing(balanced: PolicyModel) -> None:
    gather_at_once(balanced)
    assert expert_layers(balanced) == leaves(balanced) == []


def test_only_a_pass_with_gradients_gives_the_loss_and_padding_has_no_part_in_it(balanced: PolicyModel) -> None:
    samples = make_batch(0, Case("")).samples
    ids, masks = [s.token_ids for s in samples], [s.policy_mask for s in samples]
    rows = lay_out(ids, masks)
    assert rows.real_RL.sum() == sum(len(one) - 1 for one in ids) < rows.real_RL.numel()
    assert len(balanced(rows)) == 2
    balanced.balance = find_balance(balanced.network)
    with torch.no_grad():
        assert len(balanced(rows)) == 2
    padded, packed = (balanced(one)[2] for one in (rows, lay_out(ids, masks, layout="packed")))
    assert padded.item() == pytest.approx(packed.item(), rel=1e-5)


def test_models_without_the_loss_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "dense", tied=False)
    make_mixture(tmp_path / "own")
    make_balanced(tmp_path / "balanced")
    with pytest.raises(ConfigError, match="transformers has none for LlamaForCausalLM; set it to 0"):
        check_trainable(tmp_path / "dense", "lm", balanced=True)
    with pytest.raises(ConfigError, match="transformers has none for MixtureForCausalLM; set it to 0"):
        check_trainable(tmp_path / "own", "lm", trust_remote_code=True, balanced=True)
    check_trainable(tmp_path / "balanced", "lm", balanced=True)


@pytest.mark.parametrize(
    ("coef", "head", "size", "words"),
    [
        (0.0, "scalar", 2, ""),
        (0.1, "lm", 1, ""),
        (-1.0, "lm", 1, "it has to be a finite number of at least 0"),
        (0.1, "scalar", 1, "a model with a scalar head has no load-balancing loss"),
        (0.1, "lm", 2, "route a part of it each; set sequence_parallel_size to 1"),
    ],
)
def test_what_cannot_be_balanced_is_refused(coef: float, head: Any, size: int, words: str, tmp_path: Path) -> None:
    make_balanced(tmp_path)
    found = list(balance_problems(Policy(str(tmp_path)), coef, head, size))
    assert [words in problem for problem in found] == ([True] if words else [])


def test_the_coefficient_reaches_the_trainer_and_is_refused_for_a_dense_model() -> None:
    file = load_file("grpo")
    made = file.build(file.parse(("--router-aux-loss-coef", "0.01")))
    (trainer,) = (node for node in made.nodes.values() if isinstance(node, Trainer))
    assert trainer.router_aux_loss_coef == 0.01
    (problem,) = check(made, Cluster((Machine((0, 1)),))).problems
    assert "router_aux_loss_coef is 0.01, but the model is no mixture of experts; set it to 0" in problem

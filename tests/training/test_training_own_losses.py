"""Losses that a user writes: as docs/losses.md shows them, and with the mistakes that `flowrl check` reports."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flowrl
from flowrl.errors import FlowrlError
from flowrl.graph.load import load_file
from flowrl.training.loss.function_objective import COLUMNS, FunctionObjective
from flowrl.training.loss.objective import LossInputs, Objective, Totals
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.preference_objectives import DPOObjective
from flowrl.training.loss.token_objectives import SFTObjective
from flowrl.training.micro_batches import PADDING
from tests.training.objective_rig import logprobs, run, samples

ROOT = Path(__file__).parents[2]
CUTS = [[[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[4, 5, 2, 3], [], [0, 1]]]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """The code of docs/losses.md as a module."""
    found = ModuleType("losses")
    text = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "losses.md", "exec", dont_inherit=True), vars(found))
    return found


def check(objective: object) -> list[str]:
    """What `flowrl check` says of a graph whose trainer has this objective."""
    file = load_file(ROOT / "graphs" / "rloo.py")
    graph = file.build(file.config_type())
    graph.nodes["trainer"].objective = objective  # type: ignore[attr-defined]
    return [problem.removeprefix("node trainer: ") for problem in flowrl.check(graph).problems]


# What the page shows


@pytest.mark.parametrize("cut", CUTS)
def test_the_function_of_the_page_is_cispo_against_the_behavior_policy(page: ModuleType, cut: list[list[int]]) -> None:
    own = run(page.objective, cut)
    shipped = run(PolicyObjective(kind="cispo", clip_high=2.0, old="behavior", correction=None), cut)
    assert own.loss == pytest.approx(shipped.loss, rel=1e-5)
    torch.testing.assert_close(own.gradient, shipped.gradient)
    assert own.gradient.abs().sum() > 0.1
    assert own.stats["ratio_mean"] == pytest.approx(shipped.stats["ratio_mean"], rel=1e-5)


@pytest.mark.parametrize("cut", CUTS)
def test_the_class_of_the_page_is_its_formula(page: ModuleType, cut: list[list[int]]) -> None:
    found = run(page.AnchoredSFT(coef=0.5), cut)
    drawn = torch.cat(logprobs()).detach()
    ref = torch.cat([torch.from_numpy(s.ref_logprobs[2:]) for s in samples() if s.ref_logprobs is not None])
    assert found.loss == pytest.approx(float(-drawn.mean() + 0.5 * (drawn - ref).square().mean()), rel=1e-5)
    torch.testing.assert_close(found.gradient, (-1 + 0.5 * 2 * (drawn - ref)) / len(drawn))


def test_what_the_page_shows_passes_the_check(page: ModuleType) -> None:
    assert check(page.objective) == []
    assert check(page.AnchoredSFT()) == []


def test_the_page_names_every_column() -> None:
    text = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in COLUMNS)


# Defaults


class OnlyLoss(Objective):
    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -inputs.logprobs_BT[inputs.mask_BT].sum() / inputs.totals.num_tokens, {}


def test_an_objective_needs_nothing_but_a_loss() -> None:
    own, shipped = run(OnlyLoss(), CUTS[2]), run(SFTObjective(), CUTS[0])
    assert own.loss == pytest.approx(shipped.loss, rel=1e-6)
    torch.testing.assert_close(own.gradient, shipped.gradient)
    with pytest.raises(TypeError, match="abstract method"):
        Objective()  # type: ignore[abstract]


def test_the_defaults_are_those_of_a_language_model_on_rollouts() -> None:
    own = OnlyLoss()
    assert (own.head, own.at_end, own.offline, own.stats) == ("lm", False, False, ())
    assert own.needs_proximal, "a ratio against old_logprobs_BT must not be 1 in the second optimizer step"
    assert not own.needs_reference and not own.needs_mismatched and not own.needs_entropy_gradient
    assert own.enough(Totals(1, 1)) and not own.enough(Totals(0, 0))
    assert not FunctionObjective(mean_logprob, offline=True).needs_proximal
    assert FunctionObjective(mean_logprob, columns=("ref_logprobs",)).needs_reference


# Losses that are right


def mean_logprob(inputs: LossInputs) -> Tensor:
    return -inputs.logprobs_BT[inputs.mask_BT].sum() / inputs.totals.num_tokens


def sequence_mean(inputs: LossInputs) -> Tensor:
    kept_BT = inputs.logprobs_BT.where(inputs.mask_BT, 0.0)
    mean_B = kept_BT.sum(dim=1) / inputs.mask_BT.sum(dim=1).clamp(min=1)
    return -mean_B.sum() / inputs.totals.num_sequences


def clipped(inputs: LossInputs) -> Tensor:
    ratio_BT = (inputs.logprobs_BT - inputs.old_logprobs_BT).exp()
    advantages_BT = inputs.columns["advantages"]
    gain_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(0.8, 1.2) * advantages_BT)
    return -gain_BT[inputs.mask_BT].sum() / inputs.totals.num_tokens


def pairwise(inputs: LossInputs) -> Tensor:
    change_B = (inputs.logprobs_BT - inputs.columns["ref_logprobs"]).where(inputs.mask_BT, 0.0).sum(dim=1)
    chosen, rejected = inputs.pairs_P2.unbind(dim=1)
    return -torch.nn.functional.logsigmoid(change_B[chosen] - change_B[rejected]).sum() / inputs.totals.num_pairs


def entropy_bonus(inputs: LossInputs) -> Tensor:
    return mean_logprob(inputs) - 0.1 * inputs.entropies_BT[inputs.mask_BT].sum() / inputs.totals.num_tokens


class Scaled:
    """A callable object, with an option of its own."""

    def __call__(self, inputs: LossInputs, scale: float = 2.0) -> Tensor:
        return scale * mean_logprob(inputs)


RIGHT: list[FunctionObjective] = [
    FunctionObjective(mean_logprob),
    FunctionObjective(sequence_mean, offline=True),
    FunctionObjective(clipped, columns=("advantages",)),
    FunctionObjective(pairwise, columns=("ref_logprobs",), offline=True),
    FunctionObjective(entropy_bonus, entropy_gradient=True),
    FunctionObjective(Scaled()),
]


@pytest.mark.parametrize("objective", RIGHT, ids=lambda objective: objective.name)
def test_right_losses_pass_the_check(objective: FunctionObjective) -> None:
    assert check(objective) == []


@pytest.mark.parametrize("objective", RIGHT, ids=lambda objective: objective.name)
def test_right_losses_do_not_depend_on_the_micro_batches(objective: FunctionObjective) -> None:
    whole, *others = [run(objective, cut) for cut in CUTS]
    for other in others:
        assert other.loss == pytest.approx(whole.loss, rel=1e-5)
        torch.testing.assert_close(other.gradient, whole.gradient)


def test_a_function_on_pairs_is_dpo() -> None:
    own, shipped = (
        run(FunctionObjective(pairwise, columns=("ref_logprobs",)), CUTS[1]),
        run(DPOObjective(beta=1.0), CUTS[0]),
    )
    assert own.loss == pytest.approx(shipped.loss, rel=1e-5)
    torch.testing.assert_close(own.gradient, shipped.gradient)


# Mistakes


def with_stat(inputs: LossInputs) -> tuple[Tensor, dict[str, Any]]:
    return mean_logprob(inputs), {"ratio": inputs.logprobs_BT.detach().mean()}


def empty_divides_by_zero(inputs: LossInputs) -> Tensor:
    return sequence_mean(inputs) / inputs.mask_BT.any().float()


WRONG: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "two_arguments": (
        lambda logprobs, mask: logprobs,
        {},
        r"takes \(logprobs, mask\); it has to take one argument, the LossInputs of a micro-batch",
    ),
    "no_argument": (lambda: 0, {}, r"takes \(\); it has to take one argument"),
    "unknown_column": (mean_logprob, {"columns": ("reward",)}, "reads the columns reward; columns= takes advantages, "),
    "column_not_named": (
        clipped,
        {},
        r"raised KeyError: 'advantages' in test_training_own_losses\.py:\d+.*name every column .* in columns=",
    ),
    "raises": (
        lambda inputs: inputs.logprobs,
        {},
        r"raised AttributeError: .* no attribute 'logprobs' in test_training_own_losses\.py:\d+",
    ),
    "not_a_tensor": (lambda inputs: 1.0, {}, r"returned a float; it has to return its loss as a tensor, or \(loss, st"),
    "three_things": (lambda inputs: (mean_logprob(inputs), {}, 1), {}, "returned a tuple; it has to return its loss"),
    "by_token": (
        lambda inputs: -inputs.logprobs_BT,
        {},
        r"tensor of shape \[5, 4\]; .* the sum over the tokens of mask_BT",
    ),
    "by_sequence": (lambda inputs: -inputs.logprobs_BT.sum(dim=1), {}, r"tensor of shape \[5\]"),
    "detached": (
        lambda inputs: mean_logprob(replace(inputs, logprobs_BT=inputs.logprobs_BT.detach())),
        {},
        r"returned a loss without gradient; compute it from logprobs_BT",
    ),
    "constant_without_tokens": (
        lambda inputs: mean_logprob(inputs) if inputs.mask_BT.any() else torch.zeros(()),
        {},
        "without gradient for a micro-batch without a token in mask_BT",
    ),
    "not_finite_without_tokens": (
        empty_divides_by_zero,
        {},
        "not finite for a micro-batch without a token in mask_BT, .*; divide by totals",
    ),
    "mask_forgotten": (
        lambda inputs: -inputs.logprobs_BT.sum() / inputs.totals.num_tokens,
        {},
        "depends on tokens outside mask_BT; leave these out",
    ),
    "mean_of_the_micro_batch": (
        lambda inputs: -inputs.logprobs_BT.where(inputs.mask_BT, 0).sum() / inputs.mask_BT.sum().clamp(min=1),
        {},
        "gives a loss of .* for a batch, but .* in all for the same batch in 3 micro-batches; divide sums by totals",
    ),
    "entropy_gradient": (entropy_bonus, {}, "entropy_gradient=True only; pass it"),
    "stat_not_named": (with_stat, {}, "returned the stats ratio, which stats= does not name"),
    "stat_is_a_mean": (with_stat, {"stats": ("ratio",)}, "gives the stat ratio of .* divide sums by totals"),
    "stat_is_a_number": (
        lambda i: (mean_logprob(i), {"n": 3}),
        {"stats": ("n",)},
        "returned 3 as the stat n; it has to be",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_problem_of_the_check(name: str) -> None:
    function, options, message = WRONG[name]
    (problem,) = check(FunctionObjective(function, **options))
    assert re.match(rf"the loss \S+ {message}|the loss \S+ .*{message}", problem)


def test_what_is_no_objective_is_a_problem_of_the_check() -> None:
    (problem,) = check(mean_logprob)
    assert "which is not an Objective; wrap a function as FunctionObjective(function, columns=(...))" in problem
    (problem,) = check(FunctionObjective("mean_logprob"))  # type: ignore[arg-type]
    assert problem.endswith("the loss str is not a function; pass one that takes the LossInputs of a micro-batch")


def test_a_sample_that_lacks_a_column_is_named() -> None:
    objective = FunctionObjective(mean_logprob, columns=("advantages", "ref_logprobs"))
    sample = replace(samples()[0], ref_logprobs=None, advantages=np.zeros(0, np.float32))
    with pytest.raises(FlowrlError, match="'s0' has no advantages, ref_logprobs, which the loss mean_logprob reads"):
        objective.columns(sample)
    assert FunctionObjective(mean_logprob, columns=COLUMNS).columns(PADDING).keys() == set(COLUMNS)

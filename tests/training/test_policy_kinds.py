"""The kinds of policy loss against loops in Python floats, their gradients against differences of those loops, and
loss and gradient against TRL where TRL has the kind.

A loop gets the logprobs twice: `moving` where the formula has a gradient, `fixed` where it has none. The gradient of
the loss is then that of the loop in `moving`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.training.loss.loss_formulas import policy_loss
from flowrl.training.loss.objective import StepTokens
from flowrl.training.loss.policy_kinds import KINDS, choose_at_random, choose_highest
from flowrl.training.loss.policy_objective import PolicyObjective
from tests.training import objective_rig

Rows = list[list[float]]
MASK = [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]]
GIVEN = (1.3, -0.7, -1.1, 0.4, 0.0)
"""The advantage of each sequence."""
CHOSEN = [[0, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 1, 0]]


def drawn(seed: int, scale: float) -> Rows:
    rows: Rows = (np.random.default_rng(seed).normal(-2.0, scale, (5, 5))).tolist()
    return rows


NOW, OLD = drawn(1, 0.5), drawn(2, 0.5)
VARYING = [[value + 2.0 for value in row] for row in drawn(6, 1.5)]
"""Advantages that vary by token."""


def places(b: int) -> list[int]:
    return [t for t in range(5) if MASK[b][t]]


def sign_clipped(difference: float, a: float, low: float, high: float) -> float:
    return min(difference, high) if a > 0 else max(difference, -low)


def sapo(b: int, t: int, moving: Rows, fixed: Rows, row: list[float]) -> float:
    a = row[t]
    tau = 1.0 if a > 0 else 1.05
    ratio = math.exp(moving[b][t] - OLD[b][t])
    return -a * (4 / tau) / (1 + math.exp(-tau * (ratio - 1)))


def gmpo(b: int, t: int, moving: Rows, fixed: Rows, row: list[float]) -> float:
    """Token t moves alone: its share in the mean reaches the token whole, and the mean over tokens divides it."""
    sizes = [sign_clipped(fixed[b][k] - OLD[b][k], row[k], 0.4, 0.4) for k in places(b)]
    own, was = (sign_clipped(x[b][t] - OLD[b][t], row[t], 0.4, 0.4) for x in (moving, fixed))
    return -row[t] * math.exp(sum(sizes) / len(sizes) + own - was)


def vespo(b: int, t: int, moving: Rows, fixed: Rows, row: list[float]) -> float:
    a = row[t]
    k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    log_w = min(max(sum(fixed[b][i] - OLD[b][i] for i in places(b)), math.log(1e-8)), 20.0)
    return -math.exp(decay) * math.exp(log_w) ** k * math.exp(-decay * math.exp(log_w)) * a * moving[b][t]


def dppo(b: int, t: int, moving: Rows, fixed: Rows, row: list[float]) -> float:
    a = row[t]
    moved = math.exp(fixed[b][t]) - math.exp(OLD[b][t])
    outside = moved > 0.05 if a > 0 else moved < -0.05
    difference = moving[b][t] - OLD[b][t]
    return (0.0 if outside else -a * math.exp(difference)) + 0.001 * difference**2


def clip_cov(b: int, t: int, moving: Rows, fixed: Rows, row: list[float]) -> float:
    a = row[t]
    ratio = math.exp(moving[b][t] - OLD[b][t])
    return 0.0 if CHOSEN[b][t] else -min(ratio * a, min(max(ratio, 0.5), 1.6) * a)


def kl_cov(b: int, t: int, moving: Rows, fixed: Rows, row: list[float]) -> float:
    a = row[t]
    difference = moving[b][t] - OLD[b][t]
    return -math.exp(difference) * a + (abs(difference) if CHOSEN[b][t] else 0.0)


LOOPS: dict[str, Callable[..., float]] = {
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
    "dppo": dppo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "dppo": {"clip_low": 0.05, "clip_high": 0.05},
    "clip_cov": {"clip_low": 0.5, "clip_high": 0.6},
}


def loop(kind: str, moving: Rows, fixed: Rows, advantages: Rows, aggregation: str) -> float:
    rows = [[LOOPS[kind](b, t, moving, fixed, advantages[b]) for t in places(b)] for b in range(5)]
    if aggregation == "token":
        return sum(map(sum, rows)) / sum(map(len, rows))
    return sum(sum(row) / len(row) for row in rows if row) / sum(map(bool, rows))


def tensor(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def ours(kind: str, advantages: Rows, aggregation: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    leaf = tensor(NOW).requires_grad_()
    marks = {"chosen_BT": torch.tensor(CHOSEN, dtype=torch.bool)} if KINDS[kind].choose else {}
    arguments = (leaf, tensor(OLD), tensor(advantages), torch.tensor(MASK, dtype=torch.bool))
    loss, stats = policy_loss(*arguments, kind=kind, aggregation=aggregation, **marks, **OPTIONS.get(kind, {}))
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, stats


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("kind", LOOPS)
def test_loss_and_gradient_are_those_of_the_loop(kind: str, by_token: bool, aggregation: str) -> None:
    advantages = VARYING if by_token else [[a] * 5 for a in GIVEN]
    loss, gradient, _ = ours(kind, advantages, aggregation)
    assert float(loss) == pytest.approx(loop(kind, NOW, NOW, advantages, aggregation), abs=1e-12)
    h = 1e-6
    for b in range(5):
        for t in range(5):
            moved = [[list(row) for row in NOW] for _ in range(2)]
            moved[0][b][t] += h
            moved[1][b][t] -= h
            up, down = (loop(kind, one, NOW, advantages, aggregation) for one in moved)
            assert float(gradient[b, t]) == pytest.approx((up - down) / (2 * h), abs=1e-8)
    assert int((gradient != 0).sum()) > 2


def test_gmpo_has_the_gradient_of_its_sequences() -> None:
    """Over sequences, the loss is −A·exp(mean of clipped Δ), differentiated as a whole."""
    _, gradient, stats = ours("gmpo", [[a] * 5 for a in GIVEN], "sequence")
    leaf, old, total = tensor(NOW).requires_grad_(), tensor(OLD), torch.zeros((), dtype=torch.float64)
    for b, a in enumerate(GIVEN):
        if places(b):
            difference = (leaf[b] - old[b])[places(b)]
            total = total - a * (difference.clamp(max=0.4) if a > 0 else difference.clamp(min=-0.4)).mean().exp() / 4
    total.backward()
    torch.testing.assert_close(gradient, leaf.grad, rtol=0, atol=1e-12)
    assert 0 < float(stats["clip_fraction"]) < 1


def test_what_dppo_leaves_out_moved_to_where_its_advantage_pushes_it() -> None:
    _, gradient, stats = ours("dppo", [[a] * 5 for a in GIVEN], "token")
    left_out = 0
    for b, a in enumerate(GIVEN):
        for t in places(b):
            moved = math.exp(NOW[b][t]) - math.exp(OLD[b][t])
            if (moved > 0.05) if a > 0 else (moved < -0.05):
                left_out += 1
                assert float(gradient[b, t]) == pytest.approx(0.002 * (NOW[b][t] - OLD[b][t]) / 12)
    assert float(stats["clip_fraction"]) == pytest.approx(left_out / 12) and 0 < left_out < 12


def test_samples_without_an_advantage_have_a_gradient_where_ratios_are_penalised() -> None:
    sample = objective_rig.samples()[0]
    flat = replace(sample, advantages=np.zeros_like(sample.advantages))
    from_sampler = {"old": "behavior", "correction": None}
    for options, has in (
        ({"kind": "ppo"}, False),
        ({"kind": "dppo", **from_sampler}, True),
        ({"kind": "dppo", "ratio_penalty": 0.0, **from_sampler}, False),
        ({"kind": "kl_cov"}, True),
    ):
        assert PolicyObjective(**options).has_gradient(flat, flat.policy_mask) is has


# Choices among the tokens of a step


def step_tokens(number: int) -> StepTokens:
    draw = np.random.default_rng(7)
    advantages, logprobs = (draw.normal(0, 2, number).astype(np.float32) for _ in range(2))
    return StepTokens(advantages, logprobs, draw.random(number))


def covariances(step: StepTokens) -> list[float]:
    pairs = list(zip(step.advantages_N.tolist(), step.behavior_logprobs_N.tolist(), strict=True))
    mean_a, mean_l = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return [(a - mean_a) * (logprob - mean_l) for a, logprob in pairs]


def test_the_highest_covariances_are_chosen() -> None:
    step = step_tokens(500)
    found = covariances(step)
    expected = sorted(range(500), key=lambda n: -found[n])[:5]
    assert np.flatnonzero(choose_highest(step, cov_share=0.01)).tolist() == sorted(expected)
    assert choose_highest(step).sum() == 1, "at least one"


def test_some_tokens_between_the_bounds_are_chosen_by_their_keys() -> None:
    step = step_tokens(500)
    within = [n for n, one in enumerate(covariances(step)) if 1.0 < one < 5.0]
    expected = sorted(within, key=lambda n: step.keys_N[n])[:10]
    assert len(within) > 20
    assert np.flatnonzero(choose_at_random(step, cov_share=0.02)).tolist() == sorted(expected)
    everything = choose_at_random(step, cov_share=1.0, cov_range=(2.0, 3.0))
    assert np.flatnonzero(everything).tolist() == [n for n, one in enumerate(covariances(step)) if 2.0 < one < 3.0]


@pytest.mark.parametrize("choose", [choose_at_random, choose_highest])
def test_a_choice_does_not_depend_on_the_order_of_tokens(choose: Callable[..., Any]) -> None:
    step, order = step_tokens(300), np.random.default_rng(1).permutation(300)
    turned = StepTokens(step.advantages_N[order], step.behavior_logprobs_N[order], step.keys_N[order])
    chosen = choose(step, cov_share=0.05)
    assert chosen.any() and (choose(turned, cov_share=0.05) == chosen[order]).all()
    assert not choose(step_tokens(0)).size


# Options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "sapo", "clip_high": 0.3}, "clip_high is for kind ppo and gspo and .*, and kind is 'sapo'"),
        ({"sapo_temperatures": (1.0, 2.0)}, "sapo_temperatures is for kind sapo, and kind is 'ppo'"),
        ({"kind": "sapo", "sapo_temperatures": (0.0, 2.0)}, "both have to be above 0"),
        ({"kind": "vespo"}, "give old='behavior' and correction=None"),
        ({"kind": "dppo", "correction": None}, "give old='behavior' and correction=None"),
        ({"kind": "kl_cov", "cov_range": (1.0, 2.0)}, "cov_range is for kind clip_cov"),
        ({"kind": "clip_cov", "cov_range": (2.0, 1.0)}, "low < high"),
        ({"kind": "kl_cov", "cov_share": 0.0}, "above 0, and at most 1"),
        ({"kind": "kl_cov", "ratio_penalty": -1.0}, "0 or more"),
        ({"kind": "gmpo", "clip_low": -0.1}, "needs 0 or more"),
    ],
)
def test_options_of_another_kind_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PolicyObjective(**options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_a_kind_is_a_field(kind: str) -> None:
    against = {"old": "behavior", "correction": None} if KINDS[kind].against_sampler else {}
    needed = {"clip_high": 2.0} if kind == "cispo" else {}
    defaults = {name: value for name, value in KINDS[kind].defaults.items() if value is not None}
    made = PolicyObjective(kind=kind, **against, **defaults, **needed)
    assert made.given.keys() <= KINDS[kind].defaults.keys()


# TRL


def trl_loss(loss_type: str) -> tuple[Tensor, Tensor]:
    """Loss and gradient of TRL's own function, given our logprobs and no model."""
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    kind = GMPOTrainer if loss_type == "gmpo" else GRPOTrainer
    leaf, mask = tensor(NOW).requires_grad_(), torch.tensor(MASK)
    keep = [0, 1, 2, 4]  # TRL counts sequences without a token
    arguments = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=1,
    )
    trainer = SimpleNamespace(
        args=arguments,
        loss_type=loss_type,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=0.4,
        epsilon_high=0.4,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf[keep], torch.zeros(4, 5), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(4, 1, dtype=torch.long),
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": torch.zeros(4, 5, dtype=torch.long),
        "completion_mask": mask[keep],
        "advantages": tensor(GIVEN)[keep],
        "old_per_token_logps": tensor(OLD)[keep],
        "num_items_in_batch": mask.sum(),
    }
    loss = kind._compute_loss(trainer, None, inputs)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of TRL, about its own dependencies
@pytest.mark.parametrize(("kind", "aggregation"), [("sapo", "sequence"), ("gmpo", "sequence"), ("vespo", "token")])
def test_loss_and_gradient_are_those_of_trl(kind: str, aggregation: str) -> None:
    loss, gradient, _ = ours(kind, [[a] * 5 for a in GIVEN], aggregation)
    theirs, their_gradient = trl_loss(kind)
    close = 1e-7 if kind == "sapo" else 1e-12  # TRL's temperatures are float32
    assert float(loss) == pytest.approx(float(theirs), abs=close)
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=close)

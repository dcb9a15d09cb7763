"""Preference losses in float64 against their formulas, pair by pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flowrl.training.loss.preference_losses import dpo_loss, kto_loss, reward_model_loss

CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED = (
    torch.tensor(v, dtype=torch.float64)
    for v in ([-3.0, -5.0, -1.0], [-4.0, -4.5, -2.5], [-3.5, -4.0, -1.2], [-3.9, -4.4, -2.0])
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_reward_model_loss() -> None:
    margin = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    loss, stats = reward_model_loss(CHOSEN, REJECTED, margin_B=margin, centring=0.01)
    pairs = list(zip(CHOSEN.tolist(), REJECTED.tolist(), margin.tolist(), strict=True))
    expected = sum(-math.log(sigmoid(c - r - m)) + 0.01 * (c + r) ** 2 for c, r, m in pairs) / 3
    assert float(loss) == pytest.approx(expected, abs=1e-12)
    assert float(stats["accuracy"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("kind", ["dpo", "cdpo", "ipo"])
def test_dpo_family(kind: Any) -> None:
    beta, smoothing = 0.3, 0.1 if kind == "cdpo" else 0.0
    loss, stats = dpo_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, beta=beta, kind=kind, label_smoothing=smoothing)
    rows = zip(CHOSEN.tolist(), REJECTED.tolist(), REF_CHOSEN.tolist(), REF_REJECTED.tolist(), strict=True)
    total = 0.0
    for c, r, ref_c, ref_r in rows:
        h = (c - r) - (ref_c - ref_r)
        if kind == "ipo":
            total += (h - 1 / (2 * beta)) ** 2
        else:
            total += -(1 - smoothing) * math.log(sigmoid(beta * h)) - smoothing * math.log(sigmoid(-beta * h))
    assert float(loss) == pytest.approx(total / 3, abs=1e-12)
    assert float(stats["chosen"]) == pytest.approx(beta * float((CHOSEN - REF_CHOSEN).mean()))


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_smoothing_that_would_be_ignored_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="needs kind='cdpo'"):
        dpo_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, beta=0.1, kind=kind, label_smoothing=0.1)


def test_kto_has_no_gradient_through_its_baseline() -> None:
    beta = 0.5
    policy = CHOSEN.clone().requires_grad_()
    mismatched = (REF_REJECTED + 0.4).requires_grad_()
    desirable = torch.tensor([1, 0, 1])
    loss, stats = kto_loss(policy, REF_CHOSEN, desirable, mismatched, REF_REJECTED, beta=beta, desirable_weight=1.5)
    z0 = 0.4
    rewards = (CHOSEN - REF_CHOSEN).tolist()
    terms = [
        1.5 * (1 - sigmoid(beta * (r - z0))) if good else 1 - sigmoid(beta * (z0 - r))
        for r, good in zip(rewards, desirable.tolist(), strict=True)
    ]
    assert loss.item() == pytest.approx(sum(terms) / 3, abs=1e-12)
    loss.backward()
    assert mismatched.grad is None and policy.grad is not None
    assert float(stats["z0"]) == pytest.approx(z0)
    low = kto_loss(policy, REF_CHOSEN, desirable, REF_REJECTED - 1.0, REF_REJECTED, beta=beta)
    assert float(low[1]["z0"]) == 0.0


def test_kto_of_one_is_refused() -> None:
    one = CHOSEN[:1]
    with pytest.raises(ValueError, match="at least 2"):
        kto_loss(one, one, torch.tensor([1]), one, one, beta=0.1)

"""Preference losses in float64 against their formulas, pair by pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flowrl.training.loss.loss_formulas import dpo_losses, kto_losses, reward_model_loss

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
    h_B = (CHOSEN - REJECTED) - (REF_CHOSEN - REF_REJECTED)
    found = dpo_losses(h_B, beta=beta, kind=kind, label_smoothing=smoothing).tolist()
    assert found == pytest.approx([dpo_of_pair(h, beta, kind, smoothing) for h in h_B.tolist()], abs=1e-12)


def dpo_of_pair(h: float, beta: float, kind: str, smoothing: float) -> float:
    if kind == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    return -(1 - smoothing) * math.log(sigmoid(beta * h)) - smoothing * math.log(sigmoid(-beta * h))


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_smoothing_that_would_be_ignored_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="needs kind='cdpo'"):
        dpo_losses(CHOSEN - REJECTED, beta=0.1, kind=kind, label_smoothing=0.1)


def test_kto_family() -> None:
    beta, z0, desirable = 0.5, 0.4, [True, False, True]
    losses_B = kto_losses(
        CHOSEN - REF_CHOSEN,
        torch.tensor(desirable),
        torch.tensor(z0),
        beta=beta,
        desirable_weight=1.5,
        undesirable_weight=0.7,
    )
    expected = [
        1.5 * (1 - sigmoid(beta * (r - z0))) if good else 0.7 * (1 - sigmoid(beta * (z0 - r)))
        for r, good in zip((CHOSEN - REF_CHOSEN).tolist(), desirable, strict=True)
    ]
    assert losses_B.tolist() == pytest.approx(expected, abs=1e-7)

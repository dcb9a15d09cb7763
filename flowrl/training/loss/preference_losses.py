"""Losses on preferences: reward model, DPO and its variants, KTO. Pure functions of tensors.

The objectives take `dpo_losses` and `kto_losses`, the loss of each pair or completion, and divide by the numbers of a
whole optimizer step. `dpo_loss` and `kto_loss` are means over one batch that is there as a whole.

Axis B: pairs, or for KTO single completions. Logprobs are sums over a completion's tokens, EOS
included, except for IPO, which uses means per token.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

PreferenceKind = Literal["dpo", "ipo", "cdpo"]


def reward_model_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    margin_B: Tensor | None = None,
    centring: float = 0.0,
    num_pairs: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley–Terry, −log σ(c − r − m), with an optional margin (2307.09288).

    `centring` times the mean of (c + r)² keeps scores around 0. Means are over B; a trainer passes the
    `num_pairs` of its whole optimizer step. Stats: accuracy, margin.
    """
    difference_B = chosen_B - rejected_B
    loss_B = -F.logsigmoid(difference_B if margin_B is None else difference_B - margin_B)
    if centring:
        loss_B = loss_B + centring * (chosen_B + rejected_B).square()
    num = difference_B.numel() if num_pairs is None else num_pairs
    difference_B = difference_B.detach()
    stats = {"accuracy": (difference_B > 0).to(difference_B.dtype).sum() / num, "margin": difference_B.sum() / num}
    return loss_B.sum() / num, stats


def dpo_loss(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    *,
    beta: float,
    kind: PreferenceKind = "dpo",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPO (2305.18290), conservative DPO, or IPO (2310.12036, on means per token), mean over the pairs.

    See `dpo_losses`. Stats: chosen and rejected, the mean implicit rewards β log π/ref; margin, their difference;
    accuracy, the share of pairs whose difference is positive.
    """
    h_B = (policy_chosen_B - policy_rejected_B) - (ref_chosen_B - ref_rejected_B)
    loss_B = dpo_losses(h_B, beta=beta, kind=kind, label_smoothing=label_smoothing)
    rewards = {
        "chosen": beta * (policy_chosen_B - ref_chosen_B).detach().mean(),
        "rejected": beta * (policy_rejected_B - ref_rejected_B).detach().mean(),
    }
    return loss_B.mean(), _preference_stats(beta * h_B) | rewards


def dpo_losses(h_B: Tensor, *, beta: float, kind: PreferenceKind = "dpo", label_smoothing: float = 0.0) -> Tensor:
    """The loss of each pair as a function of h = (π_c − π_r) − (ref_c − ref_r).

    dpo: −log σ(βh). cdpo: −(1−ε) log σ(βh) − ε log σ(−βh) with ε = `label_smoothing`. ipo: (h − 1/(2β))².
    """
    if label_smoothing and kind != "cdpo":
        raise ValueError(f"label_smoothing = {label_smoothing} needs kind='cdpo', not {kind!r}")
    if kind == "ipo":
        return (h_B - 1 / (2 * beta)).square()
    if kind == "cdpo":
        return -(1 - label_smoothing) * F.logsigmoid(beta * h_B) - label_smoothing * F.logsigmoid(-beta * h_B)
    if kind == "dpo":
        return -F.logsigmoid(beta * h_B)
    raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(get_args(PreferenceKind))}")


def kto_loss(
    policy_B: Tensor,
    ref_B: Tensor,
    desirable_B: Tensor,
    mismatched_policy_B: Tensor,
    mismatched_ref_B: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    z0: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """KTO (2402.01306), mean over the batch; see `kto_losses`.

    z0 estimates KL(π‖ref): max(0, mean over the global batch of log π/ref on mismatched pairs (x_i, y_{i+1})),
    without gradient. Ranks that each hold a part of the batch pass it; without it the batch is global, and
    `mismatched_policy_B` and `mismatched_ref_B` are its logprobs of the mismatched completions. A batch below 2 has
    none: ValueError. Stats: z0, and the mean reward β log π/ref of the desirable and of the undesirable completions.
    """
    if z0 is None:
        if mismatched_policy_B.numel() < 2:
            raise ValueError(f"KTO needs a global batch of at least 2, got {mismatched_policy_B.numel()}")
        z0 = (mismatched_policy_B - mismatched_ref_B).mean().clamp(min=0)
    z0 = z0.detach()
    r_B, desirable = policy_B - ref_B, desirable_B.bool()
    loss_B = kto_losses(
        r_B, desirable, z0, beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    reward_B = beta * r_B.detach()
    return loss_B.mean(), {
        "z0": z0,
        "desirable_reward": _masked_mean(reward_B, desirable),
        "undesirable_reward": _masked_mean(reward_B, ~desirable),
    }


def kto_losses(
    r_B: Tensor, desirable_B: Tensor, z0: Tensor, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """The loss of each completion with r = log π/ref: λ_D(1 − σ(β(r − z0))) or λ_U(1 − σ(β(z0 − r)))."""
    return torch.where(
        desirable_B,
        desirable_weight * (1 - torch.sigmoid(beta * (r_B - z0))),
        undesirable_weight * (1 - torch.sigmoid(beta * (z0 - r_B))),
    )


def _preference_stats(margin_B: Tensor) -> dict[str, Tensor]:
    margin_B = margin_B.detach()
    return {"accuracy": (margin_B > 0).to(margin_B.dtype).mean(), "margin": margin_B.mean()}


def _masked_mean(values_B: Tensor, mask_B: Tensor) -> Tensor:
    return torch.where(mask_B, values_B, 0.0).sum() / mask_B.sum().clamp(min=1)

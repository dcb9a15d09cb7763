"""Losses on preferences: reward model, DPO and its variants, KTO. Pure functions of tensors.

For DPO and KTO the functions return the losses of single pairs and completions; the objectives divide their sums by the
counts of a whole optimizer step.

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


def dpo_losses(h_B: Tensor, *, beta: float, kind: PreferenceKind = "dpo", label_smoothing: float = 0.0) -> Tensor:
    """DPO (2305.18290), conservative DPO or IPO (2310.12036): the loss of each pair.

    A function of the difference of logprobs h = (π_c − π_r) − (ref_c − ref_r); for IPO they are means per token.
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


def kto_losses(
    r_B: Tensor, desirable_B: Tensor, z0: Tensor, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """KTO (2402.01306): the loss of each completion with r = log π/ref, λ_D(1 − σ(β(r − z0))) or λ_U(1 − σ(β(z0 − r))).

    z0 estimates KL(π‖ref): max(0, mean over the global batch of log π/ref on mismatched pairs (x_i, y_{i+1})), without
    gradient.
    """
    return torch.where(
        desirable_B,
        desirable_weight * (1 - torch.sigmoid(beta * (r_B - z0))),
        undesirable_weight * (1 - torch.sigmoid(beta * (z0 - r_B))),
    )

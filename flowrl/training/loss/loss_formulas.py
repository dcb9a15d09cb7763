"""Losses of the policy, of the value model, and on preferences (reward model, DPO and its variants, KTO): pure
functions of tensors.

Axes: B sequences, T policy tokens of the longest one; a padded position has mask 0.

A function returns (loss, stats). Both are sums divided by *denominators*. By default the denominators are the
mask's own counts, so that one call gives the mean. A trainer passes the counts of the whole optimizer step, so that the
results of its micro-batches and ranks add up exactly to the global mean.

There are three policies: π_θ (`logprobs`, being trained), π_p (`old_logprobs`, proximal: the weights at
the batch's first optimizer step) and π_b (`behavior_logprobs`, the policy that sampled the tokens).

For DPO and KTO the functions return the losses of single pairs and completions (axis B); the objectives divide their
sums by the counts of a whole optimizer step. Logprobs are sums over a completion's tokens, EOS included, except for
IPO, which uses means per token.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.training.loss.policy_kinds import KINDS, LOG_RATIO_LIMIT, PolicyTokens

Correction = Literal["tis", "icepop", "sequence_mask", "decoupled"]
Aggregation = Literal["token", "sequence", "constant"]
KLEstimator = Literal["k1", "k2", "k3", "k3_unbiased"]

KL_LIMIT = 10.0


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    kind: str = "ppo",
    behavior_logprobs_BT: Tensor | None = None,
    correction: Correction | None = None,
    correction_range: tuple[float, float] = (0.0, 2.0),
    correction_level: Literal["token", "sequence"] = "token",
    aggregation: Aggregation = "token",
    num_tokens: Tensor | float | None = None,
    num_sequences: Tensor | float | None = None,
    length: int | None = None,
    sample_tokens_B: Tensor | None = None,
    chosen_BT: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient loss; `options` are those of its kind, see `flowrl.training.loss.policy_kinds`.

    `chosen_BT` marks the tokens that a kind with a choice has chosen. `correction` weights each token by a detached
    function of u = π_p/π_b, see `correction_weights`. Stats: clip_fraction, ratio_mean, correction_mean (with a
    correction).
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(KINDS)}")
    if unknown := sorted(options.keys() - KINDS[kind].defaults.keys()):
        raise ValueError(
            f"kind {kind!r} has no {', '.join(unknown)}; it has {', '.join(KINDS[kind].defaults) or 'no'} options"
        )
    mask = mask_BT.to(logprobs_BT.dtype)
    # Values at masked positions, even infinity, must reach neither loss nor gradient.
    logprobs_BT, advantages_BT = (torch.where(mask > 0, values_BT, 0.0) for values_BT in (logprobs_BT, advantages_BT))
    difference_BT = torch.where(mask > 0, logprobs_BT - old_logprobs_BT, 0.0)
    chosen_BT = mask < 0 if chosen_BT is None else chosen_BT.bool() & (mask > 0)
    tokens = PolicyTokens(logprobs_BT, difference_BT, advantages_BT, mask, chosen_BT)
    loss_BT, limited_BT, ratio_BT = KINDS[kind].compute_terms(tokens, options)
    stats_BT = {"clip_fraction": limited_BT, "ratio_mean": ratio_BT.detach()}
    if correction is not None:
        if behavior_logprobs_BT is None:
            raise ValueError(f"correction {correction!r} needs behavior_logprobs_BT")
        weights_BT = correction_weights(
            old_logprobs_BT, behavior_logprobs_BT, mask, correction, correction_range, correction_level
        )
        loss_BT = loss_BT * weights_BT
        stats_BT["correction_mean"] = weights_BT
    loss = aggregate_terms(
        loss_BT,
        mask,
        aggregation,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        length=length,
        sample_tokens_B=sample_tokens_B,
    )
    return loss, {name: aggregate_terms(s.to(mask.dtype), mask, num_tokens=num_tokens) for name, s in stats_BT.items()}


def correction_weights(
    old_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    mask_BT: Tensor,
    correction: Correction,
    correction_range: tuple[float, float],
    level: Literal["token", "sequence"] = "token",
) -> Tensor:
    """The detached weight of each token from u = π_p/π_b and (low, high).

    tis: u clamped, per token or per sequence's product. icepop (2510.18855): u inside the range, else
    0. sequence_mask: token TIS, 0 for sequences whose geometric mean of u is outside the range.
    decoupled (2110.00641, 2505.24298): u, 0 above high.
    """
    low, high = correction_range
    log_u_BT = torch.where(mask_BT > 0, (old_logprobs_BT - behavior_logprobs_BT).detach(), 0.0)
    u_BT = log_u_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if correction == "tis":
        if level == "sequence":
            product_B1 = log_u_BT.sum(dim=-1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            return product_B1.clamp(low, high).expand_as(u_BT)
        return u_BT.clamp(low, high)
    if correction == "icepop":
        return torch.where((u_BT >= low) & (u_BT <= high), u_BT, 0.0)
    if correction == "sequence_mask":
        mean_B1 = _sequence_mean(log_u_BT, mask_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return torch.where((mean_B1 >= low) & (mean_B1 <= high), u_BT.clamp(low, high), 0.0)
    if correction == "decoupled":
        return torch.where(u_BT <= high, u_BT, 0.0)
    raise ValueError(f"unknown correction {correction!r}; choose one of {', '.join(get_args(Correction))}")


def aggregate_terms(
    values_BT: Tensor,
    mask_BT: Tensor,
    aggregation: Aggregation = "token",
    *,
    num_tokens: Tensor | float | None = None,
    num_sequences: Tensor | float | None = None,
    length: int | None = None,
    sample_tokens_B: Tensor | None = None,
) -> Tensor:
    """Masked values as one number: Σ/N, mean of sequence means, or Σ/(sequences × length) (Dr.GRPO).

    Sequences without a token in the mask do not count. Denominators default to the mask's own. Where several rows are
    one sample, `sample_tokens_B` is the number of masked tokens of each row's whole sample.
    """
    mask = mask_BT.to(values_BT.dtype)
    values_BT = torch.where(mask > 0, values_BT, 0.0)
    if aggregation == "token":
        return values_BT.sum() / _count(mask.sum() if num_tokens is None else num_tokens)
    sequences = _count((mask.sum(dim=-1) > 0).sum() if num_sequences is None else num_sequences)
    if aggregation == "sequence":
        tokens_B = mask.sum(dim=-1) if sample_tokens_B is None else sample_tokens_B
        return (values_BT.sum(dim=-1) / tokens_B.clamp(min=1)).sum() / sequences
    if aggregation != "constant":
        raise ValueError(f"unknown aggregation {aggregation!r}; choose one of {', '.join(get_args(Aggregation))}")
    if length is None:
        raise ValueError("aggregation 'constant' needs length, the constant L of Σ/(sequences × L)")
    return values_BT.sum() / (sequences * length)


def _sequence_mean(values_BT: Tensor, mask: Tensor) -> Tensor:
    return values_BT.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def _count(number: Tensor | float) -> Tensor | float:
    return number.clamp(min=1) if isinstance(number, Tensor) else max(number, 1)


def kl_estimate(
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    *,
    estimator: KLEstimator,
    behavior_logprobs_BT: Tensor | None = None,
) -> Tensor:
    """Estimates of KL(π‖π_ref) token by token, clamped to ±10: d = log π − log π_ref, d²/2, e^{−d} − 1 + d.

    As a loss, k2 has the gradient of KL(π‖ref) and plain k3 that of KL(ref‖π); k3_unbiased is k3
    times π_θ/sg(π_b). k1 has an expected gradient of zero, so it is only for rewards.
    """
    d_BT = logprobs_BT - ref_logprobs_BT
    if estimator == "k1":
        return d_BT.clamp(-KL_LIMIT, KL_LIMIT)
    if estimator == "k2":
        return (d_BT.square() / 2).clamp(max=KL_LIMIT)
    d_BT = d_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3_BT = (torch.expm1(-d_BT) + d_BT).clamp(max=KL_LIMIT)
    if estimator == "k3":
        return k3_BT
    if estimator != "k3_unbiased":
        raise ValueError(f"unknown KL estimator {estimator!r}; choose one of {', '.join(get_args(KLEstimator))}")
    if behavior_logprobs_BT is None:
        raise ValueError("estimator 'k3_unbiased' needs behavior_logprobs_BT")
    difference_BT = logprobs_BT - behavior_logprobs_BT.detach()
    return k3_BT * difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip: float | None = None,
    num_tokens: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """0.5·(V − R)²; with `clip`, 0.5·max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²); mean over tokens.

    Stats: clip_fraction, value_mean, value_error.
    """
    values_BT = torch.where(mask_BT.bool(), values_BT, returns_BT)
    error_BT = (values_BT - returns_BT).square()
    worst_BT, clipped_BT = error_BT, torch.zeros_like(error_BT)
    if clip is not None:
        near_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
        limited_BT = (near_BT - returns_BT).square()
        worst_BT, clipped_BT = torch.maximum(error_BT, limited_BT), (limited_BT > error_BT).to(error_BT.dtype)
    stats_BT = {"clip_fraction": clipped_BT, "value_mean": values_BT.detach(), "value_error": error_BT.detach()}
    loss = aggregate_terms(0.5 * worst_BT, mask_BT, num_tokens=num_tokens)
    return loss, {name: aggregate_terms(s, mask_BT, num_tokens=num_tokens) for name, s in stats_BT.items()}


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

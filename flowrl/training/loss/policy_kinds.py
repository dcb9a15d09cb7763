"""The kinds of policy loss, `--objective.kind`: for each one its formula, its options with their defaults, and whether
it looks at a whole optimizer step. docs/losses.md has papers, and the implementations that they are compared with.

A formula is a function of `PolicyTokens`, and its keyword arguments are the options of its kind: `KINDS` is all there
is to declare. It returns the loss of each token, where that loss is limited, and the ratio, [B, T] each.

ρ = exp(Δ), Δ = log π_θ − log π_old; π_old is the proximal or the behavior policy, as `PolicyObjective.old` says. A
sequence's ratio is that of a row: of the tokens in the loss that follow each other in one context. Each token has its
own gradient in it, so a mean over sequences has the gradient of the sequence's term, and the loss is exact where
advantages vary by token, too.

A kind that chooses tokens does so among all tokens of an optimizer step, before its first pass, whatever the division
into ranks and micro-batches: `choose` gets what the samples carry, and marks the chosen ones (axis N).

Only methods of tensors are used: whoever builds a graph does not import torch.

Axes: B sequences, T policy tokens of the longest one, N the tokens in the loss of one optimizer step.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flowrl.messages import Bool
from flowrl.training.loss.objective import StepTokens

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
LEAST_WEIGHT = 1e-8
"""The smallest ratio of a sequence in `vespo_loss`; a smaller one counts as this."""


@dataclass(frozen=True)
class PolicyTokens:
    """What a formula is computed from; everything is 0 outside the mask."""

    logprobs_BT: Tensor
    """log π_θ."""
    difference_BT: Tensor
    """Δ."""
    advantages_BT: Tensor
    mask_BT: Tensor
    """1 at tokens in the loss."""
    chosen_BT: Tensor
    """True at tokens that the kind's `choose` has marked."""

    @property
    def ratio_BT(self) -> Tensor:
        """ρ of each token."""
        return self.difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    def spread_mean(self, values_BT: Tensor) -> Tensor:
        """exp of the mean of `values_BT` over each row's tokens in the loss, at each of them with its own gradient."""
        own_BT = values_BT - values_BT.detach()
        counts_B1 = self.mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)
        mean_B1 = (values_BT.detach() * self.mask_BT).sum(dim=-1, keepdim=True) / counts_B1
        return mean_B1.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * own_BT.exp()


PolicyTerms = tuple["Tensor", "Tensor", "Tensor"]
"""(loss, 1 or True where it is limited, ratio) of each token."""


def reinforce_loss(tokens: PolicyTokens) -> PolicyTerms:
    """−A log π_θ."""
    loss_BT = -tokens.advantages_BT * tokens.logprobs_BT
    return loss_BT, tokens.mask_BT.new_zeros(()).expand_as(loss_BT), tokens.ratio_BT


def ppo_loss(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PolicyTerms:
    """−min(ρA, clip(ρ, 1 − low, 1 + high)A); with `dual_clip` c at most −cA where A < 0 (1707.06347, 1912.09729)."""
    return clip_surrogate(tokens.ratio_BT, tokens.advantages_BT, clip_low, clip_high, dual_clip)


def gspo_loss(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PolicyTerms:
    """As ppo, with exp(mean Δ) of the sequence in place of ρ (2507.18071)."""
    ratio_BT = tokens.spread_mean(tokens.difference_BT)
    return clip_surrogate(ratio_BT, tokens.advantages_BT, clip_low, clip_high, dual_clip)


def clip_surrogate(ratio_BT: Tensor, advantages_BT: Tensor, low: float, high: float, dual: float | None) -> PolicyTerms:
    """The clipped surrogate of PPO for any ratio."""
    unclipped_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1.0 - low, 1.0 + high) * advantages_BT
    term_BT = unclipped_BT.minimum(clipped_BT)
    if dual is not None:
        term_BT = term_BT.maximum(dual * advantages_BT).where(advantages_BT < 0, term_BT)
    return -term_BT, clipped_BT < unclipped_BT, ratio_BT


def gmpo_loss(tokens: PolicyTokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyTerms:
    """−A·exp(mean of clipped Δ): Δ is clipped to [−low, high] on the side to which A pushes it (2507.20673)."""
    difference_BT = tokens.difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    below_BT, above_BT = difference_BT.clamp(max=clip_high), difference_BT.clamp(min=-clip_low)
    limited_BT = below_BT.where(tokens.advantages_BT > 0, above_BT)
    ratio_BT = tokens.spread_mean(limited_BT)
    is_clipped_BT = (limited_BT != difference_BT) & (tokens.advantages_BT != 0)
    return -tokens.advantages_BT * ratio_BT, is_clipped_BT, ratio_BT


def cispo_loss(tokens: PolicyTokens, *, clip_low: float = 0.0, clip_high: float | None = None) -> PolicyTerms:
    """−sg(clip(ρ, low, high))·A·log π_θ; the bounds are absolute, and the upper one is required (2506.13585)."""
    if clip_high is None:
        raise ValueError("kind 'cispo' needs clip_high, the absolute upper bound of its weight")
    ratio_BT = tokens.ratio_BT.detach()
    weight_BT = ratio_BT.clamp(clip_low, clip_high)
    is_clipped_BT = weight_BT * tokens.advantages_BT < ratio_BT * tokens.advantages_BT
    return -weight_BT * tokens.advantages_BT * tokens.logprobs_BT, is_clipped_BT, ratio_BT


def sapo_loss(tokens: PolicyTokens, *, sapo_temperatures: tuple[float, float] = (1.0, 1.05)) -> PolicyTerms:
    """−(4/τ)·σ(τ(ρ − 1))·A, with the first τ where A > 0 and the second elsewhere (2511.20347)."""
    positive, other = sapo_temperatures
    tau_BT = tokens.advantages_BT.new_full((), positive).where(tokens.advantages_BT > 0, other)
    gate_BT = (tau_BT * (tokens.ratio_BT - 1.0)).sigmoid() * 4.0 / tau_BT
    return -gate_BT * tokens.advantages_BT, tokens.mask_BT.new_zeros(()).expand_as(gate_BT), tokens.ratio_BT


def vespo_loss(
    tokens: PolicyTokens,
    *,
    vespo_powers: tuple[float, float] = (2.0, 3.0),
    vespo_decays: tuple[float, float] = (3.0, 2.0),
) -> PolicyTerms:
    """−sg(φ(w))·A·log π_θ with φ(w) = w^k·e^{λ(1 − w)} and w = exp(Σ Δ) of the sequence; the first k and λ where A ≥ 0,
    the second elsewhere (2602.10693)."""
    difference_BT = tokens.difference_BT.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_w_B1 = difference_BT.sum(dim=-1, keepdim=True).clamp(math.log(LEAST_WEIGHT), LOG_RATIO_LIMIT)
    good_BT, one = tokens.advantages_BT >= 0, tokens.advantages_BT.new_ones(())
    power_BT, decay_BT = ((one * first).where(good_BT, second) for first, second in (vespo_powers, vespo_decays))
    weight_BT = (decay_BT + power_BT * log_w_B1 - decay_BT * log_w_B1.exp()).exp()
    loss_BT = -weight_BT * tokens.advantages_BT * tokens.logprobs_BT
    return loss_BT, tokens.mask_BT.new_zeros(()).expand_as(loss_BT), log_w_B1.exp().expand_as(loss_BT)


def dppo_loss(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, ratio_penalty: float = 1e-3
) -> PolicyTerms:
    """−ρA, and 0 for tokens whose probability has moved to where A pushes it: by more than `clip_high` up if A > 0, by
    more than `clip_low` down if not; plus `ratio_penalty`·Δ² of every token (2602.04879, 2602.02276)."""
    moved_BT = (tokens.logprobs_BT.exp() - (tokens.logprobs_BT - tokens.difference_BT).exp()).detach()
    outside_BT = (moved_BT > clip_high).where(tokens.advantages_BT > 0, moved_BT < -clip_low)
    gain_BT = (tokens.ratio_BT * tokens.advantages_BT).masked_fill(outside_BT, 0.0)
    return ratio_penalty * tokens.difference_BT.square() - gain_BT, outside_BT, tokens.ratio_BT


def clip_cov_loss(tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> PolicyTerms:
    """As ppo, without the chosen tokens: some of those whose covariance is high (2505.22617)."""
    loss_BT, is_clipped_BT, ratio_BT = ppo_loss(tokens, clip_low=clip_low, clip_high=clip_high)
    return loss_BT.masked_fill(tokens.chosen_BT, 0.0), is_clipped_BT | tokens.chosen_BT, ratio_BT


def kl_cov_loss(tokens: PolicyTokens, *, ratio_penalty: float = 1.0) -> PolicyTerms:
    """−ρA, plus `ratio_penalty`·|Δ| of the chosen tokens: those with the highest covariances (2505.22617)."""
    penalty_BT = ratio_penalty * tokens.difference_BT.abs() * tokens.chosen_BT
    return penalty_BT - tokens.ratio_BT * tokens.advantages_BT, tokens.chosen_BT, tokens.ratio_BT


def compute_covariances(step: StepTokens) -> npt.NDArray[np.float64]:
    """(A − mean A)(log π_b − mean log π_b) of each token of the step."""
    if not step.keys_N.size:
        return np.zeros(0)
    pair = (step.advantages_N.astype(np.float64), step.behavior_logprobs_N.astype(np.float64))
    advantages_N, logprobs_N = (values - values.mean() for values in pair)
    covariances_N: npt.NDArray[np.float64] = advantages_N * logprobs_N
    return covariances_N


def choose_at_random(step: StepTokens, *, cov_share: float = 2e-4, cov_range: tuple[float, float] = (1.0, 5.0)) -> Bool:
    """`cov_share` of all tokens, at least one, at random among those whose covariance is in `cov_range`."""
    number, (low, high) = max(1, int(cov_share * step.keys_N.size)), cov_range
    covariances_N = compute_covariances(step)
    within_N = np.flatnonzero((covariances_N > low) & (covariances_N < high))
    chosen_N = np.zeros(step.keys_N.size, np.bool_)
    chosen_N[within_N[np.argsort(step.keys_N[within_N], kind="stable")[:number]]] = True
    return chosen_N


def choose_highest(step: StepTokens, *, cov_share: float = 2e-4) -> Bool:
    """`cov_share` of all tokens, at least one: those with the highest covariances."""
    number = max(1, int(cov_share * step.keys_N.size))
    chosen_N = np.zeros(step.keys_N.size, np.bool_)
    chosen_N[np.lexsort((step.keys_N, -compute_covariances(step)))[:number]] = True
    return chosen_N


@dataclass(frozen=True)
class PolicyKind:
    """One kind."""

    loss: Callable[..., PolicyTerms]
    choose: Callable[..., Bool] | None = None
    against_sampler: bool = False
    """Whether Δ has to be that to the behavior policy, which leaves nothing to correct."""
    pulls_back: bool = False
    """Whether a token with an advantage of 0 may have a gradient, from a penalty on Δ."""

    @property
    def defaults(self) -> dict[str, Any]:
        """Its options, by their names as fields of `PolicyObjective`, and their defaults."""
        return {**_keywords(self.loss), **({} if self.choose is None else _keywords(self.choose))}

    def compute_terms(self, tokens: PolicyTokens, options: dict[str, Any]) -> PolicyTerms:
        """The terms of each token; `options` of the loss replace defaults, those of the choice say nothing here."""
        return self.loss(tokens, **{name: value for name, value in options.items() if name in _keywords(self.loss)})


@functools.cache
def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


KINDS: dict[str, PolicyKind] = {
    "ppo": PolicyKind(ppo_loss),
    "gspo": PolicyKind(gspo_loss),
    "cispo": PolicyKind(cispo_loss),
    "reinforce": PolicyKind(reinforce_loss),
    "sapo": PolicyKind(sapo_loss),
    "gmpo": PolicyKind(gmpo_loss),
    "vespo": PolicyKind(vespo_loss, against_sampler=True),
    "dppo": PolicyKind(dppo_loss, against_sampler=True, pulls_back=True),
    "clip_cov": PolicyKind(clip_cov_loss, choose_at_random),
    "kl_cov": PolicyKind(kl_cov_loss, choose_highest, pulls_back=True),
}

"""Logprobs and entropies of given tokens, computed in chunks: full logits in fp32 are never materialised.

Axes: N places (each predicts one token), H hidden size, K a teacher's, V vocabulary, C places of one chunk.

The forward keeps only hidden states and weight, and the backward computes the chunk's logits again. If all places fit
into one chunk, the logits are kept and nothing is computed twice. Logits are computed in the weight's dtype, as in
vLLM, and everything after them in at least fp32. On a CPU, `cached_logprobs` computes logprobs of unscaled logits if
neither a teacher nor the gradient of the entropy is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.training.model.model_shape import LOGITS_BYTES, logits_bytes
from flowrl.training.model.token_logprobs.cached_logprobs import cached_logprobs
from flowrl.training.model.token_logprobs.divergence import divergence, slope
from flowrl.training.model.token_logprobs.logit_scaling import UNSCALED, LogitScaling
from flowrl.training.model.token_logprobs.products import linear

CACHED_ON: tuple[str, ...] = ("cpu",)
"""Device types that use `cached_logprobs`. The formulas of `train_memory` are an upper bound of its memory too."""


def logits_bytes_on(device: torch.device) -> int:
    """Size of one chunk's logits: it grows with the memory of the GPU."""
    if device.type != "cuda":
        return LOGITS_BYTES
    return logits_bytes(torch.cuda.get_device_properties(device).total_memory)


@dataclass(frozen=True)
class Taught:
    """A teacher's next-token distribution at every place: hidden states, and the layer that maps them to logits."""

    hidden_NK: Tensor
    weight_VK: Tensor
    bias_V: Tensor | None
    scaling: LogitScaling = UNSCALED
    beta: float = 1.0
    """Parameter of the divergence by which student and teacher are compared (see `divergence`)."""

    def at(self, places_M: Tensor) -> Taught:
        """The distributions at some of the places."""
        return replace(self, hidden_NK=self.hidden_NK[places_M])

    def logprobs(self, places: slice, temperature: float) -> Tensor:
        """Logprobs [C, V] at some places, without an autograd graph."""
        return _logits(self.hidden_NK[places], self.weight_VK, self.bias_V, temperature, self.scaling).log_softmax(
            dim=-1
        )


def chunked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    taught: Taught | None = None,
    scaling: LogitScaling = UNSCALED,
    logits_bytes: int = LOGITS_BYTES,
) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy of the full softmax) at every place; logits are scaled, and divided by temperature.

    With `taught` the entropy is relative to the teacher's distribution q: −Σ p log(p/q) = −KL(p‖q), or with its `beta`
    minus the generalized Jensen-Shannon divergence.
    Gradients flow through the logprobs, and through the entropy only with `entropy_gradient`.
    """
    if hidden_NH.device.type in CACHED_ON and not entropy_gradient and taught is None and scaling == UNSCALED:
        return cached_logprobs(
            hidden_NH,
            weight_VH,
            bias_V,
            targets_N,
            temperature=temperature,
            kept_bytes=2 * logits_bytes,
            product_bytes=logits_bytes // 4,
        )
    wide_bytes = max(4, hidden_NH.element_size())
    chunk = max(1, logits_bytes // (weight_VH.shape[0] * wide_bytes))
    return _ChunkedLogprobs.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden_NH, weight_VH, bias_V, targets_N, temperature, entropy_gradient, chunk, taught, scaling
    )


def _logits(
    hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float, scaling: LogitScaling
) -> Tensor:
    logits_CV = linear(hidden_CH, weight_VH, bias_V)
    if logits_CV.dtype in (torch.bfloat16, torch.float16):
        logits_CV = logits_CV.float()
    logits_CV = scaling.apply_(logits_CV)
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        entropy_gradient: bool,
        chunk: int,
        taught: Taught | None,
        scaling: LogitScaling,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, sums = [], [], []
        kept_CV: Tensor | None = None
        for start in range(0, max(1, len(targets_N)), chunk):
            places = slice(start, start + chunk)
            logits_CV = _logits(hidden_NH[places], weight_VH, bias_V, temperature, scaling)
            log_sum_C = torch.logsumexp(logits_CV, dim=-1)
            logprobs.append(logits_CV.gather(-1, targets_N[places, None]).squeeze(-1) - log_sum_C)
            if taught is None:
                probabilities_CV = (logits_CV - log_sum_C[:, None]).exp_()
                entropies.append(log_sum_C - torch.linalg.vecdot(probabilities_CV, logits_CV))
            else:
                log_q_CV = taught.logprobs(places, temperature)
                entropies.append(-divergence(logits_CV - log_sum_C[:, None], log_q_CV, taught.beta))
            sums.append(log_sum_C)
            kept_CV = logits_CV
        log_sums_N, entropies_N = torch.cat(sums), torch.cat(entropies)
        ctx.temperature, ctx.chunk, ctx.scaling = temperature, chunk, scaling
        ctx.kept_CV, ctx.taught = kept_CV if len(sums) == 1 else None, taught
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_sums_N, entropies_N)
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies_N)
        return torch.cat(logprobs), entropies_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropies_N: Tensor | None) -> Any:
        hidden_NH, weight_VH, bias_V, targets_N, log_sums_N, entropies_N = ctx.saved_tensors
        wide = log_sums_N.dtype
        grad_hidden_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(targets_N), ctx.chunk):
            places = slice(start, start + ctx.chunk)
            logits_CV = ctx.kept_CV
            if logits_CV is None:
                logits_CV = _logits(hidden_NH[places], weight_VH, bias_V, ctx.temperature, ctx.scaling)
            log_p_CV = logits_CV - log_sums_N[places, None]
            grad_CV = _logit_gradient(
                log_p_CV,
                targets_N[places],
                None if grad_logprobs_N is None else grad_logprobs_N[places],
                None if grad_entropies_N is None else grad_entropies_N[places],
                entropies_N[places],
                None if ctx.taught is None else ctx.taught.logprobs(places, ctx.temperature),
                1.0 if ctx.taught is None else ctx.taught.beta,
            )
            grad_CV = ctx.scaling.backward_(grad_CV.div_(ctx.temperature), ctx.temperature * logits_CV)
            grad_CV = grad_CV.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_NH[places])
            if grad_weight_VH is not None:
                grad_weight_VH += grad_CV.T @ hidden_NH[places]
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(dim=0)
        ctx.kept_CV = None
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        if grad_bias_V is not None:
            grad_bias_V = grad_bias_V.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None, None, None


def _logit_gradient(
    log_p_CV: Tensor,
    targets_C: Tensor,
    grad_logprob_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    entropy_C: Tensor,
    log_q_CV: Tensor | None,
    beta: float = 1.0,
) -> Tensor:
    """Upstream gradients times ∂/∂logits: onehot − p for log p(target), −p(log p + H) for the entropy, and minus the
    slope of the divergence for an entropy relative to a teacher."""
    p_CV = log_p_CV.exp()
    if grad_logprob_C is None:
        grad_logprob_C = torch.zeros_like(entropy_C)
    slope_C1 = -grad_logprob_C[:, None]
    if grad_entropy_C is None:
        grad_CV = p_CV.mul_(slope_C1)
    elif log_q_CV is None:
        grad_CV = p_CV * (slope_C1 - grad_entropy_C[:, None] * (log_p_CV + entropy_C[:, None]))
    else:
        grad_CV = p_CV * slope_C1 - grad_entropy_C[:, None] * slope(log_p_CV, log_q_CV, beta)
    return grad_CV.scatter_add_(-1, targets_C[:, None], grad_logprob_C[:, None])


class LogprobHead(nn.Module):
    """Replaces a model's `lm_head`, with the same parameters under the same names.

    It is a separate module, so that ZeRO-3 gathers its weight around forward and backward.
    """

    def __init__(self, head: nn.Linear, scaling: LogitScaling = UNSCALED) -> None:
        super().__init__()
        self.scaling = scaling
        self.weight = head.weight
        self.bias = head.bias

    def forward(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        temperature: float,
        entropy_gradient: bool = False,
        taught: Taught | None = None,
    ) -> tuple[Tensor, Tensor]:
        return chunked_logprobs(
            hidden_NH,
            self.weight,
            self.bias,
            targets_N,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
            taught=taught,
            scaling=self.scaling,
            logits_bytes=logits_bytes_on(hidden_NH.device),
        )

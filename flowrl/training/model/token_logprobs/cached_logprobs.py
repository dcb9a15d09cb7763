"""Logprobs and entropies on a CPU: after the output layer's products, a few places at a time are computed in cache.

The forward keeps ∂ log p(target) / ∂ logits = onehot − p, in the weight's dtype, for as many places as fit into
`kept_bytes`; for the other places the backward computes the logits again. With these slopes, the backward is two
products: an upstream gradient is one factor for each place, so it scales hidden states and results, [N, H], and nothing
of the size of the logits.

onehot − p is rounded as a whole: for a likely target 1 − p is small, and a difference of rounded terms would lose it.

Axes: N places (each predicts one token), H hidden size, V vocabulary, C places of one product, R places in cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.training.model.token_logprobs.products import linear, matmul

CACHE_BYTES = 1 << 20
"""Size of the two buffers for the places in cache, in fp32."""


def cached_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    kept_bytes: int,
    product_bytes: int,
) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy) at every place, in at least fp32; only the logprobs are differentiable.

    `kept_bytes` bounds the slopes that are kept for the backward, `product_bytes` the logits of one product, in fp32.
    The weight is read once for each product.
    """
    sizes = (
        kept_bytes // (weight_VH.shape[0] * weight_VH.element_size()) if torch.is_grad_enabled() else 0,
        max(1, product_bytes // (weight_VH.shape[0] * max(4, weight_VH.element_size()))),
    )
    found: tuple[Tensor, Tensor] = _CachedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, targets_N, temperature, *sizes
    )
    return found


class _CachedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        most_kept: int,
        places_a_product: int,
    ) -> tuple[Tensor, Tensor]:
        num, vocabulary = len(targets_N), weight_VH.shape[0]
        kept_KV = weight_VH.new_empty(min(num, most_kept) if any(ctx.needs_input_grad[:3]) else 0, vocabulary)
        rows = _CachedRows(targets_N, vocabulary, _wide(weight_VH.dtype), temperature)
        for start in range(0, num, places_a_product):
            logits_CV = linear(hidden_NH[start : start + places_a_product], weight_VH, bias_V)
            rows.read(logits_CV, start, kept_KV)
        ctx.temperature, ctx.places_a_product = temperature, places_a_product
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, rows.log_sums_N, kept_KV)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rows.entropies_N)
        return rows.logprobs_N, rows.entropies_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor | None, _: None) -> Any:
        hidden_NH, weight_VH, bias_V, targets_N, log_sums_N, kept_KV = ctx.saved_tensors
        if grad_N is None:
            return (None,) * 7
        grad_N1 = (grad_N / ctx.temperature)[:, None]
        scaled_NH = (hidden_NH * grad_N1).to(weight_VH.dtype)
        grad_hidden_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        weight_sum, bias_sum = _Sum(), _Sum()
        rows = _CachedRows(targets_N, weight_VH.shape[0], log_sums_N.dtype, ctx.temperature)
        for start, stop in _ranges(len(kept_KV), len(targets_N), ctx.places_a_product):
            if stop <= len(kept_KV):
                slopes_CV = kept_KV[start:stop]
            else:
                slopes_CV = linear(hidden_NH[start:stop], weight_VH, bias_V)
                rows.slopes_(slopes_CV, start, log_sums_N)
            if grad_hidden_NH is not None:
                grad_hidden_NH[start:stop] = matmul(slopes_CV, weight_VH) * grad_N1[start:stop]
            if ctx.needs_input_grad[1]:
                weight_sum.add(slopes_CV.T, scaled_NH[start:stop], wide=log_sums_N.dtype)
            if bias_V is not None and ctx.needs_input_grad[2]:
                bias_sum.add(slopes_CV.T, grad_N1[start:stop].to(slopes_CV.dtype), wide=log_sums_N.dtype)
        grad_weight_VH = weight_sum.of(weight_VH) if ctx.needs_input_grad[1] else None
        grad_bias_V = bias_sum.of(bias_V[:, None])[:, 0] if bias_V is not None and ctx.needs_input_grad[2] else None
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, *(None,) * 4


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _ranges(num_kept: int, num: int, step: int) -> list[tuple[int, int]]:
    """The places of each pair of products of a backward: all kept places at once, the others `step` at a time."""
    kept = [(0, num_kept)] if num_kept else []
    return kept + [(start, min(num, start + step)) for start in range(num_kept, num, step)]


class _CachedRows:
    """Softmax, a few places at a time, in two buffers that stay in cache."""

    def __init__(self, targets_N: Tensor, vocabulary: int, wide: torch.dtype, temperature: float) -> None:
        most = max(1, min(len(targets_N), CACHE_BYTES // (2 * vocabulary * wide.itemsize)))
        self._logits_RV = torch.empty(most, vocabulary, dtype=wide)
        self._weights_RV = torch.empty(most, vocabulary, dtype=wide)
        self._targets_N1 = targets_N[:, None]
        self._temperature = temperature
        # Three tensors, not views of one: the caller may change them.
        self.logprobs_N, self.entropies_N, self.log_sums_N = (torch.empty(len(targets_N), dtype=wide) for _ in range(3))

    def read(self, logits_CV: Tensor, start: int, kept_KV: Tensor) -> None:
        """Find logprobs and entropies of the places from `start` on, and write the slopes of those that are kept."""
        for first in range(0, len(logits_CV), len(self._logits_RV)):
            x_RV, weights_RV, places = self._loaded(logits_CV, first, start)
            top_R1 = x_RV.amax(dim=-1, keepdim=True)
            x_RV.sub_(top_R1)
            torch.exp(x_RV, out=weights_RV)
            sum_R1 = weights_RV.sum(dim=-1, keepdim=True)
            log_R = sum_R1.log()[:, 0]
            torch.sub(x_RV.gather(-1, self._targets_N1[places])[:, 0], log_R, out=self.logprobs_N[places])
            mean_R = torch.linalg.vecdot(weights_RV, x_RV).div_(sum_R1[:, 0])
            torch.sub(log_R, mean_R, out=self.entropies_N[places])
            torch.add(top_R1[:, 0], log_R, out=self.log_sums_N[places])
            if len(kept_R := kept_KV[places]):
                self._write(weights_RV.div_(sum_R1)[: len(kept_R)], self._targets_N1[places][: len(kept_R)], kept_R)

    def slopes_(self, logits_CV: Tensor, start: int, log_sums_N: Tensor) -> None:
        """Replace logits of the places from `start` on by their slopes."""
        for first in range(0, len(logits_CV), len(self._logits_RV)):
            x_RV, weights_RV, places = self._loaded(logits_CV, first, start)
            torch.exp(x_RV.sub_(log_sums_N[places, None]), out=weights_RV)
            self._write(weights_RV, self._targets_N1[places], logits_CV[first : first + len(x_RV)])

    def _loaded(self, logits_CV: Tensor, first: int, start: int) -> tuple[Tensor, Tensor, slice]:
        """Logits over temperature in one buffer, the other buffer, and the places among all."""
        rows_RV = logits_CV[first : first + len(self._logits_RV)]
        x_RV, weights_RV = self._logits_RV[: len(rows_RV)], self._weights_RV[: len(rows_RV)]
        if self._temperature == 1.0:
            x_RV.copy_(rows_RV)
        else:
            torch.div(rows_RV, self._temperature, out=x_RV)
        return x_RV, weights_RV, slice(start + first, start + first + len(rows_RV))

    def _write(self, p_RV: Tensor, targets_R1: Tensor, out_RV: Tensor) -> None:
        """onehot − p."""
        p_RV.neg_().scatter_add_(-1, targets_R1, torch.ones_like(targets_R1, dtype=p_RV.dtype))
        out_RV.copy_(p_RV)


class _Sum:
    """A sum of matrix products: a single product keeps its dtype, several are added in a wide one."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, first: Tensor, second: Tensor, *, wide: torch.dtype) -> None:
        product = matmul(first, second)
        self._total = product if self._total is None else self._total.to(wide).add_(product)

    def of(self, like: Tensor) -> Tensor:
        """The sum, with the shape and dtype of `like`.

        It is 0 without any product: ZeRO reduces a gradient of the output layer from every rank, even from one without
        a policy token.
        """
        return torch.zeros_like(like) if self._total is None else self._total.to(like.dtype)

"""Logprobs and entropies of given tokens, computed in chunks: full logits in fp32 are never materialised.

The forward keeps only hidden states and weight, and the backward computes the chunk's logits again. If all places fit
into one chunk, the logits are kept and nothing is computed twice. Logits are computed in the weight's dtype, as in
vLLM, and everything after them in at least fp32. On a CPU, `cached_logprobs` computes logprobs of unscaled logits if
neither a teacher nor the gradient of the entropy is needed.

In `cached_logprobs`, after the output layer's products, a few places at a time are computed in cache.

The forward keeps ∂ log p(target) / ∂ logits = onehot − p, in the weight's dtype, for as many places as fit into
`kept_bytes`; for the other places the backward computes the logits again. With these slopes, the backward is two
products: an upstream gradient is one factor for each place, so it scales hidden states and results, [N, H], and nothing
of the size of the logits.

onehot − p is rounded as a whole: for a likely target 1 − p is small, and a difference of rounded terms would lose it.

`LogitScaling` is what a model does with the logits of its output layer: some families multiply them, some cap them
softly.

The model's own code is called, with a stand-in for everything before and inside the output layer. The stand-in gives it
hidden states and logits, and the logits that the model returns show the function. So a family needs no entry in a
table, and a family whose logits are another function is refused. No weights are read: they may be sharded, or on the
meta device.

`jsd_divergence` is the generalized Jensen-Shannon divergence of a student's next-token distribution p and a teacher's
q.

GKD (arXiv 2306.13649), with TRL's GKDTrainer's meaning of β:

    D_β = β · KL(q‖m) + (1 − β) · KL(p‖m),  m = β·q + (1 − β)·p      for 0 < β < 1
    D_0 = KL(q‖p), the forward KL: cross-entropy with the teacher's distribution, up to a constant
    D_1 = KL(p‖q), the reverse KL

The gradient by the student's logits is p·(g − Σ p·g), where g is the derivative by p: (1 − β)·log(p/m), since the terms
of m cancel; log(p/q) for β = 1; and for β = 0 it is p − q.

Axes: N places (each predicts one token), H hidden size, K a teacher's, V vocabulary, C places of one product, R places
in cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError
from flowrl.training.memory import LOGITS_BYTES, logits_bytes
from flowrl.training.model.products import multiply_linear, multiply_matrices

SMALL, LARGE = 2.0**-16, 2.0**40
"""A logit that shows only the factor, and one that shows only the cap."""
PLACES = 4


@dataclass(frozen=True)
class LogitScaling:
    """cap · tanh(factor · logit / cap), or factor · logit without a cap."""

    factor: float = 1.0
    cap: float | None = None

    def scale_logits_(self, logits: Tensor) -> Tensor:
        """The model's logits, from those of its output layer; changes `logits`."""
        if self.factor != 1.0:
            logits.mul_(self.factor)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def scale_gradient_(self, grad: Tensor, scaled: Tensor) -> Tensor:
        """The gradient of the output layer's logits, from the gradient `grad` of the scaled logits; changes `grad`."""
        if self.cap is not None:
            grad.mul_(1.0 - (scaled / self.cap).square_())
        return grad if self.factor == 1.0 else grad.mul_(self.factor)


UNSCALED = LogitScaling()


def find_scaling(causal_lm: Any) -> LogitScaling:
    """The scaling of a transformers model. Raises ConfigError with the reason if the model cannot be trained."""
    head = causal_lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise refuse_scaling(causal_lm, f"its output layer is a {type(head).__name__}, and a linear one is needed")
    vocabulary = int(getattr(head.weight, "ds_shape", head.weight.shape)[0])
    given = 20 * torch.randn(1, PLACES, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given[..., 0], given[..., 1] = SMALL, LARGE
    width = int(getattr(head.weight, "ds_shape", head.weight.shape)[1])
    hidden = torch.randn(1, PLACES, width, generator=torch.Generator().manual_seed(1))
    returned, received = call_with_stand_ins(causal_lm, head, hidden, given)
    if len(received) != 1 or received[0].shape != hidden.shape:
        raise refuse_scaling(causal_lm, "its output layer does not read the last hidden states once")
    factor = float(received[0].float()[0, 0, 0] / hidden[0, 0, 0])
    if not torch.allclose(received[0].float(), factor * hidden, rtol=1e-4, atol=1e-5):
        raise refuse_scaling(causal_lm, "its output layer reads something else than the last hidden states")
    factor, scaling = round_factor(factor), LogitScaling()
    if returned.shape == given.shape:
        slope, limit = float(returned[0, 0, 0]) / SMALL, float(returned[0, 0, 1])
        linear = math.isclose(limit, slope * LARGE, rel_tol=1e-4)
        scaling = LogitScaling(round_factor(slope), None if linear else round_factor(limit))
    expected = scaling.scale_logits_(given.clone())
    if returned.shape != given.shape or not torch.allclose(returned.double(), expected, rtol=1e-4, atol=1e-5):
        raise refuse_scaling(causal_lm, "it changes its logits by more than a factor and a soft cap")
    if factor != 1.0 and head.bias is not None:
        raise refuse_scaling(causal_lm, "it scales hidden states before an output layer with a bias")
    return LogitScaling(scaling.factor * factor, scaling.cap)


def refuse_scaling(causal_lm: Any, reason: str) -> ConfigError:
    """The message for a model whose logprobs flowrl cannot compute."""
    return ConfigError(
        f"{causal_lm.config.model_type} models ({type(causal_lm).__name__}) cannot be trained: {reason}; choose a "
        "model of another family"
    )


def round_factor(number: float) -> float:
    """`number` without the rounding error of float32, if it is that close to a number of four digits."""
    short = float(f"{number:.4g}")
    return short if math.isclose(number, short, rel_tol=2e-7) else number


def call_with_stand_ins(causal_lm: Any, head: nn.Linear, hidden: Tensor, given: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(the logits that the model's own forward returns, what its output layer received), if the model's body returns
    `hidden` and its output layer `given`."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    received: list[Tensor] = []

    def return_hidden(*args: Any, **kwargs: Any) -> Any:
        return _Lenient(BaseModelOutputWithPast(last_hidden_state=hidden))

    def return_given(got: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        received.append(got)
        return given.clone()

    # Some models call the body's own decoder in place of the body.
    body = causal_lm.base_model
    decoders = [getattr(body, name, None) for name in ("decoder", "transformer")]
    replaced = {id(one): one for one in (body, *decoders) if one is body or isinstance(one, nn.Module)}
    for module in replaced.values():
        module.__dict__["forward"] = return_hidden
    head.__dict__["forward"] = return_given
    try:
        with torch.no_grad():
            returned = causal_lm(input_ids=torch.zeros(1, PLACES, dtype=torch.long), use_cache=False).logits
    except Exception as error:  # the boundary to the code of a model, which may raise anything
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise refuse_scaling(
            causal_lm, f"its output layer does not read the last hidden states ({type(error).__name__}: {first_line})"
        ) from None
    finally:
        for module in (*replaced.values(), head):
            module.__dict__.pop("forward", None)
    return returned, received


class _Lenient:
    """An output that returns None for everything that it does not have, such as the routing of experts."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def __getitem__(self, index: Any) -> Any:
        return self._output[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name, None)


def jsd_divergence(log_p_CV: Tensor, log_q_CV: Tensor, beta: float) -> Tensor:
    """D_β at every place, [C]."""
    if beta == 0.0:
        return kl_divergence(log_q_CV, log_p_CV)
    if beta == 1.0:
        return kl_divergence(log_p_CV, log_q_CV)
    log_m_CV = mix_distributions(log_p_CV, log_q_CV, beta)
    return beta * kl_divergence(log_q_CV, log_m_CV) + (1 - beta) * kl_divergence(log_p_CV, log_m_CV)


def jsd_slope(log_p_CV: Tensor, log_q_CV: Tensor, beta: float) -> Tensor:
    """∂D_β/∂logits of the student, [C, V]."""
    p_CV = log_p_CV.exp()
    if beta == 0.0:
        return p_CV - log_q_CV.exp()
    g_CV = log_p_CV - (log_q_CV if beta == 1.0 else mix_distributions(log_p_CV, log_q_CV, beta))
    if beta != 1.0:
        g_CV *= 1 - beta
    mean_C: Tensor = torch.linalg.vecdot(p_CV, g_CV)
    return p_CV * (g_CV - mean_C[:, None])


def mix_distributions(log_p_CV: Tensor, log_q_CV: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_p_CV + math.log(1 - beta), log_q_CV + math.log(beta))


def kl_divergence(log_a_CV: Tensor, log_b_CV: Tensor) -> Tensor:
    """KL(a‖b) at every place."""
    kl_C: Tensor = torch.linalg.vecdot(log_a_CV.exp(), log_a_CV - log_b_CV)
    return kl_C


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
        wide = torch.float32 if weight_VH.dtype in (torch.bfloat16, torch.float16) else weight_VH.dtype
        rows = _CachedRows(targets_N, vocabulary, wide, temperature)
        for start in range(0, num, places_a_product):
            logits_CV = multiply_linear(hidden_NH[start : start + places_a_product], weight_VH, bias_V)
            rows.read_rows(logits_CV, start, kept_KV)
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
        weight_sum: Tensor | None = None
        bias_sum: Tensor | None = None
        rows = _CachedRows(targets_N, weight_VH.shape[0], log_sums_N.dtype, ctx.temperature)
        # A pair of products for all kept places at once, and for the others some at a time.
        spans = [(0, len(kept_KV))] if len(kept_KV) else []
        step = ctx.places_a_product
        spans += [(at, min(len(targets_N), at + step)) for at in range(len(kept_KV), len(targets_N), step)]
        for start, stop in spans:
            if stop <= len(kept_KV):
                slopes_CV = kept_KV[start:stop]
            else:
                slopes_CV = multiply_linear(hidden_NH[start:stop], weight_VH, bias_V)
                rows.slopes_(slopes_CV, start, log_sums_N)
            if grad_hidden_NH is not None:
                grad_hidden_NH[start:stop] = multiply_matrices(slopes_CV, weight_VH) * grad_N1[start:stop]
            if ctx.needs_input_grad[1]:
                weight_sum = add_product(weight_sum, slopes_CV.T, scaled_NH[start:stop], wide=log_sums_N.dtype)
            if bias_V is not None and ctx.needs_input_grad[2]:
                factors_C1 = grad_N1[start:stop].to(slopes_CV.dtype)
                bias_sum = add_product(bias_sum, slopes_CV.T, factors_C1, wide=log_sums_N.dtype)
        # ZeRO reduces a gradient of the output layer from every rank: from one without a policy token, zeros.
        grad_weight_VH = grad_bias_V = None
        if ctx.needs_input_grad[1]:
            grad_weight_VH = torch.zeros_like(weight_VH) if weight_sum is None else weight_sum.to(weight_VH.dtype)
        if bias_V is not None and ctx.needs_input_grad[2]:
            grad_bias_V = torch.zeros_like(bias_V) if bias_sum is None else bias_sum[:, 0].to(bias_V.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, *(None,) * 4


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

    def read_rows(self, logits_CV: Tensor, start: int, kept_KV: Tensor) -> None:
        """Find logprobs and entropies of the places from `start` on, and write the slopes of those that are kept."""
        for first in range(0, len(logits_CV), len(self._logits_RV)):
            x_RV, weights_RV, places = self._load_rows(logits_CV, first, start)
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
                self._write_slopes(
                    weights_RV.div_(sum_R1)[: len(kept_R)], self._targets_N1[places][: len(kept_R)], kept_R
                )

    def slopes_(self, logits_CV: Tensor, start: int, log_sums_N: Tensor) -> None:
        """Replace logits of the places from `start` on by their slopes."""
        for first in range(0, len(logits_CV), len(self._logits_RV)):
            x_RV, weights_RV, places = self._load_rows(logits_CV, first, start)
            torch.exp(x_RV.sub_(log_sums_N[places, None]), out=weights_RV)
            self._write_slopes(weights_RV, self._targets_N1[places], logits_CV[first : first + len(x_RV)])

    def _load_rows(self, logits_CV: Tensor, first: int, start: int) -> tuple[Tensor, Tensor, slice]:
        """Logits over temperature in one buffer, the other buffer, and the places among all."""
        rows_RV = logits_CV[first : first + len(self._logits_RV)]
        x_RV, weights_RV = self._logits_RV[: len(rows_RV)], self._weights_RV[: len(rows_RV)]
        if self._temperature == 1.0:
            x_RV.copy_(rows_RV)
        else:
            torch.div(rows_RV, self._temperature, out=x_RV)
        return x_RV, weights_RV, slice(start + first, start + first + len(rows_RV))

    def _write_slopes(self, p_RV: Tensor, targets_R1: Tensor, out_RV: Tensor) -> None:
        """onehot − p."""
        p_RV.neg_().scatter_add_(-1, targets_R1, torch.ones_like(targets_R1, dtype=p_RV.dtype))
        out_RV.copy_(p_RV)


def add_product(total: Tensor | None, first: Tensor, second: Tensor, *, wide: torch.dtype) -> Tensor:
    """A sum of matrix products: a single product keeps its dtype, several are added in a wide one."""
    product = multiply_matrices(first, second)
    return product if total is None else total.to(wide).add_(product)


CACHED_ON: tuple[str, ...] = ("cpu",)
"""Device types that use `cached_logprobs`. The formulas of `flowrl.training.memory` bound its memory, too."""


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
    """Parameter of the divergence by which student and teacher are compared (see `jsd_divergence`)."""

    def at_places(self, places_M: Tensor) -> Taught:
        """The distributions at some of the places."""
        return replace(self, hidden_NK=self.hidden_NK[places_M])

    def compute_logprobs(self, places: slice, temperature: float) -> Tensor:
        """Logprobs [C, V] at some places, without an autograd graph."""
        return compute_chunk_logits(
            self.hidden_NK[places], self.weight_VK, self.bias_V, temperature, self.scaling
        ).log_softmax(dim=-1)


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


def compute_chunk_logits(
    hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float, scaling: LogitScaling
) -> Tensor:
    logits_CV = multiply_linear(hidden_CH, weight_VH, bias_V)
    if logits_CV.dtype in (torch.bfloat16, torch.float16):
        logits_CV = logits_CV.float()
    logits_CV = scaling.scale_logits_(logits_CV)
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
            logits_CV = compute_chunk_logits(hidden_NH[places], weight_VH, bias_V, temperature, scaling)
            log_sum_C = torch.logsumexp(logits_CV, dim=-1)
            logprobs.append(logits_CV.gather(-1, targets_N[places, None]).squeeze(-1) - log_sum_C)
            if taught is None:
                probabilities_CV = (logits_CV - log_sum_C[:, None]).exp_()
                entropies.append(log_sum_C - torch.linalg.vecdot(probabilities_CV, logits_CV))
            else:
                log_q_CV = taught.compute_logprobs(places, temperature)
                entropies.append(-jsd_divergence(logits_CV - log_sum_C[:, None], log_q_CV, taught.beta))
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
                logits_CV = compute_chunk_logits(hidden_NH[places], weight_VH, bias_V, ctx.temperature, ctx.scaling)
            log_p_CV = logits_CV - log_sums_N[places, None]
            grad_CV = _logit_gradient(
                log_p_CV,
                targets_N[places],
                None if grad_logprobs_N is None else grad_logprobs_N[places],
                None if grad_entropies_N is None else grad_entropies_N[places],
                entropies_N[places],
                None if ctx.taught is None else ctx.taught.compute_logprobs(places, ctx.temperature),
                1.0 if ctx.taught is None else ctx.taught.beta,
            )
            grad_CV = ctx.scaling.scale_gradient_(grad_CV.div_(ctx.temperature), ctx.temperature * logits_CV)
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
        grad_CV = p_CV * slope_C1 - grad_entropy_C[:, None] * jsd_slope(log_p_CV, log_q_CV, beta)
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

"""The kernels of a block of ring attention: the queries of one rank with the keys and values of one rank.

A kernel computes the attention of each query to only these keys, and the logarithm of the sum of the query's weights
(its log-sum-exp), by which blocks are merged. In the backward pass it gets the result and the log-sum-exp over *all*
keys, from which the weights of this block follow without the other blocks.

Axes: R rows, h heads of queries, k of keys (g = h/k), Q queries, K keys, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

SCORES_A_CHUNK = 1 << 24
"""Number of scores that `PlainBlock` computes at a time, 64 MiB in fp32."""
CAPABILITY = (8, 0)
"""Lowest compute capability of a GPU that torch's flash attention runs on."""
WIDEST_HEAD = 256


class BlockKernel(Protocol):
    """[R, h, Q, D] of queries, [R, k, K, D] of keys and values; log-sum-exps are fp32, [R, h, Q]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(attended, log-sum-exp)."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; `out` and `lse` are those over all keys."""


@dataclass(frozen=True)
class CpuFlashBlock:
    """torch's flash attention on a CPU. `causal`: the nth query sees the first n keys; else every query sees all."""

    scale: float
    causal: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, self.causal, scale=self.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = kernel(grad, q, k, v, out, lse, 0.0, self.causal, scale=self.scale)
        return dq, dk, dv


@dataclass(frozen=True)
class CudaFlashBlock:
    """torch's flash attention on a GPU, in 16 bits. It needs as many heads of keys as of queries."""

    scale: float
    causal: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        each = q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(each, dim=1) for one in (k, v))
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal, False, scale=self.scale)
        return found[0], found[1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, each = k.shape[1], q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(each, dim=1) for one in (k, v))
        rows = (None, None, q.shape[2], k.shape[2])  # all rows have one length
        undropped = [torch.zeros(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ())]
        dq, *repeated = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *rows, 0.0, self.causal, *undropped, scale=self.scale
        )
        dk, dv = (_by_key(one, heads).sum(dim=2) for one in repeated)
        return dq, dk, dv


@dataclass(frozen=True)
class PlainBlock:
    """Attention with any mask and a soft cap, computed in fp32, some queries at a time."""

    scale: float
    seen: Callable[[slice], tuple[slice, Tensor]]
    """Slice of queries -> (slice of the keys that any of them sees, mask [queries, keys])."""
    cap: float | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q_RkgQD, k, v = _by_key(q, k.shape[1]), k.float(), v.float()
        parts = []
        for rows in self._chunks(q_RkgQD, k):
            keys, seen_QK = self.seen(rows)
            scores, _ = self._scores(q_RkgQD[..., rows, :], k[:, :, keys], seen_QK)
            lse = scores.logsumexp(dim=-1)
            weights = _weights(scores, lse, seen_QK)
            parts.append((_apart(weights.flatten(2, 3) @ v[:, :, keys], scores), lse))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, dim=-2).flatten(1, 2), torch.cat(lses, dim=-1).flatten(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_RkgQD, q_RkgQD, out_RkgQD = (_by_key(one, k.shape[1]) for one in (grad, q, out))
        lse_RkgQ, k, v = _by_key(lse[..., None], k.shape[1])[..., 0], k.float(), v.float()
        dq, dk, dv = torch.zeros_like(q_RkgQD), torch.zeros_like(k), torch.zeros_like(v)
        mean_RkgQ = torch.linalg.vecdot(grad_RkgQD, out_RkgQD)
        for rows in self._chunks(q_RkgQD, k):
            keys, seen_QK = self.seen(rows)
            scores, slope = self._scores(q_RkgQD[..., rows, :], k[:, :, keys], seen_QK)
            weights = _weights(scores, lse_RkgQ[..., rows], seen_QK)
            some = grad_RkgQD[..., rows, :].flatten(2, 3)
            dv[:, :, keys] += weights.flatten(2, 3).mT @ some
            slopes = (
                (some @ v[:, :, keys].mT)
                .view_as(weights)
                .sub_(mean_RkgQ[..., rows, None])
                .mul_(weights)
                .mul_(self.scale)
            )
            if slope is not None:
                slopes *= slope
            flat = slopes.flatten(2, 3)
            dq[..., rows, :] = _apart(flat @ k[:, :, keys], slopes)
            dk[:, :, keys] += flat.mT @ q_RkgQD[..., rows, :].flatten(2, 3)
        return dq.flatten(1, 2), dk, dv

    def _chunks(self, q_RkgQD: Tensor, k: Tensor) -> Iterator[slice]:
        rows, heads, each, queries, _ = q_RkgQD.shape
        step = max(1, SCORES_A_CHUNK // (rows * heads * each * k.shape[2]))
        for start in range(0, queries, step):
            yield slice(start, min(queries, start + step))

    def _scores(self, q_RkgQD: Tensor, k: Tensor, seen_QK: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores [R, k, g, Q, K], and the slope of the soft cap at them, None without a cap."""
        scores = _apart(q_RkgQD.flatten(2, 3) @ k.mT, q_RkgQD).mul_(self.scale)
        slope = None
        if self.cap is not None:
            share = scores.div_(self.cap).tanh_()
            slope = 1.0 - share.square()
            scores = share.mul_(self.cap)
        return scores.masked_fill_(~seen_QK, -torch.inf), slope


def _by_key(tensor: Tensor, heads: int) -> Tensor:
    """[R, h, Q, D] as [R, k, g, Q, D], in fp32."""
    rows, all_heads, places, channels = tensor.shape
    return tensor.float().reshape(rows, heads, all_heads // heads, places, channels)


def _apart(tensor: Tensor, like: Tensor) -> Tensor:
    """[R, k, g·Q, X] as [R, k, g, Q, X], with g and Q as in `like`."""
    return tensor.view(*like.shape[:4], tensor.shape[-1])


def _weights(scores: Tensor, lse: Tensor, seen_QK: Tensor) -> Tensor:
    """Weights, written over the scores; 0 at keys that are not seen, also for a query that sees none (`lse` -inf)."""
    return scores.sub_(lse[..., None]).exp_().masked_fill_(~seen_QK, 0.0)


def has_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether torch has a kernel for blocks of such queries and values without a mask."""
    if q.shape[-1] != v.shape[-1]:
        return False
    if q.device.type != "cuda":
        return q.device.type == "cpu"
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= WIDEST_HEAD
    return fits and torch.cuda.get_device_capability(q.device) >= CAPABILITY

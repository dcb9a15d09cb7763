"""Matrix products in float32 on a CPU.

torch passes these to MKL, which uses AVX512 only on Intel's processors: it reaches 112 GFLOP/s on one core of an AMD
EPYC. oneDNN, to which torch passes products in bfloat16, reaches 240 there in float32 too (`python -m
benchmarks.training.kernels --dtype float32`, with and without --plain-products). oneDNN takes 0.15 ms to prepare each
new shape, so small products stay with MKL. Both round in float32, but take sums in different orders.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.machine.cpu import cpu_flags, cpu_maker

LEAST = 1 << 26
"""Fewest multiplications of a product that goes to oneDNN; MKL takes more than a millisecond for so many."""
PLAIN = "FLOWRL_PLAIN_PRODUCTS"
"""An environment variable; if it is set, torch's choice is kept."""


@functools.cache
def prefers_onednn() -> bool:
    """Whether models are computed on this CPU, and oneDNN uses instructions of it that MKL does not use."""
    if os.environ.get(PLAIN) or torch.cuda.is_available() or not torch._C._has_mkldnn:
        return False
    return "avx512f" in cpu_flags() and cpu_maker() not in ("", "GenuineIntel")


def multiply_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear`, [..., K] and [O, K] to [..., O], differentiable."""
    if not _is_for_onednn(x, weight):
        return nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias) if t is not None):
        found: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return found
    return multiply_by_onednn(x, weight, bias)


def multiply_matrices(first: Tensor, second: Tensor) -> Tensor:
    """`first @ second` of matrices, without an autograd graph."""
    return multiply_by_onednn(first, second.T, None) if _is_for_onednn(first, second.T) else first @ second


class FastLinear(nn.Linear):
    """A linear layer that multiplies by `multiply_linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return multiply_linear(input, self.weight, self.bias)


def multiply_fast(network: nn.Module) -> None:
    """Make the linear layers of `network` multiply by `multiply_linear`, if that changes anything on this machine.

    Call this last: whatever replaces layers by their class, such as AutoTP, has to run before it.
    """
    for module in network.modules() if prefers_onednn() else ():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and weight.dim() == 2
        and x.numel() * weight.shape[0] >= LEAST
        and prefers_onednn()
    )


def multiply_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply_by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            multiply_matrices(flat, weight).view(x.shape) if wants_x else None,
            multiply_matrices(flat.T, x.reshape(-1, x.shape[-1])) if wants_weight else None,
            flat.sum(dim=0) if wants_bias else None,
        )

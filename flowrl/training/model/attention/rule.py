"""Which kernel computes the attention of a forest: a rule over its number of places and the device."""

from __future__ import annotations

from typing import Literal

from flowrl.forest import Forest

Kernel = Literal["dense", "cascade", "flex"]
DENSE_PLACES = 96
"""Most places of a forest for one dense mask on a CPU. It is faster at 114 in float32, and slower at 38 in bfloat16."""
RULE = (
    f"on a CPU one mask up to {DENSE_PLACES} tokens, above that a cascade of shared prefixes; on a GPU flex attention"
)


def possible_kernels(device: str) -> tuple[Kernel, ...]:
    """The kernels that the rule chooses from on a device of this type."""
    return ("flex",) if device == "cuda" else ("dense", "cascade")


def choose_kernel(forest: Forest, device: str) -> Kernel:
    """The kernel for `forest` on a device of this type."""
    if device == "cuda":
        return "flex"
    return "dense" if len(forest) <= DENSE_PLACES else "cascade"

"""Which kernel computes the attention of a forest: a rule over its number of places and the device."""

from __future__ import annotations

from typing import Literal

from flowrl.forest import Forest

Kernel = Literal["dense", "cascade", "flex"]
DENSE_PLACES = 96
"""Most places of a forest on a CPU for which one mask over all of them is faster than its blocks."""
RULE = (
    f"on a CPU one mask up to {DENSE_PLACES} tokens, above that a cascade of shared prefixes; on a GPU flex attention"
)


def choose_kernel(forest: Forest, device: str) -> Kernel:
    """The kernel for `forest` on a device of this type."""
    if device == "cuda":
        return "flex"
    return "dense" if len(forest) <= DENSE_PLACES else "cascade"

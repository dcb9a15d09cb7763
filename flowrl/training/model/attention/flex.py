"""Attention over a forest by torch's flex attention, which skips blocks of keys that no query of a block sees.

Axes: L places, D channels of a head. The kernel is compiled on a GPU; elsewhere torch computes the same eagerly.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def block_mask(ends_L: Tensor) -> Any:
    """torch's BlockMask for `flex`: place q sees key k if k <= q < ends_L[k]. Made once for a forest.

    `ends_L` is `Forest.ends`: for each place, the first place behind those that continue it.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends_L[key])

    size = len(ends_L)
    return create_block_mask(sees, B=None, H=None, Q_LEN=size, KV_LEN=size, device=ends_L.device)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
    """Attention [1, L, heads, D] of queries [1, heads, L, D]; keys and values may have fewer heads."""
    found = _kernel(q.device.type)(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    attended: Tensor = found.transpose(1, 2).contiguous()
    return attended


@cache
def _kernel(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Lengths differ from forest to forest; with dynamic shapes they share one compiled kernel.
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention

"""Attention over a forest by torch's flex attention, which skips blocks of keys that no query of a block sees.

Axes: L places, N blocks of places, D channels of a head. The kernel is compiled on a GPU; elsewhere torch computes the
same eagerly.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Places of a block, of queries and of keys: torch's default."""


def block_mask(ends_L: Tensor) -> Any:
    """torch's BlockMask for `flex`: place q sees key k if k <= q < ends_L[k]. Made once for a forest.

    `ends_L` is `Forest.ends`: for each place, the first place behind those that continue it. The result equals that
    of torch's `create_block_mask`, which makes tensors of L x L; here memory grows with L and with (L / BLOCK)².
    """
    from torch.nn.attention.flex_attention import BlockMask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends_L[key])

    partial_NN, full_NN = _seen_blocks(ends_L)
    listed = (*_listed(partial_NN), *_listed(full_NN))
    size = len(ends_L)
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(size, size))


def _seen_blocks(ends_L: Tensor) -> tuple[Tensor, Tensor]:
    """(partial, full), both [N, N]: whether some or all of the row's block of queries see the column's block of keys.

    The queries that see a key are one range, which starts at the key. So the range of a key in an earlier block meets a
    block of queries if the range ends behind the block's start, and covers the block if the range ends at the block's
    stop or later. For a block of keys, the last end decides the first question, and the first end the second. Behind
    the last place is padding, which nothing sees and which sees nothing: a block with padding is never full, because no
    end reaches its stop.
    """
    ends_NP = pad(ends_L, (0, -len(ends_L) % BLOCK)).view(-1, BLOCK)
    start_N1 = torch.arange(len(ends_NP), device=ends_L.device)[:, None] * BLOCK
    met_NN = (ends_NP.amax(1) > start_N1).tril()
    full_NN = (ends_NP.amin(1) >= start_N1 + BLOCK).tril(-1)  # in its own block, a place does not see those behind it
    return met_NN & ~full_NN, full_NN


def _listed(blocks_NN: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the number of its True columns, [1, 1, N], and all columns, True ones first, [1, 1, N, N]."""
    columns_NN = blocks_NN.int().argsort(dim=-1, descending=True, stable=True)
    return blocks_NN.sum(-1).int()[None, None], columns_NN.int()[None, None]


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

"""Attention over a forest, in transformers' attention interface.

A model that is loaded with the implementation `TREE` computes rows as with "sdpa". A forward pass with the keyword
`tree` computes attention by that tree's kernel instead: every layer passes the keyword on. Gradient checkpointing
repeats a layer with the same keywords, so a backward pass needs no state.

Axes: L places of a forest.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError
from flowrl.forest import Forest, extended
from flowrl.training.model.attention.cascade import Cascade, cascade_attention
from flowrl.training.model.attention.flex import block_mask, flex
from flowrl.training.model.attention.rule import Kernel, choose_kernel

TREE = "flowrl_tree"
"""Name of the implementation in transformers' interface."""
UNKNOWN = ("block_indices", "indices", "position_bias", "s_aux", "softcap")
"""Keywords of layers whose attention is more than a mask, positions and a scale. The kernels would ignore them."""


class TreeAttention:
    """Which places of one forest see which, in the form that its kernel takes."""

    def __init__(self, forest: Forest, device: torch.device, kernel: Kernel | None = None) -> None:
        """`kernel` is the one that the rule chooses, if none is given."""
        self.forest = forest
        self.device = device
        self.kernel: Kernel = kernel or choose_kernel(forest, device.type)
        self._padded: dict[int, TreeAttention] = {}

    @cached_property
    def ends_L(self) -> Tensor:
        return torch.from_numpy(self.forest.ends).to(self.device)

    @cached_property
    def mask_11LL(self) -> Tensor:
        """True where the row's place sees the column's."""
        place_L = torch.arange(len(self.forest), device=self.device)
        seen_LL = (place_L[None] <= place_L[:, None]) & (place_L[:, None] < self.ends_L[None])
        return seen_LL[None, None]

    @property
    def passed_mask(self) -> Tensor:
        """What a model gets as `attention_mask`."""
        return self.mask_11LL if self.kernel == "dense" else any_mask(self.device)

    @cached_property
    def cascade(self) -> Cascade:
        return Cascade(self.forest, self.device)

    @cached_property
    def block_mask(self) -> Any:
        return block_mask(self.ends_L)

    def padded(self, added: int) -> TreeAttention:
        """With `added` places at the end that see nothing but themselves, and that no other place sees."""
        if added and added not in self._padded:
            self._padded[added] = TreeAttention(extended(self.forest, added), self.device, self.kernel)
        return self._padded[added] if added else self

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention [1, L, heads, D] of queries [1, heads, L, D] over keys and values with as many heads or fewer."""
        if self.kernel == "cascade":
            return cascade_attention(q, k, v, self.cascade, scale)
        if self.kernel == "flex":
            return flex(q, k, v, self.block_mask, scale)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found, _ = sdpa_attention_forward(module, q, k, v, self.mask_11LL, scaling=scale)
        return found  # type: ignore[no-any-return]


def any_mask(device: torch.device) -> Tensor:
    """A mask that attention does not read: transformers makes no mask itself if it is given one with four axes."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


class UnknownToTreesError(ConfigError):
    """The model's attention is not only what mask, positions and `tree` say; the text is part of a sentence."""


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreeAttention | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The implementation `TREE`, with the signature of transformers' interface.

    Raises UnknownToTreesError if a layer does not pass `tree` on, or needs what neither a tree nor "sdpa" computes.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if unknown := sorted(name for name in UNKNOWN if kwargs.get(name) is not None):
        raise UnknownToTreesError(f"its attention has {', '.join(unknown)}, which no kernel of trees computes")
    if tree is None:
        if attention_mask is not None and attention_mask.numel() == 1 < query.shape[2]:  # that of `any_mask`
            raise UnknownToTreesError("its layers do not pass the keyword `tree` on to their attention")
        rows: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return rows
    return tree(module, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


def register() -> str:
    """Register the implementation with transformers and return its name. Only once, because it may be wrapped later."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if TREE not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(TREE, tree_attention_forward)
    AttentionMaskInterface.register(TREE, sdpa_mask)
    return TREE

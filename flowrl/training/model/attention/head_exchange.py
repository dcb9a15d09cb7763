"""Attention of a model whose ranks have a slice of the positions each (Ulysses, arXiv 2309.14509).

Everything except attention works position by position. For attention, the ranks of a group exchange data: each rank
sends its positions of all heads and receives all positions of its heads, so every kernel sees whole sequences. After
the kernel, the results are exchanged back. A forward pass with the keyword `exchange` does that around the
implementation that the model was loaded with, whichever it is, or uses a ring instead of it (`ring`). Without the
keyword nothing changes. Gradient checkpointing repeats a layer with the same keywords, and so repeats the exchanges, in
the same order on all ranks.

Axes: R rows, L positions and l of one rank, h heads, D channels, N ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.training.model.attention.ring import Ring, ring_attention
from flowrl.training.model.attention.sequence_group import SequenceGroup
from flowrl.training.model.attention.sight import Sight

Implementation = Callable[..., tuple[Tensor, Any]]
WITH_BOUNDS = ("flash", "varlen")
"""Parts of names of implementations that separate the sequences of a packed row by their ends, without a mask."""


@dataclass(frozen=True)
class Exchange:
    """The value of the keyword `exchange` in a pass over slices."""

    group: SequenceGroup
    sight: Sight

    def ring(self, query: Tensor, **kwargs: Any) -> Ring:
        """The ring that computes a layer's attention, from the keywords that the layer passes."""
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return Ring(self.group, self.sight, scale, kwargs.get("sliding_window"), kwargs.get("softcap"))


class Exchanging:
    """An implementation of attention in transformers' interface that knows the keyword `exchange`."""

    def __init__(self, inner: Implementation, name: str) -> None:
        self.inner = inner
        self.has_bounds = any(word in name for word in WITH_BOUNDS)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        exchange: Exchange | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        if exchange is None:
            return self.inner(module, query, key, value, attention_mask, **kwargs)
        if exchange.group.kind == "ring":
            assert kwargs.get("tree") is None, "a trainer whose attention is a ring lays out rows"
            return ring_attention(query, key, value, exchange.ring(query, **kwargs)), None
        kwargs.pop("position_ids", None)  # of this rank's slice; kernels would take a restart for a new sequence
        mask = None if self.has_bounds else exchange.sight.mask_11LL(kwargs.get("sliding_window"))
        q, k, v = to_heads(exchange.group, query, key, value)
        with _groups(module, q.shape[1] // k.shape[1]):
            found, _ = self.inner(module, q, k, v, mask, **kwargs)
        attended = to_positions(exchange.group, found)
        rows, heads, positions, _ = query.shape
        assert attended.shape[:3] == (rows, positions, heads), (attended.shape, query.shape)
        return attended, None


def _eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """The "eager" attention of the module's own architecture. It adds a mask and, unlike others, needs one.

    Only some architectures have a soft cap (Gemma 2), and only their own function computes it.
    """
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(
            ~mask, torch.finfo(query.dtype).min
        )
    return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, mask, **kwargs)


def make_exchanging(name: str) -> None:
    """Make transformers' implementation `name` accept the keyword. The name stays, because kernels are chosen by it."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ALL_ATTENTION_FUNCTIONS.get(name, _eager)  # only "eager" is not in the table
    if not isinstance(known, Exchanging):
        AttentionInterface.register(name, Exchanging(known, name))


def to_heads(group: SequenceGroup, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries, keys and values [R, h, l, D] of this rank's positions as [R, h/N, L, D] of its heads, in one exchange.

    Heads of keys are repeated if their number is not a multiple of N, so that each rank has those of its queries.
    """
    repeats = lcm(key.shape[1], group.size) // key.shape[1]
    tensors = [query, *(one.repeat_interleave(repeats, dim=1) if repeats > 1 else one for one in (key, value))]
    parts = [_by_rank(one, group.size) for one in tensors]
    received_NRlX = _exchanged(group, torch.cat(parts, dim=-1))
    whole_RLX = received_NRlX.transpose(0, 1).flatten(1, 2)
    widths = [part.shape[-1] for part in parts]
    return [
        one.view(*one.shape[:2], -1, tensor.shape[-1]).transpose(1, 2).contiguous()
        for one, tensor in zip(torch.split(whole_RLX, widths, dim=-1), tensors, strict=True)
    ]


def to_positions(group: SequenceGroup, attended: Tensor) -> Tensor:
    """[R, L, h/N, D] of this rank's heads as [R, l, h, D] of its positions."""
    rows, length = attended.shape[:2]
    sent_NRlhD = attended.reshape(rows, group.size, length // group.size, *attended.shape[2:]).transpose(0, 1)
    received_NRlhD = _exchanged(group, sent_NRlhD)
    return received_NRlhD.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _by_rank(tensor: Tensor, size: int) -> Tensor:
    """[R, h, l, D] as [N, R, l, h/N·D]: for each rank its heads."""
    rows, heads, length, channels = tensor.shape
    by_rank = tensor.reshape(rows, size, heads // size, length, channels)
    return by_rank.permute(1, 0, 3, 2, 4).flatten(3)


def _exchanged(group: SequenceGroup, tensor_N: Tensor) -> Tensor:
    """Send the nth part to rank n; the part from rank n takes its place. Uses DeepSpeed's operator (NCCL and gloo)."""
    from deepspeed.sequence.layer import _dim_zero_all_to_all, register_all_to_all_group

    register_all_to_all_group(group.process_group)
    received: Tensor = _dim_zero_all_to_all(group.process_group, tensor_N)
    return received


@contextmanager
def _groups(module: nn.Module, queries_a_key: int) -> Iterator[None]:
    """Within this context the module says that `queries_a_key` heads of queries share one head of keys."""
    before = getattr(module, "num_key_value_groups", None)
    if before is None or before == queries_a_key:
        yield
        return
    module.num_key_value_groups = queries_a_key  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before

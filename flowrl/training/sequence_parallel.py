"""Which trainers can divide the positions of a micro-batch among ranks (sequence parallelism). Read without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.training.layouts import tree_obstacle
from flowrl.training.settings import ZeroSettings

MASKED = ("eager", "flex_attention")
"""Implementations of attention that need a mask, which transformers makes for the positions of one rank alone."""


def sequence_problems(
    size: int, zero: ZeroSettings, config: Mapping[str, Any], heads: int | None = None
) -> Iterator[str]:
    """Why a model with this config.json cannot be trained by groups of `size` ranks, as complete sentences.

    `heads` are its attention heads if the config does not say.
    """
    if size <= 1:
        return
    found = f"sequence_parallel_size is {size}"
    if zero.attention in MASKED:
        yield (
            f"{found}, but attention {zero.attention!r} needs a mask over all positions, of which a rank has a part; "
            "choose sdpa, flash attention or varlen"
        )
    if obstacle := tree_obstacle(config):
        yield f"{found}, but {obstacle}; a rank would not see what it needs, so leave it at 1"
    heads = {**config, **(config.get("text_config") or {})}.get("num_attention_heads", heads)
    if heads and heads % size:
        able = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield (
            f"{found}, but the model has {heads} attention heads, of which each rank takes an equal number; "
            f"choose one of {able}"
        )

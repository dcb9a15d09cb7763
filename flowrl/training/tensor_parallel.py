"""Which trainers can divide the matrices of a model among ranks (tensor parallelism). Read without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from flowrl.training.settings import LoRA, ZeroSettings

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys in a config.json that give the number of experts."""


def tensor_problems(
    size: int, zero: ZeroSettings, lora: LoRA, config: Mapping[str, Any], *, sequence: int = 1
) -> Iterator[str]:
    """Why a model with this config.json cannot be trained by groups of `size` ranks, as complete sentences.

    `sequence` is the trainer's `sequence_parallel_size`.
    """
    if size <= 1:
        return
    found = f"tensor_parallel_size is {size}"
    if sequence > 1:
        yield f"{found}, and sequence_parallel_size is {sequence}; ranks divide matrices or positions, so set one to 1"
    if zero.stage == 3:
        yield (
            f"{found}, but ZeRO stage 3 shards every weight itself; set the stage to 2, 1 or 0 (--zero.stage 2), or "
            "leave tensor_parallel_size at 1"
        )
    if zero.optimizer == "muon":
        yield f"{found}, but muon orthogonalizes whole matrices, of which a rank has parts; choose adamw or sgd"
    if lora.rank:
        yield f"{found}, but adapters are not divided among ranks; leave it at 1, or train without an adapter"
    yield from _size_problems(found, size, {**config, **(config.get("text_config") or {})})


def _size_problems(found: str, size: int, config: Mapping[str, Any]) -> Iterator[str]:
    if any(config.get(name) for name in EXPERTS):
        yield f"{found}, but the experts of a mixture are not divided among ranks; leave it at 1"
        return
    heads = config.get("num_attention_heads")
    if not heads:
        return
    keys, wide = config.get("num_key_value_heads") or heads, config.get("intermediate_size") or 0
    divisor = gcd(heads, keys, wide)
    if divisor % size:
        able = ", ".join(str(n) for n in range(1, divisor + 1) if divisor % n == 0)
        yield (
            f"{found}, but the model has {heads} attention heads, {keys} heads of keys and {wide} features in a "
            f"feed-forward layer, which the ranks have to share equally; choose one of {able}"
        )

"""Which trainers can divide the positions of a micro-batch among ranks (sequence parallelism). Read without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from flowrl.training.layouts import tree_obstacle
from flowrl.training.settings import SequenceKind, ZeroSettings

MASKED = "flex_attention"
"""The attention implementation whose mask transformers makes itself, and only for the positions of one rank."""
WINDOWED = frozenset(
    [
        "cohere2",
        "exaone4",
        "gemma2",
        "gemma3_text",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
        "vaultgemma",
    ]
)
"""Model types of transformers 5 that pass each layer's window, and its soft cap if it has one, to the attention
function. Other types rely on the mask that transformers makes, which covers only the positions of one rank."""


def sequence_problems(
    size: int,
    zero: ZeroSettings,
    config: Mapping[str, Any],
    heads: int | None = None,
    *,
    kind: SequenceKind = "ulysses",
) -> Iterator[str]:
    """Why a model with this config.json cannot be trained by groups of `size` ranks, as complete sentences.

    `heads` is the number of its attention heads, used if the config does not have it.
    """
    if kind not in get_args(SequenceKind):
        yield f"sequence_parallel_kind is {kind!r}; choose one of {', '.join(get_args(SequenceKind))}"
    if size <= 1:
        if kind == "ring":
            yield f"sequence_parallel_kind is {kind!r}, but sequence_parallel_size is 1, so no ranks share positions"
        return
    found = f"sequence_parallel_size is {size}"
    if kind == "ring" and zero.attention not in (None, "sdpa"):
        yield (
            f"attention is {zero.attention!r}, but ring attention has its own kernels; leave it out, or set "
            "sequence_parallel_kind to ulysses"
        )
    elif zero.attention == MASKED:
        yield (
            f"{found}, but attention {zero.attention!r} needs a mask over all positions, of which a rank has some; "
            "choose sdpa, flash attention or varlen"
        )
    if obstacle := _obstacle(config):
        yield f"{found}, but {obstacle}; a rank would not see what it needs, so leave it at 1"
    heads = {**config, **(config.get("text_config") or {})}.get("num_attention_heads", heads)
    if kind == "ulysses" and heads and heads % size:
        able = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield (
            f"{found}, but the model has {heads} attention heads, which the ranks have to share equally; "
            f"choose one of {able}, or set sequence_parallel_kind to ring"
        )


def _obstacle(config: Mapping[str, Any]) -> str:
    """Why attention cannot be computed from slices, as part of a sentence; "" if it can.

    Slices are possible wherever trees are. They are also possible with windows and soft caps that the model passes to
    its attention function, because that function gets whole rows on every rank.
    """
    text = {**config, **(config.get("text_config") or {}), "text_config": None}
    if text.get("model_type") in WINDOWED:
        kinds = ["full_attention" if kind == "sliding_attention" else kind for kind in text.get("layer_types") or ()]
        text |= {"layer_types": kinds, "sliding_window": None, "attn_logit_softcapping": None}
    return tree_obstacle(text)

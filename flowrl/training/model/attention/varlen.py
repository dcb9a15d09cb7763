"""Attention within the sequences of a packed row, by torch's own variable-length kernel (`torch.nn.attention.varlen`).

It is torch's built-in flash attention, so no further package is needed. It runs on GPUs of compute capability 8.0 or
newer, in 16 bits. Axes: L places of the row, D channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError

VARLEN = "flowrl_varlen"
"""Name of the implementation in transformers' interface."""
CAPABILITY = (8, 0)


def require_varlen(device: torch.device) -> None:
    """Raise ConfigError unless the kernel runs on `device`."""
    if device.type != "cuda":
        raise ConfigError(f"attention 'varlen' runs on GPUs only, and this process computes on {device}; choose sdpa")
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        raise ConfigError(
            f"attention 'varlen' needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, and this one has "
            f"{found[0]}.{found[1]}; choose sdpa"
        )


def require_plain_scores(config: Any) -> None:
    """Raise ConfigError if a model with this config has attention scores that the kernel cannot compute."""
    text = config.get_text_config()
    obstacles = {
        "attn_logit_softcapping": "a soft cap on its attention scores",
        "attention_chunk_size": "attention in chunks",
    }
    found = [what for name, what in obstacles.items() if getattr(text, name, None)]
    if text.model_type == "gpt_oss":
        found.append("attention sinks")
    if found:
        raise ConfigError(
            f"attention 'varlen' does not know {found[0]}, which {text.model_type} has; leave --zero.attention out"
        )


def varlen_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The implementation `VARLEN`, with the signature of transformers' interface.

    From [1, heads, L, D] to [1, L, heads, D]; keys and values may have fewer heads.
    """
    from torch.nn.attention.varlen import varlen_attn

    assert cu_seq_lens_q is not None and max_length_q is not None, "rows are packed wherever this attention is chosen"
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    found: Any = varlen_attn(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return found[None], None


def register() -> str:
    """Register the implementation with transformers and return its name. Only once, because it may be wrapped later."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if VARLEN not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(VARLEN, varlen_attention_forward)
    AttentionMaskInterface.register(VARLEN, flash_attention_mask)  # makes no mask: rows are full
    return VARLEN

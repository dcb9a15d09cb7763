"""Models with random weights, made on the spot: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flowrl.messages import Int32

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
"""0.3 billion parameters."""


def make_small_model(path: Path, *, large: bool = False, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a Qwen2 model with a character tokenizer to `path`. Weights of equal seeds are equal."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from flowrl.models.tokens.characters import character_tokenizer

    tokenizer = character_tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        **(LARGE if large else SMALL),
        vocab_size=32_000 if large else 320,
        num_key_value_heads=4 if large else 2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.02 if large else 0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
    )
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def random_tokens(lengths: list[int], *, seed: int = 0, vocabulary: int = 256) -> list[Int32]:
    """A random sequence of each length."""
    draw = np.random.default_rng(seed)
    return [draw.integers(5, vocabulary, length).astype(np.int32) for length in lengths]


def all_masks(tokens: list[Int32]) -> list[Any]:
    """Masks under which every token counts."""
    return [np.ones(len(ids), np.bool_) for ids in tokens]

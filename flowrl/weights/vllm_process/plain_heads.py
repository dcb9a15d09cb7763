"""Prevents a crash of vLLM on CPU when adapters are served and logprobs of a prompt's tokens are requested.

vLLM adds the adapter of the output layer to all logits, with one row of its table for each token that is sampled. The
logits of a prompt's tokens have more rows than that, which on CPU raises an error that ends the engine.

flowrl's adapters leave the output layer as it is, so nothing has to be added.
"""

from __future__ import annotations

from typing import Any


def keep_heads_plain(wrapper: Any) -> None:
    """`wrapper` is vLLM's class that computes adapters."""
    wrapper.add_lora_logits = _add_nothing


def _add_nothing(*args: Any, **kwargs: Any) -> None:
    pass

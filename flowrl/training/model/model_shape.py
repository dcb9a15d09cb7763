"""The sizes of a causal language model, from its config.json, and the number of parameters that follows from them.

It covers decoders with gated feed-forward layers and RMS norms: Llama, Qwen, Mistral and their mixtures of experts. No
weights are needed, so a config.json is enough for a model that is not on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
BIASED = ("qwen2", "qwen2_moe")
"""Model types whose projections of query, key and value have biases."""
NORMED = ("qwen3", "qwen3_moe")
"""Model types with a norm of each head's query and key."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

LOGITS_BYTES = 128 << 20
"""Size of one chunk's logits in fp32. Measured on a CPU: smaller chunks, which fit into its cache, are not faster."""
LOGITS_SHARE = 128
"""On a GPU a chunk may take the memory divided by this number: 640 MiB of 80 GiB."""


def logits_bytes(device_bytes: int) -> int:
    """Size of one chunk's logits on a device with that much memory, 0 for a CPU."""
    return max(LOGITS_BYTES, device_bytes // LOGITS_SHARE)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model, in its config's words."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    """Width of a feed-forward layer; of one expert in a mixture."""
    vocab: int
    tied: bool = False
    """Whether the output layer is the embedding."""
    experts: int = 0
    """Number of experts of a layer; 0: no mixture."""
    active_experts: int = 1
    """Number of experts that compute a token."""
    biased: bool = False
    normed: bool = False
    dtype: str = "bfloat16"
    """Type in which the model is stored."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        """The shape that a config.json describes. Raises ConfigError, naming `where`, if it lacks a size."""
        config = {**config, **(config.get("text_config") or {})}
        if lacking := [name for name in NEEDED if not isinstance(config.get(name), int)]:
            raise ConfigError(f"{where} has no {lacking[0]}; the memory of a model is estimated from its sizes")
        kind, heads, hidden = str(config.get("model_type", "")), config["num_attention_heads"], config["hidden_size"]
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        wide = config.get("intermediate_size") or 4 * hidden
        return cls(
            hidden=hidden,
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            feed_forward=(config.get("moe_intermediate_size") or wide) if experts else wide,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=experts,
            active_experts=config.get("num_experts_per_tok") or 1,
            biased=bool(config.get("attention_bias", kind in BIASED)),
            normed=kind in NORMED,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        )

    @property
    def query(self) -> int:
        """Width of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all heads' keys; of the values too."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the linear layers of one decoder layer."""
        attention = ((self.hidden, self.query), (self.hidden, self.key), (self.hidden, self.key))
        expert = ((self.hidden, self.feed_forward),) * 2 + ((self.feed_forward, self.hidden),)
        return (*attention, (self.query, self.hidden), *(expert * max(1, self.experts)))

    @property
    def layer_vectors(self) -> int:
        """Number of parameters of one decoder layer that are not in matrices, plus those of a mixture's router."""
        biases = self.query + 2 * self.key if self.biased else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.normed else 0)
        return norms + biases + self.hidden * self.experts

    @property
    def layer_parameters(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.linears) + self.layer_vectors

    @property
    def parameters(self) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    @property
    def largest_matrix(self) -> int:
        return max(self.vocab * self.hidden, *(inputs * outputs for inputs, outputs in self.linears))

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest parameter; in a mixture, two matrices of all experts of a layer are one parameter."""
        return max(self.largest_matrix, 2 * self.hidden * self.feed_forward * self.experts)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA adapters of every linear layer but the output layer."""
        return rank * self.layers * sum(inputs + outputs for inputs, outputs in self.linears)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Key and value of one token in all layers."""
        return 2 * self.layers * self.key * element_bytes

    @property
    def element_bytes(self) -> int:
        return BYTES.get(self.dtype, 2)


def read_shape(path: Path) -> ModelShape | None:
    """The shape of the model in a directory, or of a config.json; None if there is none that can be read."""
    file = path if path.suffix == ".json" else path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    try:
        return ModelShape.of_config(config, str(file))
    except ConfigError:
        if path.suffix == ".json":  # a config.json is named only for its sizes
            raise
        return None

"""The sizes of a causal language model, from its config.json, and estimates of the bytes that a rank takes.

It covers decoders with gated feed-forward layers and RMS norms: Llama, Qwen, Mistral and their mixtures of experts. No
weights are needed, so a config.json is enough for a model that is not on this machine.

Estimates the bytes that one trainer rank takes, from model sizes and settings; docs/memory.md explains them.

Ψ parameters, A of them trained (all, or those of adapters), b bytes an element, n tokens of a micro-batch, N ranks. If
the matrices of layers are divided, Ψ and A are those of one rank, and N is the number of copies of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.training.settings import LoRA, SequenceKind, ZeroSettings

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
    def query_width(self) -> int:
        """Width of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of all heads' keys; of the values too."""
        return self.kv_heads * self.head_dim

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the linear layers of one decoder layer."""
        attention = ((self.hidden, self.query_width), (self.hidden, self.key_width), (self.hidden, self.key_width))
        expert = ((self.hidden, self.feed_forward),) * 2 + ((self.feed_forward, self.hidden),)
        return (*attention, (self.query_width, self.hidden), *(expert * max(1, self.experts)))

    @property
    def layer_vectors(self) -> int:
        """Number of parameters of one decoder layer that are not in matrices, plus those of a mixture's router."""
        biases = self.query_width + 2 * self.key_width if self.biased else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.normed else 0)
        return norms + biases + self.hidden * self.experts

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        of_layer = sum(inputs * outputs for inputs, outputs in self.linear_shapes) + self.layer_vectors
        return self.layers * of_layer + embeddings + self.hidden

    @property
    def largest_matrix(self) -> int:
        return max(self.vocab * self.hidden, *(inputs * outputs for inputs, outputs in self.linear_shapes))

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest parameter; in a mixture, two matrices of all experts of a layer are one parameter."""
        return max(self.largest_matrix, 2 * self.hidden * self.feed_forward * self.experts)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA adapters of every linear layer but the output layer."""
        return rank * self.layers * sum(inputs + outputs for inputs, outputs in self.linear_shapes)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Key and value of one token in all layers."""
        return 2 * self.layers * self.key_width * element_bytes

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


BUCKET_BYTES = 4 * 50_000_000
"""DeepSpeed's buffer for gradients that are about to be reduced, in fp32 (`BUCKET_ELEMENTS` of ds_config.py)."""
LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's `stage3_max_live_parameters`: the most gathered parameters that it keeps."""
SCORING_LIVE = 200_000_000
"""The most gathered parameters that a rank of a sharded scoring model keeps, unless one layer is larger."""
PERSISTENT_ELEMENTS = 100_000
"""DeepSpeed's `stage3_param_persistence_threshold`."""
QUANTIZED_BYTES = {"none": None, "nf4": 0.52, "int8": 1.02}
"""Bytes of a quantized parameter, including its share of the scales (bitsandbytes: blocks of 64, nested)."""
MOMENTS_BYTES = {"adamw": 8, "muon": 8, "sgd": 0}
"""Bytes of the optimizer's fp32 state for each trained parameter; muon's matrices need half of that."""


@dataclass(frozen=True)
class TrainerModel:
    """One rank's model, and how it is trained."""

    shape: ModelShape
    zero: ZeroSettings
    lora: LoRA
    ranks: int
    scalar: bool = False
    """A scalar head in place of the output layer."""
    device_bytes: int = 0
    """Memory of the rank's GPU; 0: the rank has no GPU, or its memory is unknown."""
    sliced: int = 1
    """Number of ranks that share a micro-batch; each has an equal number of positions."""
    kind: SequenceKind = "ulysses"
    """How these ranks compute attention."""
    tensor: int = 1
    """Number of ranks that share a micro-batch; each has an equal part of the matrices of all layers."""

    @property
    def element_bytes(self) -> int:
        return BYTES[self.zero.dtype]

    @property
    def zero_stage(self) -> int:
        return self.zero.effective_stage(self.ranks)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model."""
        head = self.shape.vocab * self.shape.hidden if self.scalar and not self.shape.tied else 0
        return self.shape.num_parameters - head

    @property
    def num_copies(self) -> int:
        """Number of copies of the model. ZeRO shards among the ranks that have the same part of the matrices."""
        return max(1, self.ranks // self.tensor)

    @property
    def _tensor_part(self) -> ModelShape:
        """The shape of this rank's part of the matrices.

        Heads and feed-forward are divided by `tensor` (`tensor_problems` checks that they can be); hidden size, layers
        and vocabulary are whole. ZeRO's sharding is not included.
        """
        shape, size = self.shape, self.tensor
        if size == 1:
            return shape
        wide = shape.feed_forward // size
        return replace(shape, heads=shape.heads // size, kv_heads=shape.kv_heads // size, feed_forward=wide)

    @property
    def num_trained(self) -> int:
        """Number of trained parameters of which this rank has a ZeRO shard: those of adapters, or all, without the
        parts of matrices that other ranks have."""
        if self.lora.rank:
            return self.shape.adapter_parameters(self.lora.rank)
        return self.num_parameters - self.shape.num_parameters + self._tensor_part.num_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that this rank keeps.

        At stage 3 it keeps its shard, and all of the parameters that are so small that stage 3 keeps them whole.
        """
        quantized, matrices = QUANTIZED_BYTES[self.lora.quantize], [i * o for i, o in self.shape.linear_shapes]
        linear = self.shape.layers * sum(matrices)
        if quantized is None:
            total = (
                self.num_parameters - self.shape.num_parameters + self._tensor_part.num_parameters
            ) * self.element_bytes
        else:
            total = int(linear * quantized) + (self.num_parameters - linear) * self.element_bytes
        if self.lora.rank:
            total += self.num_trained * self.element_bytes
        if self.zero_stage < 3:
            return total
        small = sum(size for size in matrices if size <= PERSISTENT_ELEMENTS) + self.shape.layer_vectors
        return -(-total // self.ranks) + (small * self.shape.layers + self.shape.hidden) * self.element_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole parameters that stage 3 gathers for a pass."""
        return min(self.num_parameters, LIVE_PARAMETERS) * self.element_bytes if self.zero_stage == 3 else 0

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that optimizer steps need in addition to weights and gradients: in fp32, the optimizer's moments, a
        copy of the trained parameters, and their moving average if one is kept. Stage 0 shards nothing and has no
        copy, and neither have weights in float32 at stages 1 and 2: they are their own masters, except under Muon."""
        moments, average = MOMENTS_BYTES[self.zero.optimizer] * self.num_trained, 4 * self.num_trained
        if self.zero_stage == 0:
            return moments + (average if self.zero.ema_decay else 0)
        master = -(-4 * self.num_trained // self.num_copies)
        kind = (self.zero.dtype, self.zero.offload)
        if kind == ("float32", "none") and self.zero_stage < 3 and self.zero.optimizer != "muon":
            master = 0
        return master + -(-moments // self.num_copies) + (-(-average // self.num_copies) if self.zero.ema_decay else 0)

    @property
    def gradient_bytes(self) -> int:
        """fp32 sums of this rank's shard; below stage 2 of all, and at stage 1 also gradients in the model's dtype."""
        if self.zero_stage < 2:
            return (4 + (self.element_bytes if self.zero_stage else 0)) * self.num_trained
        return -(-4 * self.num_trained // self.num_copies)

    @property
    def offload_bytes(self) -> int:
        """With offload, in host memory: a second copy of the gradients, which the optimizer reads. Below stage 3 also
        this rank's part of the weights, and the largest gradient."""
        if self.zero.offload == "none":
            return 0
        copy = -(-4 * self.num_trained // self.num_copies)
        if self.zero_stage == 3:
            return copy
        return copy - (-self.element_bytes * self.num_trained // self.num_copies) + 4 * self.shape.largest_matrix

    @property
    def bucket_bytes(self) -> int:
        return BUCKET_BYTES if self.zero_stage >= 2 else 0

    def activation_bytes(self, tokens: int) -> int:
        """What a forward over a micro-batch keeps for its backward, plus the most memory that computing adds."""
        tokens, part = -(-tokens // self.sliced), self._tensor_part
        per_layer = tokens * (
            layer_bytes(part, self.element_bytes)
            + exchanged_bytes(self.shape, self.element_bytes, self.sliced, self.kind)
        )
        feed_forward = self.element_bytes * (2 * part.feed_forward * self.shape.active_experts + self.shape.hidden)
        ring = ring_bytes(self.shape, self.element_bytes) if self.sliced > 1 and self.kind == "ring" else 0
        # Gradients of two of the largest matrices of a layer wait to be added to what was accumulated.
        matrix_gradients = 2 * self.element_bytes * max(inputs * outputs for inputs, outputs in part.linear_shapes)
        working = tokens * max(feed_forward, ring) + matrix_gradients
        head = 0 if self.scalar else head_bytes(self.shape, self.element_bytes, tokens, self.device_bytes)
        if self.zero.gradient_checkpointing:
            kept = tokens * self.element_bytes * self.shape.hidden * self.shape.layers
            return kept + max(per_layer + working, head)
        return per_layer * self.shape.layers + max(working, head)


def layer_bytes(shape: ModelShape, element: int) -> int:
    """Activations of one token that one decoder layer keeps: norms (also in fp32), attention, feed-forward."""
    norms = (16 if element == 2 else 24) * shape.hidden + 8
    attention = element * (2 * shape.query_width + 2 * shape.key_width) + 4 * shape.heads
    feed_forward = 4 * element * shape.feed_forward * shape.active_experts
    return norms + attention + feed_forward


def exchanged_bytes(shape: ModelShape, element: int, ranks: int, kind: SequenceKind = "ulysses") -> int:
    """What attention also keeps of one token if `ranks` share the positions: the result on its way back, and the keys
    and values that are repeated if their number of heads is no multiple of `ranks`. A ring keeps nothing more."""
    if ranks == 1 or kind == "ring":
        return 0
    repeated = lcm(shape.kv_heads, ranks) // shape.kv_heads - 1
    return element * (shape.query_width + 2 * shape.key_width * repeated)


def ring_bytes(shape: ModelShape, element: int) -> int:
    """The most that the backward of ring attention keeps of one token: two blocks of keys and values, two of their
    gradients in fp32, the queries' gradient in fp32, and what the kernel of a block needs."""
    return element * (shape.query_width + 8 * shape.key_width) + 8 * shape.query_width + 16 * shape.key_width


def head_bytes(shape: ModelShape, element: int, tokens: int, device_bytes: int = 0) -> int:
    """The last norm, four fp32 tensors of a chunk's logits, and the output layer's gradient in fp32 and its dtype."""
    chunk = min(tokens, max(1, logits_bytes(device_bytes) // (4 * shape.vocab)))
    last_norm = (8 if element == 2 else 12) * shape.hidden * tokens
    return last_norm + 16 * shape.vocab * chunk + (4 + element) * shape.vocab * shape.hidden


def scoring_gathered(shape: ModelShape, element: int) -> int:
    """Bytes of the whole parameters that a rank of a sharded scoring model gathers for a pass."""
    return min(shape.num_parameters, max(SCORING_LIVE, shape.vocab * shape.hidden)) * element


def scoring_bytes(shape: ModelShape, element: int, tokens: int, device_bytes: int = 0) -> int:
    """The most that a forward without gradients needs: one layer, or three fp32 tensors of a chunk's logits."""
    wide = shape.feed_forward * shape.active_experts
    layer = tokens * (3 * element * wide + (4 + 3 * element) * shape.hidden)
    chunk = min(tokens, max(1, logits_bytes(device_bytes) // (4 * shape.vocab)))
    return max(layer, element * tokens * shape.hidden + 12 * shape.vocab * chunk)

"""What a model's layers allow, from its config.json and the settings: trees of shared prefixes, and ranks that share a
micro-batch by positions (sequence parallelism) or by matrices (tensor parallelism).

Plain data that needs no torch: `flowrl check` and the batcher need the same answer as the process with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, get_args

from flowrl.messages.forest import Forest
from flowrl.training.settings import Attention, Layout, LoRA, SequenceKind, ZeroSettings

Placing = Literal["padded", "packed", "tree", "auto"]
"""How one pass is laid out, see `flowrl.training.model.row_layout`. auto: tree if that saves enough tokens."""
FULL = {"full_attention", "attention"}
PLAIN_KEYS = ("layer_types", "sliding_window", "layers_block_type")
MIXED_BY_DEFAULT = frozenset(
    [
        "afmoe",
        "axk2",
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
        "cwm",
        "deepseek_v32",
        "deepseek_v4",
        "dots1",
        "exaone4",
        "exaone_moe",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma3n",
        "gemma3n_text",
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "gemma4_unified_text",
        "glm_moe_dsa",
        "gpt_neo",
        "gpt_oss",
        "granite_swa",
        "granitemoe_swa",
        "hy_v4",
        "inkling_text",
        "kimi_linear",
        "laguna",
        "llama4",
        "llama4_text",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "ministral",
        "mistral",
        "modernbert-decoder",
        "moshi",
        "olmo3",
        "qwen4_exp",
        "vaultgemma",
        "zaya",
    ]
)
"""Model types of transformers 5 in which some layers have no full attention, unless the config says otherwise."""
OWN_ATTENTION = frozenset(
    [
        "bart",
        "big_bird",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "blt",
        "codegen",
        "cpmant",
        "ctrl",
        "falcon",
        "git",
        "gpt_neo_japanese",
        "gptj",
        "marian",
        "mbart",
        "megatron-bert",
        "musicgen",
        "musicgen_melody",
        "mvp",
        "openai-gpt",
        "pegasus",
        "plbart",
        "prophetnet",
        "reformer",
        "rembert",
        "roformer",
        "trocr",
        "whisper",
        "xglm",
        "xlm",
        "xlnet",
    ]
)
"""Model types whose classes bypass transformers' attention interface, or take no position ids."""
SILENT_LAYERS = {"nemotron", "stablelm"}
"""Model types whose layers accept keywords but do not pass them on to their attention."""
WITH_SINKS = frozenset(
    ["deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "inkling", "inkling_text", "mimo_v2_flash"]
)
"""Model types that, besides mask and positions, add a sink or a bias to attention scores or to their softmax."""
WITH_ALIBI = {"bloom", "mpt"}
RECURRENT = frozenset(
    [
        "mamba",
        "mamba2",
        "falcon_mamba",
        "falcon_h1",
        "rwkv",
        "recurrent_gemma",
        "xlstm",
        "jamba",
        "zamba",
        "zamba2",
        "bamba",
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen4_exp_text",
    ]
)
RECURRENT_KEYS = ("ssm_cfg", "state_size", "mamba_d_state", "ssm_state_size", "conv_L_cache", "linear_num_key_heads")


@dataclass(frozen=True)
class Decision:
    """The layout of a model's passes."""

    layout: Layout
    """auto: trees where sharing prefixes saves enough tokens. tree: always trees. rows: never trees."""
    reason: str = ""
    """Why passes have no trees, as part of a sentence; "" if they have, or if rows were asked for."""

    @property
    def has_trees(self) -> bool:
        return self.layout != "rows"


def decide_layout(
    asked: Layout,
    config: Mapping[str, Any],
    *,
    attention: Attention | None = None,
    packing: bool | None = None,
    kind: SequenceKind = "ulysses",
) -> Decision:
    """The layout of a model with this config.json and these settings; {} means a model with plain attention."""
    if asked == "rows":
        return Decision("rows")
    if kind == "ring":
        reason = "ring attention computes rows"
    elif packing:
        reason = "packing concatenates sequences into one row"
    elif attention not in (None, "sdpa"):
        reason = f"attention {attention!r} has its own kernels; trees need sdpa"
    else:
        reason = find_tree_obstacle(config)
    return Decision("rows", reason) if reason else Decision(asked)


def decide_trainer(zero: ZeroSettings, config: Mapping[str, Any], kind: SequenceKind) -> Decision:
    """The layout of the passes of a trainer with that `sequence_parallel_kind`."""
    return decide_layout(zero.layout, config, attention=zero.attention, packing=zero.packing, kind=kind)


def explain_refused_tree(asked: Layout, decision: Decision) -> list[str]:
    """A complete sentence if trees were asked for but are not possible; else an empty list."""
    if asked != "tree" or decision.has_trees:
        return []
    return [f"layout is 'tree', but {decision.reason}; set layout to auto, which keeps rows where it has to"]


def find_tree_obstacle(config: Mapping[str, Any]) -> str:
    """Why a model with this config.json cannot compute trees, as part of a sentence; "" if it can.

    A tree needs attention in which only the mask and the positions decide what a token sees.
    """
    text = {**config, **(config.get("text_config") or {})}
    name = f"{text.get('model_type', 'the model')} has"
    if text.get("model_type") in RECURRENT or any(text.get(key) for key in RECURRENT_KEYS):
        layers = "recurrent layers (state-space, convolution or linear attention)"
        return f"{name} {layers}, whose state runs along a whole row"
    kinds = {str(kind) for key in ("layer_types", "layers_block_type", "block_types") for kind in text.get(key) or ()}
    if others := sorted(kinds - FULL):
        return f"{name} layers with {', '.join(others).replace('_', ' ')}"
    if text.get("model_type") in MIXED_BY_DEFAULT and not any(key in text for key in PLAIN_KEYS):
        return f"{name} layers whose attention does not cover all tokens, unless its config.json says otherwise"
    if text.get("model_type") in OWN_ATTENTION or "auto_map" in config:
        return f"{name} attention that does not go through transformers' attention interface"
    if text.get("model_type") in SILENT_LAYERS:
        return f"{name} layers that pass no keyword on to their attention"
    if text.get("model_type") in WITH_SINKS:
        return f"{name} attention sinks or biases"
    if text.get("model_type") in WITH_ALIBI or text.get("alibi"):
        return f"{name} ALiBi, which takes distances from the order in a row"
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return f"{name} sliding-window attention"
    if text.get("attn_logit_softcapping") is not None:
        return f"{name} a soft cap on its attention scores"
    if text.get("attention_chunk_size") or text.get("index_topk"):
        return f"{name} chunked or sparse attention"
    if "local" in str(text.get("attention_types", "")) or "local" in str(text.get("attention_layers", "")):
        return f"{name} local attention"
    return ""


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
    if obstacle := find_slice_obstacle(config):
        yield f"{found}, but {obstacle}; a rank would not see what it needs, so leave it at 1"
    heads = {**config, **(config.get("text_config") or {})}.get("num_attention_heads", heads)
    if kind == "ulysses" and heads and heads % size:
        able = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield (
            f"{found}, but the model has {heads} attention heads, which the ranks have to share equally; "
            f"choose one of {able}, or set sequence_parallel_kind to ring"
        )


def find_slice_obstacle(config: Mapping[str, Any]) -> str:
    """Why attention cannot be computed from slices, as part of a sentence; "" if it can.

    Slices are possible wherever trees are. They are also possible with windows and soft caps that the model passes to
    its attention function, because that function gets whole rows on every rank.
    """
    text = {**config, **(config.get("text_config") or {}), "text_config": None}
    if text.get("model_type") in WINDOWED:
        kinds = ["full_attention" if kind == "sliding_attention" else kind for kind in text.get("layer_types") or ()]
        text |= {"layer_types": kinds, "sliding_window": None, "attn_logit_softcapping": None}
    return find_tree_obstacle(text)


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
    config = {**config, **(config.get("text_config") or {})}
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


Kernel = Literal["dense", "cascade", "flex"]
DENSE_PLACES = 96
"""Most places of a forest for one dense mask on a CPU. It is faster at 114 in float32, and slower at 38 in bfloat16."""
RULE = (
    f"on a CPU one mask up to {DENSE_PLACES} tokens, above that a cascade of shared prefixes; on a GPU flex attention"
)


def possible_kernels(device: str) -> tuple[Kernel, ...]:
    """The kernels that the rule chooses from on a device of this type."""
    return ("flex",) if device == "cuda" else ("dense", "cascade")


def choose_kernel(forest: Forest, device: str) -> Kernel:
    """The kernel for `forest` on a device of this type."""
    if device == "cuda":
        return "flex"
    return "dense" if len(forest) <= DENSE_PLACES else "cascade"

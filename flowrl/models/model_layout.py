"""Decides the layout of a model's passes, in the same way for `flowrl check`, the batcher and the process with the
model, from the model's shape as far as it is known without loading anything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.models.model_files import examine_json, known_config_file
from flowrl.models.policy import CHARACTER_MODELS, Policy
from flowrl.training.layouts import RULE, Decision, decide_layout, decide_trainer, sequence_problems, tensor_problems
from flowrl.training.memory import ModelShape, read_shape
from flowrl.training.settings import Head, Layout, LoRA, SequenceKind, ZeroSettings

CHARACTER_VOCABULARY = 261
CHARACTER_SHAPE = ModelShape(128, 2, 4, 4, 32, 256, CHARACTER_VOCABULARY, tied=True, biased=True, dtype="float32")
SMOLLM2_SHAPE = ModelShape(576, 30, 9, 3, 64, 1536, 49152, tied=True)


def known_shape(policy: Policy) -> ModelShape | None:
    """The shape of a built-in model, of a model directory, or of a config.json; None if there is none to read.

    A path to a config.json names a model that is not on this machine, only for `flowrl check`.
    """
    if policy.model in CHARACTER_MODELS:
        return CHARACTER_SHAPE
    if policy.model == "smollm2":
        return SMOLLM2_SHAPE
    file = known_config_file(policy)
    return None if file is None else read_shape(file if file == policy.path else file.parent)


def trainer_layout(policy: Policy, zero: ZeroSettings, kind: SequenceKind) -> Decision:
    """The layout of the passes of a trainer of `policy` with that `sequence_parallel_kind`."""
    config = known_config(policy)
    return Decision("rows", UNREAD) if config is None else decide_trainer(zero, config, kind)


def shared_problems(
    policy: Policy, zero: ZeroSettings, lora: LoRA, *, sequence: int, tensor: int, kind: SequenceKind
) -> list[str]:
    """Why ranks of a trainer of `policy` cannot share their micro-batches in such groups, as complete sentences."""
    shape, config = known_shape(policy), known_config(policy) or {}
    if shape is not None:
        numbers = {
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.feed_forward,
            "num_experts": shape.experts,
        }
        config = {**numbers, **config}
    return [
        *sequence_problems(sequence, zero, config, kind=kind),
        *tensor_problems(tensor, zero, lora, config, sequence=sequence),
    ]


def shared_notes(*, sequence: int, tensor: int, kind: SequenceKind) -> list[str]:
    """Lines of `flowrl check` about ranks that share their micro-batches."""
    found = []
    if sequence > 1:
        attend = "attention as a ring" if kind == "ring" else "some heads each in attention"
        found.append(f"each {sequence} ranks share their micro-batches, a slice of the positions each, {attend}")
    if tensor > 1:
        found.append(f"each {tensor} ranks share their micro-batches, a part of every layer's matrices each")
    return found


def balance_problems(policy: Policy, coef: float, head: Head, size: int) -> Iterator[str]:
    """Why a trainer of `policy`, with groups of `size` ranks, cannot balance experts, as complete sentences."""
    shape, found = known_shape(policy), f"router_aux_loss_coef is {coef}"
    if not 0 <= coef < math.inf:
        yield f"{found}; it has to be a finite number of at least 0"
    elif coef and shape is not None and not shape.experts:
        yield f"{found}, but the model is no mixture of experts; set it to 0"
    elif coef and head == "scalar":
        yield f"{found}, but a model with a scalar head has no load-balancing loss; set it to 0"
    elif coef and size > 1:
        yield f"{found}, but ranks that share a micro-batch route a part of it each; set sequence_parallel_size to 1"


def scoring_layout(policy: Policy, asked: Layout) -> Decision:
    """The layout of the passes of a node that scores with `policy`."""
    config = known_config(policy)
    return Decision("rows", UNREAD) if config is None else decide_layout(asked, config)


UNREAD = "the model's config.json cannot be read here"


def known_config(policy: Policy) -> Mapping[str, Any] | None:
    """The config.json of the model; {} for a built-in model, which needs no special treatment; None if it cannot be
    read."""
    if policy.built_in:
        return {}
    file = known_config_file(policy)
    if file is None:
        return None
    config, defect = examine_json(file)
    return None if defect else config


def layout_note(decision: Decision) -> str:
    """A line of `flowrl check` about a layout."""
    if decision.has_trees:
        return f"prefixes that sequences share are computed once ({RULE})"
    return f"a row is computed for each sequence, because {decision.reason or 'layout is rows'}"

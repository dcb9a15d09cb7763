"""Batches, models and cases shared by the gang test and the rank process it starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.messages import Batch, Trainable
from flowrl.training.settings import Layout

VOCABULARY = 40
TEMPERATURE = 0.8
LR = 0.05
BATCHES = 3
FIRST = 2
"""The version that the first batch of a case updates, so that its oldest tokens are of version 0."""


@dataclass(frozen=True)
class Case:
    """One way to train: an objective, and how the work is cut up."""

    name: str
    objective: dict[str, Any] = field(default_factory=dict)
    token_budget: int = 60
    optimizer_steps: int = 1
    epochs: int = 1
    mask_staleness: int = -1
    stage: int = 3
    clip: float = 0.0
    tied: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    """Further ZeroSettings."""
    layout: Layout = "rows"
    """Of trainer and batch. In a tree the samples of a group share their prompt, or the beginning of it."""
    dense_places: int | None = None
    """The most places for which the rule chooses a dense mask; None: its own."""

    pieces: tuple[tuple[int, ...], ...] = ()
    """Of each batch, the samples in the pieces before its last; (): it comes whole."""

    @property
    def half(self) -> bool:
        return self.settings.get("dtype") == "bfloat16"


PIECES = ((3, 2), (5,), (3, 4))
"""Whole groups, one of them more than a rank can share, and a last piece without samples."""
CASES = (
    Case("ppo_tis"),
    Case("one_micro_batch", token_budget=0),
    Case("untied", tied=False),
    Case("clipped_gradient", clip=0.05),
    Case("stale_masked", mask_staleness=1, token_budget=35),
    Case("optimizer_steps", optimizer_steps=3),
    Case("epochs", epochs=2, optimizer_steps=2, mask_staleness=1),
    Case("sequence_mean", {"aggregation": "sequence"}, mask_staleness=1),
    Case("constant", {"aggregation": "constant", "length": 12, "correction": None}),
    Case("gspo", {"kind": "gspo", "aggregation": "sequence", "correction": None}, optimizer_steps=2),
    Case("kl_entropy", {"kl_coef": 0.3, "entropy_coef": 0.1, "kl_estimator": "k3"}),
    Case("stage_2", stage=2, optimizer_steps=2),
    Case("stage_1", stage=1),
    Case("stage_0", stage=0, clip=0.05),
    Case("offloaded_optimizer", settings={"offload": "optimizer"}),
    Case("offloaded", settings={"offload": "all"}, optimizer_steps=2),
    Case("packed", settings={"packing": True}, token_budget=35),
    Case("gradient_checkpointing", settings={"gradient_checkpointing": True}, optimizer_steps=2),
    Case("tree", layout="tree"),
    Case("tree_of_old_tokens", layout="tree", mask_staleness=1, token_budget=30, optimizer_steps=3),
    Case("tree_cascade", layout="tree", dense_places=0, optimizer_steps=2, mask_staleness=1),
    Case(
        "tree_checkpointed",
        {"kl_coef": 0.3, "entropy_coef": 0.1, "kl_estimator": "k3"},
        layout="tree",
        dense_places=0,
        settings={"gradient_checkpointing": True},
    ),
    Case("tree_bfloat16", layout="tree", settings={"dtype": "bfloat16"}),
    Case("bfloat16_stage_3", settings={"dtype": "bfloat16"}),
    Case("bfloat16_stage_2", stage=2, settings={"dtype": "bfloat16"}),
    Case("bfloat16_stage_1", stage=1, settings={"dtype": "bfloat16"}),
    Case("pieces", clip=0.05, pieces=PIECES),
    Case("pieces_stale", {"aggregation": "sequence"}, mask_staleness=1, token_budget=35, pieces=PIECES),
    Case("pieces_tree", {"kl_coef": 0.3, "entropy_coef": 0.1}, layout="tree", pieces=PIECES),
    Case("pieces_stage_2", stage=2, clip=0.05, pieces=PIECES),
    Case("pieces_stage_1", stage=1, pieces=PIECES),
    Case("pieces_stage_0", stage=0, clip=0.05, pieces=PIECES),
    Case("pieces_offloaded", settings={"offload": "all"}, clip=0.05, pieces=PIECES),
    Case("pieces_bfloat16_stage_3", settings={"dtype": "bfloat16"}, pieces=PIECES),
    Case("pieces_bfloat16_stage_1", stage=1, settings={"dtype": "bfloat16"}, clip=0.05, pieces=PIECES),
)


def make_model(path: Path, *, tied: bool, num_layers: int = 2, hidden_size: int = 16) -> None:
    """A random small model whose logits are far from flat, saved as a Hugging Face directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 3 // 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 1.2 / hidden_size**0.5,
        "tie_word_embeddings": tied,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)) if tied else LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")


def make_batch(number: int, case: Case, *, first: int = 0) -> Batch:
    """Uneven lengths, a group of 3 and two of 2; versions reach two back; update of version `first + number`.

    Tokens of versions below 0 count as data, which no version has sampled.
    """
    draw = np.random.default_rng(number)
    samples = [
        _sample(draw, group, member, size, first + number)
        for group, size in enumerate((3, 2, 2))
        for member in range(size)
    ]
    if case.layout != "rows":
        samples = [_with_shared_prompt(sample, number) for sample in samples]
    return Batch(
        tuple(samples),
        (),
        num_sequences=len(samples),
        num_tokens=sum(s.response_tokens for s in samples),
        num_groups=3,
        mask_staleness=case.mask_staleness,
        token_budget=case.token_budget,
        optimizer_steps=case.optimizer_steps,
        layout=case.layout,
    )


def _with_shared_prompt(sample: Trainable, number: int) -> Trainable:
    """`sample` with a prompt that is the beginning of its group's."""
    prompt = np.random.default_rng((number, int(sample.prompt_id))).integers(0, VOCABULARY, 8)
    start = prompt[: sample.prompt_tokens].astype(np.int32)
    return replace(sample, token_ids=np.concatenate([start, sample.token_ids[len(start) :]]))


def _sample(draw: np.random.Generator, group: int, member: int, size: int, version: int) -> Trainable:
    prompt, response = int(draw.integers(2, 8)), int(draw.integers(1, 15))
    length = prompt + response
    policy_mask = np.arange(length) >= prompt
    if response > 5:
        policy_mask[prompt + 2 : prompt + 4] = False  # a tool's answer between two turns
    age = np.sort(draw.integers(0, 3, length))[::-1]
    return Trainable(
        sample_id=f"{version}-{group}-{member}",
        group_id=f"{version}-{group}",
        prompt_id=str(group),
        epoch=0,
        member=member,
        group_size=size,
        prompt_text="",
        response_text="",
        token_ids=draw.integers(0, VOCABULARY, length).astype(np.int32),
        policy_mask=policy_mask,
        behavior_logprobs=np.where(policy_mask, draw.normal(-3.5, 1.0, length), 0).astype(np.float32),
        versions=np.where(policy_mask, version - age, -1).astype(np.int32),
        prompt_tokens=prompt,
        truncated=False,
        generator="generator/0",
        ref_logprobs=np.where(policy_mask, draw.normal(-3.5, 0.5, length), 0).astype(np.float32),
        advantages=np.where(policy_mask, draw.normal(0, 1), 0).astype(np.float32),
    )

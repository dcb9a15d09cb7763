"""Batches, models and cases shared by the gang test and the rank process it starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.messages import Batch, Trainable
from flowrl.training.settings import Layout, SequenceKind

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
    onednn: bool = False
    """All products of linear layers go to oneDNN, however small, and on every processor."""
    sequence: int = 1
    """Ranks that share a part of a batch, by positions."""
    kind: SequenceKind = "ulysses"
    """How they compute attention."""
    tensor: int = 1
    """Ranks that share a part of a batch, by the matrices of the layers."""
    normed: bool = False
    """The heads' queries and keys are normed: a Qwen3."""
    windowed: bool = False
    """A window in one of two layers, and soft caps: a Gemma 2."""
    experts: bool = False
    """A mixture of experts, each a module of its own."""
    balance: float = 0.0
    """Coefficient of the load-balancing loss; above 0 the model is a Mixtral."""

    @property
    def model(self) -> str:
        """The directory of its model."""
        if self.balance:
            return "balanced"
        if self.normed or self.windowed:
            return "normed" if self.normed else "windowed"
        return "experts" if self.experts else "tied" if self.tied else "untied"

    pieces: tuple[tuple[int, ...], ...] = ()
    """Of each batch, the samples in the pieces before its last; (): it comes whole."""

    @property
    def half(self) -> bool:
        return self.settings.get("dtype") == "bfloat16"


DECAY = 0.5
"""Of the moving average of a case that keeps one."""
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
    Case("onednn", {"kl_coef": 0.3}, optimizer_steps=2, onednn=True, settings={"gradient_checkpointing": True}),
    Case("onednn_tree", tied=False, layout="tree", onednn=True),
    Case("onednn_stage_2", stage=2, onednn=True, clip=0.05),
    Case("tree_bfloat16", layout="tree", settings={"dtype": "bfloat16"}),
    Case("bfloat16_stage_3", settings={"dtype": "bfloat16"}),
    Case("bfloat16_stage_2", stage=2, settings={"dtype": "bfloat16"}),
    Case("bfloat16_stage_1", stage=1, settings={"dtype": "bfloat16"}),
    Case("experts", experts=True, token_budget=24, settings={"gradient_checkpointing": True}),
    Case("balanced", balance=0.5, token_budget=40),
    Case("balanced_checkpointed", balance=0.5, mask_staleness=1, stage=2, settings={"gradient_checkpointing": True}),
    Case("sequence_rows", {"kl_coef": 0.3, "entropy_coef": 0.1, "kl_estimator": "k3"}, sequence=2),
    Case("sequence_of_one", token_budget=24, tied=False, mask_staleness=0, stage=2, sequence=2),
    Case("sequence_packed", settings={"packing": True}, token_budget=35, sequence=2),
    Case("sequence_tree", layout="tree", optimizer_steps=2, mask_staleness=1, sequence=2),
    Case(
        "sequence_checkpointed",
        {"aggregation": "sequence"},
        layout="tree",
        dense_places=0,
        settings={"gradient_checkpointing": True},
        sequence=2,
    ),
    Case("pieces", clip=0.05, pieces=PIECES),
    Case("pieces_stale", {"aggregation": "sequence"}, mask_staleness=1, token_budget=35, pieces=PIECES),
    Case("pieces_tree", {"kl_coef": 0.3, "entropy_coef": 0.1}, layout="tree", pieces=PIECES),
    Case("pieces_sequence", layout="tree", mask_staleness=1, sequence=2, pieces=PIECES),
    Case("pieces_stage_2", stage=2, clip=0.05, pieces=PIECES),
    Case("pieces_stage_1", stage=1, pieces=PIECES),
    Case("pieces_stage_0", stage=0, clip=0.05, pieces=PIECES),
    Case("pieces_offloaded", settings={"offload": "all"}, clip=0.05, pieces=PIECES),
    Case("pieces_bfloat16_stage_3", settings={"dtype": "bfloat16"}, pieces=PIECES),
    Case("pieces_bfloat16_stage_1", stage=1, settings={"dtype": "bfloat16"}, clip=0.05, pieces=PIECES),
    # Last, because DeepSpeed keeps the groups of a divided model for all engines that a process makes after it.
    Case("tensor_stage_1", {"kl_coef": 0.3, "entropy_coef": 0.1}, stage=1, clip=0.05, tensor=2, pieces=PIECES),
    Case("tensor_stage_2", stage=2, tied=False, layout="tree", mask_staleness=1, optimizer_steps=2, tensor=2),
    Case("tensor_stage_0", stage=0, tied=False, clip=0.05, token_budget=24, tensor=2),
    Case("tensor_normed", stage=2, normed=True, clip=0.05, settings={"packing": True, "ema_decay": DECAY}, tensor=2),
    Case(
        "tensor_checkpointed",
        {"aggregation": "sequence"},
        stage=2,
        clip=0.05,
        settings={"gradient_checkpointing": True, "offload": "optimizer"},
        tensor=2,
    ),
    Case("tensor_bfloat16_stage_1", stage=1, settings={"dtype": "bfloat16"}, tensor=2),
)
FOUR = (
    Case("four_share_a_tree", layout="tree", mask_staleness=1, token_budget=30, sequence=4),
    Case("two_and_two", token_budget=24, mask_staleness=0, tied=False, sequence=2),
    Case("windows", windowed=True, settings={"gradient_checkpointing": True}, sequence=2),
    Case("ring_of_four", {"kl_coef": 0.3, "kl_estimator": "k3"}, mask_staleness=1, sequence=4, kind="ring", clip=0.05),
    Case(
        "rings_of_two", token_budget=24, tied=False, settings={"gradient_checkpointing": True}, sequence=2, kind="ring"
    ),
    Case("packed_rings", windowed=True, settings={"packing": True}, token_budget=35, sequence=2, kind="ring"),
)
"""Of four ranks: more than the model has heads of keys, and two parts that two ranks share each."""
FOUR_DIVIDED = (
    Case("two_copies_stage_1", stage=1, clip=0.05, token_budget=24, mask_staleness=0, tensor=2),
    Case("two_copies_stage_2", stage=2, tied=False, token_budget=30, clip=0.05, tensor=2),
    Case("two_copies_stage_0", stage=0, tied=False, token_budget=30, clip=0.05, tensor=2),
)
"""Of four ranks: two copies of a model that two ranks have each."""


def make_normed(path: Path) -> None:
    """A Qwen3, whose norms of each head's query and key every rank has whole, and uses for its own heads."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(4)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")


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


WINDOW = 4


def make_windowed(path: Path, kind: str) -> None:
    """A random model of that type, with a window in one of its two layers, or in both if its layers are all alike."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    ids = {"vocab_size": VOCABULARY, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    windows = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 0}
    config = AutoConfig.for_model(kind, **sizes, **heads, **ids, **windows)
    if getattr(config, "layer_types", None):
        config.layer_types = ["sliding_attention", "full_attention"]
    if hasattr(config, "attn_logit_softcapping"):
        config.attn_logit_softcapping = 2.0
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")


MIXTURE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class MixtureConfig(LlamaConfig):
    model_type = "mixture"


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(config.num_experts))

    def forward(self, hidden):
        flat = hidden.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(dim=-1).max(dim=-1)
        found = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            mine = (chosen == number).nonzero().flatten()
            found = found.index_add(0, mine, self.experts[number](flat[mine]) * weight[mine, None])
        return found.view_as(hidden)


class MixtureForCausalLM(LlamaForCausalLM):
    config_class = MixtureConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Block(config)
        self.post_init()
"""


def make_mixture(path: Path, *, num_experts: int = 6) -> None:
    """As `make_model`, with code of its own: layers that choose one expert of a list for each token."""
    import json

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make_model(path, tied=False)
    (path / "mixture.py").write_text(MIXTURE)
    config = json.loads((path / "config.json").read_text())
    classes = {"AutoConfig": "mixture.MixtureConfig", "AutoModelForCausalLM": "mixture.MixtureForCausalLM"}
    config |= {"model_type": "mixture", "architectures": ["MixtureForCausalLM"], "auto_map": classes}
    (path / "config.json").write_text(json.dumps(config | {"num_experts": num_experts}))
    torch.manual_seed(4)
    loaded = AutoConfig.from_pretrained(path, trust_remote_code=True)
    AutoModelForCausalLM.from_config(loaded, trust_remote_code=True).save_pretrained(path)


def make_balanced(path: Path) -> None:
    """A random Mixtral with the sizes of `make_model`."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(6)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    config = MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    MixtralForCausalLM(config).save_pretrained(path)
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

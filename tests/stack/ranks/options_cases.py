"""Trainer options that change what is trained or kept, for the options test and its rank processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.training.training_cases import PIECES, Case

BATCHES = 3
DECAY = 0.6
MUON = {"optimizer": "muon", "muon_lr_factor": 4.0, "momentum": 0.9, "weight_decay": 0.1}
ADAM = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
LORA = {"rank": 4, "alpha": 6}


@dataclass(frozen=True)
class Option:
    """One way to train. The batches and the loss are those of `case`, as in the gang test."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.05
    pieces: tuple[tuple[int, ...], ...] = ()
    """Of each batch, the samples in the pieces before its last; (): it comes whole."""

    @property
    def case(self) -> Case:
        return Case(self.name, self.objective, token_budget=45)

    @property
    def base(self) -> str:
        """Model directory: LoRA is tried on the model that is not tied as well."""
        if self.name.startswith("large"):
            return "large"
        return "untied" if self.name.endswith("untied") else "tied"


SGD = {"optimizer": "sgd", "clip_grad_norm": 0.0}
OPTIONS = (
    Option("adamw", ADAM, lr=0.01),
    Option("lora", SGD, LORA),
    Option("lora_untied", SGD, {**LORA, "rank_stabilized": True, "targets": ("q_proj", "down_proj")}),
    Option("lora_stage_2", {**SGD, "stage": 2}, LORA),
    Option("lora_stage_0", {**SGD, "stage": 0}, LORA),
    Option("lora_offloaded", {**SGD, "offload": "all"}, LORA),
    Option("lora_checkpointing", {**SGD, "gradient_checkpointing": True}, LORA),
    Option("lora_reference", SGD, LORA, {"kl_coef": 0.3}),
    Option("lora_reference_in_pieces", SGD, LORA, {"kl_coef": 0.3}, pieces=PIECES),
    Option("ema", {**ADAM, "ema_decay": DECAY}, lr=0.01),
    Option("ema_stage_2", {**ADAM, "ema_decay": DECAY, "stage": 2}, lr=0.01),
    Option("ema_stage_0", {**ADAM, "ema_decay": DECAY, "stage": 0}, lr=0.01),
    Option("ema_lora", {**ADAM, "ema_decay": DECAY}, LORA, lr=0.01),
    Option("muon", MUON, lr=0.01),
    Option("muon_stage_2", {**MUON, "stage": 2}, lr=0.01),
    Option("muon_lora", {**MUON, "weight_decay": 0.0}, LORA, lr=0.01),
)


def offloaded(disk: str) -> tuple[Option, Option]:
    """The same training with everything in host memory and with everything on `disk`.

    DeepSpeed leaves tensors of less than 1 MiB in memory, so the model is large enough for its shards to go.
    """
    memory = Option("large_in_memory", {**ADAM, "offload": "all"}, lr=0.001)
    return memory, Option("large_on_disk", {**memory.settings, "nvme_path": disk}, lr=memory.lr)

"""How a model is trained: plain data, read where the graph is built, so without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from flowrl.errors import ConfigError

Offload = Literal["none", "optimizer", "all"]
Dtype = Literal["float32", "bfloat16"]
Head = Literal["lm", "scalar"]
"""What a trained model gives: logprobs of tokens, or a number at a place (critic, reward model)."""
Start = Literal["policy", "reward_model"]
"""Where a scalar head comes from: drawn anew, or as it was saved."""
Optimizer = Literal["adamw", "sgd"]


@dataclass(frozen=True)
class ZeroSettings:
    """Memory, precision and optimizer of one trainer."""

    stage: int = 3
    """ZeRO stage: what is sharded over ranks. 1 optimizer states, 2 and gradients, 3 and parameters."""
    offload: Offload = "none"
    """What lives in host memory: optimizer states, or those and the parameters (stage 3)."""
    dtype: Dtype = "float32"
    """Of parameters and activations; master weights and gradient sums are fp32 in any case."""
    optimizer: Optimizer = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """On matrices only."""
    clip_grad_norm: float = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    attention: str | None = None
    """transformers' attention implementation; None: flash attention where installed on a GPU, else sdpa."""
    gradient_checkpointing: bool = False
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """Further DeepSpeed settings, laid over flowrl's."""

    def __post_init__(self) -> None:
        for name, choices in (("offload", Offload), ("dtype", Dtype), ("optimizer", Optimizer)):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(choices))}")
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"ZeRO stage is {self.stage}; choose 0, 1, 2 or 3")
        if self.stage == 0 and self.dtype == "bfloat16":
            raise ConfigError("bfloat16 needs ZeRO stage 1, 2 or 3, which keep fp32 master weights; stage 0 does not")
        if self.offload == "all" and self.stage != 3:
            raise ConfigError(f"offload='all' keeps parameters in host memory and needs ZeRO stage 3, not {self.stage}")
        if self.offload == "optimizer" and self.stage == 0:
            raise ConfigError("offload='optimizer' needs ZeRO stage 1, 2 or 3; stage 0 shards nothing")
        if self.clip_grad_norm < 0:
            raise ConfigError(f"clip_grad_norm is {self.clip_grad_norm}; it has to be 0 (off) or more")

    def effective_stage(self, num_ranks: int) -> int:
        """One rank has nobody to share with: parameters are not sharded then, which saves the gathering."""
        return min(self.stage, 2) if num_ranks == 1 and self.offload != "all" else self.stage

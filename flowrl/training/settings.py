"""Settings of training: plain data without torch, because every process that builds the graph reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from flowrl.errors import ConfigError

Offload = Literal["none", "optimizer", "all"]
Dtype = Literal["float32", "bfloat16"]
Head = Literal["lm", "scalar"]
"""The output of a trained model: logprobs of tokens, or one number at a position (critic, reward model)."""
Start = Literal["policy", "reward_model"]
"""How a scalar head is initialised. policy: drawn at random. reward_model: as it was saved."""
Optimizer = Literal["adamw", "muon", "sgd"]
Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "varlen"]
Layout = Literal["auto", "rows", "tree"]
Accumulate = Literal["auto", "on", "off"]
"""Whether a trainer starts on the groups of a batch that have arrived. auto: where that changes only rounding."""
SequenceKind = Literal["ulysses", "ring"]
"""How ranks that each have a slice of the positions compute attention. ulysses: a rank computes some heads over all
positions. ring: a rank computes all heads of its positions, with the keys and values of one rank after another."""
Sync = Literal["adapter", "merged"]
Quantize = Literal["none", "nf4", "int8"]
MOST_RANK = 512
"""The largest LoRA rank that vLLM serves."""


def attention_problems(attention: str | None, dtype: Dtype) -> list[str]:
    """A complete sentence if this attention cannot compute in `dtype`; else an empty list."""
    if dtype != "float32" or attention is None or not attention.startswith(("flash_attention", "varlen")):
        return []
    return [f"attention is {attention!r}, which computes in 16 bits only, but dtype is float32; set bfloat16, or sdpa"]


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters, trained in place of the weights (arXiv 2106.09685), optionally on a quantized base."""

    rank: int = 0
    """Rank of the adapters, or 0 to train all weights."""
    alpha: int | None = None
    """The adapter's product is scaled by alpha / rank; None: alpha is twice the rank."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    targets: tuple[str, ...] = ()
    """Linear layers to adapt, by the last part of their name, such as q_proj; empty: all except the output layer."""
    sync: Sync = "adapter"
    """What generators receive for every version: only the adapter, or whole weights with the adapter merged in."""
    quantize: Quantize = "none"
    """Quantization of the frozen base by bitsandbytes (QLoRA, arXiv 2305.14314)."""

    def __post_init__(self) -> None:
        for name, choices in (("sync", Sync), ("quantize", Quantize)):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(choices))}")
        if not 0 <= self.rank <= MOST_RANK:
            raise ConfigError(f"LoRA rank is {self.rank}; it has to lie between 0 (no adapter) and {MOST_RANK}")
        if self.alpha is not None and self.alpha <= 0:
            raise ConfigError(f"LoRA alpha is {self.alpha}; it has to be above 0")
        if self.quantize != "none" and not self.rank:
            raise ConfigError(f"quantize={self.quantize!r} freezes the base, so only an adapter can learn; set a rank")
        if self.quantize != "none" and self.sync == "adapter":
            raise ConfigError(
                f"quantize={self.quantize!r} with sync='adapter': the base of the generators is not quantized, so an "
                "adapter would belong to another base than the trainer's; set sync='merged'"
            )

    @property
    def synced_rank(self) -> int:
        """Rank of the adapters that generators receive, 0 if they receive whole weights."""
        return self.rank if self.sync == "adapter" else 0


@dataclass(frozen=True)
class ZeroSettings:
    """Memory, precision and optimizer of one trainer."""

    stage: int = 3
    """ZeRO stage: what is sharded over ranks. 0: nothing; 1: optimizer states; 2: and gradients; 3: and parameters."""
    offload: Offload = "none"
    """What is kept in host memory. optimizer: the optimizer states; all: also the parameters (stage 3)."""
    nvme_path: str = ""
    """Directory on a local disk where offloaded data is kept instead of in host memory (stage 3); needs libaio."""
    dtype: Dtype = "float32"
    """Type of parameters and activations; master weights and gradient sums are always fp32."""
    optimizer: Optimizer = "adamw"
    """muon: DeepSpeed's Muon for the matrices of the layers, and AdamW for embeddings, heads and vectors."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.0
    """Applied to matrices only."""
    momentum: float = 0.95
    """Momentum of muon."""
    muon_lr_factor: float = 1.0
    """Learning rate of muon's matrices as a multiple of the trainer's lr, which applies to AdamW's parameters."""
    clip_grad_norm: float | None = None
    """Largest norm of the whole gradient; 0 does not clip. None: 1, or 0 with muon, whose steps have a fixed size."""
    attention: Attention | None = None
    """An implementation of transformers, or varlen: torch's own kernel for packed rows on a GPU, which needs no further
    package. None: flash attention for bfloat16 on a GPU if it is installed, else sdpa."""
    packing: bool | None = None
    """Put the sequences of a micro-batch into one row without padding; None: only with flash attention and varlen."""
    layout: Layout = "auto"
    """tree: a prefix that sequences of a micro-batch share, such as a group's prompt, is computed once. rows: one row
    for each sequence. auto: trees where the model supports them and sharing saves enough tokens."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, more time."""
    ema_decay: float = 0.0
    """Above 0: keep an exponential moving average of the weights and export it with every checkpoint."""
    keep_optimizer: bool = True
    """Keep the optimizer's state in checkpoints. Without it, checkpoints are a third as large, and a resumed run starts
    with new moments."""
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """Further DeepSpeed settings, such as zero_optimization.overlap_comm=true; they override flowrl's."""

    def __post_init__(self) -> None:
        choices = {"offload": Offload, "dtype": Dtype, "optimizer": Optimizer, "layout": Layout}
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(kind))}")
        if self.attention not in (None, *get_args(Attention)):
            raise ConfigError(f"attention is {self.attention!r}; choose one of {', '.join(get_args(Attention))}")
        for problem in self._find_problems():
            raise ConfigError(problem)

    def _find_problems(self) -> Iterator[str]:
        if self.stage not in (0, 1, 2, 3):
            yield f"ZeRO stage is {self.stage}; choose 0, 1, 2 or 3"
        if self.stage == 0 and self.dtype == "bfloat16":
            yield "bfloat16 needs ZeRO stage 1, 2 or 3, which keep fp32 master weights; stage 0 does not"
        if self.offload == "all" and self.stage != 3:
            yield f"offload='all' keeps parameters in host memory and needs ZeRO stage 3, not {self.stage}"
        if self.offload == "optimizer" and self.stage == 0:
            yield "offload='optimizer' needs ZeRO stage 1, 2 or 3; stage 0 shards nothing"
        if self.nvme_path and self.offload == "none":
            yield f"nvme_path is {self.nvme_path!r}, but offload='none' puts nothing there; set offload too"
        if self.nvme_path and self.stage != 3:
            yield f"nvme_path needs ZeRO stage 3, not {self.stage}; leave it out to offload to host memory"
        if self.nvme_path and self.ema_decay:
            yield "ema_decay with nvme_path: the average would be kept in memory; leave one of them out"

        if self.optimizer == "muon" and self.clip_grad_norm:
            yield "clip_grad_norm with muon would scale its steps, not their gradients; leave it out"
        for name in ("largest_norm", "weight_decay", "muon_lr_factor"):
            if not 0 <= getattr(self, name) < math.inf:
                shown = "clip_grad_norm" if name == "largest_norm" else name
                yield f"{shown} is {getattr(self, name)}; it has to be a finite number of at least 0"
        shares = {"ema_decay": (self.ema_decay,), "momentum": (self.momentum,), "betas": self.betas}
        for name, found in shares.items():
            if not all(0 <= share < 1 for share in found):
                yield f"{name} is {getattr(self, name)}; it has to lie between 0 and 1, 1 excluded"
        if not self.eps > 0:
            yield f"eps is {self.eps}; it has to be above 0"
        if not self.keep_optimizer and (self.optimizer == "muon" or self.stage == 0 or self.nvme_path):
            yield "keep_optimizer off needs adamw or sgd at ZeRO stage 1, 2 or 3, without nvme_path; leave it on"
        if self.packing and self.attention == "eager":
            yield "packing needs an attention that separates the sequences of one row; choose sdpa or flash attention"
        if self.packing is False and self.attention == "varlen":
            yield "attention 'varlen' is for packed rows; leave packing out, or choose sdpa"

    def with_dtype(self, dtype: Dtype) -> ZeroSettings:
        """These settings with the dtype from the graph's own option. Raises ConfigError if they name another dtype."""
        if self.dtype not in ("float32", dtype):
            raise ConfigError(f"zero.dtype is {self.dtype!r}, but dtype is {dtype!r}; set only dtype")
        return replace(self, dtype=dtype)

    @property
    def largest_norm(self) -> float:
        """The effective value of `clip_grad_norm`."""
        if self.clip_grad_norm is not None:
            return self.clip_grad_norm
        return 0.0 if self.optimizer == "muon" else 1.0

    def effective_stage(self, num_ranks: int) -> int:
        """The ZeRO stage in effect. To save the gathering, a single rank shards parameters only if offload needs it."""
        needs_3 = self.offload == "all" or self.nvme_path
        return min(self.stage, 2) if num_ranks == 1 and not needs_3 else self.stage


Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then constant or a decay to `floor` times the peak at the run's last step."""

    decay: Decay = "constant"
    """How the rate falls from its peak to `floor` at the run's last step; linear and cosine need --steps."""
    warmup_steps: int = 0
    """Number of batches over which the rate rises; the first batch trains with peak / warmup_steps."""
    floor: float = 0.0
    """The final rate as a share of the peak, from 0 to 1."""

    def __post_init__(self) -> None:
        if self.decay not in get_args(Decay):
            raise ConfigError(f"decay is {self.decay!r}; choose one of {', '.join(get_args(Decay))}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; it has to be 0 or more")
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"floor is {self.floor}; it is a share of the learning rate, from 0 to 1")

    def rate_factor(self, step: int, num_steps: int | None) -> float:
        """The factor by which the peak rate is multiplied in batch `step` of `num_steps`, counted from 1."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        if num_steps is None:
            raise ConfigError(
                f"a {self.decay} decay ends at the run's last step, so it needs their number; set --steps"
            )
        progress = min(1.0, (step - self.warmup_steps - 1) / max(1, num_steps - self.warmup_steps - 1))
        shape = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * shape

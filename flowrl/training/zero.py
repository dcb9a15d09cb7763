"""DeepSpeed ZeRO as flowrl uses it: one engine a rank, gradient accumulation decided by the caller.

Invariants
- Gradients are sums. The caller divides its loss by global denominators; DeepSpeed averages over
  ranks, so `backward` multiplies by their number. The boundary is set explicitly for every
  micro-batch, because their number varies by step.
- Every method but the properties and `set_lr` is collective: ZeRO gathers and reduces inside.
- Master weights, accumulated gradients and their reduction are fp32, whatever the model's dtype.
- A step whose gradient is not finite is not applied, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.training.gang import Gang
from flowrl.training.model import (
    PolicyModel,
    choose_attention,
    hf_parameters,
    load_policy_model,
    splits_packed_rows,
    write_model,
)
from flowrl.training.rows import Rows, lay_out
from flowrl.training.settings import Head, Start, ZeroSettings
from flowrl.training.value_model import ScalarModel, load_scalar_model, write_scalar_model

TAG = "zero"
BUCKET_ELEMENTS = 50_000_000


@dataclass(frozen=True)
class Step:
    """What became of one optimizer step."""

    applied: bool
    grad_norm: float
    """Before clipping; infinite if the gradient was not finite."""


class ZeroEngine:
    """One rank of a model in training.

    With `head="scalar"` it is a critic or a reward model, see `load_scalar_model` for `start`.
    """

    model: PolicyModel | ScalarModel

    def __init__(
        self,
        path: str | Path,
        settings: ZeroSettings,
        gang: Gang,
        *,
        head: Head = "lm",
        start: Start = "policy",
    ) -> None:
        import deepspeed

        self.gang = gang
        self.settings = settings
        self.source = Path(path)
        attention = choose_attention(settings.attention, gang.device)
        self.packed = splits_packed_rows(attention)
        config = deepspeed_config(settings, gang.size)
        self._stage: int = config["zero_optimization"]["stage"]
        # While this object lives, from_pretrained shards every weight as it loads it.
        sharded = _sharded_loading(config) if self._stage == 3 else None
        options: dict[str, Any] = {
            "dtype": settings.dtype,
            "attention": attention,
            "gradient_checkpointing": settings.gradient_checkpointing,
        }
        if head == "scalar":
            self.model = load_scalar_model(path, start=start, seed=torch.initial_seed(), **options)
        else:
            self.model = load_policy_model(path, **options)
        del sharded
        optimizer = _optimizer(self.model, settings)
        self._engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)

    @property
    def rank(self) -> int:
        return self.gang.rank

    @property
    def device(self) -> torch.device:
        return self.gang.device

    @property
    def vocab_size(self) -> int:
        return int(self.model.network.config.vocab_size)

    # Training

    def forward(self, rows: Rows, *, temperature: float, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(logprobs_N, entropies_N) of the policy tokens, with a graph unless under `torch.no_grad`."""
        result: tuple[Tensor, Tensor] = self._engine(rows, temperature, entropy_gradient)
        return result

    def values(self, rows: Rows) -> Tensor:
        """What a scalar head says at the rows' places, [N], with a graph unless under `torch.no_grad`."""
        values_N: Tensor = self._engine(rows)
        return values_N

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of a loss with global denominators; `last` of its optimizer step or not."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.gang.size, scale_wrt_gas=False)

    def step(self) -> Step:
        """Clip, and update the weights, after a backward with `last`."""
        if self._stage == 0:
            norm = self._plain_norm()
            if not np.isfinite(norm):
                self._engine.zero_grad()
                return Step(False, float("inf"))
            self._engine.step()
            return Step(True, norm)
        self._engine.step()
        return Step(bool(self._engine.was_step_applied()), float(self._engine.get_global_grad_norm()))

    def _plain_norm(self) -> float:
        """DeepSpeed's stage 0 neither tells the gradient's norm nor looks whether it is finite."""
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))

    def set_lr(self, lr: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr

    # Weights out

    def buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[Tensor]]]:
        """Whole parameters under their Hugging Face names, valid until the next bucket. Tied ones come once."""
        for bucket in self._bucket_parameters(max_bytes):
            names, parameters = [name for name, _ in bucket], [parameter for _, parameter in bucket]
            if self._stage != 3:
                yield names, [p.detach() for p in parameters]
                continue
            import deepspeed

            with deepspeed.zero.GatheredParameters(parameters):
                yield names, [p.detach() for p in parameters]

    def _bucket_parameters(self, max_bytes: int) -> Iterator[list[tuple[str, torch.nn.Parameter]]]:
        bucket: list[tuple[str, torch.nn.Parameter]] = []
        filled = 0
        for name, parameter in hf_parameters(self.model):
            num_bytes = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
            if bucket and filled + num_bytes > max_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append((name, parameter))
            filled += num_bytes
        yield bucket

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token t | tokens before t) at temperature 1 for t = 1 ... T-1 of each sequence.

        With a scalar head, V before token t instead.
        """
        token_ids = [np.array(sequence, np.int32) for sequence in sequences]
        rows = lay_out(
            token_ids, [np.ones(len(t), np.bool_) for t in token_ids], packed=self.packed, device=self.device
        )
        with torch.no_grad():
            scalar = isinstance(self.model, ScalarModel)
            scores_N = self.values(rows) if scalar else self.forward(rows, temperature=1.0)[0]
        lengths = [len(tokens) - 1 for tokens in token_ids]
        return [part.tolist() for part in torch.split(scores_N.float().cpu(), lengths)]

    def export(self, path: str | Path) -> None:
        """Write a Hugging Face model directory, tokenizer included; complete when any rank returns."""
        state: dict[str, Tensor] = {}
        for names, tensors in self.buckets(1 << 30):
            if self.rank == 0:
                state |= {n: t.to("cpu", copy=True) for n, t in zip(names, tensors, strict=True)}
        if self.rank == 0 and isinstance(self.model, ScalarModel):
            write_scalar_model(self.model, state, self.source, path)
        elif self.rank == 0:
            write_model(self.model, state, self.source, path)
        self.gang.gather(None)

    # Checkpoints

    def save(self, path: str | Path) -> None:
        """Write master weights and optimizer state, one file or two a rank."""
        self._engine.save_checkpoint(str(path), tag=TAG, save_latest=False)

    def load(self, path: str | Path) -> None:
        """Take up what `save` wrote with the same number of ranks and the same ZeRO stage."""
        found = len(list((Path(path) / TAG).glob("*optim_states.pt")))
        if found != self.gang.size:
            raise ConfigError(
                f"checkpoint {path} was written by {found} trainer ranks, this run has {self.gang.size}; "
                f"resume with {found} trainer replicas"
            )
        self._engine.load_checkpoint(str(path), tag=TAG, load_lr_scheduler_states=False)


def _sharded_loading(config: dict[str, Any]) -> object:
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(config)


def _optimizer(model: torch.nn.Module, settings: ZeroSettings) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.0)
    matrices = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) > 1]
    others = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if not settings.weight_decay:
        groups = [{"params": parameters, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def deepspeed_config(settings: ZeroSettings, num_ranks: int) -> dict[str, Any]:
    """DeepSpeed's settings for ours; `settings.deepspeed` is laid over them."""
    zero: dict[str, Any] = {
        "stage": settings.effective_stage(num_ranks),
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
    }
    if settings.offload in ("optimizer", "all"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if settings.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.clip_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": settings.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    return _laid_over(config, settings.deepspeed)


def _laid_over(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in top.items():
        below = merged.get(name)
        merged[name] = _laid_over(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged

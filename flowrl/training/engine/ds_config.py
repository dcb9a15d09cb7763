"""DeepSpeed's configuration for a trainer's settings, and how the passes of an engine are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flowrl.training.layouts import Decision, Placing
from flowrl.training.model.policy_model import splits_packed_rows
from flowrl.training.settings import ZeroSettings

BUCKET_ELEMENTS = 50_000_000


def engine_layout(decision: Decision, attention: str, *, packing: bool | None) -> Placing:
    """How the passes of an engine are laid out."""
    if decision.layout != "rows":
        return decision.layout
    packed = splits_packed_rows(attention) if packing is None else packing
    return "packed" if packed else "padded"


def sharded_loading(config: dict[str, Any]) -> object:
    """Return an object; while it exists, transformers shards every weight as it loads it."""
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(config)


def deepspeed_config(settings: ZeroSettings, num_ranks: int) -> dict[str, Any]:
    """DeepSpeed's configuration for our settings; `settings.deepspeed` overrides it."""
    zero: dict[str, Any] = {
        "stage": settings.effective_stage(num_ranks),
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
    }
    place: dict[str, Any] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if settings.nvme_path:
        place |= {"device": "nvme", "nvme_path": settings.nvme_path}
    if settings.offload in ("optimizer", "all"):
        zero["offload_optimizer"] = place
    if settings.offload == "all":
        zero["offload_param"] = place
    if settings.optimizer == "muon":
        zero["reduce_scatter"] = False  # Muon orthogonalizes whole gradients
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.clipping,
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

"""LoRA adapters in a model, using PEFT: adds them, switches them off for the reference, writes PEFT directories.

The model keeps its class and its names: adapted layers are replaced in place, everything except adapters
(and the head of a scalar model) is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError
from flowrl.hub import name_of_snapshot
from flowrl.machine.cache import origin_of
from flowrl.training.model.tensors import adapted_layers, beside_adapter
from flowrl.training.settings import Dtype, LoRA

TRAINED_HEAD = "score"
"""The head of a scalar model starts at random values, so it is fully trained in addition to the adapter."""


def add_adapter(model: Any, lora: LoRA) -> None:
    """Freeze `model`, a transformers model, and add an adapter to its linear layers; at first it has no effect."""
    from peft import inject_adapter_in_model

    if lora.quantize != "none":
        model.train()  # in eval mode bitsandbytes repacks 4-bit weights on some CPUs, and they dequantize wrongly
    targets = target_layers(model, lora)
    inject_adapter_in_model(peft_config(lora, targets), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or name.split(".")[0] == TRAINED_HEAD)


def target_layers(model: Any, lora: LoRA) -> list[str]:
    """The last parts of the names of the layers to adapt. Raises ConfigError for a layer the model does not have."""
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name != TRAINED_HEAD
    }
    if strange := sorted(set(lora.targets) - linear):
        raise ConfigError(
            f"{type(model).__name__} has no linear layer named {', '.join(strange)}; as LoRA targets choose from "
            f"{', '.join(sorted(linear))}, or leave targets out to adapt all"
        )
    return sorted(lora.targets or linear)


def peft_config(lora: LoRA, targets: Sequence[str]) -> Any:
    """PEFT's configuration of the adapter. No dropout: π_θ and π_p have to be one function."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        use_rslora=lora.rank_stabilized,
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def vllm_adapter_config(lora: LoRA, model: Any) -> dict[str, Any]:
    """The configuration that a generator needs for an adapter in addition to its tensors, under PEFT's names."""
    layers = sorted({name.rpartition(".")[2] for name in adapted_layers(model)})
    config = peft_config(lora, layers)
    return {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "target_modules": tuple(layers),
    }


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Within this context `model` is the base model: the reference of a run that started from it, without a copy."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def quantization_config(lora: LoRA, dtype: Dtype) -> Any | None:
    """transformers' configuration of a quantized base, None without one."""
    if lora.quantize == "none":
        return None
    from transformers import BitsAndBytesConfig

    if lora.quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )


def write_adapter(model: Any, lora: LoRA, state: Mapping[str, Tensor], base: str | Path, path: str | Path) -> None:
    """Write a PEFT adapter directory that names its base model."""
    from safetensors.torch import save_file

    target = Path(path)
    target.mkdir(parents=True, exist_ok=True)
    config = peft_config(lora, vllm_adapter_config(lora, model)["target_modules"])
    origin = origin_of(Path(base))
    on_hub = name_of_snapshot(origin)
    config.base_model_name_or_path = on_hub.repo if on_hub else str(origin)
    config.revision = on_hub.revision if on_hub else None
    config.inference_mode = True
    whole = sorted({name.rpartition(".")[0] for name, _ in beside_adapter(model)})
    if whole:
        config.modules_to_save, config.task_type = whole, "SEQ_CLS"
    config.save_pretrained(target)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, target / "adapter_model.safetensors")

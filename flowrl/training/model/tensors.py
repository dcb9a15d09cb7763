"""The tensors that leave a trainer: whole weights, weights with an adapter merged in, or only the adapter.

Every entry names the parameters from which it is made, so that an engine can gather these first. Merging makes a copy,
so the base keeps its loaded values, and nothing has to be subtracted afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from flowrl.training.model.tensor_parts import whole_shape

PEFT_PREFIX = "base_model.model."
ADAPTER = "default"
"""PEFT's name for the only adapter."""


def _itself(value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True)
class Entry:
    """One tensor under its external name."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    make: Callable[..., Tensor] = _itself
    """Makes the tensor from the whole values of the parameters, in their order."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the entry's whole parameters, even if this rank has only a part of them."""
        return sum(getattr(p, "ds_numel", whole_shape(p).numel()) * p.element_size() for p in self.parameters)


def whole_weights(model: nn.Module) -> list[Entry]:
    """Every weight under its Hugging Face name, in a fixed order, tied ones once, adapters merged in."""
    layers = adapted_layers(model)
    entries = []
    for name, parameter in model.named_parameters():
        layer_name, _, rest = name.rpartition(".base_layer.")
        if ".lora_" in name:
            continue
        if rest == "weight":
            layer = layers[layer_name]
            entries.append(Entry(f"{layer_name}.weight", (parameter, *_matrices(layer)), partial(_merged, layer=layer)))
        else:
            entries.append(Entry(name.replace(".base_layer.", "."), (parameter,)))
    return entries


def adapter_weights(model: nn.Module) -> list[Entry]:
    """The content of a PEFT adapter directory, under PEFT's names: both matrices, and all other trained parameters."""
    entries = []
    for name, layer in adapted_layers(model).items():
        for letter, matrix in zip("AB", _matrices(layer), strict=True):
            entries.append(Entry(f"{PEFT_PREFIX}{name}.lora_{letter}.weight", (matrix,)))
    return entries + [Entry(PEFT_PREFIX + name, (p,)) for name, p in beside_adapter(model)]


def beside_adapter(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are fully trained in addition to an adapter: the head of a scalar model."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" not in name:
            yield name, parameter


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by the name of the layer they replace."""
    # Then no layer was adapted, and importing peft would take longer than gathering the first weights.
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def bucketed(entries: Iterable[Entry], max_bytes: int) -> Iterator[list[Entry]]:
    """The entries split into lists of at most `max_bytes`, with at least one entry in each."""
    bucket: list[Entry] = []
    filled = 0
    for entry in entries:
        if bucket and filled + entry.num_bytes > max_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(entry)
        filled += entry.num_bytes
    if bucket:
        yield bucket


def _matrices(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def _merged(weight: Tensor, down: Tensor, up: Tensor, *, layer: Any) -> Tensor:
    """A new tensor: base + scaling · up · down, summed in fp32. A quantized base is dequantized."""
    from peft.utils.integrations import dequantize_module_weight

    base = weight if weight.is_floating_point() else dequantize_module_weight(layer.get_base_layer())
    product = up.float() @ down.float()
    merged: Tensor = base.float() + layer.scaling[ADAPTER] * product
    return merged.to(down.dtype)

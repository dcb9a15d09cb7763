"""The tensors that leave a trainer: whole weights, weights with an adapter merged in, or only the adapter.

Every entry names the parameters from which it is made, so that an engine can gather these first. Merging makes a copy,
so the base keeps its loaded values, and nothing has to be subtracted afterwards.

`partition_config` divides a model's matrices among the ranks of a group (tensor parallelism), with DeepSpeed's AutoTP.

transformers says for each architecture which layers are divided by their outputs (colwise) and which by their inputs
(rowwise): `base_model_tp_plan` of its configuration. AutoTP replaces these layers, with the same parameters under the
same names. Embeddings, norms and the output layer stay whole on every rank, and so do the hidden states between blocks.

Models whose plan has other styles, for fused projections and experts, are refused.

AutoTP notes on each divided parameter, for its own checkpoints, which dimension is divided. This module reads that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError

STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "skip"}
"""transformers' name of a style -> DeepSpeed's. skip: a norm of each head, whole; its gradient is summed over ranks."""
WHOLE = "embedding_rowwise"
"""The style of an embedding that is also the output layer. It stays whole like others, for the logprobs."""
ABOUT = "ds_autotp_universal_checkpoint_meta"
"""Where AutoTP notes how a parameter is divided."""


def partition_config(network: Any, size: int) -> dict[str, Any]:
    """DeepSpeed's `partition_config` for a transformers model. Raises ConfigError if it cannot be divided by `size`."""
    plan, styles, name = read_plan(network), plan_layers(network), type(network).__name__
    if strange := sorted({style for style in styles.values() if style not in STYLES}):
        raise ConfigError(
            f"tensor_parallel_size is {size}, but transformers divides {name} in a way that flowrl does not know "
            f"({', '.join(strange)}); set tensor_parallel_size to 1"
        )
    if not styles:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but transformers has no plan of how {name} is divided (a "
            "base_model_tp_plan in its configuration); set tensor_parallel_size to 1"
        )
    # No rank may have a part of a head. The number of heads may differ between layers.
    for layer_name in (layer_name for layer_name, style in styles.items() if style == "colwise"):
        owner, layer = network.get_submodule(layer_name.rpartition(".")[0]), network.get_submodule(layer_name)
        width = getattr(owner, "head_dim", 1)
        if layer.weight.shape[0] % (size * width):
            raise ConfigError(
                f"tensor_parallel_size is {size}, but {layer_name} has {layer.weight.shape[0]} outputs in heads of "
                f"{width}, of which every rank takes an equal number; set tensor_parallel_size to another size, or to 1"
            )
    specs = [
        {
            "patterns": [pattern.pattern + r"\.weight$"],
            "partition_type": STYLES[style],
            "grad_allreduce": STYLES[style] == "skip",
        }
        for pattern, style in plan
        if style in styles.values()
    ]
    return {"use_default_specs": False, "layer_specs": specs}


def plan_layers(network: Any) -> dict[str, str]:
    """Layers of the model that are divided, and norms that see a part of the heads -> transformers' style."""
    plan = read_plan(network)
    return {name: style for name, _ in network.named_modules() for pattern, style in plan if pattern.fullmatch(name)}


def read_plan(network: Any) -> list[tuple[re.Pattern[str], str]]:
    """Patterns of layers' names, and the style of each."""
    plan: Mapping[str, str] = getattr(network.config.get_text_config(), "base_model_tp_plan", None) or {}
    number = re.escape("*")
    return [
        (re.compile(r"(.*\.)?" + re.escape(key).replace(number, "[0-9]+")), style)
        for key, style in plan.items()
        if style != WHOLE
    ]


def divided_dimension(parameter: nn.Parameter) -> int | None:
    """The dimension of which this rank has a part; None: it has the parameter whole."""
    dimension: int | None = getattr(parameter, ABOUT, {}).get("partition_dim")
    return dimension


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """The parameter's shape in the model."""
    about = getattr(parameter, ABOUT, None)
    return parameter.shape if about is None else torch.Size(about["original_shape"])


def gather_whole(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """A value for each element of a parameter, from the parts that the ranks of a group have; collective.

    For a parameter that is not divided, returns `value` itself.
    """
    dimension = divided_dimension(parameter)
    if dimension is None:
        return value
    group = tensor_group()
    parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(group.size())]
    torch.distributed.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts, dim=dimension)


def whole_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of the whole model's gradient, on every rank; collective."""
    found = [parameter for parameter in parameters if parameter.grad is not None]
    divided, whole = (
        torch.nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]).square()
        for some in (
            [p for p in found if divided_dimension(p) is not None],
            [p for p in found if divided_dimension(p) is None],
        )
    )
    torch.distributed.all_reduce(divided, group=tensor_group())
    return (divided + whole).sqrt()


def tensor_group() -> Any:
    """The process group of the ranks that together have one copy of the model. Made with the engine."""
    from deepspeed.utils import groups

    return groups.get_tensor_model_parallel_group()


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
            entries.append(
                Entry(
                    f"{layer_name}.weight", (parameter, *adapter_matrices(layer)), partial(merge_adapter, layer=layer)
                )
            )
        else:
            entries.append(Entry(name.replace(".base_layer.", "."), (parameter,)))
    return entries


def adapter_weights(model: nn.Module) -> list[Entry]:
    """The content of a PEFT adapter directory, under PEFT's names: both matrices, and all other trained parameters."""
    entries = []
    for name, layer in adapted_layers(model).items():
        for letter, matrix in zip("AB", adapter_matrices(layer), strict=True):
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


def split_in_buckets(entries: Iterable[Entry], max_bytes: int) -> Iterator[list[Entry]]:
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


def adapter_matrices(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def merge_adapter(weight: Tensor, down: Tensor, up: Tensor, *, layer: Any) -> Tensor:
    """A new tensor: base + scaling · up · down, summed in fp32. A quantized base is dequantized."""
    from peft.utils.integrations import dequantize_module_weight

    base = weight if weight.is_floating_point() else dequantize_module_weight(layer.get_base_layer())
    product = up.float() @ down.float()
    merged: Tensor = base.float() + layer.scaling[ADAPTER] * product
    return merged.to(down.dtype)

"""One ZeRO rank of the memory test, started by `ranks`: bytes of the tensors that live after a real step.

Tensors are counted by their storages, each once. Those of the step itself (activations) have gone by then.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.training.engine.gang import Gang
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.model.row_layout import RowLayout, lay_out
from flowrl.training.settings import LoRA, ZeroSettings
from tests.stack.ranks.ranks import as_rank

TOKENS = 64
"""Of the pass whose kept tensors are counted."""
CASES: dict[str, dict[str, object]] = {
    "stage 1": {"stage": 1, "dtype": "bfloat16"},
    "stage 2, offload": {"stage": 2, "dtype": "bfloat16", "offload": "optimizer"},
    "stage 3": {"stage": 3, "dtype": "bfloat16"},
    "stage 3, average": {"stage": 3, "dtype": "bfloat16", "ema_decay": 0.9},
    "stage 2, divided": {"stage": 2, "dtype": "bfloat16", "tensor": 2},
}
"""Case -> settings, the rank of an adapter, and the ranks among which matrices are divided: last, since DeepSpeed keeps
their groups."""


def settings_of(case: Mapping[str, object]) -> tuple[ZeroSettings, LoRA]:
    zero: Any = {name: value for name, value in case.items() if name not in ("rank", "tensor")}
    return ZeroSettings(**zero), LoRA(rank=int(str(case.get("rank", 0))))


def tensor_size_of(case: Mapping[str, object]) -> int:
    return int(str(case.get("tensor", 1)))


def storages() -> dict[int, int]:
    """Address -> bytes of every storage that a tensor of this process holds."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            for tensor in (thing, getattr(thing, "ds_tensor", None), thing.grad if thing.is_leaf else None):
                if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()).size():
                    found[storage.data_ptr()] = storage.size()
    return found


def kept(engine: ZeroEngine, rows: RowLayout, *, until: int) -> int:
    """Bytes that the layers from 1 to the one before `until` keep for the backward pass, what they share included."""
    layers: Any = engine.model.network.base_model.layers
    weights = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    found: dict[int, int] = {}
    keeping = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if keeping:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().size()
        return tensor

    hooks = [
        layers[1].register_forward_pre_hook(lambda *_: keeping.append(True)),
        layers[until].register_forward_pre_hook(lambda *_: keeping.clear()),
    ]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.forward(rows, temperature=1.0)
    for hook in hooks:
        hook.remove()
    return sum(size for address, size in found.items() if address not in weights)


def measured(settings: dict[str, object], gang: Gang, directory: Path) -> dict[str, int]:
    """Bytes that live after loading, between backward and step, and after the second step; and what a layer keeps."""
    zero, lora = settings_of(settings)
    gang = dataclasses.replace(gang, tensor_size=tensor_size_of(settings))
    gc.collect()  # the engine of the case before, whose addresses would be taken for this one's
    before = storages()
    engine = ZeroEngine(directory / "model", zero, gang, lora=lora)
    loaded = sum(size for address, size in storages().items() if address not in before)
    for _ in range(2):
        ids = np.arange(16, dtype=np.int32)
        rows = lay_out([ids], [np.ones(len(ids), np.bool_)], layout="padded")
        logprobs_N, _ = engine.forward(rows, temperature=1.0)
        engine.set_lr(1e-3)
        engine.add_gradient(-logprobs_N.sum(), last=True)
        del logprobs_N, rows
        gc.collect()
        accumulated = sum(size for address, size in storages().items() if address not in before)
        engine.step_optimizer()
    gc.collect()
    after = sum(size for address, size in storages().items() if address not in before)
    ids = np.arange(TOKENS + 1, dtype=np.int32)
    rows = lay_out([ids], [np.ones(len(ids), np.bool_)], layout="padded")
    layer = kept(engine, rows, until=3) - kept(engine, rows, until=2)
    return {"loaded": loaded, "accumulated": accumulated, "stepped": after, "layer": layer}


def work(gang: Gang, directory: Path, arguments: Sequence[str]) -> None:
    torch.manual_seed(0)
    names = arguments or list(CASES)
    found = {name: measured(CASES[name], gang, directory) for name in names}
    (directory / f"found-{gang.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    as_rank(work)

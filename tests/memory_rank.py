"""One ZeRO rank of the memory test, started by `tests.ranks`: bytes of the tensors that live after a real step.

Tensors are counted by their storages, each once. Those of the step itself (activations) have gone by then.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.training.engine.gang import Gang
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.model.row_layout import lay_out
from flowrl.training.settings import LoRA, ZeroSettings
from tests.ranks import as_rank

CASES: dict[str, dict[str, object]] = {
    "stage 1": {"stage": 1, "dtype": "bfloat16"},
    "stage 2, offload": {"stage": 2, "dtype": "bfloat16", "offload": "optimizer"},
    "stage 3": {"stage": 3, "dtype": "bfloat16"},
}
"""Case -> settings, and the rank of an adapter."""


def settings_of(case: Mapping[str, object]) -> tuple[ZeroSettings, LoRA]:
    zero: Any = {name: value for name, value in case.items() if name != "rank"}
    return ZeroSettings(**zero), LoRA(rank=int(str(case.get("rank", 0))))


def storages() -> dict[int, int]:
    """Address -> bytes of every storage that a tensor of this process holds."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            for tensor in (thing, getattr(thing, "ds_tensor", None), thing.grad if thing.is_leaf else None):
                if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()).size():
                    found[storage.data_ptr()] = storage.size()
    return found


def measured(settings: dict[str, object], gang: Gang, directory: Path) -> dict[str, int]:
    """Bytes that live after loading, between backward and step, and after the second step."""
    zero, lora = settings_of(settings)
    before = storages()
    engine = ZeroEngine(directory / "model", zero, gang, lora=lora)
    loaded = sum(size for address, size in storages().items() if address not in before)
    for _ in range(2):
        ids = np.arange(16, dtype=np.int32)
        rows = lay_out([ids], [np.ones(len(ids), np.bool_)], layout="padded")
        logprobs_N, _ = engine.forward(rows, temperature=1.0)
        engine.set_lr(1e-3)
        engine.backward(-logprobs_N.sum(), last=True)
        del logprobs_N, rows
        gc.collect()
        accumulated = sum(size for address, size in storages().items() if address not in before)
        engine.step()
    gc.collect()
    after = sum(size for address, size in storages().items() if address not in before)
    return {"loaded": loaded, "accumulated": accumulated, "stepped": after}


def work(gang: Gang, directory: Path, arguments: Sequence[str]) -> None:
    torch.manual_seed(0)
    names = arguments or list(CASES)
    found = {name: measured(CASES[name], gang, directory) for name in names}
    (directory / f"found-{gang.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    as_rank(work)

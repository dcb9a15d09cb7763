"""One ZeRO rank that gives its memory away between steps, started by `ranks`: the CPU stands for the device.

Every case trains its steps twice, once without interruption and once with turns between the steps. What lives in the
process besides the copy in host memory is counted from all its tensors, not from those that flowrl finds.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.training.engine.gang import Gang
from flowrl.training.engine.residence import Residence
from flowrl.training.engine.training_state import master_weights
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.model.row_layout import lay_out
from flowrl.training.settings import LoRA, ZeroSettings
from tests.stack.ranks.memory_rank import storages
from tests.stack.ranks.ranks import as_rank

CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1, bfloat16": {"stage": 1, "dtype": "bfloat16"},
    "stage 2, average": {"stage": 2, "dtype": "bfloat16", "ema_decay": 0.9},
    "stage 3": {"stage": 3, "dtype": "bfloat16"},
    "stage 3, adapter, sgd, average": {"stage": 3, "rank": 4, "optimizer": "sgd", "ema_decay": 0.5},
}
STEPS = 2


def engine_of(case: dict[str, Any], gang: Gang, directory: Path) -> ZeroEngine:
    torch.manual_seed(0)
    settings = {name: value for name, value in case.items() if name != "rank"}
    engine = ZeroEngine(directory / "model", ZeroSettings(**settings), gang, lora=LoRA(rank=case.get("rank", 0)))
    for parameter in engine.model.parameters() if case["stage"] == 0 else ():
        parameter.data = parameter.data.clone()  # on a CPU they are the file itself, which no device has
    return engine


def step(engine: ZeroEngine, number: int) -> float:
    ids = (np.arange(24) * (number + 3) % 500).astype(np.int32)
    rows = lay_out([ids, ids[:9]], [np.ones(24, np.bool_), np.ones(9, np.bool_)], layout="padded")
    engine.set_lr(1e-2)
    for last in (False, True):
        logprobs_N, _ = engine.forward(rows, temperature=1.0)
        engine.add_gradient(-logprobs_N.sum() / 64, last=last)
    return engine.step_optimizer().grad_norm


def outcome(engine: ZeroEngine) -> list[torch.Tensor]:
    """Everything that training has changed on this rank, and the whole weights."""
    whole = [tensor.clone() for _, tensors in engine.weight_buckets(1 << 30) for tensor in tensors]
    average = engine._ema.averages if engine._ema is not None else []
    return [*whole, *(t.clone() for t in master_weights(engine._engine)), *(t.clone() for t in average)]


def work(gang: Gang, directory: Path, arguments: Sequence[str]) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name in arguments or CASES:
        case = CASES[name]
        plain = engine_of(case, gang, directory)
        norms = [step(plain, number) for number in range(STEPS)]
        expected = outcome(plain)
        del plain
        gc.collect()
        before = storages()
        engine = engine_of(case, gang, directory)
        residence = Residence(engine, torch.device("cpu"))
        kept, moved, here = [], [], []
        got = []
        for number in range(STEPS):
            got.append(step(engine, number))
            if gang.rank == 0:  # the other rank stays: a turn is no collective
                here.append(sum(size for address, size in storages().items() if address not in before))
                moved.append(residence.move_away())
                gc.collect()
                after = sum(size for address, size in storages().items() if address not in before)
                kept.append(after - residence._host.reserve_for(0).numel())
                assert residence.move_away() == 0, "it is away already"
                assert residence.come_back() == moved[-1]
                assert residence.come_back() == 0
        same = [torch.equal(a, b) for a, b in zip(expected, outcome(engine), strict=True)]
        found[name] = {"norms": norms == got, "same": all(same), "kept": kept, "moved": moved, "here": here}
        residence.free_memory()
        del engine, residence
        gc.collect()
    (directory / f"residence-{gang.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    as_rank(work)

"""One rank of the moving average's test, started by `tests.stack.ranks.ranks`: ZeRO stage 1 in bfloat16.

Writes the master weights before the first step and after every one, which DeepSpeed itself gathers, and exports.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowrl.training.engine.gang import Gang
from flowrl.training.engine.training_state import whole_master_weight
from flowrl.training.engine.zero import ZeroEngine
from tests.stack.ranks.options_cases import ADAM, BATCHES, DECAY, Option
from tests.stack.ranks.options_rank import start, update
from tests.stack.ranks.ranks import as_rank

OPTION = Option("ema_bf16", {**ADAM, "ema_decay": DECAY, "stage": 1, "dtype": "bfloat16"}, lr=0.01)


def masters(engine: ZeroEngine) -> dict[str, Tensor]:
    return {name: whole_master_weight(p).clone() for name, p in engine.model.network.named_parameters()}


def train(gang: Gang, directory: Path, arguments: Sequence[str]) -> None:
    engine = start(OPTION, gang, directory)
    history = [masters(engine)]
    for version in range(BATCHES):
        update(engine, OPTION, version)
        history.append(masters(engine))
    engine.export_model(directory / "end")
    if gang.rank == 0:
        torch.save(history, directory / "masters.pt")


if __name__ == "__main__":
    as_rank(train)

"""An exponential moving average of the master weights, sharded as they are.

After every applied optimizer step: average ← decay · average + (1 − decay) · master, in fp32, each rank
its own part. Nothing but `exchanged` ever reads it: within that the average stands where DeepSpeed keeps
the master weights, so that they are gathered by the same means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Ema:
    """The average of one rank's master weights, beginning with their present values."""

    def __init__(self, engine: Any, decay: float) -> None:
        self._engine = engine
        self._decay = decay
        self._average = [tensor.clone() for tensor in master_weights(engine)]

    def update(self) -> None:
        """Take in the weights that an optimizer step just made."""
        for average, master in zip(self._average, master_weights(self._engine), strict=True):
            average.lerp_(master, 1.0 - self._decay)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Within it average and master weights have changed places."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for average, master in zip(self._average, master_weights(self._engine), strict=True):
            kept = master.clone()
            master.copy_(average)
            average.copy_(kept)

    def save(self, path: Path, rank: int) -> None:
        torch.save(self._average, path / f"ema_rank_{rank}.pt")

    def load(self, path: Path, rank: int) -> None:
        """What `save` wrote; where there is nothing (ema_decay is new), the weights just loaded."""
        file = path / f"ema_rank_{rank}.pt"
        found = torch.load(file) if file.exists() else master_weights(self._engine)
        for average, tensor in zip(self._average, found, strict=True):
            average.copy_(tensor)


def master_weights(engine: Any) -> list[Tensor]:
    """This rank's fp32 weights, as DeepSpeed's optimizer holds them, without their graph."""
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return [tensor.detach() for tensor in getattr(optimizer, name)]
    return [p.detach() for p in engine.module.parameters() if p.requires_grad]


def whole_master_weight(parameter: torch.nn.Parameter) -> Tensor:
    """The master weight of one parameter, gathered; collective. A frozen parameter is its own."""
    from deepspeed.utils import safe_get_full_fp32_param

    if not parameter.requires_grad:
        return parameter.detach()
    found = safe_get_full_fp32_param(parameter)
    return parameter.detach() if found is None else found

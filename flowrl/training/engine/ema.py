"""An exponential moving average of the master weights, sharded in the same way.

After every applied optimizer step: average ← decay · average + (1 − decay) · master, in fp32, on each rank
for its own part. Only `exchanged` reads it: within that context the average is in the place where DeepSpeed
keeps the master weights, so the same code gathers it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import FlowrlError


class Ema:
    """The average of one rank's master weights; it starts from their current values.

    `decay` is what remains of the old average after an optimizer step.
    """

    def __init__(self, engine: Any, decay: float) -> None:
        self._engine = engine
        self._decay = decay
        self._average = [tensor.clone() for tensor in master_weights(engine)]

    @property
    def averages(self) -> list[Tensor]:
        """The flat tensors of the average, one for each flat tensor of the master weights."""
        return self._average

    def update(self) -> None:
        """Add the weights that an optimizer step just made to the average."""
        for average, master in zip(self._average, master_weights(self._engine), strict=True):
            average.lerp_(master, 1.0 - self._decay)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Within this context average and master weights are exchanged."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Swap the contents, in place: DeepSpeed keeps its own references to the master tensors."""
        for average, master in zip(self._average, master_weights(self._engine), strict=True):
            kept = master.clone()
            master.copy_(average)
            average.copy_(kept)

    def save(self, path: Path, rank: int) -> None:
        """Write this rank's part into the directory `path` of a checkpoint."""
        torch.save(self._average, path / f"ema_rank_{rank}.pt")

    def load(self, path: Path, rank: int) -> None:
        """Load what `save` wrote; if there is no file (ema_decay is new), start from the weights just loaded."""
        file = path / f"ema_rank_{rank}.pt"
        found = torch.load(file) if file.exists() else master_weights(self._engine)
        for average, tensor in zip(self._average, found, strict=True):
            average.copy_(tensor)


MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Where DeepSpeed's optimizers keep this rank's fp32 weights: stage 3, stages 1 and 2, stage 1 with bfloat16."""


def master_weights(engine: Any) -> list[Tensor]:
    """This rank's fp32 weights, as DeepSpeed's optimizer holds them, detached from the autograd graph."""
    optimizer = engine.optimizer
    for name in MASTERS:
        if hasattr(optimizer, name):
            return [tensor.detach() for tensor in getattr(optimizer, name)]
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FlowrlError(
            f"ema_decay: DeepSpeed's {type(optimizer).__name__} keeps its fp32 weights where flowrl does not find "
            "them; leave ema_decay out, or the deepspeed settings that choose this optimizer"
        )
    return [p.detach() for p in engine.module.parameters() if p.requires_grad]


def whole_master_weight(parameter: torch.nn.Parameter) -> Tensor:
    """The master weight of one parameter, gathered; collective. A frozen parameter is its own master weight."""
    from deepspeed.utils import safe_get_full_fp32_param

    if not parameter.requires_grad:
        return parameter.detach()
    found = safe_get_full_fp32_param(parameter)
    return parameter.detach() if found is None else found

"""Checkpoints of weights and optimizer state that are offloaded to a disk (`nvme_path`).

DeepSpeed's own checkpoints copy only the swap files: after loading, the model computes with its initial weights
until the next step. Here every sub-group is fetched as before a step, saved or overwritten, and put back as after
a step. Only one sub-group at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WEIGHT = "weight"


def save(optimizer: Any, path: Path, rank: int) -> None:
    """Save this rank's shards, one file per sub-group of a DeepSpeed ZeRO-3 optimizer."""
    directory = path / f"on_disk_rank_{rank}"
    directory.mkdir(parents=True, exist_ok=True)
    for index, weight, state in _sub_groups(optimizer, changed=False):
        torch.save({WEIGHT: weight.detach(), **state}, directory / f"sub_group_{index}.pt")


def load(optimizer: Any, path: Path, rank: int) -> None:
    """Load what `save` wrote into an optimizer of the same model, ranks and settings; collective."""
    for index, weight, state in _sub_groups(optimizer, changed=True):
        saved = torch.load(path / f"on_disk_rank_{rank}" / f"sub_group_{index}.pt")
        weight.detach().copy_(saved.pop(WEIGHT))
        for name, value in saved.items():
            if isinstance(state.get(name), Tensor):
                state[name].copy_(value)
            else:
                state[name] = value


def _sub_groups(optimizer: Any, *, changed: bool) -> Iterator[tuple[int, Tensor, dict[str, Any]]]:
    """Yield (number, fp32 weights, optimizer state) of each sub-group; with `changed`, both are written back."""
    timers: set[str] = set()
    if changed:
        optimizer._partition_all_parameters()
    for index, weight in enumerate(optimizer.fp32_partitioned_groups_flat):
        optimizer._prepare_sub_group(index, timers)
        yield index, weight, optimizer.optimizer.state[weight]
        if changed:
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer._release_sub_group(index, timers)
    if changed:
        optimizer._post_step(timers)

"""Ranks that share micro-batches, as threads of the test's process, and rows for them to share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.training.layouts import Placing
from flowrl.training.model import sequence_attention
from flowrl.training.model.policy_model import PolicyModel
from flowrl.training.model.row_layout import RowLayout, compute_in_slices, lay_out
from flowrl.training.model.sequence_attention import SequenceGroup
from flowrl.training.settings import SequenceKind

LENGTHS = (9, 4, 7)
T = TypeVar("T")


def laid_out(layout: Placing) -> RowLayout:
    draw = np.random.default_rng(0)
    start = draw.integers(0, 9, 3)
    tokens = [np.concatenate([start, draw.integers(0, 9, n - 3)]).astype(np.int32) for n in LENGTHS]
    return lay_out(tokens, [np.arange(len(t)) >= 2 for t in tokens], layout=layout)


class Threads:
    """Ranks of one process that exchange tensors: heads without gradients, blocks of a ring with them."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch, kind: SequenceKind = "ulysses") -> None:
        self.size = size
        self.kind: SequenceKind = kind
        self._given: list[Tensor] = [torch.zeros(0)] * size
        self._barrier = threading.Barrier(size, timeout=60)
        monkeypatch.setattr(sequence_attention, "exchange_parts", self._exchanged)
        monkeypatch.setattr(sequence_attention, "start_hop", self._hop)
        monkeypatch.setattr(torch.distributed, "all_reduce", self._add_up)

    def _all(self, rank: int, given: Tensor) -> list[Tensor]:
        self._given[rank] = given.clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def _exchanged(self, group: SequenceGroup, tensor_N: Tensor) -> Tensor:
        found = torch.stack([given[group.rank] for given in self._all(group.rank, tensor_N.detach())])
        return found.requires_grad_(torch.is_grad_enabled())

    def _hop(self, group: SequenceGroup, sent: Tensor) -> Callable[[], Tensor]:
        arrived = self._all(group.rank, sent)[(group.rank - 1) % self.size].clone()
        return lambda: arrived

    def _add_up(self, values_N: Tensor, group: int) -> None:
        values_N.copy_(torch.stack(self._all(group, values_N)).sum(dim=0))

    def group(self, rank: int) -> SequenceGroup:
        return SequenceGroup(rank, rank, self.size, self.kind)

    def __call__(self, work: Callable[[SequenceGroup], T]) -> list[T]:
        """What every rank returns."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: work(self.group(rank)), range(self.size)))

    def logprobs(self, model: PolicyModel, rows: RowLayout) -> list[Tensor]:
        """Those that every rank has in the end."""

        def work(group: SequenceGroup) -> Tensor:
            with torch.no_grad():
                return compute_in_slices(model, rows, group)[0]

        return self(work)

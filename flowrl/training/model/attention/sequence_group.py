"""The ranks that share each micro-batch, which positions each of them has, and how their results come together.

With Ulysses a rank has one run of neighbouring positions. With a ring it has two, the nth from the beginning and the
nth from the end. Because a place looks at every place before it, this gives all ranks the same number of scores.

Axes: L positions, l of one rank, N values of the micro-batch, M of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.training.settings import SequenceKind


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share each micro-batch; this one is `rank` of `size` among them."""

    process_group: Any
    rank: int
    size: int
    kind: SequenceKind = "ulysses"

    def width(self, length: int) -> int:
        """Positions that each rank has of rows of this length, padding included."""
        return self._runs * self._run(length)

    def columns_l(self, length: int, rank: int) -> Tensor:
        """The positions that `rank` has of rows of this length, ascending; those from `length` on are padding."""
        run, last = self._run(length), self._runs * self.size - 1
        starts = (rank, last - rank)[: self._runs]
        return torch.cat([torch.arange(start * run, (start + 1) * run) for start in starts])

    @property
    def _runs(self) -> int:
        return 2 if self.kind == "ring" else 1

    def _run(self, length: int) -> int:
        return -(-length // (self._runs * self.size))


def sequence_group(rank: int, size: int, group_size: int, kind: SequenceKind = "ulysses") -> SequenceGroup | None:
    """Rank's group of `group_size` consecutive ranks of `size`; None for groups of one. Collective."""
    if group_size == 1:
        return None
    mine: Any = None
    for start in range(0, size, group_size):
        members: Sequence[int] = range(start, start + group_size)
        made = torch.distributed.new_group([*members])
        mine = made if rank in members else mine
    return SequenceGroup(mine, rank % group_size, group_size, kind)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_M: Tensor, mine_M: Tensor, number: int, group: SequenceGroup) -> Tensor:
        ctx.save_for_backward(mine_M)
        values_N = values_M.new_zeros(number).index_copy_(0, mine_M, values_M)
        torch.distributed.all_reduce(values_N, group=group.process_group)
        return values_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> Any:
        (mine_M,) = ctx.saved_tensors
        return grad_N.index_select(0, mine_M), None, None, None


def whole(values_M: Tensor, mine_M: Tensor, number: int, group: SequenceGroup) -> Tensor:
    """The values of all ranks, [number], on every rank; `mine_M` are the indices of `values_M` among them.

    Every rank computes the same loss from these values, but its gradient flows only into the rank's own values. So the
    gradients of the ranks add up to that of one loss.
    """
    found: Tensor = _Whole.apply(values_M, mine_M, number, group)  # type: ignore[no-untyped-call]
    return found

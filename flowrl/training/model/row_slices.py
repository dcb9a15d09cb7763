"""One rank's slice of a micro-batch: the same positions of every row, equally many for each rank of a group.

Targets are assigned before rows are divided: each policy token, with its target, belongs to the rank that has the place
that predicts it, even if the token itself is in the next slice. Rows are padded at their end, which no other place
sees.

Axes: R rows, L positions, l of one rank, N policy tokens of the micro-batch, M of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowrl.training.model.attention.head_exchange import Exchange
from flowrl.training.model.attention.sequence_group import SequenceGroup, whole
from flowrl.training.model.attention.sight import Sight
from flowrl.training.model.row_layout import RowLayout


@dataclass(frozen=True)
class RowSlice:
    """What one rank computes of a micro-batch that all ranks of its group have."""

    rows: RowLayout
    mine_M: Tensor
    """Indices of this rank's policy tokens among all. A rank without any computes one place, which is not read."""
    number: int
    group: SequenceGroup

    def whole(self, values: Tensor) -> Tensor:
        """A value for every policy token of the micro-batch, from those that this rank has computed; collective."""
        return whole(values[: len(self.mine_M)], self.mine_M, self.number, self.group)


def num_sliced(rows: RowLayout, group: SequenceGroup) -> int:
    """Tokens that the ranks of `group` compute together, padding included."""
    height, length = rows.input_ids_RL.shape
    return height * group.size * group.width(length)


def compute(
    model: Callable[..., Tensor | tuple[Tensor, ...]], rows: RowLayout, group: SequenceGroup | None, *settings: Any
) -> tuple[Tensor, ...]:
    """What `model` gives for `rows`, [N] each; each rank of a group computes a slice. Collective."""
    part = None if group is None else slice_rows(rows, group)
    found = model(rows if part is None else part.rows, *settings)
    each = (found,) if isinstance(found, Tensor) else found
    return each if part is None else tuple(part.whole(values) for values in each)


def slice_rows(rows: RowLayout, group: SequenceGroup) -> RowSlice:
    """This rank's slice of `rows`."""
    length, device = rows.input_ids_RL.shape[1], rows.places_N.device
    own = group.width(length)
    added = own * group.size - length
    columns_l = group.columns_l(length, group.rank).to(device)
    positions = rows.position_ids_RL
    if positions is None:
        positions = torch.arange(length, device=device)[None]
    own_L = torch.full((own * group.size,), -1, device=device).index_copy_(
        0, columns_l, torch.arange(own, device=device)
    )
    row_N, own_N = rows.places_N // length, own_L[rows.places_N % length]
    mine_M = torch.nonzero(own_N >= 0).flatten()
    places_M = (row_N * own + own_N)[mine_M]
    # ZeRO reduces a gradient of the output layer from every rank: one without policy tokens computes its place 0.
    none = len(mine_M) == 0
    bounds = None if rows.bounds is None else rows.bounds.padded(added)
    return RowSlice(
        replace(
            rows,
            input_ids_RL=pad(rows.input_ids_RL, (0, added))[:, columns_l],
            position_ids_RL=pad(positions, (0, added))[:, columns_l],
            real_RL=pad(rows.real_RL, (0, added))[:, columns_l],
            places_N=mine_M.new_zeros(1) if none else places_M,
            targets_N=mine_M.new_zeros(1) if none else rows.targets_N[mine_M],
            taught=None if none or rows.taught is None else rows.taught.at(mine_M),
            tree=None if rows.tree is None else rows.tree.padded(added),
            bounds=bounds,
            exchange=Exchange(group, Sight(length + added, device, None if bounds is None else bounds.ends_S)),
        ),
        mine_M,
        len(rows.places_N),
        group,
    )

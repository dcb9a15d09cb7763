"""From samples to model input, and from the model's output to one row of policy tokens per sample.

Axes: B samples, L input tokens, N policy tokens of all samples, T policy tokens of the longest sample.

Two layouts give the same results. Right-padded rows need no attention mask, because causal attention
never looks to the right. One packed row without padding has position ids that restart at each sequence; it
is only for attention that splits sequences there (flash attention's variable-length kernels). With dense
kernels packing costs more than it saves, and a mask or a cache would let neighbours attend to each other.

A sequence's last token is not part of the input, because it predicts nothing, except if a score is read
there (`lay_out_ends`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowrl.messages import Bool, Int32
from flowrl.training.model.logprobs import Taught


@dataclass(frozen=True)
class RowLayout:
    """One micro-batch as input of `PolicyModel` or `ScalarModel`."""

    input_ids_BL: Tensor
    position_ids_BL: Tensor | None
    """None: 0, 1, 2 ... in every row."""
    places_N: Tensor
    """For each policy token the flat index of the place that predicts it."""
    targets_N: Tensor
    cells_N: Tensor
    """For each policy token its flat index into [B, T]."""
    shape: tuple[int, int]
    taught: Taught | None = None
    """A teacher's distributions at these places; with it, entropies are relative to the teacher's."""

    def spread(self, values_N: Tensor) -> Tensor:
        """[N] as [B, T], 0 at padding. Differentiable."""
        flat = values_N.new_zeros(self.shape[0] * self.shape[1])
        return flat.scatter(0, self.cells_N, values_N).view(self.shape)

    def column(self, arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
        """One array per sample, already reduced to its policy tokens, as [B, T]."""
        values = torch.from_numpy(np.concatenate(arrays)).to(device)
        return self.spread(values)


def policy_places(policy_mask_T: Bool) -> npt.NDArray[np.intp]:
    """Indices of the policy tokens. A sequence's first token is never one, because nothing predicts it."""
    places = np.flatnonzero(policy_mask_T)
    return places[1:] if places.size and places[0] == 0 else places


def lay_out(
    token_ids: Sequence[Int32], policy_masks: Sequence[Bool], *, packed: bool, device: torch.device | None = None
) -> RowLayout:
    """RowLayout of the given sequences, each of at least two tokens."""
    inputs = [tokens[:-1] for tokens in token_ids]
    lengths = np.array([len(tokens) for tokens in inputs])
    chosen = [policy_places(mask) for mask in policy_masks]
    counts = np.array([len(places) for places in chosen])
    widest = int(lengths.max())
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) if packed else np.arange(len(inputs)) * widest
    most = max(1, int(counts.max()))

    def tensor(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device or torch.device("cpu"))

    return RowLayout(
        input_ids_BL=tensor(np.concatenate(inputs)[None] if packed else _padded(inputs, widest)),
        position_ids_BL=tensor(np.concatenate([np.arange(n) for n in lengths])[None]) if packed else None,
        places_N=tensor(np.concatenate([s + c - 1 for s, c in zip(starts, chosen, strict=True)])),
        targets_N=tensor(np.concatenate([t[c] for t, c in zip(token_ids, chosen, strict=True)])),
        cells_N=tensor(np.concatenate([b * most + np.arange(n) for b, n in enumerate(counts)])),
        shape=(len(inputs), most),
    )


def lay_out_ends(token_ids: Sequence[Int32], *, packed: bool, device: torch.device | None = None) -> RowLayout:
    """RowLayout of whole sequences that are read only at their last token: N = B, T = 1."""
    lengths = np.array([len(tokens) for tokens in token_ids])
    widest = int(lengths.max())
    ends = np.cumsum(lengths) if packed else np.arange(len(token_ids)) * widest + lengths

    def tensor(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device or torch.device("cpu"))

    return RowLayout(
        input_ids_BL=tensor(np.concatenate(token_ids)[None] if packed else _padded(token_ids, widest)),
        position_ids_BL=tensor(np.concatenate([np.arange(n) for n in lengths])[None]) if packed else None,
        places_N=tensor(ends - 1),
        targets_N=tensor(np.zeros(len(token_ids))),
        cells_N=tensor(np.arange(len(token_ids))),
        shape=(len(token_ids), 1),
    )


def _padded(inputs: Sequence[Int32], width: int) -> Int32:
    rows = np.zeros((len(inputs), width), np.int32)
    for row, tokens in zip(rows, inputs, strict=True):
        row[: len(tokens)] = tokens
    return rows

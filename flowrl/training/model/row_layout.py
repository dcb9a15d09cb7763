"""From samples to model input, and from the model's output to one row of policy tokens per sample.

Axes: B samples, R rows of the input, L input tokens, N policy tokens of all samples, T policy tokens of the longest
sample.

`flowrl.training.model.placement` decides where a sequence's tokens are. Here each policy token gets the place that
predicts it: the place of the token before it. In a tree, a place may predict several tokens of different samples.

A sequence's last token is not part of the input, because it predicts nothing, unless a score is read there
(`lay_out_ends`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowrl.messages import Bool, Int32
from flowrl.training.layouts import Placing
from flowrl.training.model.attention.head_exchange import Exchange
from flowrl.training.model.attention.tree_attention import TreeAttention, any_mask
from flowrl.training.model.placement import PackedBounds, Placement, place
from flowrl.training.model.token_logprobs.logprobs import Taught


@dataclass(frozen=True)
class RowLayout:
    """One micro-batch as input of `PolicyModel` or `ScalarModel`."""

    input_ids_RL: Tensor
    position_ids_RL: Tensor | None
    """None: 0, 1, 2 ... in every row."""
    real_RL: Tensor
    """False at padding."""
    places_N: Tensor
    """For each policy token the flat index of the place that predicts it."""
    targets_N: Tensor
    cells_N: Tensor
    """For each policy token its flat index into [B, T]."""
    shape: tuple[int, int]
    taught: Taught | None = None
    """A teacher's distributions at these places; with it, entropies are relative to the teacher's."""
    tree: TreeAttention | None = None
    """If the input is a forest: which places see which."""
    bounds: PackedBounds | None = None
    """If the input is a packed row: where its sequences end."""
    exchange: Exchange | None = None
    """If the input is a slice of the positions (`flowrl.training.model.row_slices`): how ranks compute attention."""

    @property
    def model_input(self) -> dict[str, object]:
        """Arguments of a transformers model. They have an attention mask only with `tree` or `exchange`: for packed
        rows, the model would take a mask for padding."""
        tree = {} if self.tree is None else {"attention_mask": self.tree.passed_mask, "tree": self.tree}
        if self.exchange is not None:
            tree |= {"attention_mask": any_mask(self.input_ids_RL.device), "exchange": self.exchange}
        ends = {} if self.bounds is None else self.bounds.passed
        return {
            "input_ids": self.input_ids_RL,
            "position_ids": self.position_ids_RL,
            "use_cache": False,
            **tree,
            **ends,
        }

    @property
    def num_computed(self) -> int:
        """Tokens that a pass computes, padding included."""
        return self.input_ids_RL.numel()

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
    token_ids: Sequence[Int32],
    policy_masks: Sequence[Bool],
    *,
    layout: Placing = "padded",
    device: torch.device | None = None,
) -> RowLayout:
    """RowLayout of the given sequences, each of at least two tokens."""
    placed = place([tokens[:-1] for tokens in token_ids], layout, device)
    chosen = [policy_places(mask) for mask in policy_masks]
    before = [where[c - 1] for where, c in zip(placed.places, chosen, strict=True)]
    targets = [t[c] for t, c in zip(token_ids, chosen, strict=True)]
    return _layout(placed, before, targets)


def lay_out_ends(
    token_ids: Sequence[Int32], *, layout: Placing = "padded", device: torch.device | None = None
) -> RowLayout:
    """RowLayout of whole sequences that are read only at their last token: N = B, T = 1."""
    placed = place(token_ids, layout, device)
    return _layout(placed, [where[-1:] for where in placed.places], [np.zeros(1, np.int32)] * len(token_ids))


def _layout(
    placed: Placement, places: Sequence[npt.NDArray[np.int64]], targets: Sequence[npt.NDArray[np.int32]]
) -> RowLayout:
    """The layout of sequences that are read at `places`, one array for each."""
    counts = [len(where) for where in places]
    most = max(1, *counts)
    device = placed.input_ids_BL.device

    def tensor(arrays: Sequence[npt.NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device)

    real = np.zeros(placed.input_ids_BL.numel(), np.bool_)
    real[np.concatenate(placed.places)] = True
    return RowLayout(
        input_ids_RL=placed.input_ids_BL,
        real_RL=torch.from_numpy(real).view(placed.input_ids_BL.shape).to(device),
        position_ids_RL=placed.position_ids_BL,
        places_N=tensor(places),
        targets_N=tensor(targets),
        cells_N=tensor([b * most + np.arange(n) for b, n in enumerate(counts)]),
        shape=(len(counts), most),
        tree=placed.tree,
        bounds=placed.bounds,
    )

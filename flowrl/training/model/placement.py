"""Where the tokens of a micro-batch are placed in the model's input.

Axes: B rows, L places of a row.

Three layouts give the same results. `padded`: one right-padded row per sequence, which needs no attention mask, because
causal attention never looks to the right. `packed`: one row without padding, whose position ids restart at each
sequence; it is only for attention that splits sequences there (flash attention's variable-length kernels). With dense
kernels packing costs more than it saves, and a mask or a cache would let neighbours attend to each other. `tree`: one
row that has every prefix that sequences share only once (`flowrl.forest`), with its own attention. `auto` chooses
`tree` if that saves enough places, else `padded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowrl.forest import Places, make_forest, num_unique
from flowrl.messages import Int32
from flowrl.training.layouts import Placing
from flowrl.training.model.attention.tree_attention import TreeAttention

TREE_SHARE = 0.9
"""Most places of a tree, as a share of those of padded rows, with which "auto" chooses the tree."""


@dataclass(frozen=True)
class PackedBounds:
    """Where the sequences of a packed row begin and end; computed once, so that not every layer has to find it out."""

    ends_S: Tensor
    """int32: a 0, then the place behind each sequence."""
    longest: int

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int64], device: torch.device) -> PackedBounds:
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return cls(torch.from_numpy(ends).to(device), int(lengths.max()))

    def padded(self, added: int) -> PackedBounds:
        """With one more sequence of `added` places at the end."""
        if not added:
            return self
        return PackedBounds(torch.cat((self.ends_S, self.ends_S[-1:] + added)), max(self.longest, added))

    @property
    def passed(self) -> dict[str, object]:
        """Keywords of transformers' models, which pass them on to variable-length attention."""
        return {
            "cu_seq_lens_q": self.ends_S,
            "cu_seq_lens_k": self.ends_S,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


@dataclass(frozen=True)
class Placement:
    """The model's input, and where each sequence is in it."""

    input_ids_BL: Tensor
    position_ids_BL: Tensor | None
    """None: 0, 1, 2 ... in every row."""
    places: Sequence[Places]
    """For every sequence, the flat index of each of its tokens."""
    tree: TreeAttention | None = None
    bounds: PackedBounds | None = None
    """Bounds of the sequences in a packed row; None for other layouts."""


def place(sequences: Sequence[Int32], layout: Placing, device: torch.device | None = None) -> Placement:
    """The input of a pass over `sequences`."""
    where = device or torch.device("cpu")
    if layout == "tree" or (layout == "auto" and saves(sequences)):
        return _tree(sequences, where)
    lengths = np.array([len(tokens) for tokens in sequences])
    widest = int(lengths.max())
    packed = layout == "packed"
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) if packed else np.arange(len(sequences)) * widest
    return Placement(
        _ids(np.concatenate(sequences)[None] if packed else _padded(sequences, widest), where),
        _ids(np.concatenate([np.arange(n) for n in lengths])[None], where) if packed else None,
        [start + np.arange(length) for start, length in zip(starts, lengths, strict=True)],
        bounds=PackedBounds.of(lengths, where) if packed else None,
    )


def saves(sequences: Sequence[Int32]) -> bool:
    """Whether a tree saves so many places that its attention, slower for each place than a row's, is worth it."""
    return num_unique(sequences) <= TREE_SHARE * len(sequences) * max(map(len, sequences))


def _tree(sequences: Sequence[Int32], device: torch.device) -> Placement:
    forest = make_forest(sequences)
    return Placement(
        _ids(forest.token_ids[None], device),
        _ids(forest.positions[None], device),
        forest.places,
        TreeAttention(forest, device),
    )


def _ids(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


def _padded(inputs: Sequence[Int32], width: int) -> Int32:
    rows = np.zeros((len(inputs), width), np.int32)
    for row, tokens in zip(rows, inputs, strict=True):
        row[: len(tokens)] = tokens
    return rows

"""Tries a tree, or slices of rows, on a loaded model, whose architecture may differ from what config.json shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.training.layouts import Placing
from flowrl.training.model.attention.rule import possible_kernels
from flowrl.training.model.attention.tree_attention import TreeAttention, UnknownToTreesError
from flowrl.training.model.row_layout import RowLayout, lay_out
from flowrl.training.settings import Dtype

TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference that rounding explains, as a share of the mean size of the results.

In bfloat16, rounding causes 0.007 for SmolLM2's logprobs and 0.04 for the values of a new head on `tiny`.
"""
START, LENGTHS = 6, (9, 5, 7)
"""Lengths of the common start of the sequences, and of what follows it."""


def require_trees(
    score: Callable[[RowLayout], Tensor], *, name: str, vocab_size: int, dtype: Dtype, device: torch.device
) -> None:
    """Raise ConfigError if `score` gives other results for a tree of three sequences than for rows; collective.

    Each kernel that the device may choose is tried.
    """
    tree, behind = _rows("tree", vocab_size, device), _behind()
    assert tree.tree is not None
    attentions = (TreeAttention(tree.tree.forest, device, kernel) for kernel in possible_kernels(device.type))
    try:
        with torch.no_grad():
            rows = score(_rows("padded", vocab_size, device))
            trees = [score(replace(tree, tree=attention)) for attention in attentions]
    except UnknownToTreesError as error:
        raise ConfigError(
            f"{name} cannot compute shared prefixes once: {error}; set layout to rows (--zero.layout rows)"
        ) from error
    differences = [_difference(one[some], rows[some]) for one in trees for some in (slice(None), behind)]
    difference = float(torch.tensor(differences).max())  # Python's max would ignore a nan
    if not difference <= TOLERANCE[dtype]:
        raise ConfigError(
            f"{name} gives other results if prefixes that sequences share are computed once: they differ by "
            f"{difference:.2g} of their size; its attention sees more than mask and positions say, so set "
            "layout to rows (--zero.layout rows)"
        )


def require_slices(
    whole: Callable[[RowLayout], Tensor],
    sliced: Callable[[RowLayout], Tensor],
    *,
    layout: Placing,
    name: str,
    vocab_size: int,
    dtype: Dtype,
    device: torch.device,
) -> None:
    """Raise ConfigError unless ranks that share positions get the results of a rank with all positions; collective."""
    with torch.no_grad():
        rows = _rows(layout, vocab_size, device)
        difference = _difference(sliced(rows), whole(rows))
    if not difference <= TOLERANCE[dtype]:
        raise ConfigError(
            f"{name} gives other results if its positions are divided among ranks: they differ by {difference:.2g} of "
            "their size; some layer other than attention looks at neighbouring positions, so set "
            "sequence_parallel_size to 1 (--trainer.sequence-parallel-size 1)"
        )


def _rows(layout: Placing, vocab_size: int, device: torch.device) -> RowLayout:
    """Three sequences with a common start."""
    draw = np.random.default_rng(0)
    start = draw.integers(0, vocab_size, START)
    sequences = [np.concatenate([start, draw.integers(0, vocab_size, n)]).astype(np.int32) for n in LENGTHS]
    return lay_out(sequences, [np.ones(len(tokens), np.bool_) for tokens in sequences], layout=layout, device=device)


def _behind() -> list[int]:
    """Indices of the results that would change if a token saw the other sequences.

    There is one result for each token except a sequence's first. The first token after the common start does not count,
    because it is predicted from the start.
    """
    ends = accumulate(START + length - 1 for length in LENGTHS)
    return [n for end, length in zip(ends, LENGTHS, strict=True) for n in range(end - length + 1, end)]


def _difference(one: Tensor, other: Tensor) -> float:
    """Mean difference as a share of the mean size."""
    return float((one - other).abs().mean() / other.abs().mean().clamp(min=1e-6))

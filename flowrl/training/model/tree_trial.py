"""Try a tree on a loaded model, because its architecture may have what its config.json does not say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.training.model.row_layout import RowLayout, lay_out
from flowrl.training.settings import Dtype

TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference that rounding explains, as a share of the mean size of the results."""
LENGTHS = (9, 5, 7)


def require_trees(
    score: Callable[[RowLayout], Tensor], *, name: str, vocab_size: int, dtype: Dtype, device: torch.device
) -> None:
    """Raise ConfigError if `score` gives other results for a tree of three sequences than for rows; collective."""
    draw = np.random.default_rng(0)
    start = draw.integers(0, vocab_size, 6)
    sequences = [np.concatenate([start, draw.integers(0, vocab_size, n)]).astype(np.int32) for n in LENGTHS]
    masks = [np.ones(len(tokens), np.bool_) for tokens in sequences]
    with torch.no_grad():
        tree, rows = (score(lay_out(sequences, masks, layout=way, device=device)) for way in ("tree", "padded"))
    difference = float((tree - rows).abs().mean() / rows.abs().mean().clamp(min=1e-6))
    if not difference <= TOLERANCE[dtype]:
        raise ConfigError(
            f"{name} gives other results if prefixes that sequences share are computed once: they differ by "
            f"{difference:.2g} of their size; its attention sees more than mask and positions say, so set layout to "
            "rows (--zero.layout rows)"
        )

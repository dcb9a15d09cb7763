"""One pass of a model that scores: from sequences to results at their policy tokens or ends.

A pass is a plain function of (model, items, trees, further arguments) with one result for each item, in order. It calls
the model exactly once; ranks that share a model rely on that. `trees`: the sequences of the pass form a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.messages import Bool, Float32, Int32
from flowrl.training.model.policy_model import PolicyModel
from flowrl.training.model.row_layout import RowLayout, lay_out, lay_out_ends, policy_places
from flowrl.training.model.value_model import ScalarModel

Masked = tuple[Int32, Bool]
"""A sequence and which of its tokens are the policy's."""


def logprobs_of(model: PolicyModel, items: Sequence[Masked], trees: bool, temperature: float) -> list[Float32]:
    """log p of the policy tokens of each sequence, at their positions; 0 elsewhere."""
    with torch.no_grad():
        logprobs_N, _ = model(_rows(model, items, trees), temperature)
    return _at_places(items, logprobs_N)


def judgements_of(
    model: PolicyModel, items: Sequence[Masked], trees: bool, temperature: float
) -> list[tuple[Float32, Float32]]:
    """(logprobs as of `logprobs_of`, last hidden states [policy tokens, K]) of each sequence."""
    with torch.no_grad():
        logprobs_N, _, hidden_NK = model(_rows(model, items, trees), temperature, with_hidden=True)
    ends = np.cumsum([len(policy_places(mask)) for _, mask in items])[:-1]
    hidden = np.split(hidden_NK.float().cpu().numpy(), ends)
    return list(zip(_at_places(items, logprobs_N), hidden, strict=True))


def values_of_pass(
    model: ScalarModel, items: Sequence[Masked], trees: bool, weights: Sequence[float] = (1.0,)
) -> list[Float32]:
    """V of the state before each policy token of each sequence, at the token's position; 0 elsewhere.

    For a head with several labels, V is the sum of their values, weighted by `weights`.
    """
    with torch.no_grad():
        values_NC = _by_label(model(_rows(model, items, trees)))
        values_N = values_NC @ torch.tensor(weights, dtype=values_NC.dtype, device=values_NC.device)
    return _at_places(items, values_N)


def scores_of_pass(model: ScalarModel, items: Sequence[Int32], trees: bool) -> list[tuple[float, ...]]:
    """The head's value, or that of each label, at the last token of each sequence."""
    device = model.network.score.weight.device
    rows = lay_out_ends(items, layout="tree" if trees else "padded", device=device)
    with torch.no_grad():
        scores_BC = _by_label(model(rows))
    return [tuple(scores) for scores in scores_BC.tolist()]


def _by_label(values: Tensor) -> Tensor:
    """[N] or [N, C] as [N, C]."""
    return values if values.ndim == 2 else values[:, None]


def _rows(model: PolicyModel | ScalarModel, items: Sequence[Masked], trees: bool) -> RowLayout:
    tokens, masks = zip(*items, strict=True)
    device = next(model.parameters()).device
    return lay_out(tokens, masks, layout="tree" if trees else "padded", device=device)


def _at_places(items: Sequence[Masked], values_N: Tensor) -> list[Float32]:
    places = [policy_places(mask) for _, mask in items]
    results = [np.zeros(len(tokens), np.float32) for tokens, _ in items]
    parts = torch.split(values_N.float().cpu(), [len(where) for where in places])
    for result, where, part in zip(results, places, parts, strict=True):
        result[where] = part.numpy()
    return results


def tokens_of(item: Any) -> Int32:
    """The tokens of an item of a pass."""
    tokens: Int32 = item[0] if isinstance(item, tuple) else item
    return tokens

"""Calls a loss once on made-up data, so that `flowrl check` finds its mistakes before a run starts.

The trial also checks what the trainer needs from a loss: a gradient in every micro-batch, no influence of tokens
outside the mask, and results that do not depend on how a batch is divided into micro-batches.

Axes: B samples, T policy tokens of the longest one, P pairs.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowrl.training.loss.objective import LossFunction, LossInputs, Objective, Totals

MASK_BT = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
LABELS_B = torch.tensor([1, -1, 1, -1, 0])
NUM_PAIRS = 2
"""Rows 0 and 1 are a pair, and so are rows 2 and 3; no token of row 4 enters the loss."""
WHOLE, PARTS = slice(0, 5), (slice(0, 2), slice(2, 4), slice(4, 5))
TOTALS = Totals(num_tokens=9, num_sequences=4, num_pairs=NUM_PAIRS, num_desirable=2)
TOLERANCE = 1e-4
"""Sums of fp32 numbers in another order differ by less than this, relative to the result or to 1."""


def trial_problem(function: LossFunction, columns: Sequence[str], objective: Objective) -> str | None:
    """What is wrong with `function`, as the rest of a sentence that begins with its name; None if nothing is."""
    results = []
    for rows in (WHOLE, *PARTS):
        found = try_function(function, make_up_inputs(columns, rows), objective)
        if isinstance(found, str):
            return found
        results.append(found)
    return find_difference(*results)


def make_up_inputs(columns: Sequence[str], rows: slice) -> LossInputs:
    """Some rows of the made-up batch as a micro-batch, cut to the longest of them."""
    mask_BT, labels_B = MASK_BT[rows], LABELS_B[rows]
    width = max(1, int(mask_BT.any(dim=0).sum()))
    draw = torch.Generator().manual_seed(0)

    def numbers(mean: float) -> Tensor:
        drawn_BT = torch.randn(MASK_BT.shape, generator=draw) * 0.5 + mean
        return drawn_BT[rows, :width].clone()

    return LossInputs(
        logprobs_BT=numbers(-1.5).requires_grad_(),
        entropies_BT=numbers(1.5).requires_grad_(),
        old_logprobs_BT=numbers(-1.5),
        mask_BT=mask_BT[:, :width],
        columns={name: numbers(-1.5 if name.endswith("logprobs") else 0.0) for name in columns},
        totals=TOTALS,
        values_BT=torch.zeros(len(mask_BT), 0),
        labels_B=labels_B,
        pairs_P2=torch.arange(2 * int((labels_B < 0).sum())).view(-1, 2),
        sample_tokens_B=mask_BT.sum(dim=1),
    )


def try_function(function: LossFunction, inputs: LossInputs, objective: Objective) -> dict[str, float] | str:
    """The numbers that `function` gives for one micro-batch, or what is wrong with them."""
    try:
        result = function(inputs)
    except Exception as error:  # a user's function can raise anything
        return describe_error(error)
    loss, stats = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, Tensor) or not isinstance(stats, Mapping):
        return f"returned a {type(result).__name__}; it has to return its loss as a tensor, or (loss, stats)"
    problem = _loss_problem(loss, inputs, objective) or _stats_problem(stats, objective)
    return problem or {name: float(value.detach()) for name, value in {"loss": loss, **stats}.items()}


def describe_error(error: Exception) -> str:
    here = Path(__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != here]
    where = f" in {Path(frames[0].filename).name}:{frames[0].lineno}" if frames else ""
    cause = "; name every column that it reads in columns=" if isinstance(error, KeyError) else ""
    return f"raised {type(error).__name__}: {error}{where}, on made-up data of the right shapes{cause}"


def _loss_problem(loss: Tensor, inputs: LossInputs, objective: Objective) -> str | None:
    where = "" if inputs.mask_BT.any() else " for a micro-batch without a token in mask_BT, which a rank can get"
    if loss.shape != ():
        return (
            f"returned a tensor of shape {list(loss.shape)}; it has to return one number: the sum over the tokens of "
            "mask_BT, divided by totals.num_tokens (or by another of the totals)"
        )
    if not loss.requires_grad:
        return f"returned a loss without gradient{where}; compute it from logprobs_BT, without detach() or item()"
    leaves = (inputs.logprobs_BT, inputs.entropies_BT)
    by_logprob_BT, by_entropy_BT = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    if not all(bool(values.isfinite().all()) for values in (loss, by_logprob_BT, by_entropy_BT)):
        return f"returned a loss or a gradient that is not finite{where}; divide by totals, not by counts of the mask"
    if by_entropy_BT.any() and not objective.needs_entropy_gradient:
        return "needs the gradient of entropies_BT, which is computed with entropy_gradient=True only; pass it"
    if any(gradient_BT[~inputs.mask_BT].any() for gradient_BT in (by_logprob_BT, by_entropy_BT)):
        return "depends on tokens outside mask_BT; leave these out, as by values_BT[inputs.mask_BT].sum()"
    return None


def _stats_problem(stats: Mapping[str, Tensor], objective: Objective) -> str | None:
    if unnamed := sorted(stats.keys() - set(objective.stats)):
        return f"returned the stats {', '.join(unnamed)}, which stats= does not name; name them there"
    for name, value in stats.items():
        if not isinstance(value, Tensor) or value.shape != ():
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            return f"returned {found} as the stat {name}; it has to be a tensor with one number"
    return None


def find_difference(whole: Mapping[str, float], *parts: Mapping[str, float]) -> str | None:
    """The first result that depends on how the batch is divided."""
    for name, value in whole.items():
        total = sum(part.get(name, 0.0) for part in parts)
        if not math.isclose(value, total, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            what = "a loss" if name == "loss" else f"the stat {name}"
            return (
                f"gives {what} of {value:.4g} for a batch, but {total:.4g} in all for the same batch in {len(parts)} "
                "micro-batches; divide sums by totals, which count the whole optimizer step, not by counts of the "
                "micro-batch"
            )
    return None

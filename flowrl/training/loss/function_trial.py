"""Calls a loss on made-up data, so that `flowrl check` finds its mistakes before a run starts.

The trial also checks what the trainer needs from a loss: a gradient in every micro-batch, no influence of tokens
outside the mask, and results that do not depend on how a batch is divided into micro-batches.

Axes: B samples, T policy tokens of the longest one, P pairs.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.messages import Trainable
from flowrl.training.loss.objective import COLUMNS, LossFunction, LossInputs, Objective, Totals

MASK_BT = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
LABELS_B = torch.tensor([1, -1, 1, -1, 0])
NUM_PAIRS = 2
"""Rows 0 and 1 are a pair, and so are rows 2 and 3; no token of row 4 enters the loss."""
WHOLE, PARTS = slice(0, 5), (slice(0, 2), slice(2, 4), slice(4, 5))
TOTALS = Totals(num_tokens=9, num_sequences=4, num_pairs=NUM_PAIRS, num_desirable=2)
TOLERANCE = 1e-4
"""Sums of fp32 numbers in another order differ by less than this, relative to the result or to 1."""


def objective_problem(objective: Objective) -> str | None:
    """What is wrong with the columns or the loss of a user's class, as the rest of a sentence that begins with its
    name; None if nothing is."""
    sample = make_up_sample()
    for column in objective.needed_columns:
        sample = sample.with_column(column, column.make_zeros(len(sample.token_ids) if column.per == "token" else 1))
    try:
        found = objective.columns(sample)
    except Exception as error:  # a user's method can raise anything
        return f"has a method columns that {describe_error(error)}"
    if not isinstance(found, Mapping):
        return f"has a method columns that returned a {type(found).__name__}; it has to return a dict of arrays by name"
    axes = {column.name: column.shape for column in objective.needed_columns}
    for name, values in found.items():
        if values is not None and np.shape(values) != (len(sample.token_ids), *axes.get(name, ())):
            return (
                f"has a method columns that returned {name} of shape {list(np.shape(values))} for a sample of "
                f"{len(sample.token_ids)} tokens; a column has one number for each token, or what `needed_columns` "
                "declares"
            )
    return trial_problem(objective.loss, tuple(found), objective)


def trial_problem(function: LossFunction, columns: Sequence[str], objective: Objective) -> str | None:
    """What is wrong with `function`, as the rest of a sentence that begins with its name; None if nothing is."""
    results: list[dict[str, float]] = []
    for rows in (WHOLE, *PARTS):
        found = try_function(function, make_up_inputs(columns, rows, objective), objective)
        if isinstance(found, str):
            return found
        results.append(found)
    whole, *parts = results
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


def make_up_sample() -> Trainable:
    """A sample of 2 prompt tokens and 3 policy tokens that has every array."""
    mask = np.array([False, False, True, True, True])
    numbers = np.where(mask, np.linspace(-1.5, -0.5, len(mask)), 0.0).astype(np.float32)
    named: dict[str, Any] = dict.fromkeys(("sample_id", "group_id", "prompt_id", "generator"), "made_up")
    named |= dict.fromkeys(COLUMNS, numbers)
    return Trainable(
        **named,
        prompt_text="",
        response_text="",
        epoch=0,
        member=0,
        group_size=1,
        token_ids=np.arange(len(mask), dtype=np.int32),
        policy_mask=mask,
        versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_tokens=2,
        truncated=False,
        loss_mask=mask,
        label=1,
        teacher_hidden=np.zeros((3, 4), np.float32),
    )


def make_up_inputs(columns: Sequence[str], rows: slice, objective: Objective) -> LossInputs:
    """Some rows of the made-up batch as a micro-batch of the objective's head, cut to the longest of them."""
    mask_BT, labels_B = MASK_BT[rows], LABELS_B[rows]
    width = max(1, int(mask_BT.any(dim=0).sum()))
    mask_BT = mask_BT.any(dim=1, keepdim=True) if objective.at_end else mask_BT[:, :width]
    draw = torch.Generator().manual_seed(0)

    def numbers(mean: float, *, given: bool = True) -> Tensor:
        drawn_BT = torch.randn(MASK_BT.shape, generator=draw) * 0.5 + mean
        return drawn_BT[rows, : mask_BT.shape[1] if given else 0].clone()

    is_lm = objective.head == "lm"
    made = {name: numbers(-1.5 if name.endswith("logprobs") else 0.0) for name in columns}
    for column in objective.needed_columns:
        zeros = torch.from_numpy(column.make_zeros(mask_BT.numel()))
        made[column.name] = zeros.view(*mask_BT.shape, *column.shape)
    return LossInputs(
        logprobs_BT=numbers(-1.5, given=is_lm).requires_grad_(),
        entropies_BT=numbers(1.5, given=is_lm).requires_grad_(),
        old_logprobs_BT=numbers(-1.5, given=is_lm),
        mask_BT=mask_BT,
        columns=made,
        totals=TOTALS,
        values_BT=numbers(0.0, given=not is_lm).requires_grad_(),
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
    is_pair = isinstance(result, tuple) and len(result) == 2
    loss, stats = result if is_pair else (result, {})
    if not isinstance(loss, Tensor) or not isinstance(stats, Mapping):
        return f"returned a {type(result).__name__}; it has to return its loss as a tensor, or (loss, stats)"
    if function == objective.loss and not is_pair:
        return "returned a tensor; the method loss has to return (loss, stats), with {} if it has no stats"
    if problem := find_loss_problem(loss, inputs, objective):
        return problem
    if unnamed := sorted(stats.keys() - set(objective.stats)):
        return f"returned the stats {', '.join(unnamed)}, which stats= does not name; name them there"
    for name, value in stats.items():
        if not isinstance(value, Tensor) or value.shape != ():
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            return f"returned {found} as the stat {name}; it has to be a tensor with one number"
    return {name: float(value.detach()) for name, value in {"loss": loss, **stats}.items()}


def describe_error(error: Exception) -> str:
    here = Path(__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != here]
    where = f" in {Path(frames[0].filename).name}:{frames[0].lineno}" if frames else ""
    cause = "; name every column that it reads in columns=" if isinstance(error, KeyError) else ""
    return f"raised {type(error).__name__}: {error}{where}, on made-up data of the right shapes{cause}"


def find_loss_problem(loss: Tensor, inputs: LossInputs, objective: Objective) -> str | None:
    where = "" if inputs.mask_BT.any() else " for a micro-batch without a token in mask_BT, which a rank can get"
    if loss.shape != ():
        return (
            f"returned a tensor of shape {list(loss.shape)}; it has to return one number: the sum over the tokens of "
            "mask_BT, divided by totals.num_tokens (or by another of the totals)"
        )
    if not loss.requires_grad:
        source = "logprobs_BT" if objective.head == "lm" else "values_BT"
        return f"returned a loss without gradient{where}; compute it from {source}, without detach() or item()"
    leaves = (inputs.logprobs_BT, inputs.values_BT, inputs.entropies_BT)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    if not all(bool(values.isfinite().all()) for values in (loss, *gradients)):
        return f"returned a loss or a gradient that is not finite{where}; divide by totals, not by counts of the mask"
    if gradients[-1].any() and not objective.needs_entropy_gradient:
        return "needs the gradient of entropies_BT, which is computed with entropy_gradient=True only; pass it"
    if any(of.numel() and of[~inputs.mask_BT].any() for of in gradients):
        return "depends on tokens outside mask_BT; leave these out, as by values_BT[inputs.mask_BT].sum()"
    return None

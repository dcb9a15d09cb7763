"""Splits an episode into its sequences, which a trainer feeds to the model as separate rows.

Quantities of a whole sample stay correct: the sample counts as one sequence, and a mean over its tokens is taken over
the tokens of all its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.messages import Batch, Bool, Branch, Sample, Trainable
from flowrl.training.model.row_layout import policy_places


@dataclass(frozen=True)
class RowShare:
    """The share that a row has in a sample with several rows."""

    sample_tokens: int
    """Tokens of all rows of the sample that enter the loss."""
    counts: bool
    """Whether the sample is counted as a sequence at this row: its first row with such a token."""


def in_rows(part: Batch, masks: Sequence[Bool]) -> tuple[Batch, list[Bool], list[RowShare | None]]:
    """`part` with one sample for each sequence, their masks, and their shares (None: the sequence is a whole sample).

    `masks` mark the tokens of each sample that enter the loss. The `micro_batches` of the returned part are indices
    into its samples.
    """
    rows: list[Trainable] = []
    shown: list[Bool] = []
    shares: list[RowShare | None] = []
    for sample, mask in zip(part.samples, masks, strict=True):
        parts = split_whole(sample, mask)
        rows += rows_of(sample)
        shown += parts
        shares += shares_of(sample, parts)
    return replace(part, samples=tuple(rows)), shown, shares


def rows_of(sample: Trainable) -> list[Trainable]:
    """One sample for each sequence of `sample`."""
    if not sample.branches:
        return [sample]
    arrays: dict[str, list[Any]] = {
        name: split_whole(sample, value)
        for name in ("advantages", "loss_mask", "returns", "ref_logprobs")
        if (value := getattr(sample, name)) is not None
    }
    return [
        replace(
            sample,
            token_ids=sequence.token_ids,
            policy_mask=sequence.policy_mask,
            behavior_logprobs=sequence.behavior_logprobs,
            versions=sequence.versions,
            branches=(),
            **{name: parts[number] for name, parts in arrays.items()},
        )
        for number, sequence in enumerate(sample.sequences)
    ]


def split_whole(sample: Sample, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """An array over all sequences of `sample` as one array for each sequence."""
    ends = np.cumsum([sequence.token_ids.size for sequence in sample.sequences])
    return np.split(values, ends[:-1])


def shares_of(sample: Sample, masks: Sequence[Bool]) -> list[RowShare | None]:
    """The share of each sequence of `sample`. `masks` mark the tokens of each sequence that enter the loss."""
    if not sample.branches:
        return [None]
    trained = [_num_trained(sequence, mask) for sequence, mask in zip(sample.sequences, masks, strict=True)]
    first = next((number for number, tokens in enumerate(trained) if tokens), None)
    return [RowShare(sum(trained), number == first) for number in range(len(trained))]


def _num_trained(sequence: Sample | Branch, mask: Bool) -> int:
    return int(mask[policy_places(sequence.policy_mask)].sum())

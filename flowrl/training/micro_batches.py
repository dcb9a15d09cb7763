"""From one rank's samples to micro-batches: the passes of an optimizer step, and each pass as tensors.

`split_in_rows` makes one row of each sequence, `plan_passes` distributes the rows over passes with and without a
backward, and `make_micro_batch` makes the tensors of one pass: the model's input, the loss mask, and the columns that
the objective needs. An empty micro-batch consists of padding that its mask excludes from the loss, because ZeRO-3's
collectives need every rank in every pass.

Axes: B samples, T policy tokens of the longest one, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowrl.messages import Batch, Bool, Sample, Trainable, packing
from flowrl.training.layouts import Placing
from flowrl.training.loss.objective import Objective
from flowrl.training.model.row_layout import RowLayout, lay_out, lay_out_ends, policy_places

Passes = tuple[tuple[int, ...], ...]
"""Numbers of samples, micro-batch by micro-batch."""
BACKWARD = 2
"""The work of a backward pass as a multiple of a forward pass: two matrix products for each forward product."""


@dataclass(frozen=True)
class RowShare:
    """The share that a row has in a sample with several rows."""

    sample_tokens: int
    """Tokens of all rows of the sample that enter the loss."""
    counts: bool
    """Whether the sample is counted as a sequence at this row: its first row with such a token."""


def split_in_rows(part: Batch, masks: Sequence[Bool]) -> tuple[Batch, list[Bool], list[RowShare | None]]:
    """`part` with one sample for each sequence, their masks, and their shares (None: the sequence is a whole sample).

    A trainer feeds the sequences of an episode to the model as separate rows. Quantities of a whole sample stay
    correct: the sample counts as one sequence, and a mean over its tokens is taken over the tokens of all its rows.
    `masks` mark the tokens of each sample that enter the loss. The `micro_batches` of the returned part are indices
    into its samples.
    """
    rows: list[Trainable] = []
    shown: list[Bool] = []
    shares: list[RowShare | None] = []
    for sample, mask in zip(part.samples, masks, strict=True):
        parts = split_by_sequence(sample, mask)
        rows += sample.split_rows()
        shown += parts
        if not sample.branches:
            shares.append(None)
            continue
        pairs = zip(sample.sequences, parts, strict=True)
        trained = [int(mask[policy_places(one.policy_mask)].sum()) for one, mask in pairs]
        first = next((number for number, tokens in enumerate(trained) if tokens), None)
        shares += [RowShare(sum(trained), number == first) for number in range(len(trained))]
    return replace(part, samples=tuple(rows)), shown, shares


def split_by_sequence(sample: Sample, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """An array over all sequences of `sample` as one array for each sequence."""
    ends = np.cumsum([sequence.token_ids.size for sequence in sample.sequences])
    return np.split(values, ends[:-1])


def plan_passes(
    part: Batch, masks: Sequence[Bool], micro_batches: Sequence[Sequence[int]], objective: Objective
) -> tuple[Passes, Passes]:
    """The passes of one optimizer step over the samples in `micro_batches`: those without a backward pass, which come
    first, and those with one.

    A group whose samples all have advantage 0, because all its rewards are equal, adds nothing to a policy gradient
    (`Objective.has_gradient`). Its forward pass still runs, because loss and stats are means over the whole step. Its
    backward pass, two thirds of the work, is left out. Neither gradient nor metrics change. A group stays whole, so
    that its prompt is computed once. A longer prefix that groups of both kinds share is computed once for each kind.
    The samples are divided by kind only if that reduces the total work.

    `masks` mark the tokens of each sample of `part` that enter the loss; every sample is one sequence.
    """
    planned = tuple(tuple(one) for one in micro_batches)
    numbers = [number for one in planned for number in one]
    groups = {part.samples[n].group_id for n in numbers if objective.has_gradient(part.samples[n], masks[n])}
    without = [number for number in numbers if part.samples[number].group_id not in groups]
    if not without:
        return (), planned
    way = part.how_packed()
    forward, both = (
        tuple(map(tuple, way.micro_batches(_make_units(part, chosen))))
        for chosen in (without, sorted({*numbers} - {*without}))
    )
    whole = _count_places(part, planned, way)
    if _count_places(part, forward, way) + (1 + BACKWARD) * _count_places(part, both, way) >= (1 + BACKWARD) * whole:
        return (), planned
    return forward, both


def _count_places(part: Batch, micro_batches: Sequence[Sequence[int]], way: packing.Packing) -> int:
    return sum(way.num_places(_make_units(part, one)) for one in micro_batches)


def _make_units(part: Batch, numbers: Sequence[int]) -> list[packing.PackedUnit]:
    lengths = [part.samples[number].pass_tokens for number in numbers]
    found = packing.join_pairs(lengths, [part.samples[number].pair for number in numbers])
    return [
        packing.PackedUnit(tuple(numbers[i] for i in unit.indices), unit.longest, unit.num_tokens) for unit in found
    ]


@dataclass(frozen=True)
class MismatchedRows:
    """The mismatched completions of a micro-batch."""

    rows: RowLayout
    ref_B: Tensor
    """Reference logprob of each completion; 0 where the sample has no mismatched one."""
    counted_B: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: model input, loss mask, and the columns that the objective needs, [B, T] each."""

    rows: RowLayout
    mask_BT: Tensor
    behavior_BT: Tensor
    ages_BT: Tensor
    columns: Mapping[str, Tensor]
    labels_B: Tensor
    pairs_P2: Tensor
    sample_tokens_B: Tensor
    """Tokens in the loss of each row's sample, over all rows of that sample."""
    num_tokens: int
    num_sequences: int
    num_desirable: int
    num_places: int
    """Tokens that a pass computes, padding excluded; 0 if there is only padding."""
    mismatched: MismatchedRows | None = None
    backward: bool = True
    """False: the micro-batch cannot change the gradient, and has only a forward pass."""

    @property
    def added_counts(self) -> tuple[int, int, int, int]:
        """The counts that this micro-batch adds to the totals of its optimizer step."""
        return self.num_tokens, self.num_sequences, len(self.pairs_P2), self.num_desirable


def make_micro_batch(
    samples: Sequence[Trainable],
    masks: Sequence[Bool],
    objective: Objective,
    *,
    version: int,
    layout: Placing,
    device: torch.device,
    shares: Sequence[RowShare | None] = (),
) -> MicroBatch:
    """Make the micro-batch of `samples`; `masks` mark the tokens that enter the loss in an update of `version`.

    `shares` say which of `samples` are single rows of a sample with several rows; () means none.
    """
    empty = not samples
    samples, masks = samples or [PADDING], masks or [np.zeros(2, np.bool_)]
    token_ids = [s.token_ids for s in samples]
    if objective.at_end:
        places = [np.array([len(tokens) - 1]) for tokens in token_ids]
        rows = lay_out_ends(token_ids, layout=layout, device=device)
        trained = [np.array([mask.any()]) for mask in masks]
    else:
        places = [policy_places(sample.policy_mask) for sample in samples]
        rows = lay_out(token_ids, [s.policy_mask for s in samples], layout=layout, device=device)
        trained = [mask[where] for mask, where in zip(masks, places, strict=True)]
    behavior = [s.behavior_logprobs[where] for s, where in zip(samples, places, strict=True)]
    wholes = [  # a row without a share is a whole sample
        share or RowShare(int(mask.sum()), bool(mask.any()))
        for mask, share in zip(trained, shares or [None] * len(trained), strict=True)
    ]
    asked = [objective.columns(sample) for sample in samples]
    columns: dict[str, Tensor] = {}
    for name in asked[0]:
        found = [values for column in asked if (values := column[name]) is not None]
        if len(found) == len(samples):  # a column that some samples lack is left out
            at_places = [values[where] for values, where in zip(found, places, strict=True)]
            columns[name] = rows.make_column(at_places, device)
    versions = [s.versions[where] for s, where in zip(samples, places, strict=True)]
    ages = [np.where(of >= 0, version - of, -1).astype(np.int32) for of in versions]  # data have no age
    return MicroBatch(
        rows,
        rows.make_column(trained, device),
        rows.make_column(behavior, device),
        rows.make_column(ages, device),
        columns,
        torch.tensor([s.label for s in samples], device=device),
        torch.tensor(find_pairs(samples, trained), dtype=torch.long, device=device).view(-1, 2),
        torch.tensor([whole.sample_tokens for whole in wholes], device=device),
        num_tokens=int(sum(mask.sum() for mask in trained)),
        num_sequences=sum(whole.counts for whole in wholes),
        num_desirable=int(sum(s.label > 0 and mask.any() for s, mask in zip(samples, trained, strict=True))),
        num_places=0 if empty else int(rows.real_RL.sum()),
        mismatched=_lay_out_mismatched(samples, layout, device) if objective.needs_mismatched else None,
    )


def _lay_out_mismatched(samples: Sequence[Trainable], layout: Placing, device: torch.device) -> MismatchedRows:
    """Input of the pass over mismatched completions; a sample without one uses its own tokens instead."""
    found = [sample.mismatched for sample in samples]
    tokens = [s.token_ids if m is None else m.token_ids for s, m in zip(samples, found, strict=True)]
    masks = [s.policy_mask if m is None else m.mask for s, m in zip(samples, found, strict=True)]
    ref = [0.0 if m is None or m.ref_logprobs is None else float(m.ref_logprobs[m.mask].sum()) for m in found]
    return MismatchedRows(
        lay_out(tokens, masks, layout=layout, device=device),
        torch.tensor(ref, device=device),
        torch.tensor([m is not None for m in found], device=device),
    )


def find_pairs(samples: Sequence[Trainable], trained: Sequence[Bool]) -> list[tuple[int, int]]:
    """(chosen, rejected) rows of the pairs whose sequences both have a token in the loss."""
    by_pair: dict[str, dict[int, int]] = {}
    for row, (sample, mask) in enumerate(zip(samples, trained, strict=True)):
        if sample.pair and sample.label and mask.any():
            by_pair.setdefault(sample.pair, {})[sample.label] = row
    return [(rows[1], rows[-1]) for rows in by_pair.values() if len(rows) == 2]


_padding: dict[str, Any] = {column.name: column.make_zeros(2) for column in Trainable.token_columns}
_padding["policy_mask"] = np.array([False, True])
PADDING = Trainable(
    sample_id="",
    group_id="",
    prompt_id="",
    epoch=0,
    member=0,
    group_size=1,
    prompt_text="",
    response_text="",
    prompt_tokens=1,
    truncated=False,
    generator="",
    **_padding,
)
"""The content of an empty micro-batch; its mask excludes every token from the loss."""

"""One micro-batch as tensors: the model's input, the loss mask, and the columns that the objective needs.

An empty micro-batch consists of padding that its mask excludes from the loss, because ZeRO-3's collectives
need every rank in every pass.

Axes: B samples, T policy tokens of the longest one, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowrl.messages import Bool, Trainable
from flowrl.training.batch.sequence_rows import RowShare
from flowrl.training.layouts import Placing
from flowrl.training.loss.objective import Objective
from flowrl.training.model.row_layout import RowLayout, lay_out, lay_out_ends, policy_places


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
    def counts(self) -> tuple[int, int, int, int]:
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
    wholes = _wholes(trained, shares)
    versions = [s.versions[where] for s, where in zip(samples, places, strict=True)]
    ages = [np.where(of >= 0, version - of, -1).astype(np.int32) for of in versions]  # data have no age
    return MicroBatch(
        rows,
        rows.column(trained, device),
        rows.column(behavior, device),
        rows.column(ages, device),
        _columns(samples, objective, places, rows, device),
        torch.tensor([s.label for s in samples], device=device),
        torch.tensor(pairs_of(samples, trained), dtype=torch.long, device=device).view(-1, 2),
        torch.tensor([whole.sample_tokens for whole in wholes], device=device),
        num_tokens=int(sum(mask.sum() for mask in trained)),
        num_sequences=sum(whole.counts for whole in wholes),
        num_desirable=int(sum(s.label > 0 and mask.any() for s, mask in zip(samples, trained, strict=True))),
        num_places=0 if empty else int(rows.real_RL.sum()),
        mismatched=_mismatched(samples, layout, device) if objective.needs_mismatched else None,
    )


def _wholes(trained: Sequence[Bool], shares: Sequence[RowShare | None]) -> list[RowShare]:
    """The share of each row; one without a share is a whole sample."""
    given = shares or [None] * len(trained)
    return [share or RowShare(int(mask.sum()), bool(mask.any())) for mask, share in zip(trained, given, strict=True)]


def _columns(
    samples: Sequence[Trainable],
    objective: Objective,
    places: Sequence[npt.NDArray[np.intp]],
    rows: RowLayout,
    device: torch.device,
) -> dict[str, Tensor]:
    """The columns that the objective needs, if every sample has them."""
    asked = [objective.columns(sample) for sample in samples]
    columns: dict[str, Tensor] = {}
    for name in asked[0]:
        found = [values for column in asked if (values := column[name]) is not None]
        if len(found) == len(samples):
            at_places = [values[where] for values, where in zip(found, places, strict=True)]
            columns[name] = rows.column(at_places, device)
    return columns


def _mismatched(samples: Sequence[Trainable], layout: Placing, device: torch.device) -> MismatchedRows:
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


def pairs_of(samples: Sequence[Trainable], trained: Sequence[Bool]) -> list[tuple[int, int]]:
    """(chosen, rejected) rows of the pairs whose sequences both have a token in the loss."""
    by_pair: dict[str, dict[int, int]] = {}
    for row, (sample, mask) in enumerate(zip(samples, trained, strict=True)):
        if sample.pair and sample.label and mask.any():
            by_pair.setdefault(sample.pair, {})[sample.label] = row
    return [(rows[1], rows[-1]) for rows in by_pair.values() if len(rows) == 2]


PADDING = Trainable(
    sample_id="",
    group_id="",
    prompt_id="",
    epoch=0,
    member=0,
    group_size=1,
    prompt_text="",
    response_text="",
    token_ids=np.zeros(2, np.int32),
    policy_mask=np.array([False, True]),
    behavior_logprobs=np.zeros(2, np.float32),
    versions=np.zeros(2, np.int32),
    prompt_tokens=1,
    truncated=False,
    generator="",
    ref_logprobs=np.zeros(2, np.float32),
    teacher_logprobs=np.zeros(2, np.float32),
    values=np.zeros(2, np.float32),
    returns=np.zeros(2, np.float32),
    advantages=np.zeros(2, np.float32),
)
"""The content of an empty micro-batch; its mask excludes every token from the loss."""

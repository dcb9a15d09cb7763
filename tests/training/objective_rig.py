"""Objectives as the learner calls them: on micro-batches made of samples, with totals over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flowrl.messages import Trainable
from flowrl.training.loss.objective import LossInputs, Objective, Totals
from flowrl.training.micro_batches import make_micro_batch

CPU = torch.device("cpu")
LENGTHS = (5, 3, 2, 6, 4, 4)
"""Policy tokens: chosen and rejected of three pairs."""


def samples() -> list[Trainable]:
    draw = np.random.default_rng(5)
    return [_sample(draw, index, length) for index, length in enumerate(LENGTHS)]


def _sample(draw: np.random.Generator, index: int, length: int) -> Trainable:
    mask = np.arange(2 + length) >= 2
    of_rollouts = np.random.default_rng(index)
    return Trainable(
        sample_id=f"s{index}",
        group_id=f"g{index // 2}",
        prompt_id="p",
        epoch=0,
        member=index % 2,
        group_size=2,
        prompt_text="",
        response_text="",
        token_ids=np.arange(len(mask), dtype=np.int32),
        policy_mask=mask,
        behavior_logprobs=np.where(mask, of_rollouts.normal(-2, 1, len(mask)), 0).astype(np.float32),
        advantages=np.where(mask, of_rollouts.normal(0, 1, len(mask)), 0).astype(np.float32),
        versions=np.full(len(mask), -1, np.int32),
        prompt_tokens=2,
        truncated=False,
        generator="",
        ref_logprobs=np.where(mask, draw.normal(-2, 1, len(mask)), 0).astype(np.float32),
        label=1 - 2 * (index % 2),
        pair=f"g{index // 2}",
    )


def logprobs() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, generator=draw) - 2).requires_grad_() for n in LENGTHS]


@dataclass
class Outcome:
    loss: float
    stats: dict[str, float]
    gradient: torch.Tensor


def run(objective: Objective, cut: Sequence[Sequence[int]], **seen: Any) -> Outcome:
    """The sum over the micro-batches of `cut`, as the learner makes it."""
    drawn, given = logprobs(), samples()
    micro_batches = [
        make_micro_batch(
            [given[i] for i in part],
            [given[i].policy_mask for i in part],
            objective,
            version=0,
            layout="padded",
            device=CPU,
        )
        for part in cut
    ]
    totals = Totals(*np.sum([micro_batch.added_counts for micro_batch in micro_batches], axis=0).tolist())
    assert objective.enough(totals)
    loss, stats = torch.zeros(()), dict[str, float]()
    for part, micro_batch in zip(cut, micro_batches, strict=True):
        empty = torch.zeros(1, requires_grad=True)
        logprobs_BT = micro_batch.rows.spread_values(torch.cat([drawn[i] for i in part]) if part else empty)
        nothing = logprobs_BT.detach() * 0
        shown = LossInputs(
            logprobs_BT,
            nothing,
            logprobs_BT.detach(),
            micro_batch.mask_BT,
            micro_batch.columns,
            totals,
            nothing,
            micro_batch.labels_B,
            micro_batch.pairs_P2,
            **seen,
        )
        part_loss, part_stats = objective.loss(shown)
        assert part_loss.requires_grad
        loss = loss + part_loss
        for name, value in part_stats.items():
            stats[name] = stats.get(name, 0.0) + float(value)
    loss.backward()
    assert stats.keys() <= set(objective.stats)
    return Outcome(float(loss.detach()), stats, torch.cat([d.grad for d in drawn if d.grad is not None]))

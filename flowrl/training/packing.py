"""Cutting a batch into ranks, optimizer steps and micro-batches. numpy only.

Invariants, held by a property test:
- every sample is in exactly one micro-batch of exactly one rank;
- an optimizer step trains the same samples whatever the number of ranks and the token budget;
- all ranks have the same `step_ends`, hence equally many micro-batches (ZeRO-3's collectives need
  every rank in each of them); a rank with nothing to do has an empty one;
- a micro-batch padded to its longest sample holds at most `token_budget` tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Batch, Bool, Trainable


def trained_mask(sample: Trainable) -> Bool:
    """The tokens of `sample` that enter the loss, before staleness masking by the trainer."""
    return sample.policy_mask if sample.loss_mask is None else sample.loss_mask


def loss_masks(samples: Sequence[Trainable], mask_staleness: int, version: int) -> list[Bool]:
    """The tokens of each sample that enter the loss in an update of `version`; -1 masks none for its age."""
    masks = [trained_mask(sample) for sample in samples]
    if mask_staleness < 0:
        return masks
    return [mask & (version - s.versions <= mask_staleness) for s, mask in zip(samples, masks, strict=True)]


def split_batch(batch: Batch, n: int) -> tuple[Batch, ...]:
    """The parts for `n` ranks: balanced by tokens, micro-batches sorted by length, longest first.

    Raises ConfigError if one sample alone exceeds the token budget.
    """
    lengths = [int(sample.token_ids.size) for sample in batch.samples]
    _refuse_longer_than_budget(batch, lengths)
    owned: list[list[int]] = [[] for _ in range(n)]
    micro_batches: list[list[tuple[int, ...]]] = [[] for _ in range(n)]
    step_ends: list[int] = []
    for step in np.array_split(np.arange(len(lengths)), batch.optimizer_steps):
        cut = [micro_batches_of(part, lengths, batch.token_budget) for part in deal(step.tolist(), lengths, n)]
        most = max(1, *(len(part) for part in cut))
        for rank, part in enumerate(cut):
            for indices in part + [[]] * (most - len(part)):
                start = len(owned[rank])
                owned[rank].extend(indices)
                micro_batches[rank].append(tuple(range(start, len(owned[rank]))))
        step_ends.append(most + (step_ends[-1] if step_ends else 0))
    return tuple(
        replace(
            batch,
            samples=tuple(batch.samples[i] for i in owned[rank]),
            micro_batches=tuple(micro_batches[rank]),
            step_ends=tuple(step_ends),
        )
        for rank in range(n)
    )


def deal(indices: Sequence[int], lengths: Sequence[int], n: int) -> list[list[int]]:
    """`indices` dealt to `n` ranks, longest first, each to the rank with the fewest tokens so far."""
    ranks: list[list[int]] = [[] for _ in range(n)]
    loads = [(0, rank) for rank in range(n)]
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(index)
        heapq.heappush(loads, (load + lengths[index], rank))
    return ranks


def micro_batches_of(indices: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """`indices`, which come longest first, cut so that count × longest stays within the budget."""
    cut: list[list[int]] = []
    for index in indices:
        fits = cut and (not token_budget or (len(cut[-1]) + 1) * lengths[cut[-1][0]] <= token_budget)
        if fits:
            cut[-1].append(index)
        else:
            cut.append([index])
    return cut


def _refuse_longer_than_budget(batch: Batch, lengths: Sequence[int]) -> None:
    if not batch.token_budget:
        return
    for sample, length in zip(batch.samples, lengths, strict=True):
        if length > batch.token_budget:
            raise ConfigError(
                f"sample {sample.sample_id!r} has {length} tokens, more than the token budget of "
                f"{batch.token_budget} a micro-batch; raise token_budget to at least the longest prompt "
                "plus the longest response"
            )

"""Cutting a batch into ranks, optimizer steps and micro-batches. numpy only.

Invariants, held by a property test:
- every sample is in exactly one micro-batch of exactly one rank;
- neighbours of one pair are in the same micro-batch, in their order;
- an optimizer step trains the same samples whatever the number of ranks and the token budget;
- all ranks have the same `step_ends`, hence equally many micro-batches (ZeRO-3's collectives need
  every rank in each of them); a rank with nothing to do has an empty one;
- a micro-batch padded to its longest sample holds at most `token_budget` tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    Raises ConfigError if one sample alone, or one pair, exceeds the token budget.
    """
    units = units_of(batch.samples)
    _refuse_longer_than_budget(batch, units)
    owned: list[list[int]] = [[] for _ in range(n)]
    micro_batches: list[list[tuple[int, ...]]] = [[] for _ in range(n)]
    step_ends: list[int] = []
    for step in np.array_split(np.arange(len(units)), batch.optimizer_steps):
        dealt = deal([units[i] for i in step], n)
        cut = [micro_batches_of(part, batch.token_budget) for part in dealt]
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


@dataclass(frozen=True)
class Unit:
    """Samples that stay together: a pair, or one sample alone."""

    indices: tuple[int, ...]
    longest: int
    """Tokens of its longest sample."""
    num_tokens: int

    @property
    def padded(self) -> int:
        """Tokens, padding included."""
        return len(self.indices) * self.longest


def units_of(samples: Sequence[Trainable]) -> list[Unit]:
    """Neighbours with the same non-empty pair as one unit each, in the order of the samples."""
    runs: list[list[int]] = []
    for index, sample in enumerate(samples):
        if sample.pair and runs and samples[runs[-1][-1]].pair == sample.pair:
            runs[-1].append(index)
        else:
            runs.append([index])
    lengths = [tokens_of(sample) for sample in samples]
    return [Unit(tuple(run), max(lengths[i] for i in run), sum(lengths[i] for i in run)) for run in runs]


def tokens_of(sample: Trainable) -> int:
    """Tokens that a pass over `sample` needs room for."""
    longest = sample.token_ids.size
    return int(longest if sample.mismatched is None else max(longest, sample.mismatched.token_ids.size))


def deal(units: Sequence[Unit], n: int) -> list[list[Unit]]:
    """`units` dealt to `n` ranks, longest first, each to the rank with the fewest tokens so far."""
    ranks: list[list[Unit]] = [[] for _ in range(n)]
    loads = [(0, rank) for rank in range(n)]
    for unit in sorted(units, key=lambda unit: (-unit.longest, unit.indices)):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(unit)
        heapq.heappush(loads, (load + unit.num_tokens, rank))
    return ranks


def micro_batches_of(units: Sequence[Unit], token_budget: int) -> list[list[int]]:
    """Indices of `units`, which come longest first, cut so that count × longest stays within the budget."""
    cut: list[list[int]] = []
    longest = 0
    for unit in units:
        if cut and (not token_budget or (len(cut[-1]) + len(unit.indices)) * longest <= token_budget):
            cut[-1].extend(unit.indices)
        else:
            cut.append(list(unit.indices))
            longest = unit.longest
    return cut


def _refuse_longer_than_budget(batch: Batch, units: Sequence[Unit]) -> None:
    if not batch.token_budget:
        return
    for unit in units:
        if unit.padded > batch.token_budget:
            what = (
                f"sample {batch.samples[unit.indices[0]].sample_id!r} has {unit.longest} tokens"
                if len(unit.indices) == 1
                else f"pair {batch.samples[unit.indices[0]].pair!r} needs {unit.padded} tokens, padding included"
            )
            raise ConfigError(
                f"{what}, more than the token budget of {batch.token_budget} a micro-batch; raise token_budget to at "
                f"least {'the longest prompt plus the longest response' if len(unit.indices) == 1 else unit.padded}"
            )

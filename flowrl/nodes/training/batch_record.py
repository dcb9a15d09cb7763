"""Collects one rank's statistics of a batch, piece by piece, and returns them when the batch is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from flowrl.messages import Batch, Bool, Trainable
from flowrl.runtime.ledger.ledger_client import Use
from flowrl.training.batch.batch_stats import BatchStats
from flowrl.training.batch.masks import trained_mask

if TYPE_CHECKING:
    from flowrl.training.engine.gang import Gang


@dataclass
class BatchRecord:
    """Statistics and uses of the samples so far."""

    stats: list[BatchStats] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    num_groups: int = 0
    """Number of groups in the whole batch, not in this rank's part."""

    def add(self, part: Batch, masks: Sequence[Bool], version: int, *, too_few: bool) -> None:
        """Add this rank's part of a piece; `masks` are the tokens that entered the loss in `version`'s update.

        With `too_few` samples for a loss none did, and those of `masks` count as masked.
        """
        if too_few:
            part = replace(part, samples=tuple(map(_without, part.samples, masks)))
            masks = [np.zeros_like(mask) for mask in masks]
        self.stats.append(BatchStats.of(part.samples, masks, version))
        self.uses += [Use.of(sample, mask) for sample, mask in zip(part.samples, masks, strict=True)]
        self.num_groups += part.num_groups

    def gathered(self, gang: Gang) -> tuple[BatchStats, list[Use]]:
        """The statistics and uses of all parts; collective."""
        stats, uses = zip(*gang.parts((BatchStats.total(self.stats), self.uses)), strict=True)
        return BatchStats.total(stats), [use for part_uses in uses for use in part_uses]


def _without(sample: Trainable, mask: Bool) -> Trainable:
    """The sample, with the tokens of `mask` kept out of the loss."""
    return replace(sample, loss_mask=trained_mask(sample) & ~mask)

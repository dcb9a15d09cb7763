"""Collects one rank's statistics of a batch, piece by piece, and returns them when the batch is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowrl.messages import Batch, Bool
from flowrl.runtime.ledger.ledger_client import Use
from flowrl.training.batch.batch_stats import BatchStats

if TYPE_CHECKING:
    from flowrl.training.engine.gang import Gang


@dataclass
class BatchRecord:
    """Statistics and uses of the samples so far."""

    stats: list[BatchStats] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    num_groups: int = 0
    """Number of groups in the whole batch, not in this rank's part."""

    def add(self, part: Batch, masks: Sequence[Bool], version: int) -> None:
        """Add this rank's part of a piece; `masks` are the tokens that entered the loss in `version`'s update."""
        self.stats.append(BatchStats.of(part.samples, masks, version))
        self.uses += [Use.of(sample, mask) for sample, mask in zip(part.samples, masks, strict=True)]
        self.num_groups += part.num_groups

    def gathered(self, gang: Gang) -> tuple[BatchStats, list[Use]]:
        """The statistics and uses of all parts; collective."""
        stats, uses = zip(*gang.parts((BatchStats.total(self.stats), self.uses)), strict=True)
        return BatchStats.total(stats), [use for part_uses in uses for use in part_uses]

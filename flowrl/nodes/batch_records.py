"""What one rank of a trainer records of its batches: statistics and uses of those that are trained, and the figures on
those that are held out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flowrl.graph.ports import In
from flowrl.messages import Batch, Bool
from flowrl.runtime.ledger.ledger_client import Use
from flowrl.training.batch_stats import BatchStats
from flowrl.training.loss.objective import trained_mask

BatchJudge = Callable[[Batch], Mapping[str, Any]]
"""The objective's stats on a batch with the current weights; collective, no gradient."""


class HeldOutFigures:
    """One rank's figures on the held-out batches, measured once for each version and reported once in the records.

    All ranks ask at the same points of the run, because measuring is collective.
    """

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._version = -1
        self._figures: dict[str, Any] = {}
        self._reported = -1
        """The newest version whose figures are in the records."""

    async def collect_batches(self, port: In[Batch]) -> None:
        """Store the held-out batches. Returns when their sender has closed, immediately if there is no sender."""
        if port.live is not None:
            async for batch in port:
                self._batches.append(copy.deepcopy(batch))  # its arrays are only valid until `finish`
                port.finish(batch)

    def measure_figures(self, version: int, judge: BatchJudge, prefix: str = "held_out") -> dict[str, Any]:
        """The figures of the current weights, which are those of `version`."""
        if self._version != version:
            self._figures = {name: value for batch in self._batches for name, value in judge(batch).items()}
            self._version = version
        return {f"{prefix}/{name}": value for name, value in self._figures.items()}

    def report_figures(self, version: int, judge: BatchJudge) -> dict[str, Any]:
        """As `measure`, for the records."""
        self._reported = version
        return self.measure_figures(version, judge)

    def lacks_report(self, version: int) -> bool:
        """Whether the records have no figures of `version` yet, although there is something to measure."""
        return bool(self._batches) and version > 0 and self._reported != version


@dataclass
class BatchRecord:
    """Statistics and uses of one rank's samples of a batch so far."""

    stats: list[BatchStats] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    num_groups: int = 0
    """Number of groups in the whole batch, not in this rank's part."""

    def add_part(self, part: Batch, masks: Sequence[Bool], version: int, *, too_few: bool) -> None:
        """Add this rank's part of a piece; `masks` are the tokens that entered the loss in `version`'s update.

        With `too_few` samples for a loss none did, and those of `masks` count as masked.
        """
        if too_few:
            kept_out = zip(part.samples, masks, strict=True)
            samples = tuple(replace(one, loss_mask=trained_mask(one) & ~mask) for one, mask in kept_out)
            part = replace(part, samples=samples)
            masks = [np.zeros_like(mask) for mask in masks]
        self.stats.append(BatchStats.collect_stats(part.samples, masks, version))
        self.uses += [Use.of(sample, mask) for sample, mask in zip(part.samples, masks, strict=True)]
        self.num_groups += part.num_groups

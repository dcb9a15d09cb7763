"""A trainer's figures on its held-out batches: measured once for each version, and reported once in the records."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.graph.ports import In
from flowrl.messages import Batch

BatchJudge = Callable[[Batch], Mapping[str, Any]]
"""The objective's stats on a batch with the current weights; collective, no gradient."""


class HeldOutFigures:
    """Those of one rank. All ranks ask at the same points of the run, because measuring is collective."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._version = -1
        self._figures: dict[str, Any] = {}
        self._reported = -1
        """The newest version whose figures are in the records."""

    async def take(self, port: In[Batch]) -> None:
        """Store the held-out batches. Returns when their sender has closed, immediately if there is no sender."""
        if port.live is not None:
            async for batch in port:
                self._batches.append(copy.deepcopy(batch))  # its arrays are only valid until `finish`
                port.finish(batch)

    def of(self, version: int, judge: BatchJudge, prefix: str = "held_out") -> dict[str, Any]:
        """The figures of the current weights, which are those of `version`."""
        if self._version != version:
            self._figures = {name: value for batch in self._batches for name, value in judge(batch).items()}
            self._version = version
        return {f"{prefix}/{name}": value for name, value in self._figures.items()}

    def report(self, version: int, judge: BatchJudge) -> dict[str, Any]:
        """As `of`, for the records."""
        self._reported = version
        return self.of(version, judge)

    def lacks(self, version: int) -> bool:
        """Whether the records have no figures of `version` yet, although there is something to measure."""
        return bool(self._batches) and version > 0 and self._reported != version

"""When rewards fail one after the other: the first failure is reported, and the run ends if nothing else happens.

A failed sample counts for no optimizer step, so a run whose reward always fails would sample without an end.
"""

from __future__ import annotations

from flowrl.errors import FlowrlError
from flowrl.graph.node import Context

FAILURES_IN_A_ROW = 256
"""Samples whose reward fails one after the other before the run ends."""


class FailingRewards:
    """Counts the consecutive failures of one node replica's reward."""

    def __init__(self) -> None:
        self._number = 0

    def scored(self) -> None:
        """A reward was computed."""
        self._number = 0

    def failed(self, context: Context, reason: str, text: str, *, samples: int = 1) -> None:
        """The reward of `samples` samples failed. Raises FlowrlError after FAILURES_IN_A_ROW samples."""
        if not self._number:
            context.progress(f"a sample failed: {text}")
        self._number += samples
        context.metric(reason, 1)
        if self._number >= FAILURES_IN_A_ROW:
            raise FlowrlError(f"the reward failed for {self._number} samples in a row; the last time: {text}")

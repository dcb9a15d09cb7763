"""When a checkpoint is due: after a number of steps, after a number of minutes, or as soon as possible."""

from __future__ import annotations

import time

from flowrl.runtime.driver.options import RunOptions

RANKS_APART = 8
"""Largest number of batches between the ranks of a gang."""
TOLD_FROM_S = 1.0
"""Checkpoints that take at least this long report their cost."""


class CheckpointClock:
    """Asked at the end of each batch, by each rank."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._soon = False
        self._answers: dict[int, bool] = {}
        self._saved_s = time.monotonic()
        """When the last checkpoint was complete; at first, when the run began."""

    def is_due(self, version: int) -> bool:
        """Whether a checkpoint follows the batch that made `version`.

        The answer to the first rank that asks holds for all ranks, because they have to wait together. No checkpoint
        follows the last step, because the end of the run makes one.
        """
        if version not in self._answers:
            self._answers = {other: due for other, due in self._answers.items() if other > version - RANKS_APART}
            self._answers[version] = version != self._options.steps and self._wants(version)
        return self._answers[version]

    def _wants(self, version: int) -> bool:
        every, minutes = self._options.save_every, self._options.save_minutes
        by_step = every > 0 and version % every == 0
        by_time = minutes > 0 and time.monotonic() - self._saved_s >= 60 * minutes
        return by_step or by_time or self._soon

    def soon(self) -> None:
        """Make a checkpoint due after the next batch."""
        self._soon = True

    def saved(self, began_s: float) -> str:
        """Note that a checkpoint that was started at `began_s` is complete. Returns its cost in words."""
        now_s = time.monotonic()
        took_s, since_s = now_s - began_s, now_s - self._saved_s
        self._saved_s, self._soon = now_s, False
        share = f", {took_s / since_s:.1%} of the time since the one before" if took_s >= TOLD_FROM_S else ""
        return f"in {took_s:.1f} s{share}"

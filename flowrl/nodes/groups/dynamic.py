"""Dynamic sampling (DAPO, arXiv 2503.14476): only groups with a learning signal are trained on.

The filter uses raw rewards, before any shaping. The tickets of filtered groups return and other groups
are admitted instead, so a batch always holds the configured number of groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.messages import Scored
from flowrl.nodes.groups.judged import Judged
from flowrl.training.advantages import all_equal, require_one_seat

LEAST_LIMIT = 256
"""The smallest default of `DynamicSampling.limit`."""
LIMIT_PER_GROUP = 16
"""Default limit per group of a batch: beyond it, more than 94% of the groups teach nothing."""


@dataclass(frozen=True)
class DynamicSampling:
    """Which groups are kept, and how many may be lost on the way to one batch."""

    groups_per_step: int
    """The batcher's number of groups in a batch."""
    mean_between: tuple[float, float] | None = None
    """None keeps groups with raw rewards that differ by more than rounding; (low, high): with low < mean < high."""
    max_filtered_per_step: int | None = None
    """If more groups than this are filtered before a batch is full, the run ends with an error; None: see `limit`."""

    @property
    def limit(self) -> int:
        """Most groups that may be filtered for one batch: `max_filtered_per_step`, or a default by the batch's size."""
        if self.max_filtered_per_step is not None:
            return self.max_filtered_per_step
        return max(LEAST_LIMIT, LIMIT_PER_GROUP * self.groups_per_step)

    def notes(self) -> list[str]:
        """What `flowrl check` reports about these settings."""
        return [f"the run ends if more than {self.limit} groups are filtered before a batch of {self.groups_per_step}"]

    def problems(self) -> list[str]:
        """Problems of these settings, as complete sentences."""
        found = []
        if self.max_filtered_per_step is not None and self.max_filtered_per_step < 1:
            found.append(f"max_filtered_per_step is {self.max_filtered_per_step}; it needs at least 1")
        if self.mean_between is not None and not self.mean_between[0] < self.mean_between[1]:
            found.append(f"mean_between is {self.mean_between}; the lower bound has to come first")
        return found

    def reason(self, raw: Sequence[float]) -> str:
        """Why a group with these raw rewards is filtered; "" if it is kept."""
        if self.mean_between is None:
            return "all_equal" if all_equal(raw) else ""
        low, high = self.mean_between
        return "" if low < float(np.mean(raw)) < high else "mean_out_of_range"


class GroupFilter:
    """Judges groups one after the other; counts the kept and the filtered groups of the current batch."""

    def __init__(self, settings: DynamicSampling | None) -> None:
        self._settings = settings
        self._kept_of_step = 0
        self._filtered_of_step = 0
        self._judged = Judged()

    def judge(self, samples: Sequence[Scored]) -> str:
        """The reason why these members of a group are not trained on; "" if they are."""
        if self._settings is None:
            return ""
        require_one_seat(samples, "dynamic sampling")
        reason = self._settings.reason([sample.raw_reward for sample in samples])
        self._judged.add(samples, passed_on=() if reason else samples)
        if reason:
            self._filtered_of_step += 1
        else:
            self._count_kept(self._settings.groups_per_step)
        return reason

    def _count_kept(self, groups_per_step: int) -> None:
        self._kept_of_step += 1
        if self._kept_of_step >= groups_per_step:
            self._kept_of_step = self._filtered_of_step = 0

    def assert_within(self, node: str) -> None:
        """Raise FlowrlError if too many groups were filtered before one batch was full."""
        settings = self._settings
        if settings is not None and self._filtered_of_step > settings.limit:
            raise FlowrlError(
                f"node {node!r}: {self._filtered_of_step} groups were filtered before a batch of "
                f"{settings.groups_per_step} was full, {self._kept_of_step} were kept; max_filtered_per_step is "
                f"{settings.limit}. The task is too easy or too hard for this policy: choose "
                "prompts it sometimes answers, raise group_size, or raise max_filtered_per_step"
            )

    def since_kept(self) -> Mapping[str, float]:
        """The sums over the groups judged since the last kept group, then reset; {} without dynamic sampling."""
        return {} if self._settings is None else self._judged.take()

    def state(self) -> Mapping[str, Any]:
        return {"kept": self._kept_of_step, "filtered": self._filtered_of_step, "judged": self._judged.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._kept_of_step, self._filtered_of_step = int(state["kept"]), int(state["filtered"])
        self._judged.load_state(state["judged"])

"""Statistics of the groups that a selecting node has judged; they travel with the next group it passes on.

So a batch has the exact statistics of the groups judged for it, even if the nodes run ahead of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.messages import Group, Scored
from flowrl.nodes.groups.by_source import FILTERED, JUDGED, counted_name

GIVE_UP_AFTER = 1024


class Judged:
    """Sums over the groups judged since the last `take`."""

    def __init__(self) -> None:
        self._sums = _nothing()

    def add(self, samples: Sequence[Scored], *, passed_on: Sequence[Scored]) -> None:
        """Add a judged group; the members `passed_on` go to the batcher, the others are filtered."""
        kept = {sample.sample_id for sample in passed_on}
        self._sums["judged_groups"] += 1
        self._sums["filtered_groups"] += not kept
        self._sums["filtered_tokens"] += sum(s.response_tokens for s in samples if s.sample_id not in kept)
        self._sums["judged_raw_reward"] += float(np.mean([sample.raw_reward for sample in samples]))
        for figure, counts in ((JUDGED, 1), (FILTERED, not kept)):
            if name := counted_name(figure, samples):
                self._sums[name] = self._sums.get(name, 0.0) + counts

    def assert_some_pass(self, node: str, why: str) -> None:
        """Raise FlowrlError if `GIVE_UP_AFTER` groups in a row were filtered: probably none will ever pass."""
        if self._sums["filtered_groups"] >= GIVE_UP_AFTER:
            raise FlowrlError(
                f"node {node!r}: none of the last {GIVE_UP_AFTER} groups could be trained on ({why}); the mean raw "
                f"reward was {self._sums['judged_raw_reward'] / self._sums['judged_groups']:.3g}; choose prompts that "
                "the policy answers sometimes, or raise group_size"
            )

    def take(self) -> Mapping[str, float]:
        """Return and reset the sums, for `Group.metrics` of the group that is passed on now."""
        told, self._sums = self._sums, _nothing()
        return told

    def state(self) -> Mapping[str, float]:
        return dict(self._sums)

    def load_state(self, state: Mapping[str, float]) -> None:
        self._sums = {name: float(value) for name, value in state.items()}


def judged_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What selection cost the batch of `groups`; {} if no node selected.

    `filtered_share` is the share of whole groups. `raw_reward_unfiltered_mean` is the mean over all groups
    judged for the batch, while its `raw_reward_mean` is the mean over the samples trained on.
    """
    told = [group.metrics for group in groups if "judged_groups" in group.metrics]
    if not told:
        return {}
    sums = {name: sum(metrics[name] for metrics in told) for name in _nothing()}
    return {
        "filtered_groups": sums["filtered_groups"],
        "filtered_share": sums["filtered_groups"] / sums["judged_groups"],
        "filtered_tokens": sums["filtered_tokens"],
        "raw_reward_unfiltered_mean": sums["judged_raw_reward"] / sums["judged_groups"],
    }


def _nothing() -> dict[str, float]:
    return dict.fromkeys(("judged_groups", "filtered_groups", "filtered_tokens", "judged_raw_reward"), 0.0)

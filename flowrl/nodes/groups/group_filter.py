"""Which groups are trained on, and what the others cost.

With dynamic sampling (DAPO, arXiv 2503.14476) only groups with a learning signal are trained on. The filter uses raw
rewards, before any shaping. The tickets of filtered groups return and other groups are admitted instead, so a batch
always holds the configured number of groups.

The statistics of all groups that a selecting node has judged travel with the next group that it passes on. So a batch
has the exact statistics of the groups judged for it, even if the nodes run ahead of each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.graph.node import Node
from flowrl.graph.ports import Call, In
from flowrl.messages import Group, Scored, Trainable
from flowrl.nodes.curriculum import PASSED, ROUNDING, GroupOutcome, Noted
from flowrl.tasks.rows import OF_TASK
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

    def find_problems(self) -> list[str]:
        """Problems of these settings, as complete sentences."""
        found = []
        if self.max_filtered_per_step is not None and self.max_filtered_per_step < 1:
            found.append(f"max_filtered_per_step is {self.max_filtered_per_step}; it needs at least 1")
        if self.mean_between is not None and not self.mean_between[0] < self.mean_between[1]:
            found.append(f"mean_between is {self.mean_between}; the lower bound has to come first")
        return found

    def why_filtered(self, raw: Sequence[float]) -> str:
        """Why a group with these raw rewards is filtered; "" if it is kept."""
        if self.mean_between is None:
            return "all_equal" if all_equal(raw) else ""
        low, high = self.mean_between
        return "" if low < float(np.mean(raw)) < high else "mean_out_of_range"


GIVE_UP_AFTER = 1024
JUDGED, FILTERED = "judged_groups", "filtered_groups"
SUMS = (JUDGED, FILTERED, "filtered_tokens", "judged_raw_reward")


class GroupFilter:
    """Judges groups one after the other: counts the kept and the filtered groups of the current batch, and has the sums
    over the groups judged since the last `take_sums`."""

    def __init__(self, settings: DynamicSampling | None) -> None:
        self._settings = settings
        self._kept_of_step = 0
        self._filtered_of_step = 0
        self._sums = dict.fromkeys(SUMS, 0.0)

    def judge_group(self, samples: Sequence[Scored]) -> str:
        """The reason why dynamic sampling filters these members of a group; "" if it does not."""
        if self._settings is None:
            return ""
        require_one_seat(samples, "dynamic sampling")
        reason = self._settings.why_filtered([sample.raw_reward for sample in samples])
        self._filtered_of_step += bool(reason)
        self._kept_of_step += not reason
        if self._kept_of_step >= self._settings.groups_per_step:
            self._kept_of_step = self._filtered_of_step = 0
        return reason

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

    def add_group(self, samples: Sequence[Scored], *, passed_on: Sequence[Scored]) -> None:
        """Add a judged group; the members `passed_on` go to the batcher, the others are filtered."""
        kept = {sample.sample_id for sample in passed_on}
        self._sums["judged_groups"] += 1
        self._sums["filtered_groups"] += not kept
        self._sums["filtered_tokens"] += sum(s.response_tokens for s in samples if s.sample_id not in kept)
        self._sums["judged_raw_reward"] += float(np.mean([sample.raw_reward for sample in samples]))
        source = samples[0].columns.get(OF_TASK) if samples else None
        if source is not None:  # the task is a mixture
            for figure, counts in ((JUDGED, 1), (FILTERED, not kept)):
                name = f"{figure} of {source}"
                self._sums[name] = self._sums.get(name, 0.0) + counts

    def assert_some_pass(self, node: str, why: str) -> None:
        """Raise FlowrlError if `GIVE_UP_AFTER` groups in a row were filtered: probably none will ever pass."""
        if self._sums["filtered_groups"] >= GIVE_UP_AFTER:
            raise FlowrlError(
                f"node {node!r}: none of the last {GIVE_UP_AFTER} groups could be trained on ({why}); the mean raw "
                f"reward was {self._sums['judged_raw_reward'] / self._sums['judged_groups']:.3g}; choose prompts that "
                "the policy answers sometimes, or raise group_size"
            )

    def take_sums(self) -> Mapping[str, float]:
        """Return and reset the sums, for `Group.metrics` of the group that is passed on now."""
        told, self._sums = self._sums, dict.fromkeys(SUMS, 0.0)
        return told

    def state(self) -> Mapping[str, Any]:
        return {"kept": self._kept_of_step, "filtered": self._filtered_of_step, "judged": dict(self._sums)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._kept_of_step, self._filtered_of_step = int(state["kept"]), int(state["filtered"])
        self._sums = {name: float(value) for name, value in state["judged"].items()}


class FilteringNode(Node):
    """The common part of nodes that compare the members of a group, and filter groups without a learning signal.

    `outcomes` tells a source with a curriculum how groups were rewarded.
    """

    keyed_state = True

    scored: In[Scored]
    outcomes: Call[GroupOutcome, Noted]

    def __init__(self, dynamic: DynamicSampling | None) -> None:
        self.dynamic = dynamic
        self._filter = GroupFilter(dynamic)

    def _drop_filtered(self, samples: Sequence[Scored], taken: Sequence[Scored]) -> bool:
        """Drop a group that has no learning signal; return whether it was dropped. `taken` are the messages that
        delivered its samples."""
        reason = self._filter.judge_group(samples)
        if reason:
            self._filter.add_group(samples, passed_on=())
            for sample in taken:
                self.scored.drop(sample, reason, state="filtered")
            self._filter.assert_within(self.name)
        return bool(reason)

    def notes(self) -> list[str]:
        return [] if self.dynamic is None else self.dynamic.notes()

    def state(self) -> Mapping[str, Any]:
        return self._filter.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._filter.load_state(state)


def judged_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What selection cost the batch of `groups`; {} if no node selected.

    `filtered_share` is the share of whole groups. `raw_reward_unfiltered_mean` is the mean over all groups
    judged for the batch, while its `raw_reward_mean` is the mean over the samples trained on.
    """
    told = [group.metrics for group in groups if "judged_groups" in group.metrics]
    if not told:
        return {}
    sums = {name: sum(metrics[name] for metrics in told) for name in SUMS}
    return {
        "filtered_groups": sums["filtered_groups"],
        "filtered_share": sums["filtered_groups"] / sums["judged_groups"],
        "filtered_tokens": sums["filtered_tokens"],
        "raw_reward_unfiltered_mean": sums["judged_raw_reward"] / sums["judged_groups"],
    }


def source_metrics(groups: Sequence[Group], names: Mapping[str, str]) -> dict[str, float]:
    """`source/NAME/FIGURE` of each source in these groups; `names` maps the source texts to the names of the sources.

    `reward_mean` and `pass_rate` are of raw rewards; a sample passes with a raw reward of 1 or more. `filtered_share`
    is the share of whole groups that were filtered on the way to this batch, if a node filters.
    """
    samples: dict[str, list[Trainable]] = defaultdict(list)
    counts: dict[str, float] = defaultdict(float)
    for group in groups:
        for sample in group.samples:
            samples[str(sample.columns.get(OF_TASK))].append(sample)
        for name, count in group.metrics.items():
            counts[name] += count
    found: dict[str, float] = {}
    for source, name in names.items():
        figures: dict[str, float] = {}
        if found_samples := samples.get(source):
            rewards = np.array([sample.raw_reward for sample in found_samples])
            figures = {
                "num_samples": float(len(found_samples)),
                "reward_mean": float(rewards.mean()),
                "pass_rate": float((rewards >= PASSED - ROUNDING).mean()),
                "response_tokens_mean": float(np.mean([sample.response_tokens for sample in found_samples])),
            }
        if judged := counts[f"{JUDGED} of {source}"]:
            figures["filtered_share"] = counts[f"{FILTERED} of {source}"] / judged
        found |= {f"source/{name}/{figure}": value for figure, value in figures.items()}
    return found

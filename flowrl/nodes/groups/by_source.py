"""Figures of a batch for each source of its rows, for a mixture of tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from flowrl.messages import Group, Sample, Trainable
from flowrl.nodes.curricula.curriculum import PASSED, ROUNDING
from flowrl.tasks.rows import OF_TASK

JUDGED, FILTERED = "judged_groups", "filtered_groups"


def counted_name(figure: str, samples: Sequence[Sample]) -> str:
    """The name under which a group is counted for its source in a mixture; "" if its task is no mixture."""
    source = samples[0].columns.get(OF_TASK) if samples else None
    return "" if source is None else f"{figure} of {source}"


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
        figures = _figures(samples[source]) if source in samples else {}
        if judged := counts[f"{JUDGED} of {source}"]:
            figures["filtered_share"] = counts[f"{FILTERED} of {source}"] / judged
        found |= {f"source/{name}/{figure}": value for figure, value in figures.items()}
    return found


def _figures(samples: Sequence[Trainable]) -> dict[str, float]:
    rewards = np.array([sample.raw_reward for sample in samples])
    return {
        "num_samples": float(len(samples)),
        "reward_mean": float(rewards.mean()),
        "pass_rate": float((rewards >= PASSED - ROUNDING).mean()),
        "response_tokens_mean": float(np.mean([sample.response_tokens for sample in samples])),
    }

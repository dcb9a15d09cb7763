"""What a finished run says about its steps: their time, and how long every stage was busy, alone and while others
worked. Pure.

Step times and busy seconds are those of `metrics.jsonl`. Their means are over the middle three fifths of the steps by
duration, so that another process on the machine, or one very long response, does not change them much. The first steps,
which fill the pipeline, and the last ones, during which nothing is generated, are left out first. `trace.json` says
which part of a stage's work happened while another stage worked.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from flowrl.errors import FlowrlError
from flowrl.runtime.telemetry.metrics import METRICS, read_lines

SKIPPED = 3
"""Number of first steps that are not measured."""
FEWEST = 5
"""Minimum number of steps for a measurement."""
CUT = 5
"""One part in this many of the steps is left out at the fast end, and another one at the slow end."""
NORMAL_IQR = 1.349
"""Distance of the quartiles of a normal variable, in standard deviations."""

Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class MeasuredStep:
    """The mean step of a run."""

    step_s: float
    num_steps: int
    """Number of steps that were measured."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Stage -> busy seconds of one of its replicas."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """Stage -> standard deviation of these seconds from step to step."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """Stage -> the fraction of its busy time in which another stage was also busy, 0 to 1."""
    load: float = 0.0
    """Load average of the machine before the run, over one minute."""
    wall_s: float = 0.0
    """Seconds that the whole run took."""


def measured_step(
    run_dir: Path,
    stages: Mapping[str, tuple[str, int]],
    *,
    trainer: str,
    tail: int,
    load: float = 0.0,
    wall_s: float = 0.0,
) -> MeasuredStep:
    """The mean step of the run in `run_dir`, without its last `tail` steps.

    `stages`: node -> (its name in the metrics, its replicas); `trainer`: the node whose batches are the steps. Raises
    FlowrlError if too few steps are left.
    """
    lines = read_lines(run_dir / METRICS)
    kept = range(SKIPPED, len(lines) - tail)
    if len(kept) < FEWEST:
        raise FlowrlError(f"{run_dir} has {len(lines)} steps; to measure it, {SKIPPED + tail + FEWEST} are needed")
    durations = {index: lines[index]["time_s"] - lines[index - 1]["time_s"] for index in kept}
    middle = middle_of(durations)
    busy = {
        node: {index: lines[index].get(f"{public}_busy_s") or 0.0 for index in kept}
        for node, (public, _) in stages.items()
    }
    return MeasuredStep(
        step_s=fmean(durations[index] for index in middle),
        num_steps=len(kept),
        busy={node: fmean(values[index] for index in middle) / stages[node][1] for node, values in busy.items()},
        spread={node: robust_spread(list(values.values())) / stages[node][1] for node, values in busy.items()},
        beside=time_beside(busy_spans(run_dir / "trace.json", trainer=trainer, tail=tail), list(stages)),
        load=load,
        wall_s=wall_s,
    )


def middle_of(durations: Mapping[int, float]) -> list[int]:
    """The keys of the middle three fifths by value."""
    ordered = sorted(durations, key=lambda index: durations[index])
    cut = len(ordered) // CUT
    return ordered[cut : len(ordered) - cut]


def robust_spread(values: Sequence[float]) -> float:
    """The standard deviation of normal values, from their quartiles: a single outlier does not change it."""
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / NORMAL_IQR


# The trace


def busy_spans(path: Path, *, trainer: str, tail: int) -> dict[str, Spans]:
    """Node replica -> the disjoint spans in which it was busy during the measured steps, in seconds and in order."""
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    tracks = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    found: dict[str, dict[str, Spans]] = {"work": defaultdict(list), "item": defaultdict(list)}
    for event in events:
        if event.get("cat") in found:
            span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            found[event["cat"]][tracks[event["pid"]]].append(span)
    ends = sorted(end for _, end in found["item"][f"{trainer}/0"])
    window = [(ends[SKIPPED - 1], ends[-1 - tail])] if len(ends) > SKIPPED + tail else []
    return {replica_id: cut_spans(join_spans(some), window) for replica_id, some in found["work"].items()}


def time_beside(spans: Mapping[str, Spans], stages: Sequence[str]) -> dict[str, float]:
    """Node -> the fraction of its busy time, over all replicas, in which another one of `stages` was busy."""
    found = {}
    for node in stages:
        mine = [some for replica_id, some in spans.items() if _node_name(replica_id) == node]
        others = [
            some
            for replica_id, some in spans.items()
            if _node_name(replica_id) in stages and _node_name(replica_id) != node
        ]
        together = join_spans([span for some in others for span in some])
        total = sum(total_length(some) for some in mine)
        found[node] = sum(total_length(cut_spans(some, together)) for some in mine) / total if total else 0.0
    return found


def join_spans(spans: Spans) -> Spans:
    """The time covered by `spans`, as disjoint spans in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def cut_spans(some: Spans, others: Spans) -> Spans:
    """The time in both lists of spans. The spans of each list are disjoint and in order, and so are those of the
    result."""
    found: Spans = []
    first = second = 0
    while first < len(some) and second < len(others):
        start, end = max(some[first][0], others[second][0]), min(some[first][1], others[second][1])
        found += [(start, end)] if end > start else []
        if some[first][1] < others[second][1]:
            first += 1
        else:
            second += 1
    return found


def total_length(spans: Spans) -> float:
    """Seconds in disjoint spans."""
    return sum(end - start for start, end in spans)


def _node_name(replica_id: str) -> str:
    return replica_id.partition("/")[0]

"""During a run: whether another placement would make its steps shorter, by the formula of `flowrl tune`.

A run measures its stages at one size only. With twice the cores or GPUs, a stage is taken to need `TWICE` of its time,
and placements with other numbers of replicas are left out. So this is an estimate, and `flowrl tune` measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from flowrl.commands.tune.cost_model import StageWork, StepRest, predict_step
from flowrl.commands.tune.placements import find_placements
from flowrl.commands.tune.stage_times import StageSize, StageTimes
from flowrl.commands.tune.tuned_graph import TunedGraph
from flowrl.commands.tune.tuned_placement import TunedPlacement
from flowrl.errors import FlowrlError
from flowrl.runtime.telemetry.metrics import node_roles

STEPS = 3
"""Number of steps in a row in which a stage has to be idle."""
IDLE = 0.5
"""Least part of a step without work for a stage to count as idle."""
TWICE = 0.6
LEAST_GAIN = 1.15
"""The predicted step has to be that much shorter, or nothing is said."""


class PlacementAdvice:
    """Watches the metrics of a run, and says once which placement would be faster."""

    def __init__(self, tuned: TunedGraph) -> None:
        self._tuned = tuned
        self._roles = node_roles(tuned.whole_graph)
        self._replicas = {name: placed.replicas for name, placed in tuned.whole_graph.placed.items() if placed.heavy}
        self._end_s: float | None = None
        """When the last step ended."""
        self._steps: list[tuple[float, dict[str, float]]] = []
        """(seconds, node -> the busy seconds of one of its replicas) of the last steps."""
        self._said = len(self._replicas) < 2

    def after_step(self, line: Mapping[str, Any]) -> str:
        """Take a line of metrics. Returns a sentence if a stage has been idle and a placement would be faster; ""
        otherwise, and always after the first time that a stage has been idle."""
        before_s, self._end_s = self._end_s, line["time_s"]
        if self._said or before_s is None or line["time_s"] <= before_s:
            return ""
        busy = {
            node: (line.get(f"{self._roles.get(node, node)}_busy_s") or 0.0) / count
            for node, count in self._replicas.items()
        }
        if not any(busy.values()):  # the run did something else, such as an evaluation
            return ""
        self._steps = [*self._steps, (line["time_s"] - before_s, busy)][-STEPS:]
        idle = [node for node in busy if all(step[node] < IDLE * step_s for step_s, step in self._steps)]
        if len(self._steps) < STEPS or not idle:
            return ""
        self._said = True
        step_s = fmean(seconds for seconds, _ in self._steps)
        mean = {node: fmean(step[node] for _, step in self._steps) for node in busy}
        faster = faster_placement(self._tuned, step_s, mean)
        if faster is None:
            return ""
        node = min(idle, key=lambda name: mean[name])
        placement, predicted_s = faster
        return (
            f"{node} was idle for {1 - mean[node] / step_s:.0%} of the last {STEPS} steps, of {step_s:.3g} s each; "
            f"with {placement.as_options} a step would take some {predicted_s:.3g} s ({placement.in_words}). "
            "That is an estimate: flowrl tune measures it"
        )


def faster_placement(
    tuned: TunedGraph, step_s: float, busy: Mapping[str, float]
) -> tuple[TunedPlacement, float] | None:
    """The fastest placement and its predicted step, if that is shorter by `LEAST_GAIN`.

    `busy`: node -> busy seconds of a replica in a step of the placement as it is. If no stage was busy, nothing was
    measured, and nothing can be predicted.
    """
    try:
        now, *others = find_placements(tuned)
    except (FlowrlError, ValueError):
        return None  # nothing fits, or the graph has no trainer
    if not now.is_default or not any(busy[stage.node] for stage in now.stages):
        return None
    times = dict(_read_times(now, busy))
    bare_s = _predict_step_s(now, times, StepRest())
    rest_s = max(0.0, step_s - bare_s)
    rest = StepRest(rest_s, rest_s, rest_s)
    replicas = {stage.node: stage.size.replicas for stage in now.stages}
    comparable = [one for one in others if {stage.node: stage.size.replicas for stage in one.stages} == replicas]
    found = [(one, _predict_step_s(one, times, rest)) for one in comparable]
    best = min(found, key=lambda pair: pair[1], default=None)
    return best if best is not None and best[1] * LEAST_GAIN < step_s else None


def _read_times(now: TunedPlacement, busy: Mapping[str, float]) -> Iterator[tuple[str, StageTimes]]:
    for stage in now.stages:
        size, seconds = stage.size, busy[stage.node]
        twice = StageSize(size.replicas, 2 * size.units, size.on_gpus)
        yield stage.node, StageTimes([(size, seconds), (twice, TWICE * seconds)])


def _predict_step_s(placement: TunedPlacement, times: Mapping[str, StageTimes], rest: StepRest) -> float:
    works: Sequence[StageWork] = [
        StageWork(
            stage.node,
            times[stage.node].stage_seconds(stage.size),
            line=stage.lease,
            cores=stage.cores,
            generates=stage.generates,
        )
        for stage in placement.stages
    ]
    return predict_step(works, ahead=placement.ahead, rest=rest, window=placement.window).step_s

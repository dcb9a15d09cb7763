"""From measured placements to predicted ones: which runs are needed, and what they show together. Pure.

The measured runs are real runs of placements that fit:
- the placement with the most even division and no shared cores, synchronous (stages work one at a time) and
  asynchronous (stages work together);
- one with shared cores;
- the one with the smallest generator;
- of those where all stages are time-shared, the one with the most and the one with the fewest devices;
- the one with the most replicas of generators, on the fewest devices, and the one with the most replicas of the other
  stages, on the most devices;
- any other that has a size of a stage that the runs above do not cover.

What is measured twice counts with its mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from flowrl.commands.tune.cost_model import StageWork, StepPrediction, StepRest, predict_step
from flowrl.commands.tune.measured_step import MeasuredStep
from flowrl.commands.tune.stage_times import StageSize, StageTimes
from flowrl.commands.tune.tuned_placement import PlacedStage, TunedPlacement

MeasuredRun = tuple[TunedPlacement, MeasuredStep]
CONTENTION = (0.5, 4.0)
"""Measured contention is limited to this range. A contention below 1 means that overlapping batches help a generator
more than the other stages disturb it."""
LEAST_BESIDE = 0.1
"""Least part of its work that a stage must do while others work; with less, its contention cannot be measured."""


def calibration_runs(wide: Sequence[TunedPlacement]) -> list[TunedPlacement]:
    """The placements to measure, the most important first; `wide` has every staleness from 0 on."""
    apart = [one for one in wide if one.num_lines > 1]
    alternating = [one for one in wide if one.num_lines == 1]
    alone = [one for one in apart if one.ahead == 0]
    found: list[TunedPlacement] = []
    if alone:
        even = min(alone, key=lambda one: (_num_replicas(one), one.shares_cores, _unevenness(one)))
        same = [one for one in apart if one.ahead and one.stages == even.stages]
        found += [even, *sorted(same, key=lambda one: one.ahead)[-1:]]
        sharing = [one for one in apart if one.ahead and one.shares_cores]
        found += sorted(sharing, key=lambda one: (_num_replicas(one), -one.ahead, _num_units(one)))[:1]
    if alternating:
        found.append(max(alternating, key=lambda one: (-_num_replicas(one), _num_units(one))))
        found.append(min(alternating, key=lambda one: (_num_replicas(one), _num_units(one))))
    if alone:
        found.append(
            min(alone, key=lambda one: (_num_replicas(one), one.shares_cores, _of_generators(one), -_num_units(one)))
        )
    if several := [one for one in (*alone, *alternating) if _num_replicas(one) > len(one.stages)]:
        found.append(max(several, key=lambda one: (*_count_parts(one), -_num_units(one))))
        found.append(max(several, key=lambda one: (*_count_parts(one)[::-1], _num_units(one))))
    for one in (*alone, *alternating):
        found += [] if _tells_sizes(found, one) else [one]
    return list({one.identity: one for one in found}.values())


def _tells_sizes(runs: Sequence[TunedPlacement], placement: TunedPlacement) -> bool:
    """Whether the runs in which only one stage works at a time determine the work of all stages of `placement`."""
    sizes: dict[tuple[str, bool], list[StageSize]] = defaultdict(list)
    for run in runs:
        for stage in run.stages if run.num_lines == 1 or run.ahead == 0 else ():
            sizes[stage.node, stage.size.on_gpus].append(stage.size)
    return all(
        (key := (stage.node, stage.size.on_gpus)) in sizes
        and StageTimes((size, 1.0) for size in sizes[key]).covers_size(stage.size)
        for stage in placement.stages
    )


def _count_parts(placement: TunedPlacement) -> tuple[int, int]:
    """Replicas of the stages that generate, and of the others."""
    generators = sum(stage.size.replicas for stage in placement.stages if stage.generates)
    return generators, _num_replicas(placement) - generators


def _num_replicas(placement: TunedPlacement) -> int:
    return sum(stage.size.replicas for stage in placement.stages)


def _num_units(placement: TunedPlacement) -> int:
    return sum(stage.size.units * stage.size.replicas for stage in placement.stages)


def _of_generators(placement: TunedPlacement) -> int:
    return sum(stage.size.units * stage.size.replicas for stage in placement.stages if stage.generates)


def _unevenness(placement: TunedPlacement) -> int:
    """Distance of the generators' devices from half of all, then devices that are left over."""
    return abs(2 * _of_generators(placement) - _num_units(placement)) - _num_units(placement)


@dataclass(frozen=True)
class Calibration:
    """What the measured placements say about others."""

    observed: tuple[MeasuredRun, ...]

    @cached_property
    def stage_times(self) -> dict[tuple[str, bool], StageTimes]:
        """(stage, whether on GPUs) -> its work by size, from the runs in which only one stage works at a time."""
        found = defaultdict(list)
        for placement, step in self._apart_in_time:
            for stage in placement.stages:
                found[stage.node, stage.size.on_gpus].append((stage.size, step.busy[stage.node]))
        return {key: StageTimes(measured) for key, measured in found.items()}

    @property
    def _apart_in_time(self) -> list[MeasuredRun]:
        return [(one, step) for one, step in self.observed if one.num_lines == 1 or one.ahead == 0]

    @property
    def _together(self) -> list[MeasuredRun]:
        return [(one, step) for one, step in self.observed if one.num_lines > 1 and one.ahead > 0]

    @cached_property
    def stage_spreads(self) -> dict[str, float]:
        """Stage -> standard deviation of its work from step to step, as a fraction of the work."""
        found = defaultdict(list)
        for placement, step in self._apart_in_time:
            for stage in placement.stages:
                found[stage.node].append(step.spread[stage.node] / max(step.busy[stage.node], 1e-12))
        return {node: median(values) for node, values in found.items()}

    @cached_property
    def core_contention(self) -> dict[str, float]:
        """Stage -> c_i, from the runs in which stages work together on different cores."""
        return self._slower(shared=False)

    @cached_property
    def gpu_sharing(self) -> dict[str, float]:
        """Stage -> s_i, from the runs in which stages work together on the same cores."""
        slower = self._slower(shared=True)
        return {node: max(0.0, slow - self.core_contention.get(node, 1.0)) for node, slow in slower.items()}

    def _slower(self, *, shared: bool) -> dict[str, float]:
        """Stage -> the time that its work takes while others work, as a multiple of the time that it takes alone.

        T = (1 - b) T' + b T' / slower, where T' are the stage's busy seconds, b is the part of them in which others
        worked, and T is its work alone.
        """
        found: dict[str, list[float]] = defaultdict(list)
        for placement, step in self._together:
            for stage in placement.stages if placement.shares_cores is shared else ():
                busy_s, part = step.busy[stage.node], step.beside.get(stage.node, 0.0)
                if part >= LEAST_BESIDE and (alone_s := self._alone_s(stage)) is not None:
                    left_s, (low, high) = alone_s - (1 - part) * busy_s, CONTENTION
                    found[stage.node].append(min(high, max(low, part * busy_s / left_s)) if left_s > 0 else high)
        return {node: fmean(values) for node, values in found.items()}

    @cached_property
    def rest_times(self) -> dict[str, float]:
        """R by kind of placement, "sync", "async" or "time_shared"; kinds that were not measured are missing."""
        found: dict[str, list[float]] = defaultdict(list)
        for placement, step in self._apart_in_time:
            kind = "time_shared" if placement.num_lines == 1 else "sync"
            found[kind].append(step.step_s - sum(step.busy.values()))
        for placement, step in self._together:
            if (works := self.stage_works(placement)) is not None and "sync" in found:
                nothing = StepRest(sync_s=fmean(found["sync"]))
                bare = predict_step(works, ahead=placement.ahead, rest=nothing, window=placement.window)
                found["async"].append(max(0.0, step.step_s - bare.step_s))
        return {kind: fmean(values) for kind, values in found.items()}

    def predict_placement(self, placement: TunedPlacement) -> StepPrediction | None:
        """The predicted step of a placement; None if what the prediction needs was not measured."""
        works, rests = self.stage_works(placement), self.rest_times
        needed = ("time_shared",) if placement.num_lines == 1 else ("sync", "async") if placement.ahead else ("sync",)
        if works is None or any(kind not in rests for kind in needed):
            return None
        rest = StepRest(**{f"{kind}_s": rests[kind] for kind in needed})
        return predict_step(works, ahead=placement.ahead, rest=rest, window=placement.window)

    def _alone_s(self, stage: PlacedStage) -> float | None:
        times = self.stage_times.get((stage.node, stage.size.on_gpus))
        return None if times is None or not times.covers_size(stage.size) else times.stage_seconds(stage.size)

    def stage_works(self, placement: TunedPlacement) -> list[StageWork] | None:
        """The stages of a placement with their work; None if the measurements do not determine the work of every
        stage."""
        found = []
        for stage in placement.stages:
            seconds = self._alone_s(stage)
            if seconds is None:
                return None
            work = StageWork(
                stage.node,
                seconds,
                spread_s=seconds * self.stage_spreads.get(stage.node, 0.0),
                line=stage.lease,
                cores=stage.cores,
                generates=stage.generates,
                contention=self.core_contention.get(stage.node, 1.0),
                sharing=self.gpu_sharing.get(stage.node, 1.0),
            )
            found.append(work)
        return found

"""The time of a step, predicted from the times of its stages. Pure.

A stage is a node with its own cores or GPUs. T_i is its work per step: the seconds that one of its replicas is busy
when no other stage is. A line is a stage, or all stages that time-share the same devices. A is the number of batches
that admission may run ahead: the declared staleness, less the versions that overtaking can cost
(`flowrl.graph.analysis.numbers`). R is the rest of a step: the time in which no stage works, or the time in addition to
the longest line (weights, messages, records, devices that change hands).

    synchronous, A = 0        P = sum_i T_i + R
    everything in one line    P = sum_i T_i + R
    asynchronous, A > 0       P = max(F + J + R, (sum_i T_i' + R_sync) / (A + 1))

F is the time of the lines side by side: all lines start at once, each works at the rate of its current stage, and lines
that are done drop out. A stage works at the rate 1 when all other lines are done, else at 1 / (c_i + s_i n_i). c_i is
its measured contention (memory, caches, turbo), n_i the number of other working lines with which it shares cores, and
s_i the cost of each: 1 if nothing was measured, because threads on one core have equal parts of it, and a parallel
stage is as fast as its slowest thread. Without contention and shared cores, F is the longest line, max_l sum_(i in l)
T_i. T_i' is T_i plus what the stage loses in F.

J is what the spread of the stages costs. With A = 1 the two longest lines wait for each other in every step, and the
mean of the larger of two is above the larger mean. For normal X and Y (C. E. Clark, Operations Research 9, 1961) with
means m >= n, theta = sqrt(var X + var Y) and a = (m - n) / theta,

    E max(X, Y) = m Phi(a) + n Phi(-a) + theta phi(a),        J = E max(X, Y) - m.

With A > 1 a line waits only when the other one is A batches behind or ahead: a random walk between two walls, with the
drift d = m - n and the variance theta^2 a step. The time that it loses at a wall is that of Brownian motion (J. M.
Harrison, Brownian Motion and Stochastic Flow Systems, 1985) between walls at a distance of (A - 1/2) m,

    J = d / (exp(2 d (A - 1/2) m / theta^2) - 1),             theta^2 / ((2 A - 1) m) for d = 0.

If any finished group of a window may go first, no stage waits for the spread of generation, and it is left out.

The second term of the maximum is Little's law for A + 1 batches in flight; the first is the bottleneck law (Denning and
Buzen, Computing Surveys 10, 1978).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EXPONENTS = 700.0
"""For larger exponents, exp overflows, and J is taken as 0."""


@dataclass(frozen=True)
class StageWork:
    """One stage of a placement."""

    name: str
    seconds: float
    """Busy seconds of one of its replicas in a step, while no other stage works."""
    spread_s: float = 0.0
    """Standard deviation of `seconds` from step to step."""
    line: str = ""
    """Name of the lease under which it is time-shared; "": the stage is a line of its own."""
    cores: frozenset[tuple[int, int]] = frozenset()
    """(machine, core) on which its replicas work."""
    generates: bool = False
    """Whether it samples from the policy."""
    contention: float = 1.0
    """Time that its work takes while others work on other cores, as a multiple of the time that it takes alone."""
    sharing: float = 1.0
    """By how much that multiple grows for each working line with which it shares cores."""


@dataclass(frozen=True)
class StepRest:
    """Seconds of a step besides the stages' work."""

    sync_s: float = 0.0
    async_s: float = 0.0
    time_shared_s: float = 0.0
    """If all stages are in one line: includes the time to hand the devices over."""


@dataclass(frozen=True)
class StepPrediction:
    """The time of a step."""

    step_s: float
    busy: Mapping[str, float] = field(default_factory=dict)
    """Stage -> the fraction of the step in which it is busy, 0 to 1."""

    @property
    def bottleneck(self) -> str:
        """The stage that is busy the longest."""
        return max(self.busy, key=lambda name: self.busy[name])


def predict_step(stages: Sequence[StageWork], *, ahead: int, rest: StepRest, window: bool = False) -> StepPrediction:
    """The step of `stages` with `ahead` batches ahead. `window`: any finished group among several may go first."""
    lines = lines_of(stages)
    alone_s = sum(stage.seconds for stage in stages)
    if ahead == 0 or len(lines) == 1:
        step_s = alone_s + (rest.time_shared_s if len(lines) == 1 else rest.sync_s)
        return StepPrediction(step_s, {stage.name: stage.seconds / step_s for stage in stages})
    length_s, busy_s = side_by_side(lines)
    lengths = sorted((_line_spread(line, busy_s, window=window) for line in lines), reverse=True)
    (longest_s, first_s), (second_s, other_s) = lengths[:2]
    waited_s = lost_to_spread(longest_s, second_s, math.hypot(first_s, other_s), ahead=ahead)
    in_flight_s = (sum(busy_s.values()) + rest.sync_s) / (ahead + 1)
    step_s = max(length_s + waited_s + rest.async_s, in_flight_s)
    return StepPrediction(step_s, {name: seconds / step_s for name, seconds in busy_s.items()})


def lines_of(stages: Sequence[StageWork]) -> list[list[StageWork]]:
    """The stages by line, in the order of their first stage."""
    found: dict[str, list[StageWork]] = {}
    for stage in stages:
        found.setdefault(stage.line or f"/{stage.name}", []).append(stage)
    return list(found.values())


def side_by_side(lines: Sequence[Sequence[StageWork]]) -> tuple[float, dict[str, float]]:
    """(F, stage -> the seconds that it is busy in it)."""
    busy_s = {stage.name: 0.0 for line in lines for stage in line}
    waiting = [list(line) for line in lines if sum(stage.seconds for stage in line) > 0]
    left = [line[0].seconds for line in waiting]
    passed_s = 0.0
    while waiting:
        working = [line[0] for line in waiting]
        slower = [_slower(stage, [other for other in working if other is not stage]) for stage in working]
        slice_s = min(seconds * slow for seconds, slow in zip(left, slower, strict=True))
        passed_s += slice_s
        for index, stage in enumerate(working):
            busy_s[stage.name] += slice_s
            left[index] -= slice_s / slower[index]
        _next_stages(waiting, left)
    return passed_s, busy_s


def _slower(stage: StageWork, others: Sequence[StageWork]) -> float:
    """c_i + s_i n_i while `others` work; 1 if there are none."""
    shared = sum(bool(stage.cores & other.cores) for other in others)
    return stage.contention + stage.sharing * shared if others else 1.0


def _next_stages(waiting: list[list[StageWork]], left: list[float]) -> None:
    """In each line, replace a stage that is done by the next one, and remove lines that are done."""
    for index in reversed(range(len(waiting))):
        while waiting[index] and left[index] <= 1e-12:
            waiting[index].pop(0)
            left[index] = waiting[index][0].seconds if waiting[index] else 0.0
        if not waiting[index]:
            del waiting[index], left[index]


def _line_spread(line: Sequence[StageWork], busy_s: Mapping[str, float], *, window: bool) -> tuple[float, float]:
    """(busy seconds of a line, their standard deviation)."""
    spreads = [0.0 if window and stage.generates else stage.spread_s for stage in line]
    return sum(busy_s[stage.name] for stage in line), math.hypot(*spreads)


def lost_to_spread(mean: float, other: float, spread: float, *, ahead: int) -> float:
    """J for lines of these mean lengths, `mean` the larger; `spread` is sqrt(var X + var Y)."""
    if spread <= 0:
        return 0.0
    if ahead == 1:
        return mean_of_larger(mean, other, spread) - mean
    drift, walls = mean - other, (ahead - 0.5) * mean
    exponent = 2 * drift * walls / spread**2
    if exponent < 1e-6:
        return spread**2 / (2 * walls)
    return drift / math.expm1(exponent) if exponent < EXPONENTS else 0.0


def mean_of_larger(mean: float, other: float, spread: float) -> float:
    """E max(X, Y) of two normal variables with these means; `spread` is sqrt(var X + var Y), above 0."""
    gap = (mean - other) / spread
    below = 0.5 * (1 + math.erf(gap / math.sqrt(2)))
    density = math.exp(-gap * gap / 2) / math.sqrt(2 * math.pi)
    return mean * below + other * (1 - below) + spread * density

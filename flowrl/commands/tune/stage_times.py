"""The work of a stage at sizes that were not measured, from sizes that were. Pure.

With R replicas of u cores (or GPUs) each, a replica's work per step is T(R, u) = T(1, u) r(R). Both factors follow
Amdahl's law (AFIPS 1967) from one measured size to the next, a + b / u and a + b / R: linear in 1 / u and in 1 / R. A
measured size has its measured time. Beyond the measured sizes, the law of the two outermost ones is extrapolated, with
a and b at least 0. With only one measured size, the work does not change with the size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, order=True)
class StageSize:
    """The size of a stage."""

    replicas: int = 1
    units: int = 1
    """Cores of a replica, or its GPUs if it has any."""
    on_gpus: bool = False

    def __str__(self) -> str:
        return f"{self.replicas} x {self.units} {'GPU' if self.on_gpus else 'core'}{'s' if self.units > 1 else ''}"


class StageTimes:
    """The measured work of one stage, on cores or on GPUs."""

    def __init__(self, measured: Iterable[tuple[StageSize, float]]) -> None:
        """`measured`: (size, busy seconds of a replica in a step); several measurements of one size count as their
        mean."""
        found: dict[StageSize, list[float]] = defaultdict(list)
        for size, seconds in measured:
            found[size].append(seconds)
        if not found:
            raise ValueError("the work of a stage that was never measured")
        self._seconds = {size: fmean(values) for size, values in found.items()}
        self._fewest = min(size.replicas for size in self._seconds)

    def covers_size(self, size: StageSize) -> bool:
        """Whether the size was measured, or its replicas and units lie between measured ones and the law of the units
        is known: a single size does not determine that law."""
        replicas = [known.replicas for known in self._seconds]
        units = [known.units for known in self._seconds]
        between = min(replicas) <= size.replicas <= max(replicas) and min(units) <= size.units <= max(units)
        known = {one.units for one in self._seconds if one.replicas == self._fewest}
        return size in self._seconds or (between and (size.units in known or len(known) > 1))

    def stage_seconds(self, size: StageSize) -> float:
        """Busy seconds of a replica in a step."""
        if size in self._seconds:
            return self._seconds[size]
        return self._by_units(size.units) * self._by_replicas(size.replicas)

    def _by_units(self, units: int) -> float:
        """T for the fewest replicas that were measured."""
        points = {size.units: seconds for size, seconds in self._seconds.items() if size.replicas == self._fewest}
        return amdahl_seconds(points, units)

    def _by_replicas(self, replicas: int) -> float:
        """r, from the sizes with more replicas."""
        ratios: dict[int, list[float]] = {self._fewest: [1.0]}
        for size, seconds in self._seconds.items():
            if size.replicas != self._fewest:
                ratios.setdefault(size.replicas, []).append(seconds / max(self._by_units(size.units), 1e-12))
        return amdahl_seconds({count: fmean(values) for count, values in ratios.items()}, replicas)


def amdahl_seconds(points: Mapping[int, float], size: int) -> float:
    """The value at `size` by a + b / size through the two neighbouring points, or the two outermost ones."""
    if size in points:
        return points[size]
    sizes = sorted(points)
    if len(sizes) == 1:
        return points[sizes[0]]
    above = next((index for index, known in enumerate(sizes) if known > size), len(sizes) - 1)
    low, high = sizes[max(above, 1) - 1], sizes[max(above, 1)]
    slope = (points[low] - points[high]) / (1 / low - 1 / high)
    if low < size < high:
        return points[low] + slope * (1 / size - 1 / low)
    slope = max(slope, 0.0)
    nearest = low if size < low else high
    fixed = max(points[nearest] - slope / nearest, 0.0)
    return fixed + (points[nearest] - fixed) * nearest / size

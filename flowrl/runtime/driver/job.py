"""The job of a driver: what the launcher has prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.channel.tickets import Tickets
from flowrl.graph.analysis.plan import Plan
from flowrl.graph.graph import Graph
from flowrl.runtime.driver.options import RunOptions
from flowrl.runtime.driver.ray_cluster.cluster import HostSlot
from flowrl.runtime.host.host_engine import HostSpec

UNBOUNDED = 1 << 40
"""Number of batches that admission may run ahead if no weights flow back; then only the lanes' credits bound it."""


@dataclass(frozen=True)
class Job:
    """One run, checked and planned."""

    graph: Graph
    plan: Plan
    options: RunOptions
    run_dir: Path
    slots: tuple[HostSlot, ...]
    specs: Mapping[str, HostSpec]
    resume_from: Path | None
    start_version: int
    start_versions: Mapping[str, int]
    """Trainer -> the version with which it starts, if that is not `start_version`."""
    rewind: Callable[[], None]
    """Rewinds the run's files to `resume_from`."""
    advise: Callable[[Mapping[str, Any]], str] | None = None
    """Takes each line of metrics and returns what the user should know of the placement, mostly ""."""

    def make_tickets(self) -> Tickets:
        """The tickets of the run; none of them is taken yet."""
        numbers, steps = self.plan.numbers, self.options.steps
        per_batch = numbers.groups_per_batch or 1
        return Tickets(
            per_batch,
            numbers.ahead if numbers.ahead is not None else UNBOUNDED,
            consumers=self.plan.consumers,
            trainers=self.plan.trainers,
            publish_every=numbers.publish_every,
            start_version=self.start_version,
            start_versions=self.start_versions,
            max_groups=None if steps is None else (steps - self.start_version) * per_batch,
        )

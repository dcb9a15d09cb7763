"""One placement of a graph: which stage has which devices, and how far admission may run ahead. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.commands.fit import Overrides, option_text
from flowrl.commands.tune.stage_times import StageSize
from flowrl.graph.analysis.check import Report
from flowrl.graph.graph import Graph


@dataclass(frozen=True)
class PlacedStage:
    """A node with cores or GPUs of its own, in a placement."""

    node: str
    size: StageSize
    lease: str = ""
    """Name of the lease under which it is time-shared; "": it is not."""
    cores: frozenset[tuple[int, int]] = frozenset()
    """(machine, core) of its replicas; empty where it has GPUs."""
    generates: bool = False


@dataclass(frozen=True)
class TunedPlacement:
    """One placement that fits."""

    options: Overrides
    """What differs from the options that the user gave."""
    stages: tuple[PlacedStage, ...]
    ahead: int = 0
    """Batches that admission may run ahead; 0: synchronous."""
    window: bool = False
    """Whether any finished group among several may go first."""
    staleness: int | None = None
    """As declared; None: the graph admits nothing."""
    look_ahead: int = 1
    is_default: bool = False
    """Whether this is the placement of a run without further options."""

    @property
    def as_options(self) -> str:
        """Its options as they are written on the command line."""
        whole = {name: int(value) if _is_whole(value) else value for name, value in self.options.items()}
        return option_text(whole) or "as it is"

    @property
    def in_words(self) -> str:
        """The placement, in words."""
        parts = [f"{stage.node} {stage.size}" for stage in self.stages]
        parts += ["in turns"] if self.num_lines == 1 and len(self.stages) > 1 else []
        parts += ["shared cores"] if self.shares_cores else []
        parts += [] if self.staleness is None else [f"staleness {self.staleness}"]
        parts += [f"look-ahead {self.look_ahead}"] if self.look_ahead > 1 else []
        return ", ".join(parts)

    @property
    def num_lines(self) -> int:
        """Number of lines, which work at the same time; the stages of a lease are one line."""
        return len({stage.lease or f"/{stage.node}" for stage in self.stages})

    @property
    def shares_cores(self) -> bool:
        """Whether stages work on the same core at the same time."""
        return any(
            one.cores & other.cores and (not one.lease or one.lease != other.lease)
            for one in self.stages
            for other in self.stages
            if one.node < other.node
        )

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for placements that are the same in everything that matters for time."""
        return (self.stages, self.ahead, self.window)


def placement_of(graph: Graph, report: Report, options: Overrides, *, is_default: bool) -> TunedPlacement:
    """The placement of a graph that was planned with these options."""
    numbers = report.plan.numbers
    return TunedPlacement(
        options,
        tuple(_make_stage(graph, report, name) for name, placed in graph.placed.items() if placed.heavy),
        ahead=numbers.ahead or 0,
        window=numbers.window is not None and numbers.window != 1,
        staleness=None if graph.admission is None else graph.admission.staleness,
        look_ahead=1 if graph.admission is None else graph.admission.look_ahead,
        is_default=is_default,
    )


def _make_stage(graph: Graph, report: Report, name: str) -> PlacedStage:
    placed = graph.placed[name]
    hosts = [host for host in report.plan.hosts if any(one.partition("/")[0] == name for one in host.nodes)]
    units = min(len(host.gpus) or len(host.cores) for host in hosts)
    cores = frozenset((host.machine, core) for host in hosts if not host.gpus for core in host.cores)
    size = StageSize(placed.replicas, units, on_gpus=any(host.gpus for host in hosts))
    return PlacedStage(name, size, hosts[0].lease, cores, is_generator(placed.node))


def is_generator(node: object) -> bool:
    """Whether a node samples from the policy, by the same rule as in `flowrl.runtime.telemetry.metrics.node_roles`."""
    return type(node).__name__.lower().endswith("generator")


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()

"""Finds options with which a graph fits: tries variations, those that cost the least speed first, until one passes the
checks.

The order: a narrower dtype, gradient checkpointing, tensor parallel parts for the generator, more ranks; then smaller
micro-batches; then trainer ranks that share their micro-batches, each with a slice of the positions or a part of the
layers' matrices. Then all of that with generator and trainer time-sharing the same GPUs; then with offload of the
optimizer, and of everything. None of them changes what is learnt, except for the rounding of bfloat16.

Ranks that divide positions each have a part of all activations and, at stage 3, of all weights. So ranks divide
matrices only if the ZeRO stage is below 3, or if the model or the settings do not let them divide positions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.analysis.check import check
from flowrl.graph.analysis.memory_use import find_residents, memory_problems
from flowrl.graph.analysis.numbers import derive_numbers
from flowrl.graph.analysis.place import device_pools, unit_need
from flowrl.graph.analysis.plan import make_plan
from flowrl.graph.graph import Graph
from flowrl.graph.load import GraphFile
from flowrl.graph.machine import Cluster
from flowrl.graph.option_types import changed_config, has_option, value_of

Overrides = dict[str, Any]
"""Option -> value, such as "zero.offload" -> "optimizer"."""
CHECKPOINTED: Overrides = {"zero.gradient_checkpointing": True}
MEMORY: tuple[tuple[Overrides, ...], ...] = (
    ({}, CHECKPOINTED),
    (CHECKPOINTED | {"zero.offload": "optimizer"},),
    (CHECKPOINTED | {"zero.offload": "all"},),
)
"""Ways of saving memory: the fast ones come before those that use host memory."""
COUNTS = (1, 2, 4, 8, 16, 32, 64)
MOST_SHARED = 8
"""Maximum number of ranks that share a micro-batch: they exchange data in every layer, so they are on one machine."""
SHARES = (None, 0.85)
"""Values of gpu_memory_utilization for an engine that time-shares a GPU: vLLM's own, and one that leaves room for the
contexts of many processes."""


def find_fitting(file: GraphFile, cfg: Any, cluster: Cluster) -> Overrides | None:
    """Overrides of `cfg` with which the graph passes every check on `cluster`; None if no overrides that were tried
    do."""
    variations = Variations(file, cfg, cluster)
    return next((overrides for overrides in variations.order_variations() if variations.fit(overrides)), None)


def option_text(overrides: Mapping[str, Any]) -> str:
    """The overrides as they are written on the command line."""
    return " ".join(_written(name.replace("_", "-"), value) for name, value in overrides.items())


def _written(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    return f"--{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


@dataclasses.dataclass(frozen=True)
class Variations:
    """Variations of a graph's options for a cluster on which it does not fit as it is."""

    file: GraphFile
    cfg: Any
    cluster: Cluster

    def fit(self, overrides: Overrides) -> bool:
        """Whether the graph passes every check with these overrides."""
        graph = self._build_graph(overrides)
        return graph is not None and not self._large(graph) and check(graph, self.cluster).ok

    def _large(self, graph: Graph) -> bool:
        """Whether the graph needs too much memory or too many GPUs, as most variations do. All checks take several
        times as long."""
        if sum(unit_need(units)[1] for _, units in device_pools(graph, self.cluster)) > self.cluster.num_gpus:
            return True
        residents = find_residents(graph, make_plan(graph, self.cluster), self.cluster)
        return any(memory_problems(residents, self.cluster))

    def is_allowed(self, overrides: Overrides) -> bool:
        """Whether nothing is wrong with these overrides, except perhaps the size of the graph."""
        graph = self._build_graph(overrides)
        if graph is None:
            return False
        report = check(graph, self.cluster)
        return report.ok or report.too_large

    def _build_graph(self, overrides: Overrides) -> Graph | None:
        """The graph with these overrides; None if one of them is refused."""
        try:
            return self.file.build(changed_config(self.cfg, overrides))
        except ConfigError:
            return None

    def order_variations(self) -> Iterator[Overrides]:
        """All variations, those that cost the least speed first."""
        for ways, sharing in itertools.product(MEMORY, [*self._sharing()]):
            known = [way for way in map(self._for_all_trainers, ways) if all(map(self._has_option, way))]
            for ranks, memory in self._grow_steps(known) if known else ():
                for count, tensor, way, dtype in itertools.product(ranks, self._engine_parts, memory, self._dtypes):
                    sized = {"generator.gpus": tensor["engine.tensor_parallel_size"]} if tensor else {}
                    yield {**dtype, **way, **count, **tensor, **sized, **sharing}

    def _grow_steps(self, ways: list[Overrides]) -> Iterator[tuple[list[Overrides], list[Overrides]]]:
        """Numbers of ranks, and ways of saving memory: micro-batches as they are, smaller, and shared by ranks."""
        small = [ways[-1] | budget for budget in self._smaller_budgets]
        ranks = self._larger_values("trainer.replicas", self.cluster.num_gpus)
        yield ranks, ways
        yield ranks, small
        yield self._shared_ranks, (small or ways)[-1:]

    @property
    def _dtypes(self) -> list[Overrides]:
        narrows = self._has_option("dtype") and value_of(self.cfg, "dtype") != "bfloat16" and self.cluster.num_gpus
        return [{}, {"dtype": "bfloat16"}] if narrows else [{}]

    @property
    def _engine_parts(self) -> list[Overrides]:
        """Numbers of tensor parallel parts of the generator's model."""
        return self._larger_values("engine.tensor_parallel_size", min(8, self.cluster.num_gpus))

    def _larger_values(self, name: str, most: int) -> list[Overrides]:
        """The option as it is, and larger values of it."""
        if not self._has_option(name):
            return [{}]
        now = value_of(self.cfg, name) or 1
        return [{}, *({name: count} for count in COUNTS if now < count <= most)]

    @cached_property
    def _smaller_budgets(self) -> list[Overrides]:
        """Halves of the token budget, as long as it has room for two of the longest samples: a preference pair."""
        longest = derive_numbers(self.file.build(self.cfg)).longest_sample
        if not self._has_option("token_budget") or not longest or not self.cluster.num_gpus:
            return []
        halves = (value_of(self.cfg, "token_budget") >> times for times in itertools.count(1))
        return [{"token_budget": budget} for budget in itertools.takewhile(lambda half: half >= 2 * longest, halves)]

    @cached_property
    def _shared_ranks(self) -> list[Overrides]:
        """Ranks that share their micro-batches: by positions, then by matrices. At stage 3, by matrices only if
        positions cannot be divided, and then at stage 2."""
        if not self._has_option("trainer.sequence_parallel_size") or not self._has_option("zero.stage"):
            return []
        positions = self._divide_batches("trainer.sequence_parallel_size", {})
        if value_of(self.cfg, "zero.stage") < 3:
            return positions + self._divide_batches("trainer.tensor_parallel_size", {})
        return positions or self._divide_batches(
            "trainer.tensor_parallel_size", self._for_all_trainers({"zero.stage": 2})
        )

    def _divide_batches(self, name: str, needed: Overrides) -> list[Overrides]:
        """Larger values of the option for which at most the size of the graph is a problem, each with numbers of
        ranks."""
        now, ranks, gpus = value_of(self.cfg, name), value_of(self.cfg, "trainer.replicas"), self.cluster.num_gpus
        most = min(MOST_SHARED, max(machine.gpus for machine in self.cluster.machines))
        sizes = [n for n in range(now + 1, most + 1) if self.is_allowed({**needed, "trainer.replicas": n, name: n})]
        counts = ((size, size * copies) for size in sizes for copies in COUNTS)
        return [{**needed, "trainer.replicas": count, name: size} for size, count in counts if ranks <= count <= gpus]

    def _sharing(self) -> Iterator[Overrides]:
        """First nothing time-shared, then generator and trainer time-shared."""
        yield {}
        if (
            self.cluster.num_gpus
            and self._has_option("engine.gpu_memory_utilization")
            and self._has_option("trainer.replicas")
        ):
            for share in SHARES:
                room = {} if share is None else {"engine.gpu_memory_utilization": share}
                yield {"time_share": ("generator", "trainer"), **room}

    def _for_all_trainers(self, overrides: Overrides) -> Overrides:
        """`overrides`, and the same for the critic's trainer, which has its own settings."""
        critic = {f"critic_{name}": value for name, value in overrides.items() if name.startswith("zero.")}
        return overrides | {name: value for name, value in critic.items() if self._has_option(name)}

    def _has_option(self, name: str) -> bool:
        return has_option(self.cfg, name)

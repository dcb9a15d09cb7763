"""A graph whose placements `flowrl tune` looks for: its roles, and what the checks say about options. Pure."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flowrl.commands.fit import Overrides
from flowrl.commands.tune.tuned_placement import TunedPlacement, is_generator, placement_of
from flowrl.errors import ConfigError
from flowrl.graph.analysis.branches import Branches
from flowrl.graph.analysis.check import check
from flowrl.graph.graph import Graph
from flowrl.graph.load import GraphFile
from flowrl.graph.machine import Cluster
from flowrl.graph.option_types import changed_config, has_option, value_of
from flowrl.options.sizes import sizes_of

PROBE = 0.0625
"""A number of cores that no option asks for: it shows which node an option is about."""
UNMEASURED: Overrides = {"evaluate": 0, "evaluate_task": (), "evaluate_every": 0, "held_out": 0, "accumulate": "off"}
"""What measured runs of shipped graphs leave out: evaluations, which are no part of a step, and training while a batch
forms, whose gain the formula does not know."""


class TooLarge(ConfigError):
    """A placement asks for more cores, GPUs or memory than the cluster has."""


@dataclass(frozen=True)
class TunedGraph:
    """A graph whose placements `flowrl tune` looks for."""

    file: GraphFile
    cfg: Any
    cluster: Cluster
    fixed: frozenset[str] = frozenset()
    """Options that the user has given: they stay."""
    most_staleness: int | None = None
    """None: that of `cfg`."""

    def place_options(self, options: Overrides, *, is_default: bool = False) -> TunedPlacement | None:
        """The placement of these options; None if it changes what was given, or the checks refuse it.

        Raises TooLarge if it asks for more than the cluster has, and nothing else is wrong with it.
        """
        options = {name: value for name, value in options.items() if value_of(self.cfg, name) != value}
        if options.keys() & self.fixed:
            return None
        try:
            graph = self.file.build(changed_config(self.measured_cfg, options))
            whole = graph if self.measured_cfg == self.cfg else self.file.build(changed_config(self.cfg, options))
        except ConfigError:
            return None
        report = check(graph, self.cluster)
        of_whole = report if whole is graph or not report.ok else check(whole, self.cluster)
        if report.too_large or of_whole.too_large:
            raise TooLarge
        return placement_of(graph, report, options, is_default=is_default) if of_whole.ok else None

    @cached_property
    def measured_cfg(self) -> Any:
        """The options of measured runs: those of the user, without evaluations, and with whole batches."""
        cfg = self.cfg
        for name, value in UNMEASURED.items():
            if has_option(cfg, name):
                with suppress(ConfigError):  # some graphs need held-out rows
                    cfg = changed_config(cfg, {name: value})
        return cfg

    @cached_property
    def whole_graph(self) -> Graph:
        """The user's graph, with the options as given."""
        return self.file.build(self.cfg)

    @cached_property
    def base_graph(self) -> Graph:
        """The graph of measured runs."""
        return self.file.build(self.measured_cfg)

    @cached_property
    def trainer(self) -> str:
        """The main trainer's node. Raises ConfigError if the graph has none."""
        trainers = Branches(self.base_graph).trainers
        if not trainers:
            raise ConfigError(
                f"{self.file.shown} trains nothing, so it has no steps to make shorter; flowrl tune takes graphs with "
                "a trainer, such as grpo"
            )
        return trainers[0]

    @cached_property
    def generator(self) -> str:
        """The node that samples, "" if there is none."""
        names = (name for name, placed in self.base_graph.placed.items() if is_generator(placed.node) and placed.heavy)
        return next(names, "")

    @cached_property
    def roles(self) -> dict[str, str]:
        """Node -> its role in the options: the nodes whose cores change with the option."""
        found: dict[str, str] = {}
        for role in sizes_of(self.cfg):
            try:
                graph = self.file.build(changed_config(self.measured_cfg, {f"{role}.cpus": PROBE}))
            except ConfigError:
                continue
            found |= {name: role for name, placed in graph.placed.items() if placed.cpus == PROBE}
        return found

    def may_change(self, *options: str) -> bool:
        """Whether all of these options exist in the graph and none of them was given."""
        return all(name not in self.fixed and has_option(self.cfg, name) for name in options)

"""`flowrl check`: runs all ten checks and reports all findings at once, without Ray or weights.

Each finding is complete on its own: what was found, what was needed, with node and port, and the
change that fixes it. torch is loaded only if a node tries a user's loss function.

The checks by module. edge_rules: 1 types, 2 unconnected ports, 8 dispatch, calls, adapters. flow_rules: 3 cycles,
4 feedback, 6 lineage. size_rules: 5 tickets, 6 groups, 7 tokens and ranks, 9 resources, 10 warnings. quantized_rules:
quantized engines. value_rules comes before them: a number that is none has to be corrected first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.errors import GraphError
from flowrl.graph.analysis import (
    accumulation,
    edge_rules,
    episode_time,
    flow_rules,
    quantized_rules,
    residents,
    size_rules,
    value_rules,
)
from flowrl.graph.analysis.plan import Plan, make_plan
from flowrl.graph.analysis.residents import DeviceUse, MachineUse, Resident
from flowrl.graph.graph import Graph
from flowrl.graph.machine import Cluster


@dataclass(frozen=True)
class Report:
    """The findings of the checks, and the plan that they checked."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    plan: Plan
    notes: tuple[str, ...] = ()
    """The nodes' notes on their settings."""
    residents: tuple[Resident, ...] = ()
    """The processes whose memory is known."""
    devices: tuple[DeviceUse, ...] = ()
    machines: tuple[MachineUse, ...] = ()

    too_large: bool = False
    """Whether the only problem is that the graph asks for more GPUs, cores or memory than the cluster has."""
    planned: bool = True
    """Whether the graph has a plan. If values of a wrong kind prevent it, `plan` is that of an empty graph."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise GraphError with every problem, if there is any."""
        if self.problems:
            raise GraphError(self.problems)


def check(graph: Graph, cluster: Cluster | None = None) -> Report:
    """Check `graph` for `cluster` (default: this machine). Never raises for a mistake in the graph."""
    cluster = cluster or Cluster.here()
    if wrong := tuple(value_rules.value_problems(graph)):
        problems = dict.fromkeys((*graph.mistakes, *wrong))
        return Report(tuple(problems), (), make_plan(Graph(graph.name), cluster), planned=False)
    plan = make_plan(graph, cluster)
    others = dict.fromkeys((*graph.mistakes, *_problems(graph, plan, cluster)))
    too_large = tuple(_too_large(graph, plan, cluster))
    problems = dict.fromkeys((*others, *too_large))
    warnings = (
        *size_rules.idle_warnings(graph, plan.numbers),
        *size_rules.episode_warnings(graph, plan.numbers),
        *episode_time.warnings(graph, plan.numbers),
        *size_rules.memory_warnings(graph, plan, cluster),
        *quantized_rules.gap_warnings(graph),
    )
    notes = tuple(f"{name}: {note}" for name, node in graph.nodes.items() for note in node.notes())
    notes += (*accumulation.piece_notes(graph), *quantized_rules.gap_notes(graph))
    notes += tuple(episode_time.notes(graph, plan.numbers))
    found = residents.residents(graph, plan, cluster)
    warnings += tuple(residents.memory_warnings(residents.machines(found, cluster)))
    return Report(
        tuple(problems),
        () if problems else warnings,
        plan,
        notes,
        found,
        residents.devices(found, cluster),
        residents.machines(found, cluster),
        too_large=bool(too_large) and not others,
    )


def _too_large(graph: Graph, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """What the cluster has too little of; nothing where a mistake leaves open which nodes share it."""
    if not graph.nodes or not graph.sharing_known or any(size_rules.sharing_problems(graph)):
        return
    yield from size_rules.resource_problems(graph, plan, cluster)
    if not plan.homeless:
        yield from residents.memory_problems(graph, plan, cluster)


def _problems(graph: Graph, plan: Plan, cluster: Cluster) -> Iterator[str]:
    if not graph.nodes:
        yield f"the graph {graph.name!r} has no nodes; add them with g.add."
        return
    numbers = plan.numbers
    yield from edge_rules.type_problems(graph)
    yield from (loose := tuple(edge_rules.connection_problems(graph)))
    yield from flow_rules.cycle_problems(graph)
    yield from flow_rules.admission_problems(graph, numbers)
    yield from size_rules.count_problems(graph, numbers)
    yield from size_rules.group_problems(graph)
    yield from size_rules.model_problems(graph)
    yield from size_rules.layout_problems(graph)
    yield from size_rules.held_out_problems(graph)
    if not loose:  # an unconnected port would be the cause of anything that these checks find missing on a path
        yield from flow_rules.feedback_problems(graph)
        yield from size_rules.ticket_problems(graph, numbers)
        yield from size_rules.trainer_problems(graph, plan)
        yield from accumulation.piece_problems(graph)
        yield from flow_rules.lineage_problems(graph)
        yield from flow_rules.branch_problems(graph)
    yield from size_rules.batch_problems(graph, numbers)
    yield from size_rules.sharing_problems(graph)
    yield from size_rules.transport_problems(plan)
    yield from size_rules.engine_length_problems(graph)
    yield from edge_rules.dispatch_problems(graph)
    yield from edge_rules.call_problems(graph)
    yield from edge_rules.adapter_problems(graph)
    yield from edge_rules.fixed_weights_problems(graph)
    yield from quantized_rules.capability_problems(graph, plan, cluster)
    for name, node in graph.nodes.items():
        yield from (f"node {name}: {problem}" for problem in node.check(numbers))

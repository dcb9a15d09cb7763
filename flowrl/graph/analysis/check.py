"""`flowrl check`: runs all checks and reports all findings at once, without Ray or weights.

Each finding is complete on its own: what was found, what was needed, with node and port, and the
change that fixes it. torch is loaded only if a node tries a user's loss function.

The checks by module. connection_rules: 1 types, 2 unconnected ports, 3 cycles, 4 feedback, 6 lineage, 8 dispatch,
calls, adapters. size_rules: 5 tickets, 6 groups, 7 tokens and ranks, 9 resources, 10 warnings. node_rules: 11 classes
of nodes and messages. Hidden methods and the kinds of values come before them: a number that is none has to be
corrected first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

from flowrl.errors import GraphError
from flowrl.graph.analysis import branches, connection_rules, memory_use, node_rules, size_rules
from flowrl.graph.analysis.memory_use import DeviceUse, MachineUse, Resident
from flowrl.graph.analysis.plan import Plan, make_plan
from flowrl.graph.annotations import declared_types
from flowrl.graph.graph import Admission, Edge, Graph
from flowrl.graph.machine import Cluster
from flowrl.graph.node import Facts


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
    if wrong := tuple(node_rules.hidden_methods(graph)) or tuple(value_problems(graph)):
        problems = dict.fromkeys((*graph.mistakes, *wrong))
        return Report(tuple(problems), (), make_plan(Graph(graph.name), cluster), planned=False)
    plan = make_plan(graph, cluster)
    others = dict.fromkeys((*graph.mistakes, *_find_problems(graph, plan, cluster)))
    too_large = tuple(_too_large(graph, plan, cluster))
    problems = dict.fromkeys((*others, *too_large))
    warnings = (
        *size_rules.idle_warnings(graph, plan.numbers),
        *size_rules.episode_warnings(graph, plan.numbers),
        *size_rules.step_time_warnings(graph, plan.numbers),
        *size_rules.memory_warnings(graph, plan, cluster),
        *size_rules.gap_warnings(graph),
    )
    notes = tuple(f"{name}: {note}" for name, node in graph.nodes.items() for note in node.notes())
    notes += (*branches.piece_notes(graph), *size_rules.gap_notes(graph))
    notes += tuple(size_rules.step_time_notes(graph, plan.numbers))
    found = memory_use.find_residents(graph, plan, cluster)
    warnings += tuple(memory_use.memory_warnings(memory_use.machine_uses(found, cluster)))
    return Report(
        tuple(problems),
        () if problems else warnings,
        plan,
        notes,
        found,
        memory_use.device_uses(found, cluster),
        memory_use.machine_uses(found, cluster),
        too_large=bool(too_large) and not others,
    )


def _too_large(graph: Graph, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """What the cluster has too little of; nothing where a mistake leaves open which nodes share it."""
    if not graph.nodes or not graph.sharing_known or any(size_rules.sharing_problems(graph)):
        return
    yield from size_rules.resource_problems(graph, plan, cluster)
    if not plan.homeless:
        yield from memory_use.memory_problems(graph, plan, cluster)


def _find_problems(graph: Graph, plan: Plan, cluster: Cluster) -> Iterator[str]:
    if not graph.nodes:
        yield f"the graph {graph.name!r} has no nodes; add them with g.add."
        return
    numbers = plan.numbers
    yield from node_rules.class_problems(graph, numbers)
    yield from connection_rules.type_problems(graph)
    yield from (loose := tuple(connection_rules.connection_problems(graph)))
    yield from connection_rules.cycle_problems(graph)
    yield from connection_rules.admission_problems(graph, numbers)
    yield from size_rules.count_problems(graph, numbers)
    yield from size_rules.group_problems(graph)
    yield from size_rules.model_problems(graph)
    yield from size_rules.layout_problems(graph)
    yield from size_rules.column_problems(graph)
    yield from size_rules.held_out_problems(graph)
    if not loose:  # an unconnected port would be the cause of anything that these checks find missing on a path
        yield from connection_rules.feedback_problems(graph)
        yield from size_rules.ticket_problems(graph, numbers)
        yield from size_rules.trainer_problems(graph, plan)
        yield from branches.piece_problems(graph)
        yield from connection_rules.lineage_problems(graph)
        yield from connection_rules.branch_problems(graph)
    yield from size_rules.batch_problems(graph, numbers)
    yield from size_rules.sharing_problems(graph)
    yield from size_rules.transport_problems(plan)
    yield from size_rules.engine_length_problems(graph)
    yield from connection_rules.dispatch_problems(graph)
    yield from connection_rules.call_problems(graph)
    yield from connection_rules.adapter_problems(graph)
    yield from connection_rules.fixed_weights_problems(graph)
    yield from size_rules.capability_problems(graph, plan, cluster)
    for name, node in graph.nodes.items():
        yield from (f"node {name}: {problem}" for problem in node.check(numbers))


WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}


def value_problems(graph: Graph) -> Iterator[str]:
    """Values of another kind than their field. What nodes declare is read only if the graph's own values are right."""
    own = tuple(_own_problems(graph))
    yield from own
    if own:
        return
    for name, node in graph.nodes.items():
        facts = node.facts()
        if isinstance(facts, Facts):
            kinds = _declared_kinds(type(facts))  # type: ignore[arg-type]  # a class can be hashed
            yield from _wrong_value(f"node {name}", _values_of(facts), kinds)
        else:
            yield f"node {name} has facts() that return {facts!r}; return Facts(...)."


def _own_problems(graph: Graph) -> Iterator[str]:
    for name, placed in graph.placed.items():
        resources = {"replicas": placed.replicas, "cpus": placed.cpus_each, "gpus": placed.gpus_each}
        yield from _wrong_value(f"node {name}", resources, {"replicas": (int,), "cpus": (float,), "gpus": (float,)})
        kind = type(placed.node)
        flags = {"gang": kind.gang, "keyed_state": kind.keyed_state}
        yield from _wrong_value(f"node {name}", flags, dict.fromkeys(flags, (bool,)))
    for edge in graph.edges:
        yield from _wrong_value(edge.name, {"capacity": edge.capacity}, _declared_kinds(Edge))
    if graph.admission is not None:
        numbers = {"staleness": graph.admission.staleness, "look_ahead": graph.admission.look_ahead}
        yield from _wrong_value("g.admit", numbers, _declared_kinds(Admission))


def _wrong_value(where: str, values: Mapping[str, Any], kinds: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    for field, value in values.items():
        if field in kinds and not any(_is_a(value, kind) for kind in kinds[field]):
            yield f"{where} has {field}={value!r}; it needs {', or '.join(WORDS[kind] for kind in kinds[field])}."


def _is_a(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


@functools.cache
def _declared_kinds(declared: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Field -> the kinds that its annotation names, for fields of a number, a truth value or a text."""
    found = {
        name: get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        for name, hint in declared_types(declared).items()
    }
    return {name: kinds for name, kinds in found.items() if all(kind in WORDS for kind in kinds)}


def _values_of(facts: Facts) -> dict[str, Any]:
    return {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}

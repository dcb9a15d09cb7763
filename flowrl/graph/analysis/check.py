"""`flowrl check`: runs all checks and reports all findings at once, without Ray or weights.

Each finding is complete on its own: what was found, what was needed, with node and port, and the
change that fixes it. torch is loaded only if a node tries a user's loss function.

The checks by module. connection_rules: 1 types, 2 unconnected ports, 3 cycles, 4 feedback, 6 lineage, 8 dispatch and
calls, 9 weights. size_rules: 5 tickets, 6 groups, 7 tokens and ranks, 9 resources, 10 warnings. Here: 11 classes of
nodes and messages. Hidden methods and the kinds of values come before them: a number that is none has to be corrected
first.

What a node's class has to be is checked as far as it can be seen without running it. The engine calls a node's
methods, matches its messages by type and counts its groups; a mistake in one of these would otherwise show after the
models are loaded. Each finding names the line of the user's class or call. The source is read where a class alone does
not tell: the size in `self.scored.groups(4)` and the name in `self.context.metric("loss", x)`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from flowrl.errors import GraphError
from flowrl.graph.analysis import branches, connection_rules, memory_use, size_rules
from flowrl.graph.analysis.memory_use import DeviceUse, MachineUse, Resident
from flowrl.graph.analysis.numbers import Numbers
from flowrl.graph.analysis.plan import Plan, make_plan
from flowrl.graph.annotations import declared_types
from flowrl.graph.graph import Admission, Edge, Graph
from flowrl.graph.machine import Cluster
from flowrl.graph.node import METRIC_NAMES, Facts, Node
from flowrl.graph.ports import In
from flowrl.messages import Message


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
    if wrong := list(hidden_methods(graph)) or value_problems(graph):
        problems = dict.fromkeys((*graph.mistakes, *wrong))
        return Report(tuple(problems), (), make_plan(Graph(graph.name), cluster), planned=False)
    plan = make_plan(graph, cluster)
    residents = memory_use.find_residents(graph, plan, cluster)
    devices, machines = memory_use.device_uses(residents, cluster), memory_use.machine_uses(residents, cluster)
    problems = dict.fromkeys((*graph.mistakes, *_find_problems(graph, plan, cluster)))

    # What the cluster has too little of; nothing where a mistake leaves open which nodes share it.
    too_large: list[str] = []
    if graph.nodes and graph.sharing_known and not any(size_rules.sharing_problems(graph)):
        too_large += size_rules.resource_problems(graph, plan, cluster)
        if not plan.homeless:
            too_large += memory_use.memory_problems(residents, cluster)

    _, accumulation_notes = branches.accumulation_findings(graph)
    gap_notes, gap_warnings = size_rules.gap_findings(graph)
    time_notes, time_warnings = size_rules.step_time_findings(graph, plan.numbers)
    warnings = [
        *size_rules.idle_warnings(graph, plan.numbers),
        *time_warnings,
        *size_rules.memory_warnings(graph, plan, cluster),
        *gap_warnings,
        *memory_use.memory_warnings(machines),
    ]
    notes = [f"{name}: {note}" for name, node in graph.nodes.items() for note in node.notes()]
    asked_notes = (*size_rules.kept_notes(graph), *size_rules.replay_notes(graph, plan.numbers))
    found = tuple(dict.fromkeys((*problems, *too_large)))
    return Report(
        found,
        () if found else tuple(warnings),
        plan,
        (*notes, *accumulation_notes, *gap_notes, *time_notes, *asked_notes),
        residents,
        devices,
        machines,
        too_large=bool(too_large) and not problems,
    )


def _find_problems(graph: Graph, plan: Plan, cluster: Cluster) -> Iterator[str]:
    if not graph.nodes:
        yield f"the graph {graph.name!r} has no nodes; add them with g.add."
        return
    numbers = plan.numbers
    yield from class_problems(graph, numbers)
    yield from connection_rules.type_problems(graph)
    yield from (loose := tuple(connection_rules.connection_problems(graph)))
    yield from connection_rules.cycle_problems(graph)
    yield from connection_rules.admission_problems(graph, numbers)
    yield from size_rules.count_problems(graph, numbers)
    yield from size_rules.group_problems(graph)
    yield from size_rules.layout_problems(graph)
    yield from size_rules.column_problems(graph)
    yield from size_rules.shared_name_problems(graph)
    if not loose:  # an unconnected port would be the cause of anything that these checks find missing on a path
        yield from connection_rules.feedback_problems(graph)
        yield from connection_rules.admitted_path_problems(graph)
        yield from size_rules.ticket_problems(graph, numbers)
        yield from size_rules.trainer_problems(graph, plan)
        yield from size_rules.kept_problems(graph, plan)
        yield from size_rules.replay_problems(graph, plan)
        yield from branches.accumulation_findings(graph)[0]
        yield from connection_rules.lineage_problems(graph)
        yield from connection_rules.branch_problems(graph)
        yield from connection_rules.derived_problems(graph)
    yield from size_rules.batch_problems(graph, numbers)
    yield from size_rules.sharing_problems(graph)
    yield from size_rules.engine_length_problems(graph)
    yield from connection_rules.dispatch_problems(graph)
    yield from connection_rules.weights_problems(graph, plan)
    yield from size_rules.capability_problems(graph, plan, cluster)
    for name, node in graph.nodes.items():
        yield from (f"node {name}: {problem}" for problem in node.check(numbers))


WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}


def value_problems(graph: Graph) -> list[str]:
    """Values of another kind than their field. What nodes declare is read only if the graph's own values are right."""
    own: list[str] = []
    for name, placed in graph.placed.items():
        resources = {"replicas": placed.replicas, "cpus": placed.cpus_each, "gpus": placed.gpus_each}
        kind = type(placed.node)
        flags = {"gang": kind.gang, "keyed_state": kind.keyed_state}
        kinds = {"replicas": (int,), "cpus": (float,), "gpus": (float,), **dict.fromkeys(flags, (bool,))}
        own += _wrong_values(f"node {name}", {**resources, **flags}, kinds)
    for edge in graph.edges:
        own += _wrong_values(edge.name, {"capacity": edge.capacity}, _declared_kinds(Edge))
    if graph.admission is not None:
        numbers = {"staleness": graph.admission.staleness, "look_ahead": graph.admission.look_ahead}
        own += _wrong_values("g.admit", numbers, _declared_kinds(Admission))
    if own:
        return own

    declared: list[str] = []
    for name, node in graph.nodes.items():
        facts = node.facts()
        if isinstance(facts, Facts):
            values = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
            declared += _wrong_values(f"node {name}", values, _declared_kinds(type(facts)))  # type: ignore[arg-type]
        else:
            declared.append(f"node {name} has facts() that return {facts!r}; return Facts(...).")
    return declared


def _wrong_values(where: str, values: Mapping[str, Any], kinds: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    for field, value in values.items():
        is_flag = isinstance(value, bool)
        is_number = isinstance(value, int | float) and not is_flag and math.isfinite(value)
        if field in kinds and not any(
            is_number if kind is float else isinstance(value, kind) and not (kind is int and is_flag)
            for kind in kinds[field]
        ):
            yield f"{where} has {field}={value!r}; it needs {', or '.join(WORDS[kind] for kind in kinds[field])}."


@functools.cache
def _declared_kinds(declared: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Field -> the kinds that its annotation names, for fields of a number, a truth value or a text."""
    found = {
        name: get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        for name, hint in declared_types(declared).items()
    }
    return {name: kinds for name, kinds in found.items() if all(kind in WORDS for kind in kinds)}


ASYNC = {name for name, value in vars(Node).items() if inspect.iscoroutinefunction(value)}
PLAIN = {name for name, value in vars(Node).items() if inspect.isfunction(value)} - ASYNC - {"__new__"}

OWN_FIGURES = {*METRIC_NAMES} - {"tokens_generated", "weight_update_pause_s", "loss", "logprob_mismatch"}
"""Figures that are computed for every line; the others a generator or a trainer of one's own reports."""


def hidden_methods(graph: Graph) -> Iterator[str]:
    """Attributes in the place of methods. No other check can be made with them: it would call them."""
    for name, node in graph.nodes.items():
        kind = type(node)
        for method in sorted(ASYNC | PLAIN):
            if not callable(getattr(node, method)):
                yield (
                    f"node {name}: {kind.__name__} ({_place_of(kind)}) has an attribute {method}, which hides a method "
                    f"that the engine calls; give the attribute another name."
                )


def class_problems(graph: Graph, numbers: Numbers) -> Iterator[str]:
    """Check 11: what the classes of nodes and messages lack."""
    for name, node in graph.nodes.items():
        yield from (f"node {name}: {problem}" for problem in _method_problems(node))
        yield from (f"node {name}: {problem}" for problem in _body_problems(node, numbers))
    ports = [port for node in graph.nodes.values() for port in node.ports.values()]
    for message in dict.fromkeys(kind for port in ports for kind in port.types):
        if not isinstance(message, type) or not issubclass(message, Message):
            continue
        # Everything that the class and its bases declare has to be a field. A dataclass that is not frozen cannot
        # inherit from Message.
        parts = [part for part in message.__mro__ if issubclass(part, Message)]
        hints = [hint for part in parts for hint in inspect.get_annotations(part).items()]
        declared = {name for name, hint in hints if "ClassVar" not in str(hint)}
        fields = {field.name for field in dataclasses.fields(message)} if dataclasses.is_dataclass(message) else None
        if fields is None or not declared <= fields:
            yield (
                f"{message.__name__} ({_place_of(message)}) is a message but no frozen dataclass, so its fields would "
                f"not be sent; write @dataclass(frozen=True) above the class."
            )


def _method_problems(node: Node) -> Iterator[str]:
    kind = type(node)
    if kind.run is Node.run:
        yield f"{kind.__name__} ({_place_of(kind)}) has no run; write `async def run(self) -> None:` with its body."
    for name in sorted(ASYNC | PLAIN):
        method = inspect.getattr_static(kind, name)
        if not inspect.isfunction(method):
            continue
        if name in ASYNC and not inspect.iscoroutinefunction(inspect.unwrap(method)):
            is_generator = inspect.isasyncgenfunction(method)
            found = "has a yield, which makes it a generator" if is_generator else "is a plain function"
            change = "send what it yields through an Out port" if is_generator else f"write `async def {name}`"
            yield f"{kind.__name__}.{name} ({_place_of(method)}) {found}; {change}."
        elif name in PLAIN and inspect.iscoroutinefunction(method):
            yield f"{kind.__name__}.{name} ({_place_of(method)}) is async, but nobody awaits it; write `def {name}`."


def _body_problems(node: Node, numbers: Numbers) -> Iterator[str]:
    """Calls in the methods of a user's class with an argument that the graph contradicts."""
    if type(node).__module__.partition(".")[0] == "flowrl":
        return
    for call, line in _calls_of(type(node)):  # type: ignore[arg-type]  # a class can be hashed
        match call:
            case ast.Call(func=ast.Attribute(ast.Attribute(ast.Name("self"), port), "groups"), args=[size]):
                waited = _number_of(node, size)
                declared = node.facts().group_size or numbers.group_size
                if isinstance(node.ports.get(port), In) and None not in (waited, declared) and waited != declared:
                    yield (
                        f"it waits for groups of {waited} samples ({line}), but a group has {declared}: the node would "
                        f"fail at the first group; pass the group size of the graph."
                    )
            case ast.Call(
                func=ast.Attribute(ast.Attribute(ast.Name("self"), "context"), "metric" | "gauge" as method),
                args=[ast.Constant(str(name)), *_],
            ) if name in OWN_FIGURES or name.endswith("_busy_s"):
                yield (
                    f"it reports the {method} {name!r} ({line}), which is a figure of flowrl's own and would replace "
                    f"yours in metrics.jsonl; choose another name."
                )


def _number_of(node: Node, size: ast.expr) -> int | None:
    """The value of a literal or of an attribute such as `self.size`; None if it is another expression."""
    found: Any = node
    if isinstance(size, ast.Constant):
        found = size.value
    elif (names := ast.unparse(size).split("."))[0] == "self" and all(name.isidentifier() for name in names):
        for name in names[1:]:
            found = getattr(found, name, None)
    return found if isinstance(found, int) else None


@functools.cache
def _calls_of(kind: type[Any]) -> tuple[tuple[ast.Call, str], ...]:
    """The calls in a class and its bases outside of flowrl, with file and line; none of a class without source."""
    found = []
    for part in kind.__mro__:
        if part.__module__.partition(".")[0] in ("flowrl", "builtins", "typing"):
            continue
        try:
            lines, first = inspect.getsourcelines(part)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):
            continue
        file = Path(inspect.getsourcefile(part) or part.__module__).name
        calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
        found += [(call, f"{file}:{first + call.lineno - 1}") for call in calls]
    return tuple(found)


def _place_of(thing: Any) -> str:
    try:
        _, line = inspect.getsourcelines(inspect.unwrap(thing))
        return f"{Path(inspect.getsourcefile(thing) or '').name}:{line}"
    except (OSError, TypeError):
        return str(getattr(thing, "__module__", "built in"))

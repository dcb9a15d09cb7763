"""The kinds of the values that users give to the graph and to its nodes. All other checks calculate with them."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin

from flowrl.graph.annotations import declared_types
from flowrl.graph.facts import Facts
from flowrl.graph.graph import Admission, Edge, Graph

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
            kinds = _kinds(type(facts))  # type: ignore[arg-type]  # a class can be hashed
            yield from _wrong(f"node {name}", _values(facts), kinds)
        else:
            yield f"node {name} has facts() that return {facts!r}; return Facts(...)."


def _own_problems(graph: Graph) -> Iterator[str]:
    for name, placed in graph.placed.items():
        resources = {"replicas": placed.replicas, "cpus": placed.cpus_each, "gpus": placed.gpus_each}
        yield from _wrong(f"node {name}", resources, {"replicas": (int,), "cpus": (float,), "gpus": (float,)})
        kind = type(placed.node)
        flags = {"gang": kind.gang, "keyed_state": kind.keyed_state}
        yield from _wrong(f"node {name}", flags, dict.fromkeys(flags, (bool,)))
    for edge in graph.edges:
        yield from _wrong(edge.name, {"capacity": edge.capacity}, _kinds(Edge))
    if graph.admission is not None:
        numbers = {"staleness": graph.admission.staleness, "look_ahead": graph.admission.look_ahead}
        yield from _wrong("g.admit", numbers, _kinds(Admission))


def _wrong(where: str, values: Mapping[str, Any], kinds: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    for field, value in values.items():
        if field in kinds and not any(_is_a(value, kind) for kind in kinds[field]):
            yield f"{where} has {field}={value!r}; it needs {', or '.join(WORDS[kind] for kind in kinds[field])}."


def _is_a(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


@functools.cache
def _kinds(declared: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Field -> the kinds that its annotation names, for fields of a number, a truth value or a text."""
    found = {
        name: get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        for name, hint in declared_types(declared).items()
    }
    return {name: kinds for name, kinds in found.items() if all(kind in WORDS for kind in kinds)}


def _values(facts: Facts) -> dict[str, Any]:
    return {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}

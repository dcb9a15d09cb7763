"""Checks 1, 2 and 8: message types, unconnected ports, dispatch rules, numbers of calls. Each finding names the fix."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator

from flowrl.errors import ConfigError
from flowrl.graph.annotations import declared_types
from flowrl.graph.graph import Edge, Graph, a_kind, owner, port_name
from flowrl.graph.node import PORT_KINDS
from flowrl.graph.ports import Call, In, Out, Port, Serve
from flowrl.messages import Message, Tombstone

PARTNER: dict[type[Port], type[Port]] = {In: Out, Out: In, Call: Serve, Serve: Call}


def type_problems(graph: Graph) -> Iterator[str]:
    """Check 1: every edge carries the message type that both its ports declare."""
    for name, node in graph.nodes.items():
        for attribute, hint in declared_types(type(node)).items():
            if hint in PORT_KINDS:
                kind = hint.__name__
                yield f"{name}.{attribute} is declared as {kind} without a message type; write it as in {kind}[Sample]."
    for port in _ports(graph):
        for kind in port.types:
            if not _is_message(kind):
                yield (
                    f"{port_name(port)} is declared with {kind!r}, which is not a message class; use a subclass of "
                    f"Message."
                )
            elif problem := _unreadable(kind):  # type: ignore[arg-type]  # a class can be hashed
                yield problem
    for edge in graph.edges:
        if all(_is_message(kind) for port in (edge.out, edge.into) for kind in port.types) and not _fits(edge):
            yield _misfit(graph, edge)


@functools.cache
def _unreadable(message: type[Message]) -> str:
    """Why the fields of a message class cannot be sent: an annotation without a meaning; "" if there is none."""
    try:
        declared_types(message)
    except ConfigError as error:
        return f"{error}."
    return ""


def _misfit(graph: Graph, edge: Edge) -> str:
    out, into = (", ".join(kind.__name__ for kind in port.types) for port in (edge.out, edge.into))
    if edge.kind == "call":
        return (
            f"{port_name(edge.out)} is a {type(edge.out).__name__}[{out}] but {port_name(edge.into)} is a "
            f"{type(edge.into).__name__}[{into}]; declare both with the same request and reply types."
        )
    others = [port_name(port) for port in _ports(graph) if isinstance(port, Out) and _compatible(port, edge.into)]
    hint = (
        f"connect {' or '.join(others)} instead" if others else "put a node between them that converts one to the other"
    )
    return f"{port_name(edge.out)} sends {out} but {port_name(edge.into)} takes {into}; {hint}."


def connection_problems(graph: Graph) -> Iterator[str]:
    """Check 2: every port is connected once and correctly, or optional, or ignored on purpose."""
    joined = Counter(id(port) for edge in graph.edges for port in (edge.out, edge.into))
    ignored = {id(port) for port in graph.ignored}
    for name, node in graph.nodes.items():
        optional, needed = node.facts().optional, node.facts().unconnected
        yield from (
            f"facts().optional of {name} names the port {port!r}, which it does not have; "
            f"it has {', '.join(node.ports) or 'none'}."
            for port in optional
            if port not in node.ports
        )
        for port in node.ports.values():
            if joined[id(port)] and id(port) in ignored:
                yield f"{port_name(port)} is both connected and ignored; remove the g.ignore or the edge."
            elif not joined[id(port)] and port.name in needed:
                yield f"node {name}: {needed[port.name]}"
            elif not joined[id(port)] and id(port) not in ignored and port.name not in optional:
                yield _unconnected(graph, port)
    yield from _doubled(graph)


def _unconnected(graph: Graph, port: Port) -> str:
    verb = "g.call" if isinstance(port, Call | Serve) else "g.connect"
    partners = [other for other in _ports(graph) if isinstance(other, PARTNER[type(port)])]
    fitting = [other for other in partners if other.node is not port.node and _partners(port, other)]
    hint = f" ({' or '.join(port_name(other) for other in fitting)} would fit)" if fitting else ""
    kind = f"{a_kind(type(port))}[{', '.join(getattr(kind, '__name__', str(kind)) for kind in port.types)}]"
    return (
        f"{port_name(port)}, {kind} port, is not connected; connect it with {verb}{hint}, "
        f"or write g.ignore({port_name(port)}) if this is intended."
    )


def _partners(port: Port, other: Port) -> bool:
    out, into = (port, other) if isinstance(port, Out | Call) else (other, port)
    return _compatible(out, into)


def _doubled(graph: Graph) -> Iterator[str]:
    pairs = Counter((edge.out, edge.into) for edge in graph.edges)
    for (out, into), count in pairs.items():
        if count > 1:
            yield f"{port_name(out)} -> {port_name(into)} is declared {count} times; keep one of these edges."
    for port in _ports(graph):
        edges = [edge for edge in dict.fromkeys(graph.edges) if edge.into is port]
        kinds = {edge.kind for edge in edges}
        if "latest" in kinds and len({edge.out for edge in edges}) > 1:
            others = ", ".join(port_name(edge.out) for edge in edges)
            yield f"{port_name(port)} keeps only the newest message, but {others} send to it; keep one latest edge."
        if isinstance(port, Call) and len({edge.into for edge in graph.edges if edge.out is port}) > 1:
            yield f"{port_name(port)} is connected to several servers, but a Call port has one; declare one for each."


def dispatch_problems(graph: Graph) -> Iterator[str]:
    """Check 8, and the requirements of gang and key dispatch on their messages."""
    for edge in graph.edges:
        if edge.kind != "queue" or not _is_message(edge.out.types[0]):
            continue
        into = graph.placed[owner(edge.into)]
        kind = edge.out.types[0]
        if into.node.keyed_state and into.replicas > 1 and not edge.rule.by_group:
            yield (
                f"{into.name} keeps items by group and has {into.replicas} replicas, but {edge.name} divides a "
                f'group among them (dispatch={edge.dispatch!r}); give that edge dispatch="key".'
            )
        if into.node.gang and into.replicas > 1 and not edge.rule.to_each:
            yield (
                f"the {into.replicas} ranks of {into.name} work in lockstep, but {edge.name} has "
                f'dispatch={edge.dispatch!r}; give that edge dispatch="gang".'
            )
        if edge.rule.splits and not into.node.gang:
            yield (
                f'{edge.name} has dispatch="gang" but {into.name} is not a gang; use "share", or set gang = True on '
                f"the node."
            )
        if edge.rule.splits and not callable(getattr(kind, "split", None)):
            yield f'{edge.name} has dispatch="gang" but {kind.__name__} has no split(n); give the message that method.'
        if edge.rule.by_group and "group_id" not in _fields(kind):
            yield f'{edge.name} has dispatch="key" but {kind.__name__} has no field group_id; add it or use "share".'
        if edge.capacity is not None and edge.capacity < 1:
            yield f"{edge.name} has capacity={edge.capacity}; it needs at least 1; without capacity= it is derived."


def call_problems(graph: Graph) -> Iterator[str]:
    """The numbers of call edges are in their valid ranges."""
    for edge in graph.edges:
        if edge.kind != "call":
            continue
        if edge.capacity is not None and edge.capacity < 1:
            yield f"{edge.name} has capacity={edge.capacity}; it needs at least 1; without capacity= it is derived."
        margin = edge.affinity_margin
        if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int) or margin < 0):
            yield (
                f"{edge.name} has affinity_margin={margin!r}; it needs a whole number of at least 0 (the open requests "
                "that a session's replica may have more than another); without affinity_margin= sessions move freely."
            )


def adapter_problems(graph: Graph) -> Iterator[str]:
    """Both ends of a weights edge declare the same content: whole weights, or adapters of one rank."""
    for edge in graph.edges:
        sent, taken = (graph.placed[owner(port)].node.facts().adapter_rank for port in (edge.out, edge.into))
        if edge.kind == "latest" and None not in (sent, taken) and sent != taken:
            yield (
                f"{port_name(edge.out)} sends {_content(sent)} but {port_name(edge.into)} takes {_content(taken)}; "
                'give both nodes the same lora (sync="merged" sends whole weights).'
            )


def fixed_weights_problems(graph: Graph) -> Iterator[str]:
    """Weights are sent to nodes that can take them, and every version that a node must not miss is sent."""
    for edge in graph.edges:
        facts, sent = (graph.placed[owner(port)].node.facts() for port in (edge.into, edge.out))
        why = facts.fixed_weights
        every = sent.publish_every
        if edge.kind == "latest" and every > 0 and facts.takes_every % every:  # `count_problems` reports others
            yield (
                f"{port_name(edge.into)} takes one version in {facts.takes_every}, but {port_name(edge.out)} sends "
                f"one in {every}; make the first number a multiple of the second."
            )
        if edge.kind == "latest" and why:
            yield f"{port_name(edge.out)} sends weights to {port_name(edge.into)}, which takes none: {why}."


def _content(rank: int | None) -> str:
    return f"adapters of rank {rank}" if rank else "whole weights"


def _fields(kind: type[Message]) -> Iterable[str]:
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _ports(graph: Graph) -> list[Port]:
    return [port for node in graph.nodes.values() for port in node.ports.values()]


def _is_message(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Message) and kind is not Tombstone


def _fits(edge: Edge) -> bool:
    return _compatible(edge.out, edge.into)


def _compatible(out: Port, into: Port) -> bool:
    """`Out` is covariant and `In` invariant: a sent message may be a subclass. Requests have to match exactly."""
    if not all(_is_message(kind) for kind in (*out.types, *into.types)):
        return False
    if isinstance(out, Call):
        return out.types == into.types
    return issubclass(out.types[0], into.types[0])

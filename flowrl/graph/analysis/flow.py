"""Which nodes a node's messages can reach: plain searches over the declared edges.

Messages flow along queue edges, and both ways along call edges (request and reply).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.graph.graph import Edge, Graph, owner
from flowrl.graph.ports import Port


@dataclass(frozen=True)
class FlowStep:
    """One possible move of a message: from one node to another, along an edge."""

    source: str
    target: str
    edge: Edge


def steps(graph: Graph) -> tuple[FlowStep, ...]:
    """All moves of messages, without latest edges."""
    return tuple(step for edge in graph.edges for step in _steps_of(edge))


def _steps_of(edge: Edge) -> Iterator[FlowStep]:
    if edge.kind == "queue":
        yield FlowStep(owner(edge.out), owner(edge.into), edge)
    elif edge.kind == "call":
        yield FlowStep(owner(edge.out), owner(edge.into), edge)
        yield FlowStep(owner(edge.into), owner(edge.out), edge)


def reachable(graph: Graph, start: str, *, not_past: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of the nodes that messages of node `start` can reach, `start` included.

    Nodes of `not_past` are reached, but pass nothing on.
    """
    return _closure(start, [(step.source, step.target) for step in steps(graph) if step.source not in not_past])


def past(graph: Graph, port: Port) -> frozenset[str]:
    """Names of the nodes that messages sent on the Out port `port` can reach."""
    starts = [owner(edge.into) for edge in graph.edges if edge.kind == "queue" and edge.out is port]
    return frozenset().union(*(reachable(graph, start) for start in starts))


def source_ports(graph: Graph) -> list[Port]:
    """Connected Out ports of nodes that receive nothing over a queue edge: samples start there."""
    fed = {owner(edge.into) for edge in graph.edges if edge.kind == "queue"}
    ports = {edge.out: None for edge in graph.edges if edge.kind == "queue" and owner(edge.out) not in fed}
    return list(ports)


def admitted_port(graph: Graph) -> Port | None:
    """The Out port whose groups get tickets."""
    return None if graph.admission is None else graph.admission.out


def _closure(start: str, pairs: list[tuple[str, str]]) -> frozenset[str]:
    seen, frontier = {start}, [start]
    while frontier:
        node = frontier.pop()
        new = {target for source, target in pairs if source == node} - seen
        seen |= new
        frontier += new
    return frozenset(seen)


def cycles(edges: list[Edge]) -> Iterator[tuple[Edge, ...]]:
    """One shortest cycle through each edge that is on a cycle; no cycle twice. Edges run out -> into."""
    seen: set[frozenset[int]] = set()
    for edge in edges:
        path = _shortest(edges, owner(edge.into), owner(edge.out))
        if path is not None:
            cycle = (edge, *path)
            key = frozenset(id(part) for part in cycle)
            if key not in seen:
                seen.add(key)
                yield cycle


def _shortest(edges: list[Edge], start: str, end: str) -> tuple[Edge, ...] | None:
    paths: dict[str, tuple[Edge, ...]] = {start: ()}
    frontier = [start]
    while frontier and end not in paths:
        ahead: list[str] = []
        for edge in edges:
            if owner(edge.out) in frontier and owner(edge.into) not in paths:
                paths[owner(edge.into)] = (*paths[owner(edge.out)], edge)
                ahead.append(owner(edge.into))
        frontier = ahead
    return paths.get(end)

"""Which trainers the branches of a graph lead to, and how many copies of a sample arrive at a port.

A sample's state depends on all paths that it takes. So for every port the run has to know which trainers are
downstream, and how many copies of a sample a node that counts samples (a group, a join, a batch) receives in all.
If a path splits at several Out ports of one node, every port delivers one thing for each sample: the message, or a
tombstone if the node sent the message elsewhere. So the number of paths is the number of arrivals.

Only queue edges carry samples. They form no cycle in a graph that passes the check.

`in_pieces`: batchers that send their batches in pieces, because every trainer that they feed begins before a batch is
whole. Pieces change only rounding. If they would change anything else, or if nothing would be gained, the batch is
sent whole, and `flowrl check` prints the reason.

`stand_ins`: nodes that can lose a replica and continue, because the others can do everything that it did. Such a node
declares this (`Facts.stands_in`) and has several replicas. It only answers requests and reads weights: the messages
of a lane belong to one replica, so no other could process them. The weights that it reads wait in host memory,
because a broadcast needs all of its readers. And it has no time-shared devices, because the nodes that share them
wait for the replica that holds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from flowrl.graph.analysis.place import HostPlan
from flowrl.graph.graph import Edge, Graph, carried_type, port_name, port_owner
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out, Port
from flowrl.graph.routes import WeightTransport
from flowrl.messages import Batch, Weights


@dataclass(frozen=True)
class FlowStep:
    """One possible move of a message: from one node to another, along an edge."""

    source: str
    target: str
    edge: Edge


def flow_steps(graph: Graph) -> tuple[FlowStep, ...]:
    """All moves of messages, without latest edges."""
    return tuple(step for edge in graph.edges for step in _steps_of(edge))


def _steps_of(edge: Edge) -> Iterator[FlowStep]:
    if edge.kind == "queue":
        yield FlowStep(port_owner(edge.out), port_owner(edge.into), edge)
    elif edge.kind == "call":
        yield FlowStep(port_owner(edge.out), port_owner(edge.into), edge)
        yield FlowStep(port_owner(edge.into), port_owner(edge.out), edge)


def reachable_nodes(graph: Graph, start: str, *, not_past: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of the nodes that messages of node `start` can reach, `start` included.

    Nodes of `not_past` are reached, but pass nothing on.
    """
    return _reached_from(
        start, [(step.source, step.target) for step in flow_steps(graph) if step.source not in not_past]
    )


def nodes_past(graph: Graph, port: Port) -> frozenset[str]:
    """Names of the nodes that messages sent on the Out port `port` can reach."""
    starts = [port_owner(edge.into) for edge in graph.edges if edge.kind == "queue" and edge.out is port]
    return frozenset().union(*(reachable_nodes(graph, start) for start in starts))


def source_ports(graph: Graph) -> list[Port]:
    """Connected Out ports of nodes that receive nothing over a queue edge: samples start there."""
    fed = {port_owner(edge.into) for edge in graph.edges if edge.kind == "queue"}
    ports = {edge.out: None for edge in graph.edges if edge.kind == "queue" and port_owner(edge.out) not in fed}
    return list(ports)


def admitted_port(graph: Graph) -> Port | None:
    """The Out port whose groups get tickets."""
    return None if graph.admission is None else graph.admission.out


def _reached_from(start: str, pairs: list[tuple[str, str]]) -> frozenset[str]:
    seen, frontier = {start}, [start]
    while frontier:
        node = frontier.pop()
        new = {target for source, target in pairs if source == node} - seen
        seen |= new
        frontier += new
    return frozenset(seen)


def find_cycles(edges: list[Edge]) -> Iterator[tuple[Edge, ...]]:
    """One shortest cycle through each edge that is on a cycle; no cycle twice. Edges run out -> into."""
    seen: set[frozenset[int]] = set()
    for edge in edges:
        path = _shortest_path(edges, port_owner(edge.into), port_owner(edge.out))
        if path is not None:
            cycle = (edge, *path)
            key = frozenset(id(part) for part in cycle)
            if key not in seen:
                seen.add(key)
                yield cycle


def _shortest_path(edges: list[Edge], start: str, end: str) -> tuple[Edge, ...] | None:
    paths: dict[str, tuple[Edge, ...]] = {start: ()}
    frontier = [start]
    while frontier and end not in paths:
        ahead: list[str] = []
        for edge in edges:
            if port_owner(edge.out) in frontier and port_owner(edge.into) not in paths:
                paths[port_owner(edge.into)] = (*paths[port_owner(edge.out)], edge)
                ahead.append(port_owner(edge.into))
        frontier = ahead
    return paths.get(end)


@dataclass(frozen=True)
class PortPlan:
    """The host's information about one port of its node."""

    name: str
    """ "node.port" """
    trainers: tuple[str, ...] = ()
    """Trainers that the messages of this port can reach, including the node itself."""
    arrivals: int = 1
    """In ports of nodes that count samples: number of messages and tombstones for each sample, or each group."""
    counted: bool = False
    """Out ports: a node downstream counts samples, so it needs a message or a tombstone for each."""


def counts_samples(node: Node) -> bool:
    """Whether the node combines samples and therefore waits for all copies of each."""
    facts = node.facts()
    return bool(facts.joins) or not facts.keeps_lineage


def trainers_beyond(graph: Graph) -> tuple[str, ...]:
    """The nodes that train, the main one first: its weights are those that the admission's first `until` names.

    A trainer is a gang, sends weights, or declares itself a trainer in its facts.
    """
    sending = {
        port_owner(e.out) for e in graph.edges if e.kind == "latest" and issubclass(carried_type(e.out), Weights)
    }
    found = [name for name, node in graph.nodes.items() if node.gang or node.facts().trains or name in sending]
    return tuple(sorted(found, key=lambda name: name != main_trainer(graph)))


def main_trainer(graph: Graph) -> str | None:
    if graph.admission is None:
        return None
    first = graph.admission.until[0] if graph.admission.until else None
    return next((port_owner(e.out) for e in graph.edges if e.kind == "latest" and e.into is first), None)


class Branches:
    """The paths of samples through one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.trainers = trainers_beyond(graph)
        self._queues = [edge for edge in graph.edges if edge.kind == "queue"]
        self._into: dict[int, list[Edge]] = {}
        self._out_of: dict[int, list[Edge]] = {}
        for edge in self._queues:
            self._into.setdefault(id(edge.into), []).append(edge)
            self._out_of.setdefault(id(edge.out), []).append(edge)

    @cached_property
    def own_clock(self) -> tuple[str, ...]:
        """Trainers whose versions differ from the main trainer's, because they receive other batches."""
        if not self.trainers:
            return ()
        fed = {name: self._batch_ports(name) for name in self.trainers}
        return tuple(name for name in self.trainers[1:] if fed[name] != fed[self.trainers[0]])

    def _batch_ports(self, name: str) -> frozenset[int]:
        """The Out ports that feed a node's required In ports."""
        node = self._graph.nodes[name]
        optional = node.facts().optional
        ports = [port for port in node.ports.values() if isinstance(port, In) and port.name not in optional]
        return frozenset(id(edge.out) for port in ports for edge in self._into.get(id(port), ()))

    def beyond(self, port: Port) -> tuple[str, ...]:
        """The trainers that an Out port's messages reach; for an In port, from its own node onwards."""
        names = (
            {port_owner(port)} if isinstance(port, In) else {port_owner(e.into) for e in self._out_of.get(id(port), ())}
        )
        reached = frozenset().union(*(self._reached(name) for name in names)) if names else frozenset()
        return tuple(name for name in self.trainers if name in reached)

    def _reached(self, start: str) -> frozenset[str]:
        """The nodes that samples can reach from `start`, `start` included."""
        seen, frontier = {start}, [start]
        while frontier:
            name = frontier.pop()
            new = {port_owner(edge.into) for edge in self._queues if port_owner(edge.out) == name} - seen
            seen |= new
            frontier += new
        return frozenset(seen)

    def counts_beyond(self, name: str) -> bool:
        """See `counts`."""
        return counts_samples(self._graph.nodes[name])

    def is_counted(self, port: Port) -> bool:
        """Whether a node downstream of this Out port counts samples or trains."""
        names = {port_owner(edge.into) for edge in self._out_of.get(id(port), ())}
        reached = frozenset().union(*(self._reached(name) for name in names)) if names else frozenset()
        return any(name in self.trainers or counts_samples(self._graph.nodes[name]) for name in reached)

    def num_arrivals(self, port: Port) -> dict[str, int]:
        """Source port -> number of arrivals at this In port for each of its samples; sources with none are left out."""
        return {
            port_name(source): number
            for source in self._sources
            if (number := sum(self._copies(edge, source) for edge in self._into.get(id(port), ())))
        }

    @property
    def _sources(self) -> list[Port]:
        admitted = admitted_port(self._graph)
        return source_ports(self._graph) if admitted is None else [admitted]

    def _copies(self, edge: Edge, source: Port) -> int:
        return self._sent(edge.out, source, frozenset())

    def _sent(self, port: Port, source: Port, above: frozenset[str]) -> int:
        """Number of things that leave `port` per sample of `source`. A cycle (rejected by the check) counts once."""
        name = port_owner(port)
        if port is source:
            return 1
        if name in above or name == port_owner(source):
            return 0
        node = self._graph.nodes[name]
        taken = [
            self._sent(edge.out, source, above | {name})
            for into in node.ports.values()
            if isinstance(into, In)
            for edge in self._into.get(id(into), ())
        ]
        return min(sum(taken), 1) if counts_samples(node) else sum(taken)

    def repeated_samples(self, port: Port) -> dict[str, list[str]]:
        """Out port -> the edges into the In port `port` that together deliver each of its messages more than once.

        Two paths that split at the edges of one Out port both deliver a sample. Two paths that split at the Out ports
        of one node do not: the node sends the sample on one of them.
        """
        paths = self._paths(port, frozenset())
        found: dict[str, dict[str, None]] = {}
        for one, other in itertools.combinations(paths, 2):
            first, second = next(
                (pair for pair in zip(one, other, strict=False) if pair[0] is not pair[1]), (None, None)
            )
            meet_here = one[-1] is not other[-1]
            if meet_here and first is not None and second is not None and first.out is second.out:
                found.setdefault(port_name(first.out), {}).update({one[-1].name: None, other[-1].name: None})
        return {out: list(lasts) for out, lasts in found.items()}

    def _paths(self, port: Port, above: frozenset[str]) -> list[tuple[Edge, ...]]:
        """The paths of samples to an In port, as edges; joined paths count as one after the join."""
        paths: list[tuple[Edge, ...]] = []
        for edge in self._into.get(id(port), ()):
            name = port_owner(edge.out)
            before = (
                [] if name in above else [path for p in self._apart(name) for path in self._paths(p, above | {name})]
            )
            paths += [(*path, edge) for path in before] or [(edge,)]
        return paths

    def _apart(self, name: str) -> list[Port]:
        """The In ports of a node, but only the first one of joined ports."""
        node = self._graph.nodes[name]
        joined = node.facts().joins[1:]
        return [port for port in node.ports.values() if isinstance(port, In) and port.name not in joined]

    def port_plans(self) -> tuple[PortPlan, ...]:
        """The plans of every connected In and Out port of the graph's queue edges, and of sources."""
        return tuple(self._plan(port) for port in self._ports())

    def _ports(self) -> Iterable[Port]:
        return (p for node in self._graph.nodes.values() for p in node.ports.values() if isinstance(p, In | Out))

    def _plan(self, port: Port) -> PortPlan:
        if isinstance(port, Out):
            return PortPlan(port_name(port), self.beyond(port), counted=self.is_counted(port))
        merging = counts_samples(self._graph.nodes[port_owner(port)])
        arrivals = max(self.num_arrivals(port).values(), default=1) if merging else 1
        return PortPlan(port_name(port), self.beyond(port), arrivals=arrivals)


def by_name(plans: Iterable[PortPlan]) -> Mapping[str, PortPlan]:
    """The plans by port name."""
    return {plan.name: plan for plan in plans}


def in_pieces(graph: Graph) -> tuple[str, ...]:
    """The names of the batchers that send batches in pieces."""
    senders = dict.fromkeys(port_owner(edge.out) for edge in _batch_edges(graph))
    return tuple(name for name in senders if not _why_not(graph, name))


def piece_problems(graph: Graph) -> Iterator[str]:
    """Trainers that are set to accumulate but cannot."""
    for trainer, why in _takes_whole_batches(graph, "on"):
        yield f"node {trainer}: accumulate is 'on', but batches come whole, because {why}; set it to 'auto' or 'off'"


def piece_notes(graph: Graph) -> Iterator[str]:
    """For each trainer that may choose, whether it accumulates, as "trainer: note"."""
    whole = dict(_takes_whole_batches(graph, "auto"))
    for name, node in graph.nodes.items():
        if name in whole:
            yield f"{name}: it begins when a batch is whole: {whole[name]}"
        elif node.facts().accumulate in ("auto", "on"):
            yield f"{name}: it accumulates gradients of a batch's groups before the others have arrived"


def _takes_whole_batches(graph: Graph, choice: str) -> Iterator[tuple[str, str]]:
    """(trainer, why its batches come whole) for trainers whose `accumulate` is `choice`."""
    for edge in _batch_edges(graph):
        trainer = port_owner(edge.into)
        if graph.nodes[trainer].facts().accumulate == choice and (why := _why_not(graph, port_owner(edge.out))):
            yield trainer, why


def _why_not(graph: Graph, batcher: str) -> str:
    """Why this batcher sends batches whole, "" if it does not."""
    reason = graph.nodes[batcher].facts().whole_batches
    if reason is None:
        return f"{batcher} makes whole batches"
    edges = [edge for edge in _batch_edges(graph) if port_owner(edge.out) == batcher]
    return next((why for why in (reason, *(_taken_whole(graph, edge) for edge in edges)) if why), "")


def _taken_whole(graph: Graph, edge: Edge) -> str:
    """Why the node at the end of this edge needs whole batches, "" if it does not."""
    name = port_owner(edge.into)
    facts = graph.nodes[name].facts()
    if facts.accumulate not in ("auto", "on"):
        return f"{name} has accumulate='off'" if facts.accumulate else f"{name} takes whole batches"
    if facts.whole_batches:
        return facts.whole_batches
    others = [other for names in graph.time_shared if name in names for other in names if other != name]
    return f"it shares its devices in time with {others[0]}" if others else ""


def _batch_edges(graph: Graph) -> list[Edge]:
    queues = (edge for edge in graph.edges if edge.kind == "queue" and edge.into.name != "held_out")
    return [edge for edge in queues if issubclass(carried_type(edge.out), Batch)]


def stand_ins(
    graph: Graph, hosts: Iterable[HostPlan], transports: Iterable[tuple[str, WeightTransport | None]]
) -> tuple[str, ...]:
    """The nodes of `graph` that can lose a replica. `transports`: (reader of weights, how the weights reach it)."""
    in_turns = {_node_of(replica_id) for host in hosts if host.lease for replica_id in host.nodes}
    broadcast = {
        _node_of(reader)
        for reader, transport in transports
        if transport is WeightTransport.NCCL and not graph.nodes[_node_of(reader)].facts().adapter_rank
    }
    sending = {port_owner(edge.out) for edge in graph.edges}
    taking = {port_owner(edge.into) for edge in graph.edges if edge.kind == "queue"}
    return tuple(
        name
        for name, placed in graph.placed.items()
        if placed.replicas > 1 and placed.node.facts().stands_in and name not in in_turns | broadcast | sending | taking
    )


def may_end(host: HostPlan, *, ended: Collection[str], hosts: Iterable[HostPlan], stand_ins: Collection[str]) -> bool:
    """Whether the run continues if the process of `host` ends after those of the hosts named in `ended`."""
    left = {_node_of(one) for other in hosts if other != host and other.name not in ended for one in other.nodes}
    return all(_node_of(replica_id) in stand_ins and _node_of(replica_id) in left for replica_id in host.nodes)


def _node_of(replica_id: str) -> str:
    return replica_id.partition("/")[0]

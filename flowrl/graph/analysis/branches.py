"""Which trainers the branches of a graph lead to, and how many copies of a sample arrive at a port.

A sample's state depends on all paths that it takes. So for every port the run has to know which trainers are
downstream, and how many copies of a sample a node that counts samples (a group, a join, a batch) receives in all.
If a path splits at several Out ports of one node, every port delivers one thing for each sample: the message, or a
tombstone if the node sent the message elsewhere. So the number of paths is the number of arrivals.

Only queue edges carry samples. They form no cycle in a graph that passes the check.

`whole_batch_reasons`: why a batcher sends its batches whole. It sends them in pieces if every trainer that it feeds
begins before a batch is whole. Pieces change only rounding. If they would change anything else, or if nothing would be
gained, the batch is sent whole, and `flowrl check` prints the reason.

`stand_ins`: nodes that can lose a replica and continue, because the others can do everything that it did. Such a node
declares this (`Facts.stands_in`) and has several replicas. It only answers requests and reads weights: the messages
of a lane belong to one replica, so no other could process them. The weights that it reads wait in host memory,
because a broadcast needs all of its readers. And it has no time-shared devices, because the nodes that share them
wait for the replica that holds them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from flowrl.graph.analysis.place import HostPlan
from flowrl.graph.graph import Edge, Graph, carried_type, port_name, port_owner
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out, Port
from flowrl.graph.routes import WeightTransport
from flowrl.messages import Batch, Weights


def reachable_nodes(
    graph: Graph, *starts: str, by_calls: bool = True, not_past: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Names of the nodes that messages of the nodes `starts` can reach, `starts` included.

    Messages move along queue edges and, with `by_calls`, both ways along call edges. Nodes of `not_past` are reached,
    but pass nothing on.
    """
    steps: list[tuple[str, str]] = []
    for edge in graph.edges:
        source, target = port_owner(edge.out), port_owner(edge.into)
        if edge.kind == "queue" or (edge.kind == "call" and by_calls):
            steps.append((source, target))
        if edge.kind == "call" and by_calls:
            steps.append((target, source))
    seen, frontier = set(starts), list(starts)
    while frontier:
        node = frontier.pop()
        new = set() if node in not_past else {target for source, target in steps if source == node} - seen
        seen |= new
        frontier += new
    return frozenset(seen)


def nodes_past(graph: Graph, port: Port, *, by_calls: bool = True) -> frozenset[str]:
    """Names of the nodes that messages sent on the Out port `port` can reach."""
    starts = [port_owner(edge.into) for edge in graph.edges if edge.kind == "queue" and edge.out is port]
    return reachable_nodes(graph, *starts, by_calls=by_calls)


def source_ports(graph: Graph) -> list[Port]:
    """Connected Out ports of nodes that receive nothing over a queue edge: samples start there."""
    fed = {port_owner(edge.into) for edge in graph.edges if edge.kind == "queue"}
    ports = {edge.out: None for edge in graph.edges if edge.kind == "queue" and port_owner(edge.out) not in fed}
    return list(ports)


def find_cycles(edges: list[Edge]) -> Iterator[tuple[Edge, ...]]:
    """One shortest cycle through each edge that is on a cycle; no cycle twice. Edges run out -> into."""
    seen: set[frozenset[int]] = set()
    for edge in edges:
        # Breadth first from the edge's end back to its beginning.
        start, end = port_owner(edge.into), port_owner(edge.out)
        paths: dict[str, tuple[Edge, ...]] = {start: ()}
        frontier = [start]
        while frontier and end not in paths:
            ahead: list[str] = []
            for step in edges:
                if port_owner(step.out) in frontier and port_owner(step.into) not in paths:
                    paths[port_owner(step.into)] = (*paths[port_owner(step.out)], step)
                    ahead.append(port_owner(step.into))
            frontier = ahead
        if end in paths:
            cycle = (edge, *paths[end])
            key = frozenset(id(part) for part in cycle)
            if key not in seen:
                seen.add(key)
                yield cycle


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
    members: int = 1
    """In ports: the members that a group has there for each that was admitted, because nodes before derive further
    samples."""
    derives: bool = False
    """In ports: whether the node derives samples from what arrives here."""


def counts_samples(node: Node) -> bool:
    """Whether the node combines samples and therefore waits for all copies of each."""
    facts = node.facts()
    return bool(facts.joins) or not facts.keeps_lineage


def merges_copies(node: Node) -> bool:
    """Whether the node makes one thing of all copies of a sample that arrive at an In port."""
    return counts_samples(node) or bool(node.facts().derives)


def find_trainers(graph: Graph) -> tuple[str, ...]:
    """The nodes that train, the main one first: its weights are those that the admission's first `until` names.

    A trainer is a gang, sends weights, or declares itself a trainer in its facts.
    """
    latest = [edge for edge in graph.edges if edge.kind == "latest"]
    sending = {port_owner(edge.out) for edge in latest if issubclass(carried_type(edge.out), Weights)}
    until = () if graph.admission is None else graph.admission.until
    main = next((port_owner(edge.out) for edge in latest if until and edge.into is until[0]), None)
    found = [name for name, node in graph.nodes.items() if node.gang or node.facts().trains or name in sending]
    return tuple(sorted(found, key=lambda name: name != main))


class Branches:
    """The paths of samples through one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.trainers = find_trainers(graph)
        self._into: dict[int, list[Edge]] = {}
        for edge in graph.edges:
            if edge.kind == "queue":
                self._into.setdefault(id(edge.into), []).append(edge)

    @cached_property
    def own_clock(self) -> tuple[str, ...]:
        """Trainers whose versions differ from the main trainer's, because they receive other batches."""
        fed: dict[str, frozenset[int]] = {}  # trainer -> the Out ports that feed its required In ports
        for name in self.trainers:
            node = self._graph.nodes[name]
            optional = node.facts().optional
            ports = [port for port in node.ports.values() if isinstance(port, In) and port.name not in optional]
            fed[name] = frozenset(id(edge.out) for port in ports for edge in self._into.get(id(port), ()))
        return tuple(name for name in self.trainers[1:] if fed[name] != fed[self.trainers[0]])

    def reached_trainers(self, port: Port) -> tuple[str, ...]:
        """The trainers that an Out port's messages reach; for an In port, from its own node onwards."""
        if isinstance(port, In):
            reached = reachable_nodes(self._graph, port_owner(port), by_calls=False)
        else:
            reached = nodes_past(self._graph, port, by_calls=False)
        return tuple(name for name in self.trainers if name in reached)

    def is_counted(self, port: Port) -> bool:
        """Whether a node downstream of this Out port counts samples or trains."""
        reached = nodes_past(self._graph, port, by_calls=False)
        return any(name in self.trainers or counts_samples(self._graph.nodes[name]) for name in reached)

    def num_arrivals(self, port: Port) -> dict[str, int]:
        """Source port -> number of arrivals at this In port for each of its samples; sources with none are left out."""
        admission = self._graph.admission
        sources = source_ports(self._graph) if admission is None else [admission.out]
        edges = self._into.get(id(port), ())
        numbers = {
            port_name(one): sum(self._num_copies(edge.out, one, frozenset()) for edge in edges) for one in sources
        }
        return {source: number for source, number in numbers.items() if number}

    def _num_copies(self, port: Port, source: Port, above: frozenset[str]) -> int:
        """Number of things that leave `port` per sample of `source`. A cycle (rejected by the check) counts once."""
        name = port_owner(port)
        if port is source:
            return 1
        if name in above or name == port_owner(source):
            return 0
        node = self._graph.nodes[name]
        edges = [edge for into in node.ports.values() if isinstance(into, In) for edge in self._into.get(id(into), ())]
        taken = sum(self._num_copies(edge.out, source, above | {name}) for edge in edges)
        return min(taken, 1) if merges_copies(node) else taken

    def repeated_samples(self, port: Port) -> dict[str, list[str]]:
        """Out port -> the edges into the In port `port` that together deliver each of its messages more than once.

        Two paths that split at the edges of one Out port both deliver a sample. Two paths that split at the Out ports
        of one node do not: the node sends the sample on one of them.
        """
        found: dict[str, dict[str, None]] = {}
        for one, other in itertools.combinations(self._find_paths(port, frozenset()), 2):
            split = next((pair for pair in zip(one, other, strict=False) if pair[0] is not pair[1]), None)
            meet_here = one[-1] is not other[-1]
            if meet_here and split is not None and split[0].out is split[1].out:
                found.setdefault(port_name(split[0].out), {}).update({one[-1].name: None, other[-1].name: None})
        return {out: list(lasts) for out, lasts in found.items()}

    def _find_paths(self, port: Port, above: frozenset[str]) -> list[tuple[Edge, ...]]:
        """The paths of samples to an In port, as edges; joined paths count as one after the join."""
        paths: list[tuple[Edge, ...]] = []
        for edge in self._into.get(id(port), ()):
            name = port_owner(edge.out)
            node = self._graph.nodes[name]
            joined = node.facts().joins[1:]
            ports = [into for into in node.ports.values() if isinstance(into, In) and into.name not in joined]
            before = [] if name in above else [path for p in ports for path in self._find_paths(p, above | {name})]
            paths += [(*path, edge) for path in before] or [(edge,)]
        return paths

    def derivers(self, port: Port) -> frozenset[tuple[str, ...]]:
        """For each path of samples to an In port: the nodes on it that derive samples, in order."""
        return self._derivers(port, frozenset())

    def _derivers(self, port: Port, above: frozenset[str]) -> frozenset[tuple[str, ...]]:
        found: set[tuple[str, ...]] = set()
        for name in {port_owner(edge.out) for edge in self._into.get(id(port), ())} - above:
            node = self._graph.nodes[name]
            before = [self._derivers(one, above | {name}) for one in node.ports.values() if isinstance(one, In)]
            own = (name,) if node.facts().derives else ()
            found |= {(*path, *own) for path in frozenset().union(*before) or {()}}
        return frozenset(found)

    def num_members(self, port: Port) -> int:
        """The members that a group has at an In port for each that was admitted, lost ones included."""
        return max(
            (
                math.prod(1 + sum(self._graph.nodes[name].facts().derives.values()) for name in path)
                for path in self.derivers(port)
            ),
            default=1,
        )

    def port_plans(self) -> tuple[PortPlan, ...]:
        """The plans of every In and Out port of the graph."""
        found = []
        for node in self._graph.nodes.values():
            for port in node.ports.values():
                name, trainers = port_name(port), self.reached_trainers(port)
                if isinstance(port, Out):
                    found.append(PortPlan(name, trainers, counted=self.is_counted(port)))
                elif isinstance(port, In):
                    arrivals = max(self.num_arrivals(port).values(), default=1) if merges_copies(node) else 1
                    derives = bool(node.facts().derives) and id(port) in self._into
                    members = self.num_members(port)
                    found.append(PortPlan(name, trainers, arrivals=arrivals, members=members, derives=derives))
        return tuple(found)


def whole_batch_reasons(graph: Graph) -> dict[str, str]:
    """Batcher -> why it sends its batches whole, "" if it sends them in pieces."""
    found: dict[str, str] = {}
    for edge in _batch_edges(graph):
        batcher, trainer = port_owner(edge.out), port_owner(edge.into)
        if found.get(batcher):
            continue
        reason, facts = graph.nodes[batcher].facts().whole_batches, graph.nodes[trainer].facts()
        in_turns = [other for names in graph.time_shared if trainer in names for other in names if other != trainer]
        if reason is None:
            found[batcher] = f"{batcher} makes whole batches"
        elif reason:
            found[batcher] = reason
        elif facts.accumulate not in ("auto", "on"):
            found[batcher] = f"{trainer} " + ("has accumulate='off'" if facts.accumulate else "takes whole batches")
        elif facts.whole_batches:
            found[batcher] = facts.whole_batches
        else:
            found[batcher] = f"it shares its devices in time with {in_turns[0]}" if in_turns else ""
    return found


def accumulation_findings(graph: Graph) -> tuple[list[str], list[str]]:
    """(problems, notes): trainers that are set to accumulate but cannot; for each trainer that may choose, whether it
    accumulates, as "trainer: note"."""
    reasons = whole_batch_reasons(graph)
    whole = {port_owner(edge.into): why for edge in _batch_edges(graph) if (why := reasons[port_owner(edge.out)])}
    problems, notes = [], []
    for name, node in graph.nodes.items():
        accumulate, why = node.facts().accumulate, whole.get(name, "")
        if accumulate == "on" and why:
            problems.append(
                f"node {name}: accumulate is 'on', but batches come whole, because {why}; set it to 'auto' or 'off'"
            )
        if accumulate == "auto" and why:
            notes.append(f"{name}: it begins when a batch is whole: {why}")
        elif accumulate in ("auto", "on"):
            notes.append(f"{name}: it accumulates gradients of a batch's groups before the others have arrived")
    return problems, notes


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

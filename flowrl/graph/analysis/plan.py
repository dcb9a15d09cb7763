"""The plan of a run: hosts, lanes, calls, transports and derived numbers. Pure functions; `flowrl check`
prints the plan, the launcher builds it, `graph.json` stores it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flowrl.graph.analysis.branches import Branches, PortPlan, stand_ins, whole_batch_reasons
from flowrl.graph.analysis.numbers import Numbers, derive_numbers, in_flight, lane_capacity, message_bytes
from flowrl.graph.analysis.place import HostPlan, place_replicas
from flowrl.graph.graph import Edge, EdgeKind, Graph, carried_type, port_name, port_owner
from flowrl.graph.machine import Cluster
from flowrl.graph.routes import WeightRoute, WeightTransport
from flowrl.messages import Column, Weights
from flowrl.messages.base import type_name

__all__ = ["CallPlan", "EdgePlan", "HostPlan", "LanePlan", "Plan", "WeightPlan", "make_plan"]


@dataclass(frozen=True)
class LanePlan:
    """The lane from one producer replica to one consumer replica of a queue or latest edge."""

    name: str
    """ "generator/0.rollouts -> reward/1.rollouts" """
    edge: str
    producer: str
    """Node replica, as "generator/0"."""
    consumer: str
    producer_host: str
    consumer_host: str
    capacity: int
    kind: EdgeKind
    types: tuple[str, ...]
    """Name of the message type."""
    transport: str
    """process | ipc | tcp"""


@dataclass(frozen=True)
class CallPlan:
    """The connection of one requesting replica and one serving replica of a call edge."""

    name: str
    edge: str
    caller: str
    server: str
    caller_host: str
    server_host: str
    capacity: int
    """The most open requests."""
    affinity_margin: int | None
    """How many more open requests a session's replica may have than the one with the fewest; None: it moves freely."""
    types: tuple[str, ...]
    """Names of request and reply type."""
    transport: str


@dataclass(frozen=True)
class EdgePlan:
    """An edge with all its derived values."""

    name: str
    kind: EdgeKind
    out: str
    into: str
    dispatch: str
    capacity: int
    capacity_derived: bool
    types: tuple[str, ...]
    message_bytes: int
    retained_bytes: int
    """Upper bound of the bytes that producers keep for this edge until their acks."""
    transports: tuple[str, ...]


@dataclass(frozen=True)
class WeightPlan:
    """How the tensors of a latest edge of weights reach one consumer replica."""

    edge: str
    producer: str
    consumer: str
    transport: WeightTransport | None
    """None: no transport reaches the reader; `check` refuses such a plan."""
    dtype: str = ""
    """Dtype of the reader's parameters, from `Facts.weights_dtype`."""


@dataclass(frozen=True)
class Plan:
    """Everything that follows from a graph and a cluster."""

    graph: str
    numbers: Numbers
    hosts: tuple[HostPlan, ...]
    edges: tuple[EdgePlan, ...]
    lanes: tuple[LanePlan, ...]
    calls: tuple[CallPlan, ...]
    weights: tuple[WeightPlan, ...]
    nodes: tuple[dict[str, Any], ...]
    admission: dict[str, Any] | None
    trainers: tuple[str, ...] = ()
    """The nodes that train, the main one first."""
    own_clock: tuple[str, ...] = ()
    """Trainers whose versions differ from the main one's, because they get other batches."""
    in_pieces: tuple[str, ...] = ()
    """Batchers that send the groups of a batch as they finish, because its trainers accumulate gradients."""
    ports: tuple[PortPlan, ...] = ()
    """For each port: the trainers that its samples can reach, and the copies that arrive."""
    homeless: tuple[str, ...] = ()
    """Hosts for which the cluster has no devices; none in a plan that runs."""
    columns: tuple[tuple[Column, str], ...] = ()
    """Each column that a node adds to samples, with the node's name."""
    stand_ins: tuple[str, ...] = ()
    """The nodes that continue if they lose a replica (`stand_ins`)."""

    def host_of(self, replica: str) -> HostPlan:
        """The host in which the node replica "reward/0" runs."""
        return next(host for host in self.hosts if replica in host.nodes)

    @property
    def retained_bytes(self) -> int:
        return sum(edge.retained_bytes for edge in self.edges)

    @property
    def consumers(self) -> tuple[tuple[str, str], ...]:
        """(consumer replica, producing node) for every latest edge that ends a ticket."""
        until = () if self.admission is None else tuple(self.admission["until"])
        edges = {edge.name for edge in self.edges if edge.into in until}
        lanes = [lane for lane in self.lanes if lane.edge in edges]
        return tuple(dict.fromkeys((lane.consumer, lane.producer.split("/")[0]) for lane in lanes))

    def to_json(self) -> dict[str, Any]:
        """The content of `graph.json`: the derived numbers by name, then the parts."""
        return {
            "graph": self.graph,
            **asdict(self.numbers),
            "retained_bytes": self.retained_bytes,
            "num_processes": len(self.hosts) + 1,
            "admission": self.admission,
            "nodes": list(self.nodes),
            "trainers": list(self.trainers),
            "own_clock": list(self.own_clock),
            "in_pieces": list(self.in_pieces),
            **{
                key: [asdict(item) for item in getattr(self, key)]
                for key in ("edges", "hosts", "lanes", "calls", "weights", "ports")
            },
        }


def make_plan(graph: Graph, cluster: Cluster | None = None) -> Plan:
    """Plan `graph` for `cluster` (default: this machine). Checks nothing; flowrl.graph.analysis.check does that."""
    cluster = cluster or Cluster.here()
    numbers = derive_numbers(graph)
    hosts, homeless = place_replicas(graph, cluster)
    by_replica = {replica: host for host in hosts for replica in host.nodes}
    links = [link for edge in graph.edges for link in _plan_links(graph, edge, numbers, by_replica)]
    lanes = tuple(link for link in links if isinstance(link, LanePlan))
    weights = _plan_weights(graph, lanes, by_replica)
    branches = Branches(graph)
    admission = graph.admission
    return Plan(
        graph=graph.name,
        numbers=numbers,
        hosts=hosts,
        edges=tuple(_plan_edge(graph, edge, numbers, links) for edge in graph.edges),
        lanes=lanes,
        calls=tuple(link for link in links if isinstance(link, CallPlan)),
        weights=weights,
        nodes=tuple(
            {
                "name": name,
                "type": type(placed.node).__name__,
                "replicas": placed.replicas,
                "cpus": placed.cpus_each,
                "gpus": placed.gpus_each,
                "gang": placed.node.gang,
            }
            for name, placed in graph.placed.items()
        ),
        admission=None
        if admission is None
        else {
            "out": port_name(admission.out),
            "until": [port_name(port) for port in admission.until],
            "staleness": admission.staleness,
            "on_limit": admission.on_limit,
            "look_ahead": admission.look_ahead,
        },
        trainers=branches.trainers,
        own_clock=branches.own_clock,
        in_pieces=tuple(batcher for batcher, why in whole_batch_reasons(graph).items() if not why),
        ports=branches.port_plans(),
        homeless=homeless,
        columns=tuple((one, name) for name, node in graph.nodes.items() for one in node.facts().columns),
        stand_ins=stand_ins(graph, hosts, [(one.consumer, one.transport) for one in weights]),
    )


def _plan_links(
    graph: Graph, edge: Edge, numbers: Numbers, hosts: dict[str, HostPlan]
) -> Iterator[LanePlan | CallPlan]:
    """The lanes of an edge, or the connections of a call edge: one from each sending to each receiving replica."""
    sender, receiver = graph.placed[port_owner(edge.out)], graph.placed[port_owner(edge.into)]
    capacity = lane_capacity(graph, edge, numbers)
    # The message classes by the names that are valid in every process.
    types = tuple(type_name(kind) if isinstance(kind, type) else str(kind) for kind in edge.out.types)
    # Of the ranks of a gang, only rank 0 publishes weights.
    num_senders = 1 if edge.kind == "latest" and sender.node.gang else sender.replicas
    for one, other in itertools.product(range(num_senders), range(receiver.replicas)):
        source, target = f"{sender.name}/{one}", f"{receiver.name}/{other}"
        name = f"{source}.{edge.out.name} -> {target}.{edge.into.name}"
        here, there = hosts[source], hosts[target]
        transport = _lane_transport(here, there)
        if edge.kind == "call":
            yield CallPlan(
                name=name,
                edge=edge.name,
                caller=source,
                server=target,
                caller_host=here.name,
                server_host=there.name,
                capacity=capacity,
                affinity_margin=edge.affinity_margin,
                types=types,
                transport=transport,
            )
        else:
            yield LanePlan(
                name=name,
                edge=edge.name,
                producer=source,
                consumer=target,
                producer_host=here.name,
                consumer_host=there.name,
                capacity=capacity,
                kind=edge.kind,
                types=types,
                transport=transport,
            )


def _lane_transport(one: HostPlan, other: HostPlan) -> str:
    if one.name == other.name:
        return "process"
    return "ipc" if one.machine == other.machine else "tcp"


def _plan_edge(graph: Graph, edge: Edge, numbers: Numbers, links: Sequence[LanePlan | CallPlan]) -> EdgePlan:
    mine = [link for link in links if link.edge == edge.name]
    size = message_bytes(graph, edge, numbers)
    depth = lane_capacity(graph, edge, numbers)
    bounded = None if edge.kind != "queue" else in_flight(carried_type(edge.out), numbers)
    return EdgePlan(
        name=edge.name,
        kind=edge.kind,
        out=port_name(edge.out),
        into=port_name(edge.into),
        dispatch=edge.dispatch,
        capacity=depth,
        capacity_derived=edge.capacity is None and edge.kind != "latest",
        types=tuple(getattr(kind, "__name__", str(kind)) for kind in edge.out.types),
        message_bytes=size,
        retained_bytes=size * (bounded if bounded is not None else depth * len(mine)),
        transports=tuple(dict.fromkeys(link.transport for link in mine)),
    )


def _plan_weights(graph: Graph, lanes: tuple[LanePlan, ...], hosts: dict[str, HostPlan]) -> tuple[WeightPlan, ...]:
    """The transport to every reader. One trainer publishes in one way: between GPUs if all its readers can do so."""
    edges = {
        edge.name: edge for edge in graph.edges if edge.kind == "latest" and issubclass(carried_type(edge.out), Weights)
    }
    ways = [(lane, hosts[lane.producer], hosts[lane.consumer]) for lane in lanes if lane.edge in edges]
    facts = {name: graph.nodes[port_owner(edge.into)].facts() for name, edge in edges.items()}

    # Both can take part in a broadcast if they are on different GPUs, as NCCL requires, at the same time. A reader with
    # time-shared devices may have to wait for them, while the node that holds them waits for the trainer.
    in_host_memory = set()
    for lane, trainer, reader in ways:
        apart = trainer.machine != reader.machine or not set(trainer.gpus) & set(reader.gpus)
        can_broadcast = bool(trainer.gpus and reader.gpus) and apart and not reader.lease
        if not can_broadcast or facts[lane.edge].weights_in_host_memory:
            in_host_memory.add(lane.producer)

    plans = []
    for lane, trainer, reader in ways:
        transport: WeightTransport | None = WeightTransport.NCCL
        if reader.num_gpus and not trainer.num_gpus:
            transport = None
        elif lane.producer in in_host_memory:
            transport = WeightTransport.SHM if trainer.machine == reader.machine else WeightTransport.TCP
        plans.append(WeightPlan(lane.edge, lane.producer, lane.consumer, transport, facts[lane.edge].weights_dtype))
    return tuple(plans)


def routes_of(plan: Plan, node: str) -> tuple[WeightRoute, ...]:
    """The routes that concern `node`: its own if it is a trainer, else those of the trainer whose weights it reads."""

    def name(replica_id: str) -> str:
        return replica_id.split("/")[0]

    trainers = {name(p.producer) for p in plan.weights if node in (name(p.producer), name(p.consumer))}
    ways = {p.consumer: p for p in plan.weights if name(p.producer) in trainers}
    routes = []
    for reader, way in sorted(ways.items()):
        assert way.transport is not None, "`check` refuses a reader that no transport reaches"
        routes.append(WeightRoute(reader, way.transport, len(plan.host_of(reader).gpus) or 1, way.dtype))
    return tuple(routes)

"""Which nodes can lose a replica and continue: those whose other replicas can do everything that it did.

Such a node declares this (`Facts.stands_in`) and has several replicas. It only answers requests and reads weights: the
messages of a lane belong to one replica, so no other replica could process them. The weights that it reads wait in host
memory, because a broadcast needs all of its readers. And it has no time-shared devices, because the nodes that share
them wait for the replica that holds them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from flowrl.graph.analysis.place import HostPlan
from flowrl.graph.graph import Graph, owner
from flowrl.graph.routes import WeightTransport


def stand_ins(
    graph: Graph, hosts: Iterable[HostPlan], transports: Iterable[tuple[str, WeightTransport | None]]
) -> tuple[str, ...]:
    """The nodes of `graph` that can lose a replica. `transports`: (reader of weights, how the weights reach it)."""
    in_turns = {_node(replica_id) for host in hosts if host.lease for replica_id in host.nodes}
    broadcast = {
        _node(reader)
        for reader, transport in transports
        if transport is WeightTransport.NCCL and not graph.nodes[_node(reader)].facts().adapter_rank
    }
    sending = {owner(edge.out) for edge in graph.edges}
    taking = {owner(edge.into) for edge in graph.edges if edge.kind == "queue"}
    return tuple(
        name
        for name, placed in graph.placed.items()
        if placed.replicas > 1 and placed.node.facts().stands_in and name not in in_turns | broadcast | sending | taking
    )


def may_end(host: HostPlan, *, ended: Collection[str], hosts: Iterable[HostPlan], stand_ins: Collection[str]) -> bool:
    """Whether the run continues if the process of `host` ends after those of the hosts named in `ended`."""
    left = {_node(one) for other in hosts if other != host and other.name not in ended for one in other.nodes}
    return all(_node(replica_id) in stand_ins and _node(replica_id) in left for replica_id in host.nodes)


def _node(replica_id: str) -> str:
    return replica_id.partition("/")[0]

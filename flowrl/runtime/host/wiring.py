"""Connects the ports of one node replica to the lanes that the plan assigns to it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

from flowrl.channel.control import Answer
from flowrl.channel.endpoint import Endpoint
from flowrl.channel.lanes.dispatch import Inbox, OutEdge
from flowrl.channel.lanes.lane import LaneSpec
from flowrl.episode import Turn
from flowrl.graph.analysis.branches import PortPlan, by_name
from flowrl.graph.analysis.plan import LanePlan, Plan
from flowrl.graph.dispatch_rules import RULES
from flowrl.graph.graph import Graph
from flowrl.graph.ports import Call, In, Out, Serve
from flowrl.message_base import type_name
from flowrl.runtime.activity.lease import Lease
from flowrl.runtime.host.replica import Replica
from flowrl.runtime.ports.inbound import Inbound
from flowrl.runtime.ports.join import Joined
from flowrl.runtime.ports.outbound import Outbound
from flowrl.runtime.ports.requests import LiveCall, LiveServe


def join(replica: Replica, graph: Graph, plan: Plan, endpoint: Endpoint) -> None:
    """Give every port of `replica` its live side.

    An ignored port gets one without lanes; an unused Call or Serve port gets none.
    """
    node = graph.nodes[replica.place.node]
    port_plans = by_name(plan.ports)
    admitted = [port_plans[plan.admission["out"]]] if plan.admission is not None else plan.ports
    replica.every_trainer = frozenset(trainer for port_plan in admitted for trainer in _ends(plan, port_plan))
    ends = {end for edge in plan.edges for end in (edge.out, edge.into)}
    sink = not any(isinstance(port, Out) for port in node.ports.values())
    for port in node.ports.values():
        label = f"{replica.place.node}.{port.name}"
        port.connected = label in ends
        if isinstance(port, In):
            arrivals = port_plans[label].arrivals
            port.live = replica.inbound[port.name] = _inbound(replica, plan, endpoint, label, arrivals, sink=sink)
            replica.trainers |= frozenset(_ends(plan, port_plans[label]))
        elif isinstance(port, Out):
            port.live = replica.outbound[port.name] = _outbound(replica, graph, plan, endpoint, port_plans[label])
        elif isinstance(port, Call):
            port.live = _call(replica, plan, endpoint, label)
        elif isinstance(port, Serve):
            port.live = _serve(replica, plan, endpoint, label)


def _spec(lane: LanePlan) -> LaneSpec:
    return LaneSpec(
        name=lane.name,
        edge=lane.edge,
        producer=lane.producer,
        consumer=lane.consumer,
        producer_host=lane.producer_host,
        consumer_host=lane.consumer_host,
        capacity=lane.capacity,
        kind="latest" if lane.kind == "latest" else "queue",
        types=lane.types,
    )


def _ends(plan: Plan, port_plan: PortPlan) -> tuple[str, ...]:
    """The trainers downstream of a port; in a graph without trainers, the single end "" of all branches."""
    return port_plan.trainers if plan.trainers else ("",)


def _inbound(replica: Replica, plan: Plan, endpoint: Endpoint, label: str, arrivals: int, *, sink: bool) -> Inbound:
    inbox = Inbox(label)
    for lane in plan.lanes:
        if lane.consumer == replica.place.replica_id and lane.edge.endswith(f" -> {label}"):
            inbox.add(endpoint.receiver(_spec(lane)))
            sink = sink or lane.kind == "latest"
    away = label.partition(".")[2] in replica.node.facts().without_devices
    lease = Lease("", replica.place.replica_id, endpoint) if away else replica.lease
    services = (replica.open_items, replica.activity, replica, lease)
    port = Inbound(label, inbox, *services, sink=sink, arrivals=arrivals)
    port.joined = Joined
    return port


def _outbound(replica: Replica, graph: Graph, plan: Plan, endpoint: Endpoint, port_plan: PortPlan) -> Outbound:
    label = port_plan.name
    lanes: dict[str, list[LanePlan]] = defaultdict(list)
    for lane in plan.lanes:
        if lane.producer == replica.place.replica_id and lane.edge.startswith(f"{label} -> "):
            lanes[lane.edge].append(lane)
    rules = {edge.name: RULES[edge.dispatch] for edge in plan.edges}
    shared = {edge.name: graph.nodes[edge.into.partition(".")[0]].facts().ranks_per_part for edge in plan.edges}
    edges = [
        OutEdge([endpoint.sender(_spec(lane)) for lane in members], rules[edge], lanes_per_part=shared[edge])
        for edge, members in lanes.items()
    ]
    for out in edges:
        out.on_taken(replica.open_items.arrived)
    return Outbound(label, edges, replica, _ends(plan, port_plan), counted=port_plan.counted)


def _call(replica: Replica, plan: Plan, endpoint: Endpoint, label: str) -> LiveCall | None:
    calls = [w for w in plan.calls if w.caller == replica.place.replica_id and w.edge.startswith(f"{label} -> ")]
    if not calls:
        return None
    ledger = replica.context.ledger
    answered = (ledger.answered,) if calls[0].types[0] == type_name(Turn) else ()
    live = LiveCall(label, calls, endpoint, replica.activity, replica.context.metric, *answered)
    replica.calls.append(live)
    return live


def _serve(replica: Replica, plan: Plan, endpoint: Endpoint, label: str) -> LiveServe | None:
    calls = [w for w in plan.calls if w.server == replica.place.replica_id and w.edge.endswith(f" -> {label}")]
    if not calls:
        return None
    doors: Any = _Doors(endpoint, replica)
    return LiveServe(label, calls, doors, replica.activity, replica.lease, replica.context.gauge)


class _Doors:
    """Wraps the endpoint for a Serve port, so that its handlers run as work of the node."""

    def __init__(self, endpoint: Endpoint, replica: Replica) -> None:
        self._endpoint = endpoint
        self._pending = replica.activity.pending

    def on(self, kind: str, handler: Answer) -> None:
        if not inspect.iscoroutinefunction(handler):
            self._endpoint.on(kind, handler)
            return

        async def answer(host: str, body: Any) -> Any:
            self._pending.enter()
            return await handler(host, body)

        self._endpoint.on(kind, answer)

"""Who waits for whom: the proof of a deadlock, and the report of a standstill.

A deadlock is a set of nodes in which no node can move unless another node of the set moves. No node of the set has
anything of its own pending (`activity.pending`), and everything that could end one of its waits, a node or the driver,
is also in the set. The driver is in the set if it is not working on anything and all nodes are in the set. `lookout`
makes sure, between two looks, that nothing is in transit to these nodes. The proof does not depend on elapsed time.

Everything else is a standstill: it is reported after STALL_S, with what each node does, and again each time its length
has doubled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.graph.analysis.plan import Plan

STALL_S = 120.0
DRIVER = "the driver"

ReplicaReport = Mapping[str, Any]
"""What `Replica.report` returns for one node replica: "moves" counts its events, "waits" are (kind, what, seconds)."""


@dataclass(frozen=True)
class Topology:
    """Who can end whose wait: node names by port, by edge, and for tickets."""

    producers: Mapping[str, tuple[str, ...]]
    """In or Serve port "node.port" -> nodes that send to it or call it."""
    consumers: Mapping[str, tuple[str, ...]]
    """Edge name -> nodes that take from it."""
    servers: Mapping[str, tuple[str, ...]]
    """Call port "node.port" -> nodes that answer it."""
    ticket_holders: tuple[str, ...]
    """Nodes whose progress returns tickets: the senders of the edges `admit` waits for."""

    @staticmethod
    def of(plan: Plan) -> Topology:
        """The topology of a plan's edges and admission."""
        producers: dict[str, list[str]] = {}
        servers: dict[str, list[str]] = {}
        for edge in plan.edges:
            producers.setdefault(edge.into, []).append(_owner(edge.out))
            if edge.kind == "call":
                servers.setdefault(edge.out, []).append(_owner(edge.into))
        return Topology(
            producers={port: tuple(nodes) for port, nodes in producers.items()},
            consumers={edge.name: (_owner(edge.into),) for edge in plan.edges},
            servers={port: tuple(nodes) for port, nodes in servers.items()},
            ticket_holders=tuple(dict.fromkeys(policy for _, policy in plan.consumers)),
        )

    def others(self, kind: str, what: str) -> tuple[str, ...]:
        """The nodes that can end such a wait, as named in reports."""
        return self.ticket_holders if kind == "ticket" else self.enders(kind, what)

    def enders(self, kind: str, what: str) -> tuple[str, ...]:
        """The nodes that can end such a wait; or the driver, for all nodes, as it may move when any node has moved."""
        known = {"item": self.producers, "credit": self.consumers, "reply": self.servers}.get(kind, {})
        return known.get(what, (DRIVER,))


def _owner(port: str) -> str:
    return port.split(".")[0]


def deadlocked(reports: Iterable[ReplicaReport], topology: Topology, *, driver: Sequence[str]) -> set[str]:
    """The replicas that can move only when another one of them moves, if nothing is in transit to them.

    `driver`: what the driver is working on now.
    """
    by_node: dict[str, list[ReplicaReport]] = {}
    for report in reports:
        by_node.setdefault(_node(report), []).append(report)
    stuck = {node for node, replicas in by_node.items() if not any(map(_moves_by_itself, replicas))}
    if not driver and len(stuck) == len(by_node):
        stuck.add(DRIVER)
    while free := {node for node in stuck if not _enders(by_node.get(node, ()), topology) <= stuck}:
        stuck -= free
    return {str(r["replica_id"]) for node in stuck for r in by_node.get(node, ()) if not r["ended"]}


def _moves_by_itself(report: ReplicaReport) -> bool:
    return bool(report["alive"]) or not (report["waits"] or report["ended"])


def _enders(replicas: Iterable[ReplicaReport], topology: Topology) -> set[str]:
    return {ender for report in replicas for kind, what, _ in report["waits"] for ender in topology.enders(kind, what)}


def _node(report: ReplicaReport) -> str:
    return str(report["replica_id"]).split("/")[0]


def wait_for_cycle(waits: Mapping[str, Sequence[tuple[str, str]]], topology: Topology) -> list[str]:
    """A cycle of nodes each waiting for the next, as lines; empty if there is none.

    `waits` maps a node name to its (kind, what) waits.
    """
    steps = {
        node: [(other, kind, what) for kind, what in held for other in topology.others(kind, what)]
        for node, held in waits.items()
    }
    for start in steps:
        path = _path_back(start, start, steps, {start})
        if path:
            return [f"{node} waits for {kind} of {what}, held up by {other}" for node, other, kind, what in path]
    return []


def _path_back(
    node: str, goal: str, steps: Mapping[str, list[tuple[str, str, str]]], seen: set[str]
) -> list[tuple[str, str, str, str]]:
    for other, kind, what in steps.get(node, ()):
        if other == goal:
            return [(node, other, kind, what)]
        if other not in seen:
            seen.add(other)
            rest = _path_back(other, goal, steps, seen)
            if rest:
                return [(node, other, kind, what), *rest]
    return []


def describe(reports: Iterable[ReplicaReport], topology: Topology) -> str:
    """What each node does or waits for, after the cycle of nodes that only wait for each other, if there is one."""
    reports = list(reports)
    moving = {_node(report) for report in reports if _moves_by_itself(report)}
    waits: dict[str, list[tuple[str, str]]] = {}
    for report in reports:
        if (node := _node(report)) not in moving:
            waits.setdefault(node, []).extend((kind, what) for kind, what, _ in report["waits"])
    cycle = wait_for_cycle(waits, topology)
    head = ["wait-for cycle:", *(f"  {line}" for line in cycle)] if cycle else []
    return "\n".join([*head, "every node:", *(f"  {_line(report)}" for report in reports)])


def _line(report: ReplicaReport) -> str:
    if report["ended"]:
        return f"{report['replica_id']} has ended"
    waits = "; ".join(f"{kind} of {what} for {for_s:.0f} s" for kind, what, for_s in report["waits"])
    if not report["alive"]:
        return f"{report['replica_id']} waits: {waits or 'nothing it could name'}"
    return f"{report['replica_id']} works: {'; '.join(report['alive'])}" + (f" (waits: {waits})" if waits else "")


@dataclass
class Standstill:
    """Records since when nothing has moved, and when the next report is due."""

    _last: Any = None
    """Node replica -> (number of its moves, whether it has ended), at the last move."""
    _since_s: float = 0.0
    """When the last move was seen."""
    _due_after_s: float = field(default=STALL_S)
    """Length of the standstill at which the next report is due."""

    def moved(self, now_s: float) -> None:
        """Something has moved that no report shows."""
        self._since_s, self._due_after_s = now_s, STALL_S

    def look(self, reports: Iterable[ReplicaReport], now_s: float) -> float | None:
        """Seconds for which nothing has moved, if a report is due now; otherwise None."""
        moves = {report["replica_id"]: (report["moves"], report["ended"]) for report in reports}
        if moves != self._last:
            self._last, self._since_s, self._due_after_s = moves, now_s, STALL_S
            return None
        for_s = now_s - self._since_s
        if for_s < self._due_after_s:
            return None
        self._due_after_s = 2 * for_s
        return for_s

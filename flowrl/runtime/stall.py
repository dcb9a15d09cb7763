"""Nothing hangs silently: a deadlock is found and named, a stall reported.

A deadlock: in two looks in a row no node was inside user code and nothing had moved between them. It
cannot mend itself, as whatever could move it would be one of the nodes looked at.
A stall: nothing moved for `STALL_S` although some node works. That may be a long step; it is only told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.graph.plan import Plan

LOOK_EVERY_S = 5.0
STALL_S = 120.0


@dataclass(frozen=True)
class Topology:
    """Who can end whose wait: node names by port, by edge, and those behind the tickets."""

    producers: Mapping[str, tuple[str, ...]]
    """In port "node.port": nodes that send into it."""
    consumers: Mapping[str, tuple[str, ...]]
    """Edge name: nodes that take from it."""
    ticket_holders: tuple[str, ...]
    """Nodes whose progress returns tickets: the senders of the edges `admit` waits for."""

    @staticmethod
    def of(plan: Plan) -> Topology:
        """The topology of a plan's edges and admission."""
        producers: dict[str, list[str]] = {}
        for edge in plan.edges:
            producers.setdefault(edge.into, []).append(edge.out.split(".")[0])
        return Topology(
            producers={port: tuple(nodes) for port, nodes in producers.items()},
            consumers={edge.name: (edge.into.split(".")[0],) for edge in plan.edges},
            ticket_holders=tuple(dict.fromkeys(policy for _, policy in plan.consumers)),
        )

    def others(self, kind: str, what: str) -> tuple[str, ...]:
        if kind == "item":
            return self.producers.get(what, ())
        if kind == "credit":
            return self.consumers.get(what, ())
        if kind == "ticket":
            return self.ticket_holders
        return ()


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


@dataclass
class Watch:
    """Compares looks; each look is the reports of every node replica."""

    topology: Topology
    _last: dict[str, int] = field(default_factory=dict)
    _still: int = 0
    _moved_s: float = 0.0
    _told: bool = False

    def look(self, reports: Iterable[Mapping[str, Any]], now_s: float) -> tuple[str, str]:
        """("", "") if all is well, else ("deadlock" | "stall", what to tell)."""
        reports = list(reports)
        moves = {report["node"]: report["moves"] for report in reports}
        moved = moves != self._last
        self._last = moves
        if moved:
            self._still, self._moved_s, self._told = 0, now_s, False
            return "", ""
        if not any(report["working"] for report in reports):
            self._still += 1
            if self._still >= 2:
                return "deadlock", self.describe(reports)
        elif now_s - self._moved_s > STALL_S and not self._told:
            self._told = True
            return "stall", self.describe(reports)
        return "", ""

    def describe(self, reports: Iterable[Mapping[str, Any]]) -> str:
        """The wait-for cycle if there is one, and what each node waits for."""
        reports = list(reports)
        waits: dict[str, list[tuple[str, str]]] = {}
        lines = []
        for report in reports:
            node = str(report["node"]).split("/")[0]
            waits.setdefault(node, []).extend((kind, what) for kind, what, _ in report["waits"])
            doing = "works" if report["working"] else "waits"
            details = "; ".join(f"{kind} of {what} for {for_s:.0f} s" for kind, what, for_s in report["waits"])
            lines.append(f"  {report['node']} {doing}: {details or 'nothing it could name'}")
        cycle = wait_for_cycle(waits, self.topology)
        head = ["wait-for cycle:", *(f"  {line}" for line in cycle)] if cycle else []
        return "\n".join([*head, "every node:", *lines])

"""Combines the statistics that the processes report about once per second, for the whole run.

A report holds running totals, so a lost or late report does no harm. `since_line` returns the growth since the
previous metrics line; `nodes` and `edges` return fractions of the last WINDOW_S seconds.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW_S = 5.0
REPLICA = re.compile(r"/\d+")


@dataclass(frozen=True)
class NodeNow:
    """One node; its replicas are combined."""

    node: str
    num_replicas: int
    busy: float
    """Mean over the replicas of the fraction of time spent working."""


@dataclass(frozen=True)
class EdgeNow:
    """One edge; its lanes are combined."""

    edge: str
    producer: str
    consumer: str
    depth: int
    """Number of messages sent but not yet taken."""
    num_lanes: int
    blocked: float
    """Fraction of time in which a sender waited for credit; the largest over the producers."""


@dataclass
class _Meter:
    """A total that a process reports: its newest value, its growth since the last metrics line, its current rate."""

    total: float = 0.0
    since_line: float = 0.0
    _points: deque[tuple[float, float]] = field(default_factory=deque)
    """(time of a reading in seconds, total), oldest first: those of the last WINDOW_S, and the one before them."""

    def add_reading(self, total: float, now_s: float) -> None:
        """Add a reading; the total of a restarted replica begins at 0 again."""
        self.since_line += float(total - self.total if total >= self.total else total)
        if total < self.total:
            self._points.clear()
        self.total = total
        self._points.append((now_s, total))
        while len(self._points) > 2 and self._points[1][0] <= now_s - WINDOW_S:
            self._points.popleft()

    @property
    def rate(self) -> float:
        """Growth per second over the window. For a total of seconds it can exceed 1: readings are dated on arrival."""
        if len(self._points) < 2:
            return 0.0
        (start_s, start), (end_s, end) = self._points[0], self._points[-1]
        return (end - start) / (end_s - start_s) if end_s > start_s else 0.0

    def take_growth(self) -> float:
        """The growth since the last call."""
        value, self.since_line = self.since_line, 0.0
        return value


class Statistics:
    """Statistics of one run; its input are the bodies of the processes' "statistics" notifications."""

    def __init__(self) -> None:
        self._busy: dict[str, _Meter] = defaultdict(_Meter)
        """By node replica."""
        self._counters: dict[tuple[str, str], _Meter] = defaultdict(_Meter)
        """By (node replica, name)."""
        self._observed: dict[str, tuple[int, float, float]] = {}
        """Name -> number, sum and largest of the values of all replicas since the last metrics line."""
        self._blocked: dict[str, _Meter] = defaultdict(_Meter)
        """By producer's end of an edge, as `producer_end` names it: all its lanes report the same time."""
        self._depth: dict[str, int] = {}
        """By lane: messages sent but not yet taken, as its producer last reported."""
        self._lost: set[str] = set()
        """The node replicas whose processes are lost; they report nothing more."""

    def add_report(self, body: Mapping[str, Any], now_s: float) -> None:
        """Add one process's report. Both ends of a lane may report it; the sender's blocking counts."""
        for replica_id, meters in body.get("nodes", {}).items():
            self._busy[replica_id].add_reading(meters["busy_s"], now_s)
            for name, total in meters["counters"].items():
                self._counters[replica_id, name].add_reading(total, now_s)
            for name, (count, total, largest) in meters["observed"].items():
                before = self._observed.get(name, (0, 0.0, largest))
                self._observed[name] = (before[0] + count, before[1] + total, max(before[2], largest))
        blocked: dict[str, float] = {}
        for lane, report in body.get("lanes", {}).items():
            if report["sent"] and consumer_of(lane) not in self._lost:
                end = producer_end(lane)
                self._depth[lane] = report["depth"]
                blocked[end] = max(blocked.get(end, 0.0), report["blocked_s"])
        for end, blocked_s in blocked.items():
            self._blocked[end].add_reading(blocked_s, now_s)

    def note_lost(self, replica_id: str, counter: str, now_s: float) -> None:
        """The process of this replica is lost: count that in `counter`, unless the replica itself has counted it."""
        self._lost.add(replica_id)
        for lane in [lane for lane in self._depth if consumer_of(lane) in self._lost]:
            del self._depth[lane]
        counted = self._counters[replica_id, counter]
        counted.add_reading(max(counted.total, 1.0), now_s)

    def since_line(self) -> dict[str, Any]:
        """Sums, means and edges since the last call, by the names of a metrics line."""
        line: dict[str, Any] = {}
        for (_, name), meter in self._counters.items():
            grown = meter.take_growth()
            line[name] = line.get(name, 0) + (
                int(grown) if grown.is_integer() else grown
            )  # counts are integers in JSON
        for replica_id, meter in self._busy.items():
            name = f"{without_replicas(replica_id)}_busy_s"
            line[name] = line.get(name, 0.0) + meter.take_growth()
        for name, (count, total, largest) in self._observed.items():
            line[name], line[f"{name}_max"] = total / count, largest
        self._observed = {}
        edges: dict[str, dict[str, float]] = {}
        """Edge -> sum of the depths of its lanes, and of the blocked seconds of its producer's replicas."""
        for lane, depth in self._depth.items():
            edges.setdefault(without_replicas(lane), {"depth": 0, "blocked_s": 0.0})["depth"] += depth
        for end, meter in self._blocked.items():
            edges.setdefault(without_replicas(end), {"depth": 0, "blocked_s": 0.0})["blocked_s"] += meter.take_growth()
        return line | {"edges": edges}

    def counter_rate(self, name: str) -> float:
        """Growth per second of a counter, over all replicas."""
        meters = {one: meter for (one, key), meter in self._counters.items() if key == name}
        return sum(meter.rate for replica_id, meter in meters.items() if replica_id not in self._lost)

    def nodes(self) -> list[NodeNow]:
        """Every node with its busy fraction, in order of first report."""
        rates: dict[str, list[float]] = {}
        for replica_id, meter in self._busy.items():
            if replica_id not in self._lost:
                rates.setdefault(without_replicas(replica_id), []).append(min(meter.rate, 1.0))
        return [NodeNow(node, len(busy), sum(busy) / len(busy)) for node, busy in rates.items()]

    def edges(self) -> list[EdgeNow]:
        """Every edge, in order of first report: its lanes' depths add up, and its most blocked producer counts."""
        lanes: dict[str, list[str]] = {}
        for lane in self._depth:
            lanes.setdefault(without_replicas(lane), []).append(lane)
        found = []
        for edge, names in lanes.items():
            producer, consumer = (port.split(".")[0] for port in edge.split(" -> "))
            depth = sum(self._depth[lane] for lane in names)
            blocked = max(min(self._blocked[end].rate, 1.0) for end in {producer_end(lane) for lane in names})
            found.append(EdgeNow(edge, producer, consumer, depth, len(names), blocked))
        return found


def without_replicas(name: str) -> str:
    """The node of a replica, "generator" of "generator/0", or the edge of a lane."""
    return REPLICA.sub("", name)


def consumer_of(lane: str) -> str:
    """The replica at the consumer's end of a lane: "reward/1" of "generator/0.rollouts -> reward/1.rollouts"."""
    return lane.partition(" -> ")[2].partition(".")[0]


def producer_end(lane: str) -> str:
    """One producer's end of an edge: "generator/0.rollouts -> reward.rollouts"."""
    producer, arrow, consumer = lane.partition(" -> ")
    return producer + arrow + REPLICA.sub("", consumer)


def find_bottleneck(nodes: Iterable[NodeNow], edges: Iterable[EdgeNow]) -> tuple[str, str]:
    """(node, why) of the node that limits the others now; ("", why) if there is none.

    This is the busiest node. Time in which a node waits to send does not count as busy: such a node is itself held up
    by a node downstream.
    """
    edges = list(edges)
    held_up: dict[str, float] = {}
    for edge in edges:
        held_up[edge.producer] = max(held_up.get(edge.producer, 0.0), edge.blocked)
    now = max(nodes, key=lambda now: now.busy - held_up.get(now.node, 0.0), default=None)
    if now is None or now.busy - held_up.get(now.node, 0.0) < 0.5:
        return "", "no node works more than half of the time"
    waiting = [e for e in edges if e.consumer == now.node and e.blocked >= 0.05]
    why = f"works {now.busy:.0%} of the time"
    if waiting:
        worst = max(waiting, key=lambda e: e.blocked)
        why += f", {worst.producer} waits for it {worst.blocked:.0%}"
    return now.node, why

"""The driver's lookout: it proves deadlocks, and reports standstills and silent processes by name.

A deadlock is a set of nodes in which no node can move unless another node of the set moves. No node of the set has
anything of its own pending (`activity.pending`), and everything that could end one of its waits, a node or the driver,
is also in the set. The driver is in the set if it is not working on anything and all nodes are in the set. The proof
does not depend on elapsed time.

It takes two looks that show the same replicas stuck and unmoved. Between the looks there are FLUSHES rounds. In each
round, every process confirms that everything it had sent has arrived, which works because frames of a link keep their
order. One round is enough for messages. There are more because the driver may answer an arriving message, and because a
restored connection first asks which frames were lost.

Everything else is a standstill: it is reported after STALL_S, with what each node does, and again each time its length
has doubled.

Waits: each question to a process has a time limit. One that exceeds it is not asked again until it has answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flowrl.errors import LaneFailed, Stalled
from flowrl.graph.analysis.plan import Plan
from flowrl.runtime.driver.run_processes import RunProcesses
from flowrl.runtime.ledger.accounting import Accounting
from flowrl.wire.endpoint import Endpoint

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
            producers.setdefault(edge.into, []).append(_node_of_port(edge.out))
            if edge.kind == "call":
                servers.setdefault(edge.out, []).append(_node_of_port(edge.into))
        return Topology(
            producers={port: tuple(nodes) for port, nodes in producers.items()},
            consumers={edge.name: (_node_of_port(edge.into),) for edge in plan.edges},
            servers={port: tuple(nodes) for port, nodes in servers.items()},
            ticket_holders=tuple(dict.fromkeys(policy for _, policy in plan.consumers)),
        )

    def find_enders(self, kind: str, what: str) -> tuple[str, ...]:
        """The nodes that can end such a wait; or the driver, for all nodes, as it may move when any node has moved."""
        known = {"item": self.producers, "credit": self.consumers, "reply": self.servers}.get(kind, {})
        return known.get(what, (DRIVER,))


def _node_of_port(port: str) -> str:
    return port.split(".")[0]


def find_deadlocked(reports: Iterable[ReplicaReport], topology: Topology, *, driver: Sequence[str]) -> set[str]:
    """The replicas that can move only when another one of them moves, if nothing is in transit to them.

    `driver`: what the driver is working on now.
    """
    by_node: dict[str, list[ReplicaReport]] = {}
    for report in reports:
        by_node.setdefault(_node_of_report(report), []).append(report)
    stuck = {node for node, replicas in by_node.items() if not any(map(_can_move, replicas))}
    if not driver and len(stuck) == len(by_node):
        stuck.add(DRIVER)
    while free := {
        node
        for node in stuck
        for report in by_node.get(node, ())
        for kind, what, _ in report["waits"]
        if not stuck.issuperset(topology.find_enders(kind, what))
    }:
        stuck -= free
    return {str(r["replica_id"]) for node in stuck for r in by_node.get(node, ()) if not r["ended"]}


def _can_move(report: ReplicaReport) -> bool:
    return bool(report["alive"]) or not (report["waits"] or report["ended"])


def _node_of_report(report: ReplicaReport) -> str:
    return str(report["replica_id"]).split("/")[0]


def wait_for_cycle(waits: Mapping[str, Sequence[tuple[str, str]]], topology: Topology) -> list[str]:
    """A cycle of nodes each waiting for the next, as lines; empty if there is none.

    `waits` maps a node name to its (kind, what) waits.
    """
    steps = {
        node: [
            (other, kind, what)
            for kind, what in held
            for other in (topology.ticket_holders if kind == "ticket" else topology.find_enders(kind, what))
        ]
        for node, held in waits.items()
    }
    for start in steps:
        path = _find_path_back(start, start, steps, {start})
        if path:
            return [f"{node} waits for {kind} of {what}, held up by {other}" for node, other, kind, what in path]
    return []


def _find_path_back(
    node: str, goal: str, steps: Mapping[str, list[tuple[str, str, str]]], seen: set[str]
) -> list[tuple[str, str, str, str]]:
    for other, kind, what in steps.get(node, ()):
        if other == goal:
            return [(node, other, kind, what)]
        if other not in seen:
            seen.add(other)
            rest = _find_path_back(other, goal, steps, seen)
            if rest:
                return [(node, other, kind, what), *rest]
    return []


def describe_reports(reports: Iterable[ReplicaReport], topology: Topology) -> str:
    """What each node does or waits for, after the cycle of nodes that only wait for each other, if there is one."""
    reports = list(reports)
    moving = {_node_of_report(report) for report in reports if _can_move(report)}
    waits: dict[str, list[tuple[str, str]]] = {}
    for report in reports:
        if (node := _node_of_report(report)) not in moving:
            waits.setdefault(node, []).extend((kind, what) for kind, what, _ in report["waits"])
    cycle = wait_for_cycle(waits, topology)
    head = ["wait-for cycle:", *(f"  {line}" for line in cycle)] if cycle else []
    return "\n".join([*head, "every node:", *(f"  {_describe_report(report)}" for report in reports)])


def _describe_report(report: ReplicaReport) -> str:
    if report["ended"]:
        return f"{report['replica_id']} has ended"
    waits = "; ".join(
        what if kind == "inside" else f"{kind} of {what} for {for_s:.0f} s" for kind, what, for_s in report["waits"]
    )
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

    def note_move(self, now_s: float) -> None:
        """Something has moved that no report shows."""
        self._since_s, self._due_after_s = now_s, STALL_S

    def look_for_standstill(self, reports: Iterable[ReplicaReport], now_s: float) -> float | None:
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


LOOK_EVERY_S = 5.0
FLUSHES = 3
FLUSHED_WITHIN_S = 5.0
REPORT_AFTER_S = 10.0
"""Silence after which a process is named in a warning; the warning repeats each time the silence has doubled."""
SILENT = "it is stopped, or its code does not release the GIL"


class Lookout:
    """Watches the processes of one run.

    `warn(text)` shows the user a warning; `progress(replica_id, text)` shows how far the set-up of a node is.
    """

    def __init__(
        self,
        processes: RunProcesses,
        endpoint: Endpoint,
        topology: Topology,
        warn: Callable[[str], None],
        progress: Callable[[str, str], None],
    ) -> None:
        self._processes = processes
        self._endpoint = endpoint
        self._topology = topology
        self._warn = warn
        self._show_progress = progress
        self._standstill = Standstill()
        self._last: list[ReplicaReport] = []
        """The reports of the last look."""
        self._doing: list[str] = []
        self.accounting: Accounting | None = None
        """The accounting; None until it is opened."""
        self._blocking: set[str] = set()
        """Lines of code already reported as blocking an event loop."""
        self._report_silence_at_s: dict[str, float] = {}
        """Silent process -> length of silence, in seconds, at which the next warning is due."""
        endpoint.on("ping", self._answer_ping)
        endpoint.on("progress", self._note_progress)

    async def _answer_ping(self, host: str, body: Any) -> None:
        """The reply proves that everything `host` sent before has arrived and is booked."""
        if self.accounting is not None:
            await self.accounting.bookings.wait_for_jobs()

    def _note_progress(self, host: str, body: Any) -> None:
        """A node that reports progress may be slow, but is not stuck."""
        self._standstill.note_move(time.monotonic())
        self._show_progress(body["node"], body["text"])

    @contextmanager
    def note_work(self, what: str) -> Iterator[None]:
        """Inside, the driver works on something that will move the run: a checkpoint, the set-up."""
        self._doing.append(what)
        try:
            yield
        finally:
            self._doing.remove(what)

    async def watch_run(self, every_s: float) -> None:
        """Look every `every_s` seconds. Raises Stalled for a deadlock, NodeFailed for a process that has died."""
        while True:
            await asyncio.sleep(every_s)
            await self.look_once()

    async def look_once(self) -> None:
        reports = self._last = await self._ask_for_reports()
        for report in reports:  # name code that blocks an event loop now, once per line
            if (where := report.get("still")) and where not in self._blocking:
                self._blocking.add(where)
                self._warn(f"{report['replica_id']}: its event loop is blocked at {where}")

        silent = self._processes.find_silent()
        for host in [host for host in self._report_silence_at_s if host not in silent]:
            del self._report_silence_at_s[host]
            if host not in self._processes.lost:
                self._warn(f"host {host!r} answers again")
        for host, for_s in silent.items():
            if for_s >= self._report_silence_at_s.get(host, REPORT_AFTER_S):
                self._report_silence_at_s[host] = 2 * for_s
                nodes = ", ".join(self._processes.replica_ids(host))
                self._warn(f"host {host!r} ({nodes}) has not answered for {for_s:.0f} s: {SILENT}")

        if self._find_stuck(reports) and (proof := await self._prove_deadlock()):
            raise Stalled(f"the run is deadlocked: no node works and nothing is in flight.\n{proof}")
        if (standstill_s := self._standstill.look_for_standstill(reports, time.monotonic())) is not None:
            self._warn(f"nothing has moved for {standstill_s:.0f} s.\n{self._describe_all(reports)}")

    async def describe_now(self) -> str:
        """What every node and the driver do and wait for. Takes at most some seconds, in any state of the processes."""
        return self._describe_all(await self._ask_for_reports())

    def describe_last(self) -> str:
        """As `describe`, of at most LOOK_EVERY_S ago and without asking: for a caller that cannot wait."""
        return self._describe_all(self._last)

    def _describe_all(self, reports: list[ReplicaReport]) -> str:
        return "\n".join(
            [describe_reports(reports, self._topology), *(f"  the driver: {what}" for what in self._doing)]
        )

    # Deadlocks

    def _find_stuck(self, reports: list[ReplicaReport]) -> set[str]:
        booking = ["bookings"] if self.accounting is not None and self.accounting.bookings.busy else []
        return find_deadlocked(reports, self._topology, driver=[*self._doing, *booking])

    async def _prove_deadlock(self) -> str:
        """What the deadlocked nodes wait for; "" if no deadlock is proven."""
        first = await self._ask_for_reports()
        if not self._find_stuck(first):
            return ""

        # Everything in transit between any two processes has to arrive.
        others = list(self._processes)
        body = {"peers": [*others, self._endpoint.host]}
        try:
            async with asyncio.timeout(FLUSHED_WITHIN_S):
                for _ in range(FLUSHES):
                    await asyncio.gather(*(self._endpoint.request(other, "flush", body) for other in others))
        except (TimeoutError, LaneFailed):  # `RunProcesses` reports the death of a process
            return ""

        second = await self._ask_for_reports()
        stuck = self._find_stuck(first) & self._find_stuck(second)
        moves = {report["replica_id"]: report["moves"] for report in second}
        moved = {report["replica_id"] for report in first if moves.get(report["replica_id"]) != report["moves"]}
        return "" if not stuck or stuck & moved else self._describe_all(second)

    # Processes

    async def _ask_for_reports(self) -> list[ReplicaReport]:
        """The reports of all replicas. Replicas in a silent process count as alive."""
        answered, silent = await self._processes.ask_for_waits()
        reports: list[ReplicaReport] = [*answered]
        unknown = [(replica_id, host) for host in silent for replica_id in self._processes.replica_ids(host)]
        for replica_id, host in unknown:
            text = f"its process, host {host!r}, has not answered for {silent[host]:.0f} s: {SILENT}"
            reports.append({"replica_id": replica_id, "alive": [text], "waits": [], "moves": -1, "ended": False})
        return reports

"""The driver's lookout: it proves deadlocks, and reports standstills and silent hosts by name.

A deadlock is proven by two looks that show the same replicas stuck (`stall`) and unmoved. Between the looks there are
FLUSHES rounds. In each round, every process confirms that everything it had sent has arrived, which works because
frames of a link keep their order. One round is enough for messages. There are more because the driver may answer an
arriving message, and because a restored connection first asks which frames were lost.

Waits: each question to a host has a time limit. A host that exceeds it is not asked again until it has answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from flowrl.channel.endpoint import Endpoint
from flowrl.errors import LaneFailed, Stalled
from flowrl.runtime.driver.processes.hosts import Hosts
from flowrl.runtime.driver.processes.stall import ReplicaReport, Standstill, Topology, deadlocked, describe

LOOK_EVERY_S = 5.0
FLUSHES = 3
FLUSHED_WITHIN_S = 5.0
REPORT_AFTER_S = 10.0
"""Silence after which a host is named in a warning; the warning repeats each time the silence has doubled."""
SILENT = "it is stopped, or its code does not release the GIL"


class AccountingState(Protocol):
    """The part of the accounting that the lookout reads: its pending records may move the run."""

    def is_booking(self) -> bool: ...
    async def booked(self) -> None: ...


class Lookout:
    """Watches the hosts of one run.

    `warn(text)` shows the user a warning; `progress(replica_id, text)` shows how far the set-up of a node is.
    """

    def __init__(
        self,
        hosts: Hosts,
        endpoint: Endpoint,
        topology: Topology,
        warn: Callable[[str], None],
        progress: Callable[[str, str], None],
    ) -> None:
        self._hosts = hosts
        self._endpoint = endpoint
        self._topology = topology
        self._warn = warn
        self._show_progress = progress
        self._standstill = Standstill()
        self._last: list[ReplicaReport] = []
        """The reports of the last look."""
        self._doing: list[str] = []
        self.accounting: AccountingState | None = None
        """The accounting; None until it is opened."""
        self._blocking: set[str] = set()
        """Lines of code already reported as blocking an event loop."""
        self._report_host_at_s: dict[str, float] = {}
        """Silent host -> length of silence, in seconds, at which the next warning is due."""
        endpoint.on("ping", self._ping)
        endpoint.on("progress", self._progress)

    async def _ping(self, host: str, body: Any) -> None:
        """The reply proves that everything `host` sent before has arrived and is booked."""
        if self.accounting is not None:
            await self.accounting.booked()

    def _progress(self, host: str, body: Any) -> None:
        """A node that reports progress may be slow, but is not stuck."""
        self._standstill.moved(time.monotonic())
        self._show_progress(body["node"], body["text"])

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Inside, the driver works on something that will move the run: a checkpoint, the set-up."""
        self._doing.append(what)
        try:
            yield
        finally:
            self._doing.remove(what)

    async def watch(self, every_s: float) -> None:
        """Look every `every_s` seconds. Raises Stalled for a deadlock, NodeFailed for a host that has died."""
        while True:
            await asyncio.sleep(every_s)
            await self.look()

    async def look(self) -> None:
        reports = self._last = await self._reports()
        self._report_blocking(reports)
        self._report_silence()
        if self._stuck(reports) and (proof := await self._proof()):
            raise Stalled(f"the run is deadlocked: no node works and nothing is in flight.\n{proof}")
        if (for_s := self._standstill.look(reports, time.monotonic())) is not None:
            self._warn(f"nothing has moved for {for_s:.0f} s.\n{self._described(reports)}")

    async def describe(self) -> str:
        """What every node and the driver do and wait for. Takes at most some seconds, in any state of the hosts."""
        return self._described(await self._reports())

    def last_described(self) -> str:
        """As `describe`, of at most LOOK_EVERY_S ago and without asking: for a caller that cannot wait."""
        return self._described(self._last)

    def _described(self, reports: list[ReplicaReport]) -> str:
        return "\n".join([describe(reports, self._topology), *(f"  the driver: {what}" for what in self._doing)])

    # Deadlocks

    def _stuck(self, reports: list[ReplicaReport]) -> set[str]:
        booking = ["bookings"] if self.accounting is not None and self.accounting.is_booking() else []
        return deadlocked(reports, self._topology, driver=[*self._doing, *booking])

    async def _proof(self) -> str:
        """What the deadlocked nodes wait for; "" if no deadlock is proven."""
        first = await self._reports()
        if not self._stuck(first) or not await self._flushed():
            return ""
        second = await self._reports()
        stuck = self._stuck(first) & self._stuck(second)
        moved = {report["replica_id"] for report in first} - _unmoved(first, second)
        return "" if not stuck or stuck & moved else self._described(second)

    async def _flushed(self) -> bool:
        """Whether everything in transit between any two processes has arrived."""
        hosts = list(self._hosts)
        body = {"peers": [*hosts, self._endpoint.host]}
        try:
            async with asyncio.timeout(FLUSHED_WITHIN_S):
                for _ in range(FLUSHES):
                    await asyncio.gather(*(self._endpoint.request(host, "flush", body) for host in hosts))
        except (TimeoutError, LaneFailed):  # `Hosts` reports the death of a host
            return False
        return True

    # Hosts

    async def _reports(self) -> list[ReplicaReport]:
        """The reports of all replicas. Replicas in a silent host count as alive."""
        reports, silent = await self._hosts.reports()
        unknown = [(replica_id, host) for host in silent for replica_id in self._hosts.replica_ids(host)]
        return [*reports, *(self._of_silent(replica_id, host, silent[host]) for replica_id, host in unknown)]

    def _of_silent(self, replica_id: str, host: str, for_s: float) -> ReplicaReport:
        text = f"its process, host {host!r}, has not answered for {for_s:.0f} s: {SILENT}"
        return {"replica_id": replica_id, "alive": [text], "waits": [], "moves": -1, "ended": False}

    def _report_blocking(self, reports: list[ReplicaReport]) -> None:
        """Name code that blocks an event loop now, once per line; the host reports the duration afterwards."""
        for report in reports:
            if (where := report.get("still")) and where not in self._blocking:
                self._blocking.add(where)
                self._warn(f"{report['replica_id']}: its event loop is blocked at {where}")

    def _report_silence(self) -> None:
        """Warn about silent hosts at doubling intervals, and report when they answer again."""
        silent = self._hosts.silent()
        for host in [host for host in self._report_host_at_s if host not in silent]:
            del self._report_host_at_s[host]
            if host not in self._hosts.lost:
                self._warn(f"host {host!r} answers again")
        for host, for_s in silent.items():
            if for_s >= self._report_host_at_s.get(host, REPORT_AFTER_S):
                self._report_host_at_s[host] = 2 * for_s
                nodes = ", ".join(self._hosts.replica_ids(host))
                self._warn(f"host {host!r} ({nodes}) has not answered for {for_s:.0f} s: {SILENT}")

    async def answers(self, kind: str, asked: Mapping[str, Awaitable[Any]]) -> list[Any]:
        """The answers of hosts to `kind`. Warns about hosts whose answer is late. Raises the first failure."""
        tasks = {host: asyncio.ensure_future(answer) for host, answer in asked.items()}
        began, report_after_s = time.monotonic(), REPORT_AFTER_S
        try:
            while True:
                done, late = await asyncio.wait(
                    tasks.values(), timeout=report_after_s, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                if not late:
                    return [task.result() for task in tasks.values()]
                names = ", ".join(host for host, task in tasks.items() if task in late)
                self._warn(f"{kind!r} waits for {names}, for {time.monotonic() - began:.0f} s now")
                report_after_s *= 2
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)


def _unmoved(first: list[ReplicaReport], second: list[ReplicaReport]) -> set[str]:
    """The replicas that have not moved between two looks."""
    before = {report["replica_id"]: report["moves"] for report in first}
    return {report["replica_id"] for report in second if before.get(report["replica_id"]) == report["moves"]}

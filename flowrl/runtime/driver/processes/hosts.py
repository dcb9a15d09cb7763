"""The host processes of a run, seen from the driver: start, query, watch and end them.

A host answers with plain data; a failure arrives as a mapping and is raised here as NodeFailed, once. When a host's
process dies, the error names the nodes that it ran. If the run continues without the host, the host is `lost`, and
everything here applies to the other hosts. The kernel reports the death if the process ran on this machine (Ray need
not be alive for that); otherwise Ray reports it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from flowrl.channel.endpoint import Address, Endpoint
from flowrl.errors import FlowrlError, NodeFailed
from flowrl.runtime.driver.ray_cluster import slow_start
from flowrl.runtime.driver.ray_cluster.claims import visible_devices
from flowrl.runtime.driver.ray_cluster.cluster import HEAD_AWAY_S, HostSlot, RayCluster
from flowrl.runtime.driver.ray_cluster.deaths import deaths, ray_errors, rays_detail
from flowrl.runtime.driver.ray_cluster.lifeline import outlive
from flowrl.runtime.host.actor import HostActor
from flowrl.runtime.host.host_engine import HostSpec
from flowrl.runtime.host.processes import Processes, pid_space

STOP_WITHIN_S = 6.0
AFTER_DEATH_S = 3.0
"""As STOP_WITHIN_S, if a process has died: ending Ray may take 4 s more, and the run should end within 10 s."""
ANSWER_WITHIN_S = 1.5
"""A live process answers within this time, even while a node blocks its event loop."""
KILLED_WITHIN_S = 2.0
"""Time in which a killed host ends: if Ray is alive, it kills a host at once."""


class HostLossRules(Protocol):
    """Whether and how the run continues without the process of a host: see `flowrl.runtime.driver.losses`."""

    def may_end(self, host: str) -> bool:
        """Whether the run continues if the process of `host` ends now."""

    def has_ended(self, host: str, reason: str) -> None:
        """The process of `host` has ended, and the run continues."""


class Hosts:
    """All hosts of one run, by name.

    `on_death(error)` is called for a death that ends the run. Without `losses`, every death ends the run.
    """

    losses: HostLossRules | None = None

    def __init__(
        self, cluster: RayCluster, endpoint: Endpoint, on_death: Callable[[FlowrlError], None] = lambda _: None
    ) -> None:
        self._cluster = cluster
        self._on_death = on_death
        self._processes = Processes()
        """The processes of the hosts on this machine."""
        self._rays = Processes()
        self._head: asyncio.Task[None] | None = None
        self._endpoint = endpoint
        self._actors: dict[str, Any] = {}
        self._specs: dict[str, HostSpec] = {}
        self._late: dict[str, tuple[float, asyncio.Future[list[dict[str, Any]]]]] = {}
        """Host whose answer is late -> (time of the question, its pending answer)."""
        self.pids: dict[str, int] = {}
        self.death: FlowrlError | None = None
        """The first death of a process that ends the run; later failures are its consequences."""
        self.lost: set[str] = set()
        """Hosts whose processes have died, and without which the run continues."""

    def __iter__(self) -> Iterator[str]:
        """The hosts that are not lost."""
        return iter([host for host in self._actors if host not in self.lost])

    async def start(self, slots: Sequence[HostSlot], specs: Mapping[str, HostSpec]) -> None:
        """Start the processes, bind their sockets, connect all of them to each other, and build the nodes."""
        self._specs = dict(specs)
        self._follow_ray()
        for index, slot in enumerate(slots):
            self._actors[slot.host] = self._cluster.spawn(HostActor, index, slot, specs[slot.host])
        opened = await self._opened()
        self.pids = {host: answer["pid"] for host, answer in opened.items()}
        addresses: dict[str, Address] = {host: answer["address"] for host, answer in opened.items()}
        addresses[self._endpoint.host] = self._endpoint.address
        for host, address in addresses.items():
            if host != self._endpoint.host:
                self._endpoint.connect(host, address)
        for host, answer in opened.items():
            if answer["pids"] == pid_space() and answer["pid"] != os.getpid():
                self._processes.follow(host, answer["pid"], self._has_ended)
        meeting = {host: answer["meeting"] for host, answer in opened.items()}
        await self.ask("wire", addresses, self._gang_addresses(meeting), self._devices(opened))

    async def _opened(self) -> dict[str, Any]:
        """What each process answers when it has begun. Raises FlowrlError if one does not begin in time."""
        limit_s = self._cluster.limit_s
        asked = {host: asyncio.ensure_future(self.ask_one(host, "open")) for host in self._actors}
        try:
            await asyncio.wait(asked.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
            if late := [host for host, answer in asked.items() if not answer.done()]:
                for answer in asked.values():
                    if answer.done():
                        answer.result()
                raise FlowrlError(
                    f"after {limit_s:.0f} s {len(late)} of {len(asked)} processes had not begun: {', '.join(late)}; "
                    f"{slow_start.load()}; start the run when less runs here, or give it more time with --start-minutes"
                )
            return {host: answer.result() for host, answer in asked.items()}
        finally:
            for answer in asked.values():
                answer.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)

    def _devices(self, opened: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
        """Host -> the GPUs that it sees."""
        hosts = next(iter(self._specs.values())).plan.hosts
        reserved = {host: answer["gpus"] for host, answer in opened.items()}
        return visible_devices(hosts, reserved, self._cluster.own_devices())

    def _follow_ray(self) -> None:
        for name, pid in self._cluster.processes().items():
            self._rays.follow(name, pid, self._ray_has_ended)
        if (head := self._cluster.head()) is not None:
            self._head = asyncio.create_task(outlive(head, patience_s=HEAD_AWAY_S))
            self._head.add_done_callback(self._head_has_ended)

    def _has_ended(self, host: str) -> None:
        if (death := self._dead(host, "")) is not None:
            self._on_death(death)

    def _head_has_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._ray_has_ended("head")

    def _ray_has_ended(self, name: str) -> None:
        """End the run now: Ray's library would end this process a minute later."""
        error = self._cluster.has_lost(name)
        self.death = self.death or error
        self._on_death(error)

    def _dead(self, host: str, why: str) -> FlowrlError | None:
        """The process of `host` has died: fail everything that waits for it. Returns None if the run continues.

        If Ray has ended, that is the reported cause.
        """
        if host in self.lost:
            return None
        self._rays.look()
        if self.death is None and not self._cluster.head_answers():
            self._ray_has_ended("head")
        place = self._specs[host].places[0]
        reason = f"the process of host {host!r} (pid {self.pids.get(host)}) died: killed, out of memory, or crashed"
        if self.death is None and self.losses is not None and self.losses.may_end(host):
            self.lost.add(host)
            self._endpoint.peer_left(host, reason)
            self._cluster.kill(host)  # Ray may report this for one that it cannot reach
            self.losses.has_ended(host, reason + why)
            return None
        self.death = self.death or NodeFailed(self._node(host), place.replica, reason + why)
        self._endpoint.peer_failed(host, reason)
        return self.death

    def _gang_addresses(self, meeting: Mapping[str, str]) -> dict[str, str]:
        """Node -> address at which its ranks meet: on the machine of its replica 0."""
        return {
            place.node: meeting[host]
            for host, spec in self._specs.items()
            for place in spec.places
            if place.replica == 0
        }

    async def ask(self, method: str, *args: Any) -> dict[str, Any]:
        """Call `method` on every host at once. Raises the first NodeFailed."""
        assert not self.lost, "hosts are asked at once before the run; later one by one"
        answers = await asyncio.gather(*(self.ask_one(host, method, *args) for host in self._actors))
        return dict(zip(self._actors, answers, strict=True))

    async def ask_one(self, host: str, method: str, *args: Any) -> Any:
        """Call `method` on one host; None if it is lost. Raises its failure, or the death of its process."""
        try:
            answer = await asyncio.wrap_future(getattr(self._actors[host], method).remote(*args).future())
        except asyncio.CancelledError:
            raise  # the next lines import Ray, which a run within one process does without
        except deaths() as error:
            if (death := self._dead(host, rays_detail(error))) is None:
                return None
            raise death from None
        except ray_errors() as error:
            raise NodeFailed(self._node(host), 0, f"its host {host!r} failed in {method!r}: {error}") from None
        if isinstance(answer, dict) and "failure" in answer:
            raise _failure(answer["failure"])
        return answer

    def _node(self, host: str) -> str:
        return ", ".join(place.node for place in self._specs[host].places)

    async def reports(self) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """What the replicas of every host do and wait for, and the silent hosts with the seconds of their silence.

        Takes at most ANSWER_WITHIN_S. Raises NodeFailed for a host whose process has died.
        """
        now = time.monotonic()
        asked = {host: self._late.get(host) or (now, self._ask_for_report(host)) for host in self}
        if asked:
            await asyncio.wait([answer for _, answer in asked.values()], timeout=ANSWER_WITHIN_S)
        for host, late in asked.items():
            if late[1].done():
                self._late.pop(host, None)
            else:
                self._late.setdefault(host, late)
        reports = [report for _, answer in asked.values() if answer.done() for report in answer.result() or ()]
        return reports, self.silent()

    def _ask_for_report(self, host: str) -> asyncio.Future[list[dict[str, Any]]]:
        return asyncio.ensure_future(self.ask_one(host, "waits"))

    def silent(self) -> dict[str, float]:
        """Host that did not answer the last question in time -> seconds since that question."""
        now = time.monotonic()
        late = {host: one for host, one in self._late.items() if host not in self.lost}
        return {host: now - since for host, (since, answer) in late.items() if not answer.done()}

    def replica_ids(self, host: str) -> list[str]:
        """The node replicas of a host."""
        return [place.replica_id for place in self._specs[host].places]

    async def stop(self, *, within_s: float | None = None) -> list[NodeFailed]:
        """Stop the hosts in order, and kill them after `within_s` seconds. Returns the nodes' failures to close."""
        if within_s is None:
            within_s = STOP_WITHIN_S if self.death is None else AFTER_DEATH_S
        self.losses = None  # from now on, the run need not survive a death
        self._processes.expect_ends()
        self._rays.expect_ends()
        for _, answer in self._late.values():
            answer.cancel()
        tasks = {host: asyncio.ensure_future(self.ask_one(host, "stop")) for host in self}
        if tasks:
            _, late = await asyncio.wait(tasks.values(), timeout=within_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        for host in self._actors:
            self._cluster.kill(host)
        await self._processes.end(within_s=0.0 if self._cluster.lost else min(within_s, KILLED_WITHIN_S))
        self._rays.close()
        if self._head is not None:
            self._head.cancel()
        return [failed for host, task in tasks.items() for failed in self._ill_closed(host, task, within_s)]

    def _ill_closed(self, host: str, task: asyncio.Future[Any], within_s: float) -> list[NodeFailed]:
        """How the nodes of a host failed to close; nothing if a process has died, which is reported as the cause."""
        if self.death is not None:
            return []
        if task.cancelled():
            return [NodeFailed(self._node(host), 0, f"it did not close within {within_s:g} s and was killed")]
        if isinstance(error := task.exception(), NodeFailed):
            return [error]
        return [_failure(report) for report in task.result()]


def _failure(report: Mapping[str, Any]) -> NodeFailed:
    return NodeFailed(
        report["node"],
        report["replica"],
        report["reason"],
        remote_traceback=report.get("traceback", ""),
        ticket=report.get("ticket"),
    )

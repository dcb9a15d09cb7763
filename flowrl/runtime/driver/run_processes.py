"""The processes of a run, seen from the driver: `RunProcesses` starts, watches and ends them, `Orders` asks them.

A process answers with plain data; a failure arrives as a mapping and is raised here as NodeFailed, once. When one dies,
the error names the nodes that it ran. If the run continues without it, it is `lost`, and everything here applies to the
others: requests to several skip those that are lost, even if they are lost before they answer. The kernel reports the
death if the process ran on this machine (Ray need not be alive for that); otherwise Ray reports it.

Ray's library ends a driver that has not reached the head of its cluster for a minute, whatever the driver does. So a
connection to the head is kept, only to detect that the head has ended. A head may return earlier, if the cluster keeps
its state, so a lost connection is retried for some seconds.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flowrl.errors import FlowrlError, LaneFailed, NodeFailed
from flowrl.graph.analysis.plan import Plan
from flowrl.machine.processes import Processes, pid_space
from flowrl.runtime.driver import ray_start
from flowrl.runtime.driver.ray_cluster import HEAD_AWAY_S, RayCluster
from flowrl.runtime.driver.resources import ProcessSlot, visible_devices
from flowrl.runtime.process.actor import ProcessActor
from flowrl.runtime.process.engine import ProcessSpec
from flowrl.wire.endpoint import Address, Endpoint

RETRY_S = 1.0
PROBES = ((socket.SO_KEEPALIVE, 1), (socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""Keepalive options: they break the connection when the other machine was switched off."""


async def watch_address(address: tuple[str, int], *, patience_s: float) -> None:
    """Returns when no process has listened at `address` for `patience_s` seconds."""
    loop = asyncio.get_running_loop()
    last_s = loop.time()
    while loop.time() - last_s < patience_s:
        try:
            async with asyncio.timeout(patience_s):
                reader, writer = await asyncio.open_connection(*address)
        except OSError:  # TimeoutError is an OSError
            await asyncio.sleep(RETRY_S)
            continue
        start_s = loop.time()
        (keep, on), *details = PROBES
        link: socket.socket = writer.get_extra_info("socket")
        link.setsockopt(socket.SOL_SOCKET, keep, on)
        for option, value in details:
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        try:
            while await reader.read(4096):  # discard what the server sends
                pass
        except OSError:
            pass
        finally:
            writer.close()
        last_s = loop.time()
        if last_s - start_s < RETRY_S:  # a server may close a connection at once that does not use its protocol
            await asyncio.sleep(RETRY_S)


MEMORY_USED = re.compile(r"Memory usage (\d+)B exceeded .* of (\d+)B limit")
MEMORY_USER = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
LARGEST = 3
"""Number of processes that are named when memory has run out."""
GB = 1e9


def death_errors() -> tuple[type[Exception], ...]:
    """Ray's errors for an actor whose process has died."""
    from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError

    return ActorDiedError, RayActorError, OutOfMemoryError


def ray_errors() -> type[Exception]:
    from ray.exceptions import RayError

    error: type[Exception] = RayError
    return error


def rays_detail(error: Exception) -> str:
    """Ray's own detail about a death, in parentheses, without its list of common causes; "" if it has none."""
    text = str(error)
    if (used := MEMORY_USED.search(text)) is not None:  # one clause instead of some forty lines
        users = [f"{command} {gb} GB" for _, gb, command in MEMORY_USER.findall(text)[:LARGEST]]
        largest = f", most of it by {', '.join(users)}" if users else ""
        now, limit = (int(number) / GB for number in used.groups())
        return f" (Ray killed it because {now:.1f} of {limit:.1f} GB of the machine's memory were used{largest})"
    line = next((line for line in text.splitlines() if "Worker exit detail:" in line), "")
    detail = line.partition("Worker exit detail:")[2].partition("Some common causes")[0].strip().rstrip(".")
    return f" ({detail})" if detail else ""


STOP_WITHIN_S = 6.0
AFTER_DEATH_S = 3.0
"""As STOP_WITHIN_S, if a process has died: ending Ray may take 4 s more, and the run should end within 10 s."""
ANSWER_WITHIN_S = 1.5
"""A live process answers within this time, even while a node blocks its event loop."""
KILLED_WITHIN_S = 2.0
"""Time in which a killed process ends: if Ray is alive, it kills one at once."""


class RunProcesses:
    """All processes of one run, by name.

    `on_death(error)` is called for a death that ends the run, and `on_lost(host, reason)` for one after which the run
    continues. `may_lose(host)` tells which: by default, every death ends the run.
    """

    def __init__(
        self, cluster: RayCluster, endpoint: Endpoint, on_death: Callable[[FlowrlError], None] = lambda _: None
    ) -> None:
        self._cluster = cluster
        self._on_death = on_death
        self.may_lose: Callable[[str], bool] = lambda host: False
        self.on_lost: Callable[[str, str], None] = lambda host, reason: None
        self._processes = Processes()
        """Those on this machine."""
        self._rays = Processes()
        self._head: asyncio.Task[None] | None = None
        self._endpoint = endpoint
        self._actors: dict[str, Any] = {}
        self._specs: dict[str, ProcessSpec] = {}
        self._late: dict[str, tuple[float, asyncio.Future[list[dict[str, Any]]]]] = {}
        """Process whose answer is late -> (time of the question, its pending answer)."""
        self.pids: dict[str, int] = {}
        self.death: FlowrlError | None = None
        """The first death of a process that ends the run; later failures are its consequences."""
        self.lost: set[str] = set()
        """Those that have died, and without which the run continues."""

    def __iter__(self) -> Iterator[str]:
        """The processes that are not lost."""
        return iter([host for host in self._actors if host not in self.lost])

    async def start(self, slots: Sequence[ProcessSlot], specs: Mapping[str, ProcessSpec]) -> None:
        """Start the processes, bind their sockets, connect all of them to each other, and build the nodes."""
        self._specs = dict(specs)
        for name, pid in self._cluster.processes().items():
            self._rays.follow_process(name, pid, self._end_with_ray)
        if (head := self._cluster.head()) is not None:
            self._head = asyncio.create_task(watch_address(head, patience_s=HEAD_AWAY_S))
            self._head.add_done_callback(lambda task: None if task.cancelled() else self._end_with_ray("head"))
        for index, slot in enumerate(slots):
            self._actors[slot.process] = self._cluster.spawn(ProcessActor, index, slot, specs[slot.process])
        opened = await self._open_all()
        self.pids = {host: answer["pid"] for host, answer in opened.items()}
        addresses: dict[str, Address] = {host: answer["address"] for host, answer in opened.items()}
        addresses[self._endpoint.host] = self._endpoint.address
        for host, address in addresses.items():
            if host != self._endpoint.host:
                self._endpoint.connect(host, address)
        for host, answer in opened.items():
            if answer["pids"] == pid_space() and answer["pid"] != os.getpid():
                self._processes.follow_process(host, answer["pid"], self._note_death)
        meeting = {host: answer["meeting"] for host, answer in opened.items()}
        gangs = {
            place.node: meeting[host]
            for host, spec in self._specs.items()
            for place in spec.places
            if place.replica == 0
        }
        """Node -> address at which its ranks meet: on the machine of its replica 0."""
        hosts = next(iter(self._specs.values())).plan.hosts
        reserved = {host: answer["gpus"] for host, answer in opened.items()}
        await self.ask_processes(
            "wire", addresses, gangs, visible_devices(hosts, reserved, self._cluster.own_devices())
        )

    async def _open_all(self) -> dict[str, Any]:
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
                    f"{ray_start.describe_load()}; start the run when less runs here, or give it more time with "
                    "--start-minutes"
                )
            return {host: answer.result() for host, answer in asked.items()}
        finally:
            for answer in asked.values():
                answer.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)

    def _note_death(self, host: str) -> None:
        if (death := self._handle_death(host, "")) is not None:
            self._on_death(death)

    def _end_with_ray(self, name: str) -> None:
        """End the run now: Ray's library would end this process a minute later."""
        error = self._cluster.has_lost(name)
        self.death = self.death or error
        self._on_death(error)

    def _handle_death(self, host: str, why: str) -> FlowrlError | None:
        """The process of `host` has died: fail everything that waits for it. Returns None if the run continues.

        If Ray has ended, that is the reported cause.
        """
        if host in self.lost:
            return None
        self._rays.report_ended()
        if self.death is None and not self._cluster.head_answers():
            self._end_with_ray("head")
        place = self._specs[host].places[0]
        reason = f"the process of host {host!r} (pid {self.pids.get(host)}) died: killed, out of memory, or crashed"
        if self.death is None and self.may_lose(host):
            self.lost.add(host)
            self._endpoint.peer_left(host, reason)
            self._cluster.kill(host)  # Ray may report this for one that it cannot reach
            self.on_lost(host, reason + why)
            return None
        self.death = self.death or NodeFailed(self._name_nodes(host), place.replica, reason + why)
        self._endpoint.peer_failed(host, reason)
        return self.death

    async def ask_processes(self, method: str, *args: Any) -> dict[str, Any]:
        """Call `method` on every process at once. Raises the first NodeFailed."""
        assert not self.lost, "hosts are asked at once before the run; later one by one"
        answers = await asyncio.gather(*(self.ask_one(host, method, *args) for host in self._actors))
        return dict(zip(self._actors, answers, strict=True))

    async def ask_one(self, host: str, method: str, *args: Any) -> Any:
        """Call `method` on one process; None if it is lost. Raises its failure, or its death."""
        try:
            answer = await asyncio.wrap_future(getattr(self._actors[host], method).remote(*args).future())
        except asyncio.CancelledError:
            raise  # the next lines import Ray, which a run within one process does without
        except death_errors() as error:
            if (death := self._handle_death(host, rays_detail(error))) is None:
                return None
            raise death from None
        except ray_errors() as error:
            raise NodeFailed(self._name_nodes(host), 0, f"its host {host!r} failed in {method!r}: {error}") from None
        if isinstance(answer, dict) and "failure" in answer:
            raise _node_failed(answer["failure"])
        return answer

    def _name_nodes(self, host: str) -> str:
        return ", ".join(place.node for place in self._specs[host].places)

    async def ask_for_waits(self) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """What the replicas of every process do and wait for, and the silent processes with the seconds of their
        silence.

        Takes at most ANSWER_WITHIN_S. Raises NodeFailed for a process that has died.
        """
        now = time.monotonic()
        asked = {
            host: self._late.get(host) or (now, asyncio.ensure_future(self.ask_one(host, "waits"))) for host in self
        }
        if asked:
            await asyncio.wait([answer for _, answer in asked.values()], timeout=ANSWER_WITHIN_S)
        for host, late in asked.items():
            if late[1].done():
                self._late.pop(host, None)
            else:
                self._late.setdefault(host, late)
        reports = [report for _, answer in asked.values() if answer.done() for report in answer.result() or ()]
        return reports, self.find_silent()

    def find_silent(self) -> dict[str, float]:
        """Process that did not answer the last question in time -> seconds since that question."""
        now = time.monotonic()
        late = {host: one for host, one in self._late.items() if host not in self.lost}
        return {host: now - since for host, (since, answer) in late.items() if not answer.done()}

    def replica_ids(self, host: str) -> list[str]:
        """The node replicas of a process."""
        return [place.replica_id for place in self._specs[host].places]

    async def stop(self, *, within_s: float | None = None) -> list[NodeFailed]:
        """Stop the processes in order, and kill them after `within_s` seconds. Returns the nodes' failures to close."""
        if within_s is None:
            within_s = STOP_WITHIN_S if self.death is None else AFTER_DEATH_S
        self.may_lose = lambda host: False  # from now on, the run need not survive a death
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
        await self._processes.end_all(within_s=0.0 if self._cluster.lost else min(within_s, KILLED_WITHIN_S))
        self._rays.close()
        if self._head is not None:
            self._head.cancel()
        if self.death is not None:  # it is reported as the cause
            return []

        failed: list[NodeFailed] = []
        for host, task in tasks.items():
            if task.cancelled():
                text = f"it did not close within {within_s:g} s and was killed"
                failed.append(NodeFailed(self._name_nodes(host), 0, text))
            elif isinstance(error := task.exception(), NodeFailed):
                failed.append(error)
            else:
                failed += map(_node_failed, task.result())
        return failed


def _node_failed(report: Mapping[str, Any]) -> NodeFailed:
    return NodeFailed(
        report["node"],
        report["replica"],
        report["reason"],
        remote_traceback=report.get("traceback", ""),
        ticket=report.get("ticket"),
    )


WARN_AFTER_S = 10.0
"""Time after which a process whose answer is late is named in a warning; the warning repeats in doubled times."""
LOST = object()
"""Takes the place of the answer of a lost process."""


class Orders:
    """Requests to the processes of one run. Each request raises the error if the process answers with one.

    `processes` are those that are not lost; `lost` are those that have died, and without which the run continues.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        plan: Plan,
        processes: Iterable[str],
        warn: Callable[[str], None],
        *,
        lost: Collection[str] = (),
    ) -> None:
        self.plan = plan
        self.processes = processes
        self._lost = lost
        self._endpoint = endpoint
        self._warn = warn

    @property
    def num_lost(self) -> int:
        """How many processes are lost."""
        return len(self._lost)

    async def ask(self, host: str, kind: str, body: Any = None) -> Any:
        """The answer of one process to `kind`."""
        return await self._endpoint.request(host, kind, body if body is not None else {})

    async def ask_all(self, kind: str, body: Callable[[str], Any] = lambda host: {}) -> list[Any]:
        """The answers of all processes to `kind`, asked with `body(host)`."""
        asked = {host: self._unless_lost(host, self.ask(host, kind, body(host))) for host in self.processes}
        return [answer for answer in await self._collect_answers(kind, asked) if answer is not LOST]

    async def _collect_answers(self, kind: str, asked: Mapping[str, Awaitable[Any]]) -> list[Any]:
        """The answers of processes to `kind`. Warns about processes whose answer is late. Raises the first failure."""
        tasks = {host: asyncio.ensure_future(answer) for host, answer in asked.items()}
        began, report_after_s = time.monotonic(), WARN_AFTER_S
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

    async def ask_for_page(self, host: str, kind: str) -> list[Any]:
        """The page that the process answers with; an empty page if the process is lost."""
        page = await self._unless_lost(host, self.ask(host, kind))
        return [] if page is LOST else list(page)

    async def on_nodes(self, replica_ids: Iterable[str], method: str, **arguments: Any) -> list[Any]:
        """`on_node` of these node replicas at once."""
        found = [
            self._unless_lost(host, self.on_node(replica_id, method, **arguments))
            for replica_id in replica_ids
            if (host := self.host_of(replica_id)) not in self._lost
        ]
        return [answer for answer in await asyncio.gather(*found) if answer is not LOST]

    async def _unless_lost(self, host: str, answer: Awaitable[Any]) -> Any:
        """The answer, or LOST if the process is lost."""
        try:
            return await answer
        except LaneFailed:
            if host not in self._lost:
                raise
            return LOST

    def replicas(self, node: str) -> list[str]:
        """The replica ids of a node, in order, for example ["trainer/0", "trainer/1"]."""
        found = [one for host in self.plan.hosts for one in host.nodes if one.rpartition("/")[0] == node]
        return sorted(found, key=lambda one: int(one.rpartition("/")[2]))

    def host_of(self, replica_id: str) -> str:
        """The name of the process in which a node replica runs."""
        return self.plan.host_of(replica_id).name

    async def on_node(self, replica_id: str, method: str, **arguments: Any) -> Any:
        """Call a coroutine method of one node replica in its process."""
        body = {"replica_id": replica_id, "method": method, "arguments": arguments}
        return await self.ask(self.host_of(replica_id), "node", body)

    async def set_gate(self, replica_id: str, by: str, *, open_: bool) -> dict[str, int]:
        """Open or close the gate of one node replica for `by`. Returns how many items each of its ports has taken."""
        body = {"replica_id": replica_id, "by": by, "open": open_}
        taken: dict[str, int] = await self.ask(self.host_of(replica_id), "gate", body)
        return taken

    async def reach_counts(self, replica_id: str, taken: Mapping[str, int]) -> None:
        """Let each port of a node replica take items up to these numbers, and wait until the ports have taken them."""
        await self.ask(self.host_of(replica_id), "reach", {"replica_id": replica_id, "taken": taken})

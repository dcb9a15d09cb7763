"""The engine of one process: it rebuilds the graph, connects the nodes of its process to their lanes, and runs them.

Lifecycle: open -> wire -> setup -> run -> stop. Everything runs on one event loop, which nothing may block: nodes do
heavy work in `blocking`. The first node that fails ends the run of its process; the driver ends the other processes. A
failure leaves the process as plain data that names the node.

Waits: a pause for a checkpoint waits for invocations to end, or to wait, and warns of nodes that take long.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import traceback
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowrl.errors import FlowrlError, LaneFailed, NodeFailed, SampleFailed, WireError
from flowrl.graph.graph import Graph
from flowrl.graph.load import rebuild_graph
from flowrl.graph.machine import require_files
from flowrl.graph.node import Node
from flowrl.hub import take_commits
from flowrl.machine.processes import pid_space
from flowrl.messages.episode import AskRecord
from flowrl.runtime.checkpoints.snapshots import SavedMessage, as_frame, pack_pages, unpack_page
from flowrl.runtime.process.context import DRIVER, ReplicaPlace
from flowrl.runtime.process.replica import Replica, connect_ports
from flowrl.runtime.telemetry.trace import TraceBuffer
from flowrl.wire.activity import OUTSIDE, Lease, as_failure, ended_by_itself, is_cancelled
from flowrl.wire.connection import EndpointTransport, local_ip
from flowrl.wire.control import Answer
from flowrl.wire.encoding.codec import dump_value, load_value
from flowrl.wire.encoding.cost import chunked
from flowrl.wire.endpoint import Address, Endpoint
from flowrl.wire.run_files import sweep

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of the disk, not of the writing code: reported without a traceback."""


class NodeError(Exception):
    """A node's failure as plain data, inside this process."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["reason"])
        self.report = report


@contextmanager
def attribute_failures(replica: Replica) -> Iterator[None]:
    """Exceptions raised inside reach the driver as failures of the node. A node boundary."""
    try:
        yield
    except BaseException as error:  # the boundary to the node's code, which may raise anything
        failure = as_failure(error, cancelled=is_cancelled())
        if not isinstance(failure, Exception):
            raise
        told = failure_of(replica, failure)
        raise NodeFailed(
            told["node"], told["replica"], told["reason"], remote_traceback=told["traceback"], ticket=told["ticket"]
        ) from error


def failure_of(replica: Replica, error: BaseException) -> dict[str, Any]:
    place = replica.place
    return report_of(error) | {"node": place.node, "replica": place.replica, "ticket": replica.open_items.failed_ticket}


def report_of(error: BaseException) -> dict[str, Any]:
    """The report of an exception; for an exception group, of the first one that is not a LaneFailed."""
    while isinstance(error, BaseExceptionGroup):
        leaves = leaves_of(error)
        error = next((leaf for leaf in leaves if not isinstance(leaf, LaneFailed)), leaves[0])
    told = isinstance(error, FlowrlError) or (isinstance(error, OSError) and error.errno in NO_SPACE)
    reason = str(error) if isinstance(error, FlowrlError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SampleFailed):
        reason = f"it raised SampleFailed({reason!r}) outside of `self.PORT.each(...)`, so the sample is unknown"
    return {
        "reason": reason,
        "traceback": "" if told else "".join(traceback.format_exception(error)),
        "ticket": None,
        "consequence": isinstance(error, LaneFailed),
    }


def leaves_of(group: BaseExceptionGroup[Any]) -> list[Any]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (leaves_of(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]


def meeting_place(*, alone: bool) -> str:
    """ "host:port" on this machine, free at the moment, at which the ranks of a gang can meet.

    `alone`: all ranks are on this machine.
    """
    address = "127.0.0.1" if alone else local_ip()
    with socket.socket() as probe:
        probe.bind((address, 0))
        return f"{address}:{probe.getsockname()[1]}"


REPORT_EVERY_S = 1.0
TOLD_EVERY_S = 60.0
"""Interval between warnings that name the nodes whose invocations a checkpoint waits for."""


@dataclass(frozen=True)
class ProcessSpec:
    """Everything that a process needs, as plain data."""

    process: str
    run_id: str
    driver_pid: int
    graph_file: str
    config: dict[str, Any]
    places: tuple[ReplicaPlace, ...]
    plan: Any
    cores: tuple[int, ...]
    transport: EndpointTransport
    commits: Mapping[str, str] = field(default_factory=dict)
    """Name on the Hub -> commit to which it is resolved in this run (`flowrl.hub`)."""
    directory: str = ""
    """The driver's working directory, to which relative paths of the user refer; "" if this process is in it."""
    machines: tuple[str, ...] = ()
    """Names and addresses of the run's machines, which are reached without a proxy."""


class ProcessEngine:
    """The engine of one process; used only on its own loop."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        take_commits(spec.commits)
        self.trace = TraceBuffer()
        self.endpoint = Endpoint(spec.process, run_id=spec.run_id, driver_pid=spec.driver_pid, transport=spec.transport)
        self.replicas: dict[str, Replica] = {}
        self._reporting: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._kept: Iterator[list[Any]] = iter(())
        """Pages of a snapshot's messages and records that the driver has not fetched yet."""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def handle_unretrieved(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if error is not None and not isinstance(error, asyncio.CancelledError):
                self.fail(error)
            else:
                loop.default_exception_handler(context)

        asyncio.get_running_loop().set_exception_handler(handle_unretrieved)

    def fail(self, error: BaseException) -> None:
        """End the run of this process because of an exception that nobody awaits."""
        self._end_with_failure(self._process_failure(error if isinstance(error, Exception) else ended_by_itself(error)))

    def _end_with_failure(self, failure: dict[str, Any]) -> None:
        if not self._broken.done():
            self._broken.set_exception(NodeError(failure))
            self._broken.exception()  # mark it as retrieved: there may be no `run` that raises it

    async def open(self) -> dict[str, Any]:
        """Bind the sockets. The driver forwards the answer to every other process."""
        if self.spec.transport.spans_machines:
            sweep()  # on its own machine the driver sweeps
        address: Address = await self.endpoint.open()
        handlers: dict[str, Answer] = {
            "pause": self._pause_process,
            "resume": self._resume_process,
            "gate": self._set_gate,
            "reach": self._reach_counts,
            "give up": self._give_up_group,
            "lost": self._drop_lost_peer,
            "quiesce": self._wait_until_quiet,
            "ping": self._answer_ping,
            "flush": self._wait_until_arrived,
            "snapshot": self._take_snapshot,
            "kept": self._next_page,
            "restore": self._restore_states,
            "send again": self._send_again,
            "node": self._call_node,
            "report": self._report_now,
            "trace level": self._set_trace_level,
        }
        for kind, handler in handlers.items():
            self.endpoint.on(kind, handler)
        meeting = meeting_place(alone=not self.spec.transport.spans_machines)
        return {"pid": os.getpid(), "pids": pid_space(), "address": address, "meeting": meeting}

    async def wire(self, addresses: Mapping[str, Address], gangs: Mapping[str, str]) -> None:
        """Rebuild the graph, once per replica index, and connect this process's nodes to their lanes."""
        require_files(len(addresses))
        for host, address in addresses.items():
            if host != self.spec.process:
                self.endpoint.connect(host, address)
        graphs = {place.replica: self.build_graph() for place in self.spec.places}
        self._lease = lease = Lease(self.spec.places[0].lease, self.spec.process, self.endpoint)
        for place in self.spec.places:
            graph = graphs[place.replica]
            replica = self.make_replica(graph.nodes[place.node], place, lease)
            replica.context.gang_address = gangs[place.node]

            def end_with_task(error: BaseException, replica: Replica = replica) -> None:
                """A task that the node started has died, and nobody awaits it."""
                self._end_with_failure(failure_of(replica, error))

            replica.activity.died = end_with_task
            self.replicas[place.replica_id] = replica
            connect_ports(replica, graph, self.spec.plan, self.endpoint)
        self._reporting = asyncio.get_running_loop().create_task(self._report_regularly())

    def build_graph(self) -> Graph:
        """A new graph with its own nodes. `flowrl.testing` overrides this and `make_replica`."""
        path = Path(self.spec.graph_file)
        if not path.is_file():  # on another machine than the driver's: the copy in Ray's working directory
            path = Path.cwd() / path.name
        return rebuild_graph(path, self.spec.config)[0]

    def make_replica(self, node: Node, place: ReplicaPlace, lease: Lease) -> Replica:
        return Replica(node, place, self.endpoint, self.trace, lease)

    async def setup(self) -> None:
        """Run every node's set-up, one after the other: concurrent heavy imports in two threads break."""

        async def set_up_nodes() -> None:
            nodes = [replica.node for replica in self.replicas.values()]
            async with self._lease.setting_up(nodes, on_devices=bool(self.spec.places[0].gpus)):
                for replica in self.replicas.values():
                    activity = replica.activity
                    with activity.pending.named(), activity.waiting(OUTSIDE, "its set-up", inside=None):
                        await self._run_named(replica, replica.node.setup())

        await self._run_unless_broken(set_up_nodes())

    async def run(self) -> None:
        """Run every node's body until all have returned, or one has failed."""

        async def run_node(replica: Replica) -> None:
            await self._run_named(replica, replica.run())
            self.endpoint.notify(DRIVER, "ended", {"replica_id": replica.place.replica_id})

        async def run_nodes() -> None:
            async with asyncio.TaskGroup() as tasks:
                for replica in self.replicas.values():
                    tasks.create_task(run_node(replica))

        await self._run_unless_broken(run_nodes())
        self._send_report()

    async def _run_unless_broken(self, body: Coroutine[Any, Any, None]) -> None:
        """Run `body` until it has ended, or until a task or callback that nobody awaits has failed."""
        self._running = asyncio.create_task(body)
        await asyncio.wait((self._running, self._broken), return_when=asyncio.FIRST_COMPLETED)
        if not self._running.done():
            self._broken.result()
        await self._running

    async def _run_named(self, replica: Replica, body: Coroutine[Any, Any, None]) -> None:
        """Run a node's coroutine; its failure becomes plain data that names the node. A node boundary."""
        try:
            await body
        except BaseException as error:  # the boundary to the node's code, which may raise anything
            failure = as_failure(error, cancelled=is_cancelled())
            if not isinstance(failure, Exception):
                raise
            raise NodeError(failure_of(replica, failure)) from error

    async def guarded(self, body: Coroutine[Any, Any, Any]) -> Any:
        """The result of `body`, or {"failure": ...} with the first failure, where causes precede consequences."""
        try:
            return await body
        except* NodeError as group:
            failures = [error.report for error in leaves_of(group)]
        except* FlowrlError as group:
            failures = [self._process_failure(leaves_of(group)[0])]
        return {"failure": min(failures, key=lambda report: report["consequence"])}

    def _process_failure(self, error: BaseException) -> dict[str, Any]:
        """The report of a failure that belongs to no single node."""
        place = self.spec.places[0]
        return report_of(error) | {"node": ", ".join(p.node for p in self.spec.places), "replica": place.replica}

    async def stop(self) -> list[dict[str, Any]]:
        """End the bodies that still run, then close nodes and sockets. Returns the nodes' failures to close."""
        for replica in self.replicas.values():
            replica.activity.died = lambda error: None  # cancelling its tasks may raise anything now
        for task in (self._reporting, self._running):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,))
        failures = []
        for replica in self.replicas.values():
            try:
                await self._run_named(replica, replica.node.close())
            except NodeError as error:  # the other nodes are closed in any case
                failures.append(error.report)
            finally:
                replica.context.close()
        self._send_report()
        await self.endpoint.close()
        return failures

    async def waits(self) -> list[dict[str, Any]]:
        return [replica.report() for replica in self.replicas.values()]

    # Requests of the driver over the control link

    async def _pause_process(self, host: str, body: Any) -> None:
        """Stop taking items; when every invocation has ended or waits, also stop sending."""
        for replica in self.replicas.values():
            replica.gate("checkpoint", open_=False)
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wait_for_invocations(), TOLD_EVERY_S)
                break
            for replica_id in [one for one, replica in self.replicas.items() if replica.activity.working]:
                text = (
                    "a checkpoint waits for its invocations to end. If they wait for another item of this node, which "
                    "comes only after the checkpoint, put the wait inside `with self.context.waiting('what for'):`"
                )
                self.endpoint.notify(DRIVER, "warning", {"node": replica_id, "text": text})
        for replica in self.replicas.values():
            replica.pause_sending(True)

    async def _resume_process(self, host: str, body: Any) -> None:
        """Take and send items again, and report to the ledger."""
        for replica in self.replicas.values():
            replica.context.ledger.pause(False)
            replica.pause_sending(False)
            replica.gate("checkpoint", open_=True)

    async def _wait_for_invocations(self) -> None:
        """Wait until no invocation of any node here is inside user code."""
        while any(replica.activity.working for replica in self.replicas.values()):
            for replica in self.replicas.values():
                await replica.activity.idle()

    async def _set_gate(self, host: str, body: dict[str, Any]) -> dict[str, int]:
        """Open or close a node's gate; running invocations continue. Returns how many items each port has taken."""
        replica = self.replicas[body["replica_id"]]
        replica.gate(body["by"], open_=body["open"])
        return {name: port.num_taken for name, port in replica.inbound.items()}

    def _give_up_group(self, host: str, body: dict[str, str]) -> None:
        """Handle the driver's report that a node has dropped a whole group."""
        for replica in self.replicas.values():
            replica.open_items.given_up.give_up_group(body["group_id"], body["state"], body["reason"])

    def _drop_lost_peer(self, host: str, body: dict[str, Any]) -> None:
        """Handle the driver's report that the run continues without another process, which has died."""

        def drop() -> None:
            self.endpoint.peer_left(body["host"], body["reason"])
            for replica in self.replicas.values():
                replica.context.ledger.server_lost(body["replica_ids"])

        # Not now: this note may be one of several frames that arrived together. The frames behind it must come before
        # any frame that `peer_left` takes from the sockets. Requests among those frames begin after `drop`.
        asyncio.get_running_loop().call_soon(drop)

    async def _reach_counts(self, host: str, body: dict[str, Any]) -> None:
        """Let a node take items at each port up to the given numbers, whatever its gates say."""
        ports = self.replicas[body["replica_id"]].inbound
        await asyncio.gather(*(ports[name].reach(taken) for name, taken in body["taken"].items()))

    async def _wait_until_quiet(self, host: str, body: dict[str, Any]) -> tuple[int, int]:
        """Wait until everything in transit from here has arrived. Returns total counts of moves: (messages, waits)."""
        await self._wait_for_invocations()
        await self.endpoint.arrived(body["peers"])
        return self.endpoint.moves(), sum(replica.activity.moves for replica in self.replicas.values())

    async def _answer_ping(self, host: str, body: Any) -> None:
        """The reply shows `host` that everything it sent before has arrived: see `Endpoint.arrived`."""

    async def _wait_until_arrived(self, host: str, body: dict[str, Any]) -> None:
        """Wait until everything in transit from here has arrived."""
        await self.endpoint.arrived(body["peers"])

    async def _take_snapshot(self, host: str, body: Any) -> dict[str, Any]:
        """This process's part of a snapshot, without messages and records, which "kept" returns after the graph
        resumes.

        The process is paused, but waits for something outside the graph may end at any time, and their invocations
        continue. So everything is read at one moment, and later reports to the ledger are held back.
        """
        replicas = self.replicas.values()
        for replica in replicas:
            replica.context.ledger.pause(True)
        messages: list[SavedMessage] = []
        for replica in replicas:
            with attribute_failures(replica):
                messages += replica.saved()
        self._kept = pack_pages(messages)
        states = {}
        for replica_id, replica in self.replicas.items():
            with attribute_failures(replica):
                try:
                    states[replica_id] = as_frame(dump_value(dict(replica.node.state())))
                except WireError as error:
                    raise FlowrlError(f"its `state()` cannot be stored in a checkpoint: {error}") from error
        outs = {
            f"{replica_id} {name}": out for replica_id, r in self.replicas.items() for name, out in r.outbound.items()
        }
        return {
            "ended": [place for replica in replicas for place in replica.open_items.waiting_for_children()],
            "lost": [
                (*place, dump_value(marker))
                for replica in replicas
                for place, marker in replica.open_items.lost_items()
            ],
            "parts": [parts for out in outs.values() for parts in out.parts()],
            "sent": [key for replica in replicas for key in replica.sent_already()],
            "sent_before": list(set().union(*(out.sent_before for out in outs.values()))),
            "left_out": list(set().union(*(out.left_out for out in outs.values()))),
            "cursors": {name: out.cursor for name, out in outs.items()},
            "states": states,
        }

    async def _next_page(self, host: str, body: Any) -> list[Any]:
        """The next page of this process's messages and records for the snapshot; empty after the last page."""
        return next(self._kept, [])

    async def _restore_states(self, host: str, body: dict[str, Any]) -> None:
        """Load the states of a checkpoint."""
        for replica_id, replica in self.replicas.items():
            if replica_id in body["states"]:
                with attribute_failures(replica):
                    replica.node.load_state(load_value(body["states"][replica_id]))
            for name, out in replica.outbound.items():
                out.sent_before.update(body["sent"])
                out.cursor = body["cursors"].get(f"{replica_id} {name}", 0)

    async def _send_again(self, host: str, page: list[Any]) -> None:
        """Accept messages of a checkpoint, which are sent on their lanes when the nodes run, and replies for them."""
        for replica_id, edge, consumer, envelope in unpack_page(page):
            if isinstance(envelope.body, AskRecord):
                self.replicas[replica_id].open_items.asked_before[edge, envelope.id] = envelope.body
            else:
                self.replicas[replica_id].restore((edge, consumer, envelope))

    async def _call_node(self, host: str, body: dict[str, Any]) -> Any:
        """Call a node's coroutine method: checkpoint, snapshot, evaluate, finish."""
        replica = self.replicas[body["replica_id"]]
        method = getattr(replica.node, body["method"])
        replica.activity.pending.enter()
        with attribute_failures(replica):
            return await method(**body.get("arguments", {}))

    # Reports

    async def _report_regularly(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._send_report()

    async def _report_now(self, host: str, body: Any) -> None:
        """Send a report now. The report is sent before the answer, so it also arrives before the answer."""
        self._send_report()

    def _set_trace_level(self, host: str, level: int) -> None:
        self.trace.level = level

    def _send_report(self) -> None:
        """Send the totals of all replicas and lanes, with the events traced since the last report; if they are too
        many, further reports contain only the rest of them."""
        first, *more = [*chunked(self.trace.drain_events())] or [[]]
        nodes = {replica_id: replica.context.meters.read_totals() for replica_id, replica in self.replicas.items()}
        lanes = {name: asdict(stats) for name, stats in self.endpoint.statistics().items()}
        for report in ({"nodes": nodes, "lanes": lanes, "trace": first}, *({"trace": events} for events in more)):
            self.endpoint.notify(DRIVER, "statistics", report)

    def warn_of_block(self, culprit: tuple[str, str], for_s: float) -> None:
        """Warn that the loop was blocked; the watch thread schedules this call when the block has ended."""
        node, where = culprit
        advice = "; use `await self.blocking(...)` there" if node else ""
        text = f"the event loop was blocked for {for_s:.1f} s at {where}{advice}"
        self.endpoint.notify(DRIVER, "warning", {"node": node or self.spec.process, "text": text})

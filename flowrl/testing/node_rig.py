"""`NodeRig` and `run_node`: one node in the hands of a test.

The node runs in the real engine: its ports, items, groups, joins, calls and state are those of a run. A test takes the
places of its neighbours and of the driver: it feeds In ports, collects what leaves Out ports, answers Call ports and
asks Serve ports.

Every wait ends with what it waits for, with the node's failure (raised as the node raised it), or after `timeout_s`
with RigTimeout, which says what the node is waiting for. Leaving the rig stops the node, wherever it is.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast, overload

from flowrl.errors import LaneFailed
from flowrl.graph.graph import carried_type
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out, Port, Serve
from flowrl.messages import Message, Tombstone
from flowrl.runtime.checkpoints.snapshots import read_state
from flowrl.runtime.driver.run_checkpoints import Snapshotter
from flowrl.runtime.ledger.accounting import Accounting
from flowrl.runtime.process.engine import NodeError
from flowrl.testing.clock import VirtualClock, run_on
from flowrl.testing.record import NodeRecord, Sent
from flowrl.testing.rig_engine import HOST, NoAccounting, RigEngine, RigOrders
from flowrl.testing.rig_failures import Leaked, RigTimeout, failure_in, left_over, node_failed, situation
from flowrl.testing.rig_graph import RigGraph, Surroundings
from flowrl.testing.rig_nodes import Answer
from flowrl.wire.activity import HostLoop
from flowrl.wire.encoding.schema import Envelope

T = TypeVar("T", bound=Message)
Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)
R = TypeVar("R")
TIMEOUT_S = 10.0
SETUP_TIMEOUT_S = 100.0
"""Shortest timeout of a set-up, which may import libraries and load models."""
Fed = Message | tuple[int, Message]
"""A message to feed; with the ticket that it travels under, where that matters."""


class NodeRig:
    """One running node, as an asynchronous context manager:

        async with NodeRig(TooShort(least=2)) as rig:
            rig.feed("samples", sample(0, response=1), sample(1, response=5))
            assert (await rig.receive("kept")).member == 1
            record = await rig.finished()
            assert record.reasons() == [("filtered", "too_short")]

    Entering does what a run does: it calls the node's `check`, `preflight` (unless it is switched off) and `setup`,
    restores the state from `resume` (a directory that `snapshot` wrote), and starts the node's `run`. Leaving closes
    the node.

    `answers` maps Call ports to functions, plain or async, that take a request and return the reply; a Call port
    without an answer is not connected, and neither is a port in `ignore`. All other ports are. Edges have room for
    everything that a test sends, except those of the Out ports in `unread`: such an edge holds one message, and a
    second send waits until the test calls `read`. `around` sets what the node finds in its `context`, see Surroundings.
    """

    def __init__(
        self,
        node: Node,
        *,
        name: str = "",
        answers: Mapping[str, Answer] | None = None,
        ignore: Collection[str] = (),
        unread: Collection[str] = (),
        timeout_s: float = TIMEOUT_S,
        preflight: bool = True,
        resume: Path | None = None,
        **around: Unpack[Surroundings],
    ) -> None:
        self.node = node
        self.timeout_s = timeout_s
        self._graph = RigGraph(node, name, answers or {}, ignore=ignore, unread=unread)
        self._around = around
        self._preflight = preflight
        self._resume = resume
        self._changed = asyncio.Event()
        self.record = NodeRecord({port: [] for port in self._graph.collectors}, changed=self._changed.set)
        self._num_received = dict.fromkeys(self._graph.collectors, 0)
        """Out port -> number of its messages that `receive` has returned."""
        self._engine: RigEngine
        self._running: asyncio.Task[None] | None = None

    # Beginning and end

    async def __aenter__(self) -> Self:
        if self._preflight:
            with ThreadPoolExecutor(1) as thread:  # a preflight may run an event loop of its own
                thread.submit(self.node.preflight).result()
        self._handler = asyncio.get_running_loop().get_exception_handler()
        self._run_dir = TemporaryDirectory(prefix="flowrl-rig-")
        around: Surroundings = {"run_dir": self._run_dir.name, **self._around}
        spec = self._graph.spec(uuid.uuid4().hex[:12], self._resume, around)
        num_groups = self._around.get("num_groups")
        self._engine = RigEngine(spec, self._graph.graph, self.node, self.record, num_groups)
        try:
            await self._begin(self._engine)
        except BaseException:  # a node's setup may raise anything, and what has started is stopped
            await self._stop()
            raise
        return self

    async def _begin(self, engine: RigEngine) -> None:
        opened = await engine.open()
        engine.answer_as_driver()
        await engine.wire({}, dict.fromkeys(self._graph.graph.nodes, opened["meeting"]))
        engine.under_test.context.replica = self._around.get("replica", 0)
        engine.under_test.context.num_replicas = self._around.get("num_replicas", 1)
        for name, collector in self._graph.collectors.items():
            collector.collect = functools.partial(self._collect, name)
            collector.finish = engine.replicas[f"{collector.name}/0"].open_items.end_item
        within_s = max(SETUP_TIMEOUT_S, self.timeout_s)
        await self._within(engine.setup(), f"the set-up of node {self._graph.name!r} has not ended", within_s)
        if self._resume is not None:
            await self._restore(self._resume)
        self._running = asyncio.create_task(engine.run())

    async def _restore(self, snapshot: Path) -> None:
        state = read_state(snapshot)
        producers = Counter(producer for producer, *_ in state["messages"])
        for feeder in self._graph.feeders.values():
            feeder.num_fed += producers[f"{feeder.name}/0"]
        await self._snapshotter(snapshot).put_back(state)

    def _collect(self, port: str, envelope: Envelope) -> None:
        sent_on = self._graph.collectors[port].of
        if not isinstance(envelope.body, (carried_type(sent_on), Tombstone)):
            raise TypeError(f"{sent_on!r} sent a {type(envelope.body).__name__}")
        made_from = self._engine.under_test.open_items.parents.get(envelope.id, ())
        self.record.outputs[port].append(Sent(envelope.body, envelope.ticket, made_from))
        self._changed.set()

    async def finished(self, *, leftovers: bool = False) -> NodeRecord:
        """End every stream to the node, read every one from it, and wait until its `run` has returned.

        Raises Leaked if the node did not finish messages that it was sent, unless `leftovers` are expected.
        """
        self.end()
        self.read(*self._graph.collectors)
        await self._within(self._ended(), f"node {self._graph.name!r} has not ended with its streams")
        if not leftovers and (left := left_over(self._engine.under_test, self._graph.feeders)):
            raise Leaked(f"node {self._graph.name!r} ended with {left}")
        return self.record

    async def _ended(self) -> None:
        assert self._running is not None
        await asyncio.wait((self._running,))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed = self._failure()
        reports = await self._stop()
        failed = failed or self._failure()  # the failure may have been on its way
        if error is None and failed is not None:
            raise failed
        if error is None and reports:
            raise node_failed(reports[0])

    async def _stop(self) -> list[dict[str, Any]]:
        """Close everything. Returns the reports of nodes that failed to close."""
        stopping = asyncio.ensure_future(self._engine.stop())
        await asyncio.wait((stopping,), timeout=self.timeout_s)
        asyncio.get_running_loop().set_exception_handler(self._handler)
        self._run_dir.cleanup()
        if not stopping.done():
            raise RigTimeout(f"node {self._graph.name!r} has not ended {self.timeout_s:g} s after it was cancelled")
        return stopping.result()

    # In place of the neighbours

    @overload
    def feed(self, port: In[T], *messages: T | Tombstone, ticket: int | None = None) -> None: ...
    @overload
    def feed(self, port: str, *messages: Message, ticket: int | None = None) -> None: ...
    def feed(self, port: In[Any] | str, *messages: Message, ticket: int | None = None) -> None:
        """Send messages to an In port, in order. Does not wait.

        They travel under `ticket`; without one, each group has a ticket of its own, in order of appearance. A Tombstone
        takes the place of a member that was lost on its way (see `flowrl.testing.lost`).
        """
        name = self._graph.port(port, In)
        feeder = self._graph.feeders[name]
        for message in messages:
            if not isinstance(message, (carried_type(feeder.of), Tombstone)):
                raise TypeError(f"{feeder.of!r} was fed a {type(message).__name__}")
            feeder.put(message, ticket)

    def end(self, *ports: Port | str) -> None:
        """End the streams to these In ports, and the calls to these Serve ports; without arguments, to all of them."""
        around = self._graph.feeders | self._graph.askers
        for name in [self._graph.port(port, In, Serve) for port in ports] or around:
            around[name].end()

    async def taken(self, port: In[Any] | str) -> None:
        """Wait until the node has taken everything that was fed to `port`."""
        name = self._graph.port(port, In)
        num_fed = self._graph.feeders[name].num_fed
        await self._within(
            self._engine.under_test.inbound[name].reach(num_fed),
            f"port {name!r} of node {self._graph.name!r} has not taken the {num_fed} message(s) that were fed to it",
        )

    def read(self, *ports: Out[Any] | str) -> None:
        """From now on, take what the node sends on these Out ports, which were `unread`."""
        for port in ports:
            self._graph.collectors[self._graph.port(port, Out)].read()

    @overload
    async def receive(self, port: Out[T]) -> T: ...
    @overload
    async def receive(self, port: str) -> Any: ...
    async def receive(self, port: Out[Any] | str) -> Any:
        """The next message that the node sends on an Out port; tombstones are passed over."""
        name = self._graph.port(port, Out)
        number = self._num_received[name]
        await self._within(
            self._changes(lambda: len(self.record.sent(name)) > number),
            f"port {name!r} of node {self._graph.name!r} got no message",
        )
        self._num_received[name] = number + 1
        return self.record.sent(name)[number]

    @overload
    async def ask(self, port: Serve[Req, Rep], request: Req, *, session: str = "", priority: int = 0) -> Rep: ...
    @overload
    async def ask(self, port: str, request: Message, *, session: str = "", priority: int = 0) -> Any: ...
    async def ask(self, port: Serve[Any, Any] | str, request: Message, *, session: str = "", priority: int = 0) -> Any:
        """The node's reply to a request on a Serve port. Raises SampleFailed if the node fails the sample."""
        name = self._graph.port(port, Serve)
        asking = self._graph.askers[name].port(request, session=session, priority=priority)
        return await self._within(asking, f"port {name!r} of node {self._graph.name!r} gave no reply")

    async def until(self, condition: Callable[[NodeRecord], bool], what: str = "what the test waits for") -> None:
        """Wait until `condition(record)` holds; it is checked after each change of the record."""
        await self._within(
            self._changes(lambda: condition(self.record)), f"{what} has not come from node {self._graph.name!r}"
        )

    async def _changes(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # In place of the driver

    def give_up(self, group_id: str, *, state: str = "dropped", reason: str = "given_up") -> None:
        """Tell the node that another node dropped this whole group: work of `each` on its members is cancelled."""
        self._engine.endpoint.notify(HOST, "give up", {"group_id": group_id, "state": state, "reason": reason})

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Inside, the node is paused as for a checkpoint: no invocation is in user code, nothing is taken or sent."""
        orders = self._orders()
        waiting = f"node {self._graph.name!r} does not pause: an invocation has not ended"
        await self._within(orders.ask(HOST, "pause"), waiting)
        yield
        await orders.ask(HOST, "resume")

    async def snapshot(self, directory: Path) -> Path:
        """Write a snapshot of the node, and of the messages that it has not finished, to the new `directory`.

        The node continues afterwards. `resume=directory` lets a fresh node in another rig continue from the snapshot:
        its `load_state` gets what `state` returned, the unfinished messages come to it again, and messages already sent
        are not sent twice.
        """
        directory.mkdir(parents=True)  # noqa: ASYNC240
        taking = self._snapshotter(directory).take({}, directory, cast(Accounting, NoAccounting()))
        await self._within(taking, f"the snapshot of node {self._graph.name!r} has not ended")
        return directory

    def _snapshotter(self, directory: Path) -> Snapshotter:
        return Snapshotter(self._orders(), {self._graph.name: self.node}, directory, keep=0)

    def _orders(self) -> RigOrders:
        return RigOrders(self._engine.endpoint, self._graph.plan, [HOST], cast(Any, None))

    # Waiting

    async def _within(self, work: Awaitable[R], what: str, timeout_s: float | None = None) -> R:
        """The result of `work`. Raises the node's failure if that comes first, and RigTimeout, whose text begins with
        `what`."""
        within_s = self.timeout_s if timeout_s is None else timeout_s
        task = asyncio.ensure_future(work)
        both = {task} if self._running is None else {task, self._running}
        try:
            await asyncio.wait(both, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if (failed := self._failure()) is not None:
                raise failed
            await asyncio.wait((task,), timeout=0)  # the end of the node may be what `work` waits for
            if task.done():
                return await self._result(task)
            ended = self._running is not None and self._running.done()
            when = "before the node ended" if ended else f"within {within_s:g} s"
            raise RigTimeout(f"{what} {when}; {situation(self._engine.under_test, self._graph.feeders)}")
        finally:
            task.cancel()
            await asyncio.wait((task,), timeout=self.timeout_s)  # `_stop` reports code that ignores the cancel

    async def _result(self, task: asyncio.Future[R]) -> R:
        try:
            return task.result()
        except LaneFailed:  # a consequence of what ends the engine
            if self._running is None:
                raise
            await asyncio.wait((self._running,), timeout=self.timeout_s)
            raise self._failure() or RigTimeout("the engine does not end after a failure") from None
        except (NodeError, BaseExceptionGroup) as error:
            raise failure_in(error) from None

    def _failure(self) -> BaseException | None:
        """Why the engine has ended, if it failed."""
        running = self._running
        if running is None or not running.done() or running.cancelled():
            return None
        error = running.exception()
        return None if error is None else failure_in(error)


def run_node(
    node: Node,
    feed: Mapping[Any, Iterable[Fed]] | None = None,
    *,
    clock: VirtualClock | None = None,
    leftovers: bool = False,
    name: str = "",
    answers: Mapping[str, Answer] | None = None,
    ignore: Collection[str] = (),
    timeout_s: float = TIMEOUT_S,
    preflight: bool = True,
    resume: Path | None = None,
    **around: Unpack[Surroundings],
) -> NodeRecord:
    """Run `node` from its checks to its close, and return what it did:

        record = run_node(TooShort(least=2), {"samples": [sample(0, response=1), sample(1, response=5)]})
        assert [one.member for one in record.sent("kept")] == [1]

    `feed` maps each In port to its messages (a pair is a ticket and its message), and each Serve port to requests,
    which are asked one after the other. With a `clock` the node runs in its time. See NodeRig for the rest.
    """

    async def main() -> NodeRecord:
        rig = NodeRig(
            node,
            name=name,
            answers=answers,
            ignore=ignore,
            timeout_s=timeout_s,
            preflight=preflight,
            resume=resume,
            **around,
        )
        async with rig:
            for port, messages in (feed or {}).items():
                await _give(rig, port, messages)
            return await rig.finished(leftovers=leftovers)

    if clock is not None:
        return clock.run(main())
    return run_on(HostLoop, main())


async def _give(rig: NodeRig, port: Port | str, messages: Iterable[Fed]) -> None:
    """Feed an In port, or ask a Serve port."""
    live = rig.node.ports.get(port) if isinstance(port, str) else port
    for one in messages:
        ticket, message = one if isinstance(one, tuple) else (None, one)
        if isinstance(live, Serve):
            rig.record.replies.setdefault(live.name, []).append(await rig.ask(live, message))
        else:
            rig.feed(cast(Any, port), message, ticket=ticket)

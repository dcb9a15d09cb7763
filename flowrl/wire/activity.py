"""What a process is doing: its waits, its event loop, its leases of devices, and why a node that waits is still alive.

`Activity` records the engine's waits of a node replica, for stall reports, quiescence and the view. `HostLoop` records
what else the node has started (`Pending`), `reasons_alive` judges from both whether something other than another node
will wake it. `Lease` is one host's side of a lease on shared devices. `PrioritySlots` are places that waiting tasks get
in order of priority.

How the code of a node may end: by returning, or by an Exception, which fails the node. Everything else is converted to
such an exception (`as_failure`). Code that nobody cancelled raises CancelledError when a library cancels what the code
awaits; asyncio treats that as an orderly end, so the current item would stay open forever. SystemExit and
KeyboardInterrupt end an event loop, and GeneratorExit passes every `except Exception`.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import AsyncGeneratorType, FrameType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import uvloop

from flowrl.errors import FlowrlError
from flowrl.graph.node import Node
from flowrl.messages.base import node_context
from flowrl.wire.control import as_exception, is_cancel

if TYPE_CHECKING:  # what declares a graph loads no sockets
    from flowrl.wire.endpoint import Endpoint


class PrioritySlots:
    """Slots that waiting tasks get by priority: the smallest first, then in order of arrival.

    Invariants
    - No task waits while a slot is free: a slot that is given back goes directly to the next task.
    - A cancelled wait keeps no slot. If its slot was granted in the same tick, the next task gets that slot.
    - The queue has at most one entry more than twice the number of waiting tasks. So the entries of cancelled waits do
      not accumulate, and each wait costs O(log n) without a search of the queue.

    Waits: for a slot that is given back or added.
    """

    def __init__(self, num_free: int) -> None:
        self._num_free = num_free
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap of (priority, order of arrival, granted); entries whose wait was cancelled are still in it."""
        self._arrivals = itertools.count()
        self._num_waiting = 0

    @asynccontextmanager
    async def hold_slot(self, priority: int) -> AsyncIterator[None]:
        """Inside, hold one slot."""
        await self.take_slot(priority)
        try:
            yield
        finally:
            self.add_slots(1)

    async def take_slot(self, priority: int) -> None:
        """Wait for a slot; `add(1)` gives it back."""
        if self._num_free:
            self._num_free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._arrivals), granted))
        self._num_waiting += 1
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self.add_slots(1)
            raise
        finally:
            self._num_waiting -= 1
            if len(self._queue) > 2 * self._num_waiting:  # the entries of cancelled waits outnumber the others
                self._queue = [entry for entry in self._queue if not entry[2].done()]
                heapq.heapify(self._queue)

    def add_slots(self, number: int) -> None:
        """Give back slots, or add new ones."""
        self._num_free += number
        while self._num_free and self._queue:
            *_, granted = heapq.heappop(self._queue)
            if not granted.done():
                granted.set_result(None)
                self._num_free -= 1

    def __len__(self) -> int:
        """The number of entries in the queue."""
        return len(self._queue)


UNOBSERVED_S = 5.0
"""Time within which other code may await a failed task; after that, the task's exception fails the node."""


class Pending:
    """What one node replica has pending on its host's loop; used only on that loop.

    `died(error)` is called for a task that ended with an exception nobody awaits, or by a cancel nobody requested.
    """

    def __init__(self, died: Callable[[BaseException], None]) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        """Tasks that have not ended."""
        self.timers: WeakSet[asyncio.TimerHandle] = WeakSet()
        self.calls: set[asyncio.Future[Any]] = set()
        """Futures of functions that run in a thread."""
        self.servers: WeakSet[Any] = WeakSet()
        self.readers: set[int] = set()
        """Descriptors that the node's code, or a library that it uses, watches with `add_reader`."""
        self.connected = False
        """Whether the node has ever opened a connection, or started a program, on this loop."""
        self._threads = frozenset(threading.enumerate())
        self._died = died
        self.context: Any = None
        """The node's context, which messages that its code makes report to."""

    @property
    def hears_others(self) -> bool:
        """Whether something that the loop does not see may wake the node's own futures: a connection that the node
        has opened, or a thread that was started since the node was made and is not the engine's."""
        new = [thread for thread in threading.enumerate() if thread not in self._threads]
        return self.connected or not all(_of_engine(thread) for thread in new)

    def adopt_task(self, task: asyncio.Task[Any]) -> None:
        """Make `task` belong to the node until it ends."""
        self.tasks.add(task)
        task.add_done_callback(self._task_ended)

    def called(self, call: asyncio.Future[Any]) -> None:
        """Record the future of a function that the node runs in a thread."""
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Everything that the current task starts inside belongs to the node; the task itself does not."""
        token, other = in_node.set(self), node_context.set(self.context)
        try:
            yield
        finally:
            in_node.reset(token)
            node_context.reset(other)

    def enter(self) -> None:
        """Make the current task, and everything it starts from now on, belong to the node."""
        in_node.set(self)
        node_context.set(self.context)
        task = asyncio.current_task()
        if task is not None and task not in self.tasks:
            self.adopt_task(task)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if task.cancelled():
            if not task.cancelling():
                self._died(ended_by_itself(asyncio.CancelledError(), task))
        elif isinstance(error := _unseen_exception(task), SystemExit | KeyboardInterrupt):
            self._died(ended_by_itself(error, task))
        elif error is not None:
            task.get_loop().call_later(UNOBSERVED_S, self._unless_observed, task)

    def _unless_observed(self, task: asyncio.Task[Any]) -> None:
        if (error := _unseen_exception(task)) is not None:
            task.exception()  # mark it as retrieved: it is reported here
            self._died(error if isinstance(error, Exception) else ended_by_itself(error, task))


def _unseen_exception(task: asyncio.Task[Any]) -> BaseException | None:
    """The task's exception, if nobody has retrieved it yet: asyncio logs such exceptions as never retrieved."""
    return task._exception if task._log_traceback else None


def _of_engine(thread: threading.Thread) -> bool:
    """Whether it is a thread of flowrl, or one of an executor whose calls the loop sees."""
    return thread.name.startswith(("flowrl-", "asyncio")) or "/" in thread.name  # a replica's own: "reward/0"


in_node: ContextVar[Pending | None] = ContextVar("flowrl_in_node", default=None)
"""The node whose code runs now; None for the engine's own code."""


@contextmanager
def apart() -> Iterator[None]:
    """Tasks that a library starts inside belong to no node.

    Use it for the permanent tasks of an engine that does only what a node requests and awaits: when they are idle,
    they must not make the node count as alive.
    """
    token = in_node.set(None)
    try:
        yield
    finally:
        in_node.reset(token)


class HostLoop(uvloop.Loop):
    """uvloop's loop (a round trip of small messages takes a sixth less time), plus a record of what each node owns.

    `in_node` names the node whose code runs. Everything that this code starts on the loop belongs to the same node:
    tasks, timers, calls in threads, servers, readable descriptors. This has two uses. The stall watch can distinguish a
    node that only another node can wake from a node that something of its own will wake (`pending`). And the failure of
    a task is reported if nobody retrieves its exception, or if the task ended by a cancel that nobody requested, by
    SystemExit or by KeyboardInterrupt.

    The loop does not see threads that the node starts itself, or child processes that no task waits for. Code that
    receives items from them declares it with `context.outside(...)`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._read_by: dict[int, Pending] = {}
        """Descriptor -> the node that waits for it to become readable."""

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(coro, name=name, context=context)
        owner = in_node.get() if context is None else context.get(in_node)
        if owner is not None:
            owner.adopt_task(task)
        return task

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer: asyncio.TimerHandle = super().call_later(delay, callback, *args, context=context)
        # uvloop returns a plain handle for a delay below a millisecond: that call is due at once
        if (owner := in_node.get()) is not None and hasattr(timer, "when"):
            owner.timers.add(timer)
        return timer

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        call: Any = super().run_in_executor(executor, func, *args)
        if (owner := in_node.get()) is not None:
            owner.called(call)
        return cast(asyncio.Future[Any], call)

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        return _note_connection(await super().create_connection(*args, **kwargs))

    async def create_unix_connection(self, *args: Any, **kwargs: Any) -> Any:
        return _note_connection(await super().create_unix_connection(*args, **kwargs))

    async def create_datagram_endpoint(self, *args: Any, **kwargs: Any) -> Any:
        return _note_connection(await super().create_datagram_endpoint(*args, **kwargs))

    async def connect_read_pipe(self, *args: Any, **kwargs: Any) -> Any:
        return _note_connection(await super().connect_read_pipe(*args, **kwargs))

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> Any:
        return _note_connection(await super().subprocess_exec(*args, **kwargs))

    async def subprocess_shell(self, *args: Any, **kwargs: Any) -> Any:
        return _note_connection(await super().subprocess_shell(*args, **kwargs))

    async def create_server(self, *args: Any, **kwargs: Any) -> Any:
        return _note_server(await super().create_server(*args, **kwargs))

    async def create_unix_server(self, *args: Any, **kwargs: Any) -> Any:
        return _note_server(await super().create_unix_server(*args, **kwargs))

    def add_reader(self, fileobj: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        super().add_reader(fileobj, callback, *args)
        if (owner := in_node.get()) is not None:
            self._read_by[_descriptor(fileobj)] = owner
            owner.readers.add(_descriptor(fileobj))

    def remove_reader(self, fileobj: Any) -> bool:  # type: ignore[override]
        if (owner := self._read_by.pop(_descriptor(fileobj), None)) is not None:
            owner.readers.discard(_descriptor(fileobj))
        return bool(super().remove_reader(fileobj))


class NodeLoop(asyncio.SelectorEventLoop):
    """As HostLoop, in Python, for a run in one process: what it waits for, and its time, can be replaced."""

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(coro, name=name, context=context)
        owner = in_node.get() if context is None else context.get(in_node)
        if owner is not None:
            owner.adopt_task(task)
        return task

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        if (owner := in_node.get()) is not None:
            owner.timers.add(timer)
        return timer

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        call: asyncio.Future[Any] = super().run_in_executor(executor, func, *args)
        if (owner := in_node.get()) is not None:
            owner.called(call)
        return call

    async def create_server(self, *args: Any, **kwargs: Any) -> Any:
        return _note_server(await super().create_server(*args, **kwargs))

    async def create_unix_server(self, *args: Any, **kwargs: Any) -> Any:
        return _note_server(await super().create_unix_server(*args, **kwargs))


def _note_server(server: Any) -> Any:
    if (owner := in_node.get()) is not None:
        owner.servers.add(server)
    return server


def _note_connection(connection: Any) -> Any:
    if (owner := in_node.get()) is not None:
        owner.connected = True
    return connection


def _descriptor(fileobj: Any) -> int:
    return fileobj if isinstance(fileobj, int) else int(fileobj.fileno())


def ended_by_itself(error: BaseException, task: asyncio.Task[Any] | None = None) -> Exception:
    """The Exception to report when the code of a node (in `task`) ended by `error`."""
    return as_exception("its code" if task is None else f"its task {task.get_name()}, {task.get_coro()!r},", error)


def as_failure(error: BaseException, *, cancelled: bool) -> BaseException:
    """The Exception to raise for `error`; `error` itself if it is an Exception, or follows from the engine's cancel.

    `cancelled`: the engine has cancelled the code, or a task that contains it.
    """
    if isinstance(error, Exception) or (cancelled and isinstance(error, asyncio.CancelledError | GeneratorExit)):
        return error
    if isinstance(error, BaseExceptionGroup) and (exceptions := error.subgroup(Exception)) is not None:
        return exceptions
    return ended_by_itself(error)


def is_cancelled() -> bool:
    """Whether the current task was cancelled, or the code is being discarded outside of any task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # the loop is not running any more
        task = None
    return task is None or bool(task.cancelling())


OUTSIDE = "outside"
"""The kind of a wait that something outside the graph ends."""


def _report_to_loop(error: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": str(error), "exception": error})


@dataclass(slots=True)
class Wait:
    """A wait in the engine that has started and not ended."""

    kind: str
    """item, credit, ticket, reply, lock, barrier, waiting (for what the node itself or the driver does) or outside."""
    what: str
    since_s: float
    task: asyncio.Task[Any] | None


@dataclass(eq=False)
class Activity:
    """One node replica's waits and counters; touched only on the host's event loop.

    Invariants
    - `working` counts the invocations that are inside user code and not in one of the engine's waits. An invocation
      with several concurrent waits (it sends two messages at once) counts as waiting while any of them lasts. A
      checkpoint waits until `working` is 0.
    - Each wait records the task that waits. `reasons_alive` judges the other tasks of the node.
    """

    node: str
    working: int = 0
    moves: int = 0
    """Increases with every event: an item taken, a message sent, a ticket received, a call returned."""
    waits: dict[int, Wait] = field(default_factory=dict)
    died: Callable[[BaseException], None] = _report_to_loop
    """Called when a task that the node started fails, and no code awaits it."""
    last_token: int = 0
    """The key of the newest wait."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()
        self.pending = Pending(lambda error: self.died(error))

    def begin(self) -> ActiveInvocation:
        """Begin an invocation, which enters user code."""
        self.count_working(+1)
        return ActiveInvocation(self)

    def count_working(self, change: int) -> None:
        self.working += change
        if self.working > 0:
            self._idle.clear()
        else:
            self._idle.set()

    def waiting(self, kind: str, what: str, *, inside: ActiveInvocation | None) -> ActiveWait:
        """Record a wait. `inside`: the invocation that the wait is part of; it does not count as working meanwhile."""
        return ActiveWait(self, kind, what, inside)

    async def idle(self) -> None:
        """Wait until no invocation is inside user code."""
        await self._idle.wait()


class ActiveWait:
    """One wait of an activity, as a `with` block.

    It is a class because a generator costs more, and each turn of an episode has a dozen waits.
    """

    __slots__ = ("_activity", "_inside", "_kind", "_token", "_what")

    def __init__(self, activity: Activity, kind: str, what: str, inside: ActiveInvocation | None) -> None:
        self._activity, self._kind, self._what, self._inside = activity, kind, what, inside

    def __enter__(self) -> None:
        activity = self._activity
        activity.last_token = self._token = activity.last_token + 1
        activity.waits[self._token] = Wait(self._kind, self._what, time.monotonic(), asyncio.current_task())
        if self._inside is not None:
            self._inside.count_wait(+1)

    def __exit__(self, *error: object) -> None:
        del self._activity.waits[self._token]
        self._activity.moves += 1
        if self._inside is not None:
            self._inside.count_wait(-1)


class ActiveInvocation:
    """One invocation of a node, shared by all tasks that work on it."""

    __slots__ = ("_activity", "_over", "_waits")

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._waits = 0
        self._over = False

    def count_wait(self, change: int) -> None:
        """Count a wait of the invocation that begins (+1) or has ended (-1)."""
        stood = self._waits > 0
        self._waits += change
        if not self._over and stood != (self._waits > 0):
            self._activity.count_working(1 if stood else -1)

    def end(self) -> None:
        """End the invocation, even if some of its waits still last. May be called more than once."""
        if not self._over:
            self._over = True
            if not self._waits:
                self._activity.count_working(-1)


in_invocation: ContextVar[ActiveInvocation | None] = ContextVar("flowrl_in_invocation", default=None)
"""The invocation that the current task works on."""


LOCKS = (asyncio.Lock.acquire.__code__, asyncio.Semaphore.acquire.__code__, PrioritySlots.take_slot.__code__)
INSIDE = (
    *(asyncio.Event.wait.__code__, asyncio.Condition.wait.__code__, asyncio.Condition.wait_for.__code__),
    *(asyncio.Queue.get.__code__, asyncio.Queue.put.__code__, asyncio.Queue.join.__code__),
)
FLOWRL = str(Path(__file__).parents[1])
"""flowrl's own nodes say what they wait for."""
GROUP = asyncio.TaskGroup.__aexit__.__code__
WAIT = asyncio.tasks._wait.__code__  # type: ignore[attr-defined]
WAIT_FOR = asyncio.wait_for.__code__
TOLD = 3
"""Number of reasons reported for one node, which may have a thousand tasks."""


def reasons_alive(activity: Activity, now_s: float) -> list[str]:
    """What will wake this node, as texts; empty if only another node can wake it. A deadlocked node has none.

    Each task of a node is judged separately. Every task counts as alive except these:
    - a task in one of the engine's waits: only another node, or the driver, ends that wait;
    - a task that waits for tasks of its own node (`await task`, gather, wait, wait_for, a TaskGroup): those tasks are
      judged separately;
    - a task that waits for an asyncio Lock or Semaphore, or for PrioritySlots: another task ends this wait;
    - a task whose own code, not a library's, waits for a future, an Event, a Condition or a Queue (`find_inside`), if
      the node has no connection and no thread that could end this wait: a task of the same node ends it, or the driver.
    A timer, a call in a thread, a server and a watched descriptor also keep their node alive. Anything unknown counts
    as alive: at worst a deadlock is reported as a standstill, and never a standstill as a deadlock.
    """
    pending = activity.pending
    found = [wait.what for wait in activity.waits.values() if wait.kind == OUTSIDE]
    if not (found or pending.tasks):
        return ["its code has not started"]
    waiting = {wait.task for wait in activity.waits.values()}
    for task in pending.tasks:
        future = task._fut_waiter  # type: ignore[attr-defined]
        if future is None or future.done():  # it resumes in this tick of the loop, or in the next
            found.append(place_of(task))
        elif task not in waiting and (pending.hears_others or not _waits_inside(task)):
            awaited = _awaited_tasks(task, future)
            if awaited is None or any(other not in pending.tasks for other in awaited):
                found.append(place_of(task))
    if any(not timer.cancelled() and timer.when() >= now_s for timer in pending.timers):
        found.append("a timer")
    if pending.calls:
        found.append("a call in a thread")
    if pending.readers or any(server.is_serving() for server in pending.servers):
        found.append("a connection")
    found = list(dict.fromkeys(found))
    return found if len(found) <= TOLD else [*found[:TOLD], f"{len(found) - TOLD} more"]


def find_inside(activity: Activity) -> list[str]:
    """The places where the node's own code waits for something that is the node's own, and has not said what."""
    waiting = {wait.task for wait in activity.waits.values()}
    return [place_of(task) for task in activity.pending.tasks if task not in waiting and _waits_inside(task)]


def _waits_inside(task: asyncio.Task[Any]) -> bool:
    """Whether a user's code awaits a plain future, or one of asyncio's that a task of the same loop ends."""
    frames = list(_frames_of(task))
    while frames and frames[-1].f_code in INSIDE:
        frames.pop()
    if not frames or _of_library(frames[-1]) or frames[-1].f_code.co_filename.startswith(FLOWRL):
        return False
    at: Any = task.get_coro()
    while (then := getattr(at, "cr_await", None) or getattr(at, "ag_await", None)) is not None:
        at = then
    return type(task._fut_waiter) is asyncio.Future and type(at).__name__ == "FutureIter"  # type: ignore[attr-defined]


def _awaited_tasks(task: asyncio.Task[Any], future: asyncio.Future[Any]) -> list[Any] | None:
    """The tasks that `task` waits for; [] for a lock; None if it waits for something else."""
    if isinstance(future, asyncio.Task):
        return [future]
    if isinstance(future, asyncio.tasks._GatheringFuture):  # type: ignore[attr-defined]
        return [child for child in future._children if not child.done()]
    frame = innermost_frame(task)
    if frame is None:
        return None
    if frame.f_code in LOCKS:
        return []
    if frame.f_code is GROUP:
        return list(frame.f_locals["self"]._tasks)
    if frame.f_code is WAIT:
        return [one for one in frame.f_locals["fs"] if not one.done()]
    return [frame.f_locals["fut"]] if frame.f_code is WAIT_FOR else None


def innermost_frame(task: asyncio.Task[Any]) -> FrameType | None:
    """The innermost frame of `task` that can be found."""
    return next(reversed(list(_frames_of(task))), None)


def _frames_of(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames of `task`, outermost first: of coroutines and of the async generators that they iterate."""
    at: Any = task.get_coro()
    while at is not None:
        if type(at).__name__.startswith("async_generator_"):  # an `anext`, which refers to its generator
            at = next((one for one in gc.get_referents(at) if isinstance(one, AsyncGeneratorType)), None)
        frame = getattr(at, "cr_frame", None) or getattr(at, "ag_frame", None)
        if frame is None:
            return
        yield frame
        at = getattr(at, "cr_await", None) or getattr(at, "ag_await", None)


def place_of(task: asyncio.Task[Any]) -> str:
    """ "Judge.ask (judge.py:21)": the innermost place of `task` outside of libraries, else the innermost place."""
    frames = list(_frames_of(task))
    if not frames:
        return task.get_name()
    frame = ([frame for frame in frames if not _of_library(frame)] or frames)[-1]
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"


def _of_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return "/site-packages/" in name or "/asyncio/" in name


class Lease:
    """One host's side of a lease on shared devices: the host works only while it holds the lease of its cores or GPUs.

    Without a name, invocations begin without waiting.

    The first invocation that begins in a host takes the lease, and the last one that ends releases it. Other hosts that
    share the lease wait at the beginning of their invocations. Nodes with state on the device move it in `on_acquire`
    and `on_release`. Set-up on GPUs also happens under the lease: the hosts load one after the other, and each leaves
    the device before the next one loads.

    Invariants
    - An invocation works only between the end of every node's `on_acquire` and the beginning of the next `on_release`.
    - No hook is ever interrupted: an invocation that is cancelled during a hook ends after the hook. An invocation that
      is cancelled while it waits for the driver leaves the queue.
    - After any cancellation, the lease is released when no invocation is open. It is never released unless it is held.
    - When a hook fails, every later invocation here fails, and the lease is released: no host waits for a broken one.

    Waits: for the holder's last open invocation to end.
    """

    def __init__(self, name: str, host: str, link: Endpoint) -> None:
        self._body: dict[str, Any] = {"name": name, "claimant": host, "party": host.split("/")[0]}
        self.name = name
        self.nodes: Sequence[Node] = ()
        self._link = link
        self._claims = itertools.count(1)
        self._num_invocations = 0
        """Number of invocations that are open, or wait to begin."""
        self._held = False
        self._change: asyncio.Task[None] | None = None
        """The task that takes or releases the lease, while one runs."""
        self._asking: asyncio.Future[Any] | None = None
        self._failed: Exception | None = None

    @asynccontextmanager
    async def setting_up(self, nodes: Sequence[Node], *, on_devices: bool) -> AsyncIterator[None]:
        """Inside, the nodes of this host are set up; with `on_devices`, under the lease.

        The nodes' hooks are not called before the end of the block: until then, the nodes have nothing to move.
        """
        if on_devices:
            await self.begin()
        try:
            yield
            self.nodes = nodes
        finally:
            if on_devices:
                await self.end()

    async def begin(self) -> None:
        """Begin an invocation; returns when this host holds the devices. Raises FlowrlError if a hook failed."""
        if not self.name:
            return
        self._num_invocations += 1
        try:
            while not self._held or self._change is not None:
                await self._wait_for_change()
        except (Exception, asyncio.CancelledError):  # whatever a hook raised, the invocation has not begun
            await self.end()
            raise

    async def end(self) -> None:
        """End an invocation. A cancel is raised only after the change of the lease that it would interrupt."""
        if not self.name:
            return
        self._num_invocations -= 1
        cancel: asyncio.CancelledError | None = None
        while not self._num_invocations and (self._held or self._change is not None):
            if self._asking is not None:
                self._asking.cancel()
            try:
                await self._wait_for_change()
            except asyncio.CancelledError as error:
                cancel = error
        if cancel is not None:
            raise cancel

    async def _wait_for_change(self) -> None:
        """Wait for the running change, or start the next one. Cancelling this wait does not stop the change."""
        if self._failed is not None:
            raise self._failed
        if self._change is None:
            self._change = asyncio.get_running_loop().create_task(self._change_hands())
        change = self._change
        await asyncio.wait((change,))
        change.result()

    async def _change_hands(self) -> None:
        try:
            await (self._give_back() if self._held else self._take_lease())
        except Exception as error:  # the hooks are user code; every later request for the lease raises it too
            self._failed = error
            raise
        finally:
            self._change = None

    async def _take_lease(self) -> None:
        self._body["claim"] = next(self._claims)
        try:
            if await self._request_lock() and self._num_invocations:
                for node in self.nodes:
                    await _run_hook(node, "on_acquire", node.on_acquire)
                self._held = True
        finally:
            if not self._held:
                self._release_lock()  # also after a cancel: the driver may have granted the lock already

    async def _request_lock(self) -> bool:
        """Request the lock from the driver; False if no invocation here needs it any more."""
        asking = self._asking = asyncio.ensure_future(self._link.request("driver", "lock", dict(self._body)))
        await asyncio.wait((asking,))
        self._asking = None
        if asking.cancelled():
            return False
        asking.result()
        return True

    async def _give_back(self) -> None:
        try:
            for node in self.nodes:
                await _run_hook(node, "on_release", node.on_release)
        finally:
            self._held = False
            self._release_lock()

    def _release_lock(self) -> None:
        """Tell the driver, without waiting, that the claim of `_take_lease` is over. It need not have been granted."""
        self._link.notify("driver", "unlock", dict(self._body))


async def _run_hook(node: Node, name: str, hook: Callable[[], Awaitable[None]]) -> None:
    """Run a hook; every failure names the node. A node boundary."""
    try:
        await hook()
    except GeneratorExit:  # the event loop is closed
        raise
    except BaseException as error:  # the boundary to the node's hook, which may raise anything
        if is_cancel(error):  # a cancel of everything here: the loop ends
            raise
        told = "".join(traceback.format_exception(error))
        where = f"{node.name}/{node.context.replica}"
        raise FlowrlError(f"`{name}` of {where} raised {type(error).__name__}: {error}\n{told.rstrip()}") from error

"""The event loop of a host. It records what is pending for each node.

`in_node` names the node whose code runs. Everything that this code starts on the loop belongs to the same node: tasks,
timers, calls in threads, servers, readable descriptors. This has two uses. The stall watch can distinguish a node that
only another node can wake from a node that something of its own will wake (`pending`). And the failure of a task is
reported if nobody retrieves its exception, or if the task ended by a cancel that nobody requested, by SystemExit or by
KeyboardInterrupt.

The loop does not see threads that the node starts itself, or child processes that no task waits for. Code that
receives items from them declares it with `context.outside(...)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast
from weakref import WeakSet

import uvloop

from flowrl.runtime.activity.ending import ended_by_itself

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
        self._died = died

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Make `task` belong to the node until it ends."""
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def called(self, call: asyncio.Future[Any]) -> None:
        """Record the future of a function that the node runs in a thread."""
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Everything that the current task starts inside belongs to the node; the task itself does not."""
        token = in_node.set(self)
        try:
            yield
        finally:
            in_node.reset(token)

    def enter(self) -> None:
        """Make the current task, and everything it starts from now on, belong to the node."""
        in_node.set(self)
        task = asyncio.current_task()
        if task is not None and task not in self.tasks:
            self.adopt(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if task.cancelled():
            if not task.cancelling():
                self._died(ended_by_itself(asyncio.CancelledError(), task))
        elif isinstance(error := _raised(task), SystemExit | KeyboardInterrupt):
            self._died(ended_by_itself(error, task))
        elif error is not None:
            task.get_loop().call_later(UNOBSERVED_S, self._unless_observed, task)

    def _unless_observed(self, task: asyncio.Task[Any]) -> None:
        if (error := _raised(task)) is not None:
            task.exception()  # mark it as retrieved: it is reported here
            self._died(error if isinstance(error, Exception) else ended_by_itself(error, task))


def _raised(task: asyncio.Task[Any]) -> BaseException | None:
    """The task's exception, if nobody has retrieved it yet: asyncio logs such exceptions as never retrieved."""
    return task._exception if task._log_traceback else None


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
    """uvloop's loop (a round trip of small messages takes a sixth less time), plus a record of what each node owns."""

    def __init__(self) -> None:
        super().__init__()
        self._read_by: dict[int, Pending] = {}
        """Descriptor -> the node that waits for it to become readable."""

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(coro, name=name, context=context)
        owner = in_node.get() if context is None else context.get(in_node)
        if owner is not None:
            owner.adopt(task)
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

    async def create_server(self, *args: Any, **kwargs: Any) -> Any:
        return _serving(await super().create_server(*args, **kwargs))

    async def create_unix_server(self, *args: Any, **kwargs: Any) -> Any:
        return _serving(await super().create_unix_server(*args, **kwargs))

    def add_reader(self, fileobj: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        super().add_reader(fileobj, callback, *args)
        if (owner := in_node.get()) is not None:
            self._read_by[_descriptor(fileobj)] = owner
            owner.readers.add(_descriptor(fileobj))

    def remove_reader(self, fileobj: Any) -> bool:  # type: ignore[override]
        if (owner := self._read_by.pop(_descriptor(fileobj), None)) is not None:
            owner.readers.discard(_descriptor(fileobj))
        return bool(super().remove_reader(fileobj))


def _serving(server: Any) -> Any:
    if (owner := in_node.get()) is not None:
        owner.servers.add(server)
    return server


def _descriptor(fileobj: Any) -> int:
    return fileobj if isinstance(fileobj, int) else int(fileobj.fileno())

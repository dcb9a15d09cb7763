"""The event loop of a host, which knows what is pending in the name of which node.

`in_node` says whose code runs. What that code starts on the loop belongs to the same node: tasks, timers, calls in
threads, servers, readable descriptors. Two things follow. The stall watch can tell a node that only another node can
move from one that something of its own will move (`pending`). And a task that ends in any way other
than by returning is told, whoever waits for it.

Not seen: a thread that the node starts itself, and child processes that no task waits for. Code that hands items over
from there says so with `context.outside(...)`.
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
"""Time that a failed task has to be awaited by other code; after it, the task's exception fails the node."""


class Pending:
    """What one node replica has under way on its host's loop; touched only there.

    `died(error)` is told of a task that ended with an exception nobody awaits, or by a cancellation nobody asked for.
    """

    def __init__(self, died: Callable[[BaseException], None]) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.timers: WeakSet[asyncio.TimerHandle] = WeakSet()
        self.calls: set[asyncio.Future[Any]] = set()
        """Of functions that run in a thread."""
        self.servers: WeakSet[Any] = WeakSet()
        self.readers: set[int] = set()
        self._died = died

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def called(self, call: asyncio.Future[Any]) -> None:
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)

    @contextmanager
    def named(self) -> Iterator[None]:
        """What the present task starts inside belongs to the node; the task itself does not."""
        token = in_node.set(self)
        try:
            yield
        finally:
            in_node.reset(token)

    def enter(self) -> None:
        """The present task, and all that it starts from now on, belong to the node."""
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
            task.exception()  # it is told now
            self._died(error if isinstance(error, Exception) else ended_by_itself(error, task))


def _raised(task: asyncio.Task[Any]) -> BaseException | None:
    """What it raised, if nobody has asked for it yet: asyncio logs such an exception as never retrieved."""
    return task._exception if task._log_traceback else None


in_node: ContextVar[Pending | None] = ContextVar("flowrl_in_node", default=None)
"""The node in whose name the present code runs; None for the engine's own."""


@contextmanager
def apart() -> Iterator[None]:
    """Tasks that a library starts inside belong to no node.

    For the standing tasks of an engine that moves only what a node asks of it and awaits: idle, they are no reason to
    take the node for alive.
    """
    token = in_node.set(None)
    try:
        yield
    finally:
        in_node.reset(token)


class HostLoop(uvloop.Loop):
    """uvloop's loop (a round trip of small messages takes a sixth less on it), with each node's belongings listed."""

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
        if (owner := in_node.get()) is not None:
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

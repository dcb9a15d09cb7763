"""Invocations: the pieces of work that user code gets from an In port, one after the other, from begin to end.

Invariants
- Taking, beginning and finishing may be cancelled at any point (`asyncio.timeout` around the next item): nothing is
  lost, and the next call continues where the cancelled one stopped.
- Every piece of work (an item, a joined sample, a group) begins under the lease of its host's devices, and counts as
  working until user code asks for the next one.

Waits: for the port's next piece of work, for the lease, and at the end until tombstones for the work are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from flowrl.runtime.activity.activity import ActiveInvocation, Activity, in_invocation
from flowrl.runtime.activity.lease import Lease
from flowrl.runtime.ports.items import Item, at_hand, current


class Trace(Protocol):
    """Records when invocations begin and end."""

    def trace_invocation(self, item: Item, *, begins: bool) -> None: ...


class Invocation:
    """One piece of work: user code gets `value`, which is made from `items`.

    With `whole`, the engine ends the invocation: messages that the body's task sends after `enter` are made from
    `whole` and the other items of its sample, and the engine calls `end` when the body is done. Without `whole`, the
    items are held. The methods are called in the order below; those that wait may be called again after a cancellation.
    """

    def __init__(
        self,
        value: Any,
        items: list[Item],
        *,
        lease: Lease,
        activity: Activity,
        trace: Trace,
        whole: Item | None = None,
        end: Callable[[Item], Awaitable[None]] | None = None,
    ) -> None:
        self.value = value
        self._items = items
        self._whole = whole
        self._end = end
        self._lease = lease
        self._activity = activity
        self._trace = trace
        self._active: ActiveInvocation | None = None
        self._leased = False

    async def begin(self) -> None:
        """Wait for the devices."""
        if self._lease.name and not self._leased:
            with self._activity.waiting("lock", self._lease.name, inside=None):
                await self._lease.begin()
            self._leased = True
        if self._active is None:
            for item in self._items:
                self._trace.trace_invocation(item, begins=True)
            self._active = self._activity.begin()

    def enter(self) -> None:
        """Mark this task as working on the items from now on."""
        current.set(self._whole.whole if self._whole is not None else ())
        in_invocation.set(self._active)
        at_hand.set(self._items[0].envelope.ticket)

    def leave(self) -> None:
        """The body is done with the work. Call it once."""
        current.set(())
        in_invocation.set(None)
        at_hand.set(-1)
        assert self._active is not None
        self._active.end()
        for item in self._items:
            self._trace.trace_invocation(item, begins=False)

    async def finish(self) -> None:
        """End the items if the engine ends them, and release the devices."""
        if self._whole is not None and self._end is not None:
            await self._end(self._whole)
            self._whole = None
        if self._leased:
            self._leased = False
            await self._lease.end()

    def abandon(self) -> None:
        """User code left the loop during the work: its items stay unfinished."""
        if self._active is not None:
            self._active.end()
        if self._leased:
            self._leased = False
            task = asyncio.get_running_loop().create_task(self._lease.end())
            _ending.add(task)
            task.add_done_callback(_ending.discard)


_ending: set[asyncio.Task[None]] = set()
"""Tasks that release the leases of abandoned invocations; the event loop itself holds tasks only weakly."""


class Invocations:
    """Iterates over the pieces of work that `pull` returns; `pull` returns None at the end of the stream."""

    def __init__(
        self, pull: Callable[[], Awaitable[Invocation | None]], close: Callable[[], None] = lambda: None
    ) -> None:
        self._pull = pull
        self._close = close
        self._next: Invocation | None = None
        self._given: Invocation | None = None
        self._left = False
        """Whether `leave` was called on `_given`, and `finish` has not completed."""

    def __aiter__(self) -> Invocations:
        return self

    async def __anext__(self) -> Any:
        await self._finish()
        if self._next is None:
            self._next = await self._pull()
        if self._next is None:
            self._close()
            raise StopAsyncIteration
        await self._next.begin()
        self._given, self._next = self._next, None
        self._given.enter()
        return self._given.value

    async def _finish(self) -> None:
        if self._given is None:
            return
        if not self._left:
            self._left = True
            self._given.leave()
        await self._given.finish()
        self._given, self._left = None, False

    def __del__(self) -> None:
        """Abandon the current work: user code left its loop by `break` or by an exception."""
        if self._given is not None and not self._left:
            self._given.abandon()
        self._close()

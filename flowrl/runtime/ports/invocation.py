"""Invocations: what user code gets of an In port, one piece of work after the other, from its begin to its end.

Invariants
- Taking, beginning and finishing may be cancelled at any point (`asyncio.timeout` around the next item): nothing is
  lost, and the next call goes on where the cancelled one stood.
- Whatever the piece of work is (an item, a joined sample, a group), it is begun under the lease of its host's
  devices and counts as working until the next one is asked for.

Waits: for the port's next piece of work, for the lease, and at the end for the news of it to leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from flowrl.runtime.activity.activity import ActiveInvocation, Activity, in_invocation
from flowrl.runtime.activity.lease import Lease
from flowrl.runtime.ports.items import Item, at_hand, current


class Trace(Protocol):
    """Who is told of begins and ends."""

    def flow(self, item: Item, *, begins: bool) -> None: ...


class Invocation:
    """One piece of work: `value` is what user code gets, `items` what it is made of.

    With `whole` the engine ends it: what follows in the task of the body is made from that item and the others of its
    sample, and `end` is called when the body has let go. Otherwise the items are on hold. The methods are called in
    their order; those that wait may be called again after a cancellation.
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
                self._trace.flow(item, begins=True)
            self._active = self._activity.begin()

    def enter(self) -> None:
        """What follows in this task is the work."""
        current.set(self._whole.whole if self._whole is not None else ())
        in_invocation.set(self._active)
        at_hand.set(self._items[0].envelope.ticket)

    def leave(self) -> None:
        """The body has let go. Once."""
        current.set(())
        in_invocation.set(None)
        at_hand.set(-1)
        assert self._active is not None
        self._active.end()
        for item in self._items:
            self._trace.flow(item, begins=False)

    async def finish(self) -> None:
        """End what the engine ends, and give the devices back."""
        if self._whole is not None and self._end is not None:
            await self._end(self._whole)
            self._whole = None
        if self._leased:
            self._leased = False
            await self._lease.end()

    def abandon(self) -> None:
        """The body was left inside the work: its items stay unfinished."""
        if self._active is not None:
            self._active.end()
        if self._leased:
            self._leased = False
            task = asyncio.get_running_loop().create_task(self._lease.end())
            _ending.add(task)
            task.add_done_callback(_ending.discard)


_ending: set[asyncio.Task[None]] = set()
"""Leases that abandoned invocations give back; the loop itself keeps tasks by weak references only."""


class Invocations:
    """The pieces of work that `pull` brings, one after the other; it gives None at the end of the stream."""

    def __init__(
        self, pull: Callable[[], Awaitable[Invocation | None]], close: Callable[[], None] = lambda: None
    ) -> None:
        self._pull = pull
        self._close = close
        self._next: Invocation | None = None
        self._given: Invocation | None = None
        self._left = False
        """`_given` has been left, and is not finished yet."""

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
        """A loop that was left by `break`, or by an exception, lets go of this object."""
        if self._given is not None and not self._left:
            self._given.abandon()
        self._close()

"""Leases on shared devices: a host works only while it holds the lease of its cores or GPUs.

The first invocation that begins in a host takes the lease, and the last one that ends releases it. Other hosts that
share the lease wait at the beginning of their invocations. Nodes with state on the device move it in `on_acquire` and
`on_release`. Set-up on GPUs also happens under the lease: the hosts load one after the other, and each leaves the
device before the next one loads.

Invariants
- An invocation works only between the end of every node's `on_acquire` and the beginning of the next `on_release`.
- No hook is ever interrupted: an invocation that is cancelled during a hook ends after the hook. An invocation that
  is cancelled while it waits for the driver leaves the queue.
- After any cancellation, the lease is released when no invocation is open. It is never released unless it is held.
- When a hook fails, every later invocation here fails, and the lease is released: no host waits for a broken one.

Waits: for the holder's last open invocation to end.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from flowrl.channel.control import is_cancel
from flowrl.errors import FlowrlError
from flowrl.graph.node import Node


class LockLink(Protocol):
    """The control link to the driver, which keeps the locks."""

    async def request(self, host: str, kind: str, body: dict[str, Any]) -> Any: ...
    def notify(self, host: str, kind: str, body: dict[str, Any]) -> None: ...


class Lease:
    """One host's side of a lease. Without a name, invocations begin without waiting."""

    def __init__(self, name: str, host: str, link: LockLink) -> None:
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
                await self._changed()
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
                await self._changed()
            except asyncio.CancelledError as error:
                cancel = error
        if cancel is not None:
            raise cancel

    async def _changed(self) -> None:
        """Wait for the running change, or start the next one. Cancelling this wait does not stop the change."""
        if self._failed is not None:
            raise self._failed
        if self._change is None:
            self._change = asyncio.get_running_loop().create_task(self._move())
        change = self._change
        await asyncio.wait((change,))
        change.result()

    async def _move(self) -> None:
        try:
            await (self._give_back() if self._held else self._take())
        except Exception as error:  # the hooks are user code; every later request for the lease raises it too
            self._failed = error
            raise
        finally:
            self._change = None

    async def _take(self) -> None:
        self._body["claim"] = next(self._claims)
        try:
            if await self._granted() and self._num_invocations:
                for node in self.nodes:
                    await _hook(node, "on_acquire", node.on_acquire)
                self._held = True
        finally:
            if not self._held:
                self._unlock()  # also after a cancel: the driver may have granted the lock already

    async def _granted(self) -> bool:
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
                await _hook(node, "on_release", node.on_release)
        finally:
            self._held = False
            self._unlock()

    def _unlock(self) -> None:
        """Tell the driver, without waiting, that the claim of `_take` is over. It need not have been granted."""
        self._link.notify("driver", "unlock", dict(self._body))


async def _hook(node: Node, name: str, hook: Callable[[], Awaitable[None]]) -> None:
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

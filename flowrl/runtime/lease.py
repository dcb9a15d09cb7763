"""Turns on shared devices: a host works only while it holds the lease of its cores or GPUs.

The first turn that begins in a host acquires the lease, the last one that ends gives it back; other
hosts of the same lease wait at the beginning of their turns. Nodes that keep state on the device move
it in `on_acquire` and `on_release`. Waits: for the holder's last open turn to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from flowrl.graph.node import Node


class Link(Protocol):
    """The control link to the driver, where the turns are kept."""

    async def request(self, host: str, kind: str, body: dict[str, Any]) -> Any: ...
    def notify(self, host: str, kind: str, body: dict[str, Any]) -> None: ...


class Lease:
    """One host's share in a lease. Without a name every turn is free."""

    def __init__(self, name: str, host: str, link: Link) -> None:
        self._body = {"name": name, "node": host, "party": host.split("/")[0]}
        self.name = name
        self._link = link
        self._turns = 0
        self._change = asyncio.Lock()
        self.nodes: Sequence[Node] = ()

    async def begin(self) -> None:
        """A turn wants to begin; returns when the devices are this host's."""
        if not self.name:
            return
        async with self._change:
            if self._turns == 0:
                await self._link.request("driver", "turn", self._body)
                for node in self.nodes:
                    await node.on_acquire()
            self._turns += 1

    async def end(self) -> None:
        """A turn has ended."""
        if not self.name:
            return
        async with self._change:
            self._turns -= 1
            if self._turns == 0:
                for node in self.nodes:
                    await node.on_release()
                self._link.notify("driver", "turn_over", self._body)

"""Run-wide turns and the batch-end barrier, kept in the driver.

Waits: a turn ends with `over` of the holder, or its death; a barrier when every trainer has arrived and
the checkpoint that is due there is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class Turns:
    """Named turns, first come first served.

    A turn has one holder, or several hosts of one `party`: the ranks of a gang work in lockstep, so they
    hold a turn together or wait for ever.
    """

    def __init__(self) -> None:
        self._holders: dict[str, tuple[str, list[str]]] = {}
        """Turn -> (party, its nodes that hold it)."""
        self._queues: dict[str, list[tuple[str, str, asyncio.Future[None]]]] = {}

    async def take(self, host: str, body: dict[str, Any]) -> None:
        name, node = body["name"], body["node"]
        party = body.get("party", node)
        if self._joins(name, party, node):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (party, node, waiter)
        self._queues.setdefault(name, []).append(entry)
        try:
            await waiter
        except asyncio.CancelledError:
            if entry in self._queues[name]:
                self._queues[name].remove(entry)
            else:
                self.over(host, body)
            raise

    def over(self, host: str, body: dict[str, Any]) -> None:
        name, node = body["name"], body["node"]
        _, nodes = self._holders.get(name, ("", []))
        if node not in nodes:
            return
        nodes.remove(node)
        if not nodes:
            del self._holders[name]
            self._call_next(name)

    def _joins(self, name: str, party: str, node: str) -> bool:
        holder, nodes = self._holders.setdefault(name, (party, []))
        if holder == party:
            nodes.append(node)
        return holder == party

    def _call_next(self, name: str) -> None:
        """The first in the queue, and everybody of its party."""
        queue = self._queues.get(name, [])
        if not queue:
            return
        first = queue[0][0]
        called = [entry for entry in queue if entry[0] == first]
        self._queues[name] = [entry for entry in queue if entry[0] != first]
        for party, node, waiter in called:
            self._joins(name, party, node)
            waiter.set_result(None)


class BatchEnd:
    """Where trainers stand at a batch's end while a checkpoint is written.

    `due(version)` says whether one is; `write(version)` is called once, when all `size` replicas stand.
    """

    def __init__(self, size: int, due: Callable[[int], bool], write: Callable[[int], Awaitable[None]]) -> None:
        self._size = size
        self._due = due
        self._write = write
        self._arrived: dict[int, int] = {}
        self._open: dict[int, asyncio.Event] = {}

    async def arrive(self, host: str, body: dict[str, Any]) -> None:
        version = int(body["version"])
        if not self._due(version):
            return
        opened = self._open.setdefault(version, asyncio.Event())
        self._arrived[version] = self._arrived.get(version, 0) + 1
        if self._arrived[version] < self._size:
            await opened.wait()
            return
        try:
            await self._write(version)
        finally:
            opened.set()

"""Run-wide turns and the batch-end barrier, kept in the driver.

Waits: a turn ends with `over` of the holder, or its death; a barrier when every trainer has arrived and
the checkpoint that is due there is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class Turns:
    """Named turns, one holder each, first come first served."""

    def __init__(self) -> None:
        self._holder: dict[str, str] = {}
        self._queues: dict[str, list[tuple[str, asyncio.Future[None]]]] = {}

    async def take(self, host: str, body: dict[str, Any]) -> None:
        name, node = body["name"], body["node"]
        if name not in self._holder:
            self._holder[name] = node
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (node, waiter)
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
        name = body["name"]
        if self._holder.get(name) != body["node"]:
            return
        del self._holder[name]
        queue = self._queues.get(name, [])
        if queue:
            node, waiter = queue.pop(0)
            self._holder[name] = node
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

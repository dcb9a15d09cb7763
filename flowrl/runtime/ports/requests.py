"""The live sides of Call and Serve: request and reply between node replicas.

The caller's item stays unfinished until the reply, because its invocation waits here. When the caller cancels a
request, the server cancels its body; when the server dies, the request fails. A body that ends in any other way than
by returning or by raising SampleFailed fails the server.
Waits: a call waits for a free slot of the edge and for its reply; a server waits until every caller has closed.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from flowrl.channel.control import as_exception, is_cancel
from flowrl.channel.endpoint import Endpoint
from flowrl.errors import LaneFailed, SampleFailed
from flowrl.graph.analysis.plan import CallPlan
from flowrl.messages import Message
from flowrl.runtime.activity.activity import Activity, in_invocation
from flowrl.runtime.activity.lease import Lease


class LiveCall:
    """One Call port of one replica; `ways` lead to the replicas that serve it."""

    def __init__(
        self, port: str, ways: Sequence[CallPlan], caller: str, endpoint: Endpoint, activity: Activity
    ) -> None:
        self.port = port
        self._ways = tuple(ways)
        self._caller = caller
        self._endpoint = endpoint
        self._activity = activity
        self._slots = [asyncio.Semaphore(way.capacity) for way in ways]
        self._outstanding = [0] * len(ways)

    async def call(self, request: Message, *, session: str, priority: int, timeout_s: float | None) -> Any:
        index = self._choose(session)
        way = self._ways[index]
        self._outstanding[index] += 1
        try:
            with self._activity.waiting("reply", self.port, inside=in_invocation.get()):
                async with asyncio.timeout(timeout_s), self._slots[index]:
                    reply = await self._endpoint.request(
                        way.server_host, f"call:{way.server}:{way.edge}", {"request": request, "priority": priority}
                    )
        finally:
            self._outstanding[index] -= 1
        if "failed" in reply:
            raise SampleFailed(reply["failed"])
        return reply["reply"]

    def _choose(self, session: str) -> int:
        if session and self._ways[0].session_affinity:
            return zlib.crc32(session.encode()) % len(self._ways)
        return min(range(len(self._ways)), key=self._outstanding.__getitem__)

    def close(self) -> None:
        for way in self._ways:
            self._endpoint.notify(way.server_host, f"callers:{way.server}:{way.edge}", {"closed": self._caller})


class LiveServe:
    """One Serve port of one replica; `ways` come from the replicas that may call it."""

    def __init__(
        self, port: str, ways: Sequence[CallPlan], endpoint: Endpoint, activity: Activity, lease: Lease
    ) -> None:
        self._body: asyncio.Future[Callable[[Any], Awaitable[Message]]] = asyncio.get_running_loop().create_future()
        self._slots = asyncio.Semaphore(1)
        self._callers = {way.caller for way in ways}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._port = port
        self._activity = activity
        self._lease = lease
        for way in ways:
            endpoint.on(f"call:{way.server}:{way.edge}", self._answer)
            endpoint.on(f"callers:{way.server}:{way.edge}", self._closed)
        if not ways:
            self._ended.set_result(None)

    async def serve(self, body: Callable[[Any], Awaitable[Message]], concurrency: int) -> None:
        self._slots = asyncio.Semaphore(concurrency)
        self._body.set_result(body)
        with self._activity.waiting("item", self._port, inside=None):
            await self._ended

    async def _answer(self, host: str, message: dict[str, Any]) -> dict[str, Any]:
        body = await asyncio.shield(self._body)  # shared by all requests: cancelling one of them must not cancel it
        async with self._slots:
            try:
                return await self._work(body, message["request"])
            except SampleFailed as failure:
                return {"failed": str(failure)}
            except GeneratorExit:  # the event loop is closed
                raise
            except BaseException as error:  # a node boundary: the server fails, and so does the run
                if is_cancel(error):
                    raise
                if not self._ended.done():
                    self._ended.set_exception(as_exception(f"a request to {self._port}", error))
                raise LaneFailed(f"{self._port} failed") from error

    async def _work(self, body: Callable[[Any], Awaitable[Message]], request: Any) -> dict[str, Any]:
        await self._lease.begin()
        invocation = self._activity.begin()
        in_invocation.set(invocation)
        try:
            return {"reply": await body(request)}
        finally:
            invocation.end()
            await self._lease.end()

    def _closed(self, host: str, message: dict[str, Any]) -> None:
        self._callers.discard(message["closed"])
        if not self._callers and not self._ended.done():
            self._ended.set_result(None)

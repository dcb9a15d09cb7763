"""The live sides of Call and Serve: request and reply between node replicas.

The caller's item stays unfinished until the reply, because its invocation waits here. When the caller cancels a
request, the server cancels its body; when the server dies, the request fails.

A body that raises OutOfService takes its replica out of service: the request, and all later ones, go to the other
replicas. The death of the replica's process has the same effect if the run continues without that process
(`Endpoint.peer_left`). A body that ends in any way other than by returning, or by raising OutOfService or SampleFailed,
fails the server.

Requests wait in order of priority, the smallest number first, then in order of arrival: at the caller for a place on
the edge, and at the server for one of its `concurrency` places. Every reply tells the caller how many requests the
other callers have open at the server, waiting or running; `sessions` uses this to choose the server of a request.
Waits: a call waits for a place on the edge and for its reply; a server waits until every caller has closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from flowrl.channel.control import as_exception, is_cancel
from flowrl.channel.endpoint import Endpoint
from flowrl.errors import LaneFailed, OutOfService, SampleFailed
from flowrl.graph.analysis.plan import CallPlan
from flowrl.messages import Message
from flowrl.runtime.activity.activity import Activity, in_invocation
from flowrl.runtime.activity.lease import Lease
from flowrl.runtime.activity.slots import PrioritySlots
from flowrl.runtime.ports.sessions import SessionRouter

Body = Callable[[Any], Awaitable[Message]]
Meter = Callable[[str, float], None]


class LiveCall:
    """One Call port of one replica; `calls` (at least one) lead to the replicas that serve it.

    `count` adds to the counter `requests_moved`: requests whose session was on another replica before.
    `answered(server, request, reply)` is called for each reply.
    """

    def __init__(
        self,
        port: str,
        calls: Sequence[CallPlan],
        endpoint: Endpoint,
        activity: Activity,
        count: Meter,
        answered: Callable[[str, Any, Any], None] = lambda *answer: None,
    ) -> None:
        self.port = port
        self._calls = tuple(calls)
        self._endpoint = endpoint
        self._activity = activity
        self._count = count
        self._answered = answered
        self._slots = [PrioritySlots(call.capacity) for call in calls]
        self._router = SessionRouter(len(calls), margin=calls[0].affinity_margin, caller=calls[0].caller)

    async def call(self, request: Message, *, session: str, group: str, priority: int, timeout_s: float | None) -> Any:
        with self._activity.waiting("reply", self.port, inside=in_invocation.get()):
            async with asyncio.timeout(timeout_s):
                while "out_of_service" in (reply := await self._ask_one(request, session, group, priority)):
                    if not self._router.num_in_service:
                        raise OutOfService(f"{self.port} has no replica left to ask: {reply['out_of_service']}")
        if "failed" in reply:
            raise SampleFailed(reply["failed"])
        return reply["reply"]

    async def _ask_one(self, request: Message, session: str, group: str, priority: int) -> Any:
        """Ask the replica that the router chooses. Returns its answer."""
        choice = self._router.begin(session, group)
        others = None
        try:
            if choice.moved:
                self._count("requests_moved", 1)
            async with self._slots[choice.replica].held(priority):
                reply = await self._ask(self._calls[choice.replica], request, priority)
            others = reply["others"]
        finally:
            self._router.end(choice.replica, others)
        if "out_of_service" in reply:
            self._router.leave(choice.replica)
        elif "reply" in reply:
            self._answered(self._calls[choice.replica].server, request, reply["reply"])
        return reply

    async def _ask(self, call: CallPlan, request: Message, priority: int) -> Any:
        body = {"request": request, "priority": priority, "call": call.name}
        try:
            return await self._endpoint.request(call.server_host, f"call:{call.server}:{call.edge}", body)
        except LaneFailed as failed:
            if not self._endpoint.has_left(call.server_host):
                raise
            return {"out_of_service": str(failed), "others": None}

    def forget(self, session: str) -> None:
        self._router.forget(session)

    def close(self) -> None:
        for call in self._calls:
            self._endpoint.notify(call.server_host, f"callers:{call.server}:{call.edge}", {"closed": call.caller})


class LiveServe:
    """One Serve port of one replica; `calls` come from the replicas that may call it.

    Whenever a request arrives, `gauge` gets the number of open requests, under the name "open_" plus the port's name.
    """

    def __init__(
        self,
        port: str,
        calls: Sequence[CallPlan],
        endpoint: Endpoint,
        activity: Activity,
        lease: Lease,
        gauge: Meter,
    ) -> None:
        self._body: Body | None = None
        self._slots = PrioritySlots(0)
        """Requests that arrive before `serve` is called wait for the slots that it adds."""
        self._open: Counter[str] = Counter()
        """Name of a call -> number of its requests that wait or run."""
        self.num_open = 0
        """Number of requests that wait or run, of all calls together."""
        self._callers = {call.caller for call in calls}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._port = port
        self._activity = activity
        self._lease = lease
        self._gauge = gauge
        for call in calls:
            endpoint.on(f"call:{call.server}:{call.edge}", self._answer)
            endpoint.on(f"callers:{call.server}:{call.edge}", self._closed)
        if not calls:
            self._ended.set_result(None)

    async def serve(self, body: Body, concurrency: int) -> None:
        if self._body is not None:
            raise RuntimeError(f"{self._port} is served already; call `each` once, with one body for all requests")
        self._body = body
        self._slots.add(concurrency)
        with self._activity.waiting("item", self._port, inside=None):
            await self._ended

    async def _answer(self, host: str, message: dict[str, Any]) -> dict[str, Any]:
        call = message["call"]
        self._opened(call, +1)
        self._gauge(f"open_{self._port.rpartition('.')[2]}", self.num_open)
        try:
            async with self._slots.held(message["priority"]):
                reply = await self._reply(message["request"])
        finally:
            self._opened(call, -1)
        return reply | {"others": self.num_open - self._open[call]}

    def _opened(self, call: str, change: int) -> None:
        self._open[call] += change
        self.num_open += change

    async def _reply(self, request: Any) -> dict[str, Any]:
        try:
            return await self._work(request)
        except SampleFailed as failure:
            return {"failed": str(failure)}
        except OutOfService as left:
            return {"out_of_service": str(left)}
        except GeneratorExit:  # the event loop is closed
            raise
        except BaseException as error:  # a node boundary: the server fails, and so does the run
            if is_cancel(error):
                raise
            if not self._ended.done():
                self._ended.set_exception(as_exception(f"a request to {self._port}", error))
            raise LaneFailed(f"{self._port} failed") from error

    async def _work(self, request: Any) -> dict[str, Any]:
        assert self._body is not None, "slots are there from `serve` on"
        await self._lease.begin()
        invocation = self._activity.begin()
        in_invocation.set(invocation)
        try:
            return {"reply": await self._body(request)}
        finally:
            invocation.end()
            await self._lease.end()

    def _closed(self, host: str, message: dict[str, Any]) -> None:
        self._callers.discard(message["closed"])
        if not self._callers and not self._ended.done():
            self._ended.set_result(None)

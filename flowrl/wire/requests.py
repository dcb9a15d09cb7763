"""The live sides of Call and Serve: request and reply between node replicas.

The caller's item stays unfinished until the reply, because its invocation waits here. When the caller cancels a
request, the server cancels its body; when the server dies, the request fails.

A body that raises OutOfService takes its replica out of service: the request, and all later ones, go to the other
replicas. The death of the replica's process has the same effect if the run continues without that process
(`Endpoint.peer_left`). A body that ends in any way other than by returning, or by raising OutOfService or SampleFailed,
fails the server.

Requests wait in order of priority, the smallest number first, then in order of arrival: at the caller for a place on
the edge, and at the server for one of its `concurrency` places. Every reply tells the caller how many requests the
other callers have open at the server, waiting or running; `SessionRouter` uses this to choose the server of a request.
Waits: a call waits for a place on the edge and for its reply; a server waits until every caller has closed.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.errors import LaneFailed, OutOfService, SampleFailed
from flowrl.graph.analysis.plan import CallPlan
from flowrl.messages import Message
from flowrl.wire.activity import Activity, Lease, PrioritySlots, in_invocation
from flowrl.wire.control import as_exception, is_cancel
from flowrl.wire.endpoint import Endpoint

MOST_SESSIONS = 1 << 16
"""Number of sessions that one Call port of a replica remembers; each takes about 300 bytes, including its names."""


@dataclass(frozen=True)
class RoutedTo:
    """Where a request goes."""

    replica: int
    moved: bool
    """Whether the request's session was on another replica before."""


@dataclass(slots=True)
class GroupHome:
    """Where the first session of a group went, and how many of its sessions are known."""

    replica: int
    num_sessions: int = 0


@dataclass(slots=True)
class SessionHome:
    """Where a session is, and its group ("" for none)."""

    replica: int
    group: str


class SessionRouter:
    """Chooses the server replica for a request: the one that has served its session, unless that is much busier.

    The load of a replica is the number of requests that this caller has open there, plus the number that the other
    callers had open there when the replica last replied to this caller. A replica that has not replied yet is given the
    smallest number that any replica has reported for the other callers: if it counted as idle, all callers would go to
    the slowest replica, which replies last.

    Invariants
    - A request goes to a replica whose load exceeds the smallest load by at most the margin; without a margin, to one
      with the smallest load.
    - A session stays on its replica for as long as that rule allows. A new session goes where the first session of its
      group went, for as long as the rule allows; otherwise, and without a group, to a replica with the smallest load.
    - Among replicas of equal load the choice is round-robin. Each replica of the calling node starts at a different
      server replica, so that callers without any reply yet do not all choose the same one.
    - A replica where this caller has nothing open sends it no reply, so the replica's last report would never change.
      Each reply of another replica therefore lowers that report by one request.
    - A replica that is out of service is not chosen again; its sessions and groups move to the other replicas. Once all
      replicas are out of service, the choice is as if all were in service: the caller gives up then.
    - A group is known while at least one of its sessions is known. At most `most_sessions` sessions are known: a new
      session replaces the least recently used one, which counts as new if it asks again.

    `caller` is the replica that asks, for example "environment/0".

    Without a `margin`, sessions and groups are not remembered, and each request goes to a replica with the smallest
    load.
    """

    def __init__(
        self, num_replicas: int, *, margin: int | None, caller: str, most_sessions: int = MOST_SESSIONS
    ) -> None:
        self._margin = margin
        self._most_sessions = most_sessions
        self._own = [0] * num_replicas
        """Open requests of this caller, by replica."""
        self._others: list[int | None] = [None] * num_replicas
        """Open requests of all other callers, by replica, as last reported; None before the first report."""
        self._sessions: OrderedDict[str, SessionHome] = OrderedDict()
        """In order of last use, the least recently used session first."""
        self._groups: dict[str, GroupHome] = {}
        self._in_service = [True] * num_replicas
        node, _, index = caller.partition("/")
        self._next = (zlib.crc32(node.encode()) + int(index or 0)) % num_replicas
        """The replica that is preferred first among replicas of equal load."""

    @property
    def loads(self) -> tuple[int, ...]:
        """The load of each replica."""
        unknown = min((others for others in self._others if others is not None), default=0)
        pairs = zip(self._own, self._others, strict=True)
        return tuple(own + (unknown if others is None else others) for own, others in pairs)

    @property
    def num_in_service(self) -> int:
        return sum(self._in_service)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def begin(self, session: str = "", group: str = "") -> RoutedTo:
        """Choose the replica for a request, and count the request as open there until `end`."""
        choice = self._choose_home(session, group)
        self._own[choice.replica] += 1
        return choice

    def end(self, replica: int, others: int | None = None) -> None:
        """A request has ended.

        `others` is how many requests the other callers have open at `replica`, by the reply; None without a reply.
        """
        self._own[replica] -= 1
        if others is None:
            return
        self._others = [
            before - 1 if before and not own else before for own, before in zip(self._own, self._others, strict=True)
        ]
        self._others[replica] = others

    def leave(self, replica: int) -> None:
        """This replica is out of service from now on."""
        self._in_service[replica] = False

    def forget(self, session: str) -> None:
        """The session has ended. Does nothing for an unknown session."""
        home = self._sessions.pop(session, None)
        if home is not None and home.group:
            group = self._groups[home.group]
            group.num_sessions -= 1
            if not group.num_sessions:
                del self._groups[home.group]

    def _choose_home(self, session: str, group: str) -> RoutedTo:
        if not session or self._margin is None:
            return RoutedTo(self._least_loaded(), moved=False)
        home = self._sessions.get(session)
        if home is None:
            return RoutedTo(self._add_home(session, group), moved=False)
        self._sessions.move_to_end(session)
        if self._is_near(home.replica):
            return RoutedTo(home.replica, moved=False)
        home.replica = self._least_loaded()
        return RoutedTo(home.replica, moved=True)

    def _add_home(self, session: str, group: str) -> int:
        """Remember a new session. Returns its replica."""
        if len(self._sessions) == self._most_sessions:
            self.forget(next(iter(self._sessions)))
        known = self._groups.get(group)
        replica = known.replica if known is not None and self._is_near(known.replica) else self._least_loaded()
        if group:
            self._groups.setdefault(group, GroupHome(replica)).num_sessions += 1
        self._sessions[session] = SessionHome(replica, group)
        return replica

    def _is_near(self, replica: int) -> bool:
        """Whether the margin allows a request to go to `replica`."""
        loads = self.loads
        least = min(loads[index] for index in self._replicas_in_use())
        return self._margin is not None and self._in_service[replica] and loads[replica] <= least + self._margin

    def _least_loaded(self) -> int:
        loads = self.loads
        order = sorted(self._replicas_in_use(), key=lambda replica: (replica - self._next) % len(loads))
        chosen = min(order, key=loads.__getitem__)
        self._next = (chosen + 1) % len(loads)
        return chosen

    def _replicas_in_use(self) -> list[int]:
        """The replicas in service; all replicas, once none is in service."""
        every = range(len(self._in_service))
        return [replica for replica in every if self._in_service[replica]] or list(every)


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
        call, others = self._calls[choice.replica], None
        try:
            if choice.moved:
                self._count("requests_moved", 1)
            async with self._slots[choice.replica].hold_slot(priority):
                body = {"request": request, "priority": priority, "call": call.name}
                try:
                    reply = await self._endpoint.request(call.server_host, f"call:{call.server}:{call.edge}", body)
                except LaneFailed as failed:
                    if not self._endpoint.has_left(call.server_host):
                        raise
                    reply = {"out_of_service": str(failed), "others": None}
            others = reply["others"]
        finally:
            self._router.end(choice.replica, others)
        if "out_of_service" in reply:
            self._router.leave(choice.replica)
        elif "reply" in reply:
            self._answered(call.server, request, reply["reply"])
        return reply

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
            endpoint.on(f"call:{call.server}:{call.edge}", self._answer_request)
            endpoint.on(f"callers:{call.server}:{call.edge}", self._caller_closed)
        if not calls:
            self._ended.set_result(None)

    async def serve(self, body: Body, concurrency: int) -> None:
        if self._body is not None:
            raise RuntimeError(f"{self._port} is served already; call `each` once, with one body for all requests")
        self._body = body
        self._slots.add_slots(concurrency)
        with self._activity.waiting("item", self._port, inside=None):
            await self._ended

    async def _answer_request(self, host: str, message: dict[str, Any]) -> dict[str, Any]:
        call = message["call"]
        self._open[call] += 1
        self.num_open += 1
        self._gauge(f"open_{self._port.rpartition('.')[2]}", self.num_open)
        try:
            async with self._slots.hold_slot(message["priority"]):
                reply = await self._run_body(message["request"])
        finally:
            self._open[call] -= 1
            self.num_open -= 1
        return reply | {"others": self.num_open - self._open[call]}

    async def _run_body(self, request: Any) -> dict[str, Any]:
        assert self._body is not None, "slots are there from `serve` on"
        try:
            await self._lease.begin()
            invocation = self._activity.begin()
            in_invocation.set(invocation)
            try:
                return {"reply": await self._body(request)}
            finally:
                invocation.end()
                await self._lease.end()
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

    def _caller_closed(self, host: str, message: dict[str, Any]) -> None:
        self._callers.discard(message["closed"])
        if not self._callers and not self._ended.done():
            self._ended.set_result(None)

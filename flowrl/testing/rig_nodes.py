"""The nodes around a node under test: each has one port, whose other end is a port of that node."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from flowrl.graph.node import Node
from flowrl.graph.ports import Port
from flowrl.messages import Message
from flowrl.wire.encoding.schema import Envelope, source_id
from flowrl.wire.in_ports import Inbound
from flowrl.wire.items import Item
from flowrl.wire.out_ports import Outbound

N = TypeVar("N", bound=Node)
Answer = Callable[[Any], Message | Awaitable[Message]]
PORT = "port"


def with_port(kind: type[N], port: Any) -> type[N]:
    """The class `kind` with a port of this type, such as `In[Sample]`."""
    return type(kind.__name__, (kind,), {"__annotations__": {PORT: port}})


class RigNode(Node):
    """A node of a rig; its one port is `port`."""

    port: Any

    def __init__(self, of: Port) -> None:
        self.of = of
        """The port of the node under test."""


class Feeder(RigNode):
    """Sends messages to an In port, each as soon as its edge has room, until `end`."""

    tickets: dict[str, int]
    """Group -> its ticket; all feeders of a rig share this dict."""

    def __init__(self, of: Port) -> None:
        super().__init__(of)
        self._queue: asyncio.Queue[tuple[int, Message] | None] = asyncio.Queue()
        self.num_fed = 0
        self._num_sent = 0
        self.ended = False

    def put(self, message: Message, ticket: int | None) -> None:
        self.num_fed += 1
        self._queue.put_nowait((self._ticket(message) if ticket is None else ticket, message))

    def _ticket(self, message: Message) -> int:
        group = getattr(message, "group_id", "")
        return self.tickets.setdefault(group, len(self.tickets)) if group else -1

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self._queue.put_nowait(None)

    async def run(self) -> None:
        live: Outbound = self.port.live
        (edge,) = live.edges
        while (fed := await self._queue.get()) is not None:
            await edge.send(self._envelope(*fed))
            self._num_sent += 1

    def _envelope(self, ticket: int, message: Message) -> Envelope:
        key = source_id(self.name, str(self._num_sent))
        member = getattr(message, "member", -1)
        return Envelope(key, ticket, getattr(message, "group_id", ""), member, message)

    def state(self) -> Mapping[str, Any]:
        return {"num_sent": self._num_sent, "tickets": self.tickets}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._num_sent = state["num_sent"]
        self.tickets.update(state["tickets"])


class Collector(RigNode):
    """Takes everything that leaves an Out port, tombstones included, from `read` on."""

    collect: Callable[[Envelope], None]
    finish: Callable[[Item], None]
    """Both are set by the rig."""

    def __init__(self, of: Port) -> None:
        super().__init__(of)
        self._reading = asyncio.Event()

    def read(self) -> None:
        self._reading.set()

    async def run(self) -> None:
        await self._reading.wait()
        live: Inbound = self.port.live
        while (item := await live.take()) is not None:
            self.collect(item.envelope)
            self.finish(item)


class Answerer(RigNode):
    """Serves a Call port with a test's function."""

    answer: Answer

    async def run(self) -> None:
        await self.port.each(self._reply)

    async def _reply(self, request: Any) -> Any:
        reply = self.answer(request)
        return await reply if inspect.isawaitable(reply) else reply


class Asker(RigNode):
    """Calls a Serve port for the test, until `end`."""

    def __init__(self, of: Port) -> None:
        super().__init__(of)
        self._ended = asyncio.Event()

    def end(self) -> None:
        self._ended.set()

    async def run(self) -> None:
        await self._ended.wait()

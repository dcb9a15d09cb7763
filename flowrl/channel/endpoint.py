"""Endpoint: connects one host process to the run, with lanes, requests and notes to every other host.

Everything runs on the event loop on which `open` was called. Calls from elsewhere (an endpoint on another
loop of this process, shared memory freed by a garbage collection) are forwarded to that loop.

What ends a wait: see `ends` (sends), `inbox` (takes) and `control` (requests); `close` ends them all, and
itself waits at most a second for frames that are still to be sent.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import zmq

from flowrl.channel.control import Answer, Control
from flowrl.channel.encoding.multiparts import RELEASE, REPLY, REQUEST, Frame, MessageDecoder
from flowrl.channel.lanes.ends import ReceiveLane, SendLane
from flowrl.channel.lanes.inbox import EndOfStream
from flowrl.channel.lanes.lane import ReceiverLane, SenderLane
from flowrl.channel.lanes.lane_spec import LaneSpec, LaneStatistics
from flowrl.channel.lanes.latest import LatestReceiver, LatestSender
from flowrl.channel.links.address import (
    Address,
    ipc_path,
    remove_socket,
    run_prefix,
    this_machine,
)
from flowrl.channel.links.endpoint_transport import EndpointTransport, IpcTransport
from flowrl.channel.links.link import Link, Listener, LocalLink, SocketLink
from flowrl.channel.links.presence import Presence
from flowrl.channel.links.slab import Attached, Slab, SlabBlock
from flowrl.channel.router import Router
from flowrl.errors import LaneFailed, WireError

__all__ = ["Address", "EndOfStream", "Endpoint", "LaneWait"]

_local: weakref.WeakValueDictionary[str, Endpoint] = weakref.WeakValueDictionary()
"""The open endpoints of this process, by their ipc path."""
_contexts: set[zmq.Context[Any]] = set()
"""The contexts of endpoints that are not closed. A garbage collection that ends a context blocks forever if the
context's sockets are also garbage, so an endpoint that nobody closes keeps its context until the process ends."""


@dataclass(frozen=True)
class LaneWait:
    """One wait of a sender, receiver or request, for stall reports."""

    kind: str
    """credit | item | reply"""
    what: str
    """The lane, the port, or "KIND of HOST"."""
    for_s: float


class Endpoint:
    """See the module.

    `transport` is the run's transport; the default is the one for a single machine.
    `failed(error)` receives every error that no caller can receive (for example a note's handler raised, or received
    bytes are not a frame); the default is the loop's exception handler.
    """

    def __init__(
        self,
        host: str,
        *,
        run_id: str,
        driver_pid: int,
        incarnation: int = 0,
        machine: str | None = None,
        transport: EndpointTransport | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.host = host
        self.incarnation = incarnation
        self._run_id = run_id
        self._driver_pid = driver_pid
        self._machine = machine if machine is not None else this_machine()
        self._transport = transport if transport is not None else IpcTransport()
        self._failed = failed or self._to_loop
        self._router = Router(host, incarnation, self._failed)
        self._control = Control(self._router.post, self._failed)
        self._router.control = self
        prefix = run_prefix(run_id, driver_pid)
        self._slab = Slab(prefix, host, incarnation)
        self._attached = Attached(prefix, self._unseen)
        self._decoder = MessageDecoder(self._attached.array)
        self._left: set[str] = set()
        """Hosts for which `peer_left` was called."""

    # Opening, peers, closing

    async def open(self) -> Address:
        """Start to listen. Returns the address for all other endpoints."""
        self._presence = Presence(self._run_id)
        self._slab.open()
        self._loop = self._router.loop = asyncio.get_running_loop()
        self._context: zmq.Context[Any] = zmq.Context()
        # A peer on another machine takes three sockets, and zmq allows 1,023 by default.
        self._context.set(zmq.MAX_SOCKETS, int(self._context.get(zmq.SOCKET_LIMIT)))
        _contexts.add(self._context)
        self._listener = Listener(self._context, self._arrived)
        path = ipc_path(self._run_id, self._driver_pid, self.host, self.incarnation)
        url = self._transport.open(self._listener, path)
        self.address = Address(self.host, self.incarnation, self._machine, os.getpid(), str(path), url)
        _local[self.address.ipc] = self
        self.connect(self.host, self.address)
        return self.address

    def connect(self, host: str, address: Address) -> None:
        """Connect to `host` at `address`: in process, by ipc or by tcp, whichever is nearest.

        If `address` has another incarnation than before, the process was restarted. All kept messages are replayed to
        it. Sends and takes continue without an error, unless `peer_failed` has ended them; requests to the previous
        process raise LaneFailed.
        """
        if self._router.peer(host).incarnation not in (None, address.incarnation):
            self._router.fail(host, "its process was restarted", ())
        self._router.join(host, address.incarnation, self._link(address))

    def peer_failed(self, host: str, reason: str) -> None:
        """The supervisor reports that the process of `host` is dead: every call that waits for it raises LaneFailed.

        Messages kept for it stay kept, for `connect` to a new process.
        """
        self._router.fail(host, reason, self._router.lanes(host))

    def peer_left(self, host: str, reason: str) -> None:
        """Like `peer_failed`, for a process that the run continues without. Frames that have arrived still count.

        Do not call this from a handler of notes: it processes all frames that have arrived, even before the remaining
        frames that came together with the note.
        """
        self._listener.drain()
        self._left.add(host)
        self.peer_failed(host, reason)

    def has_left(self, host: str) -> bool:
        """Whether `peer_left` was called for `host`."""
        return host in self._left

    def _link(self, address: Address) -> Link:
        neighbour = _local.get(address.ipc) if address.pid == os.getpid() else None
        if neighbour is not None:
            return LocalLink(neighbour.deliver_from(self._loop), self.host, self.incarnation)
        near = address.machine == self._machine
        return SocketLink(
            self._context,
            self._transport.target(address, near=near),
            self.host,
            self.incarnation,
            place=self._slab.lender(address.host) if near else None,
            reconnected=lambda: self._router.reconnected(address.host),
        )

    async def close(self) -> None:
        """Send all due frames, end every wait, release sockets and shared memory."""
        if self._router.closed or not hasattr(self, "address"):
            return
        await self._control.close()
        self._listener.drain()
        self._router.close()
        self._listener.close()
        self._router.close_links()
        _local.pop(self.address.ipc, None)
        await self._loop.run_in_executor(None, self._context.term)
        _contexts.discard(self._context)
        self._slab.close()
        self._attached.close()
        remove_socket(self.address.ipc)
        self._presence.close()

    # Lanes

    def sender(self, spec: LaneSpec) -> SendLane:
        """Create the producer's end of a lane that starts here. Once per lane."""
        session = self._router.session(spec)
        machine = LatestSender(spec, session) if spec.kind == "latest" else SenderLane(spec, session)
        lane = SendLane(spec, machine, self._router)
        self._router.add_sender(lane)
        return lane

    def receiver(self, spec: LaneSpec) -> ReceiveLane:
        """Create the consumer's end of a lane that ends here. Once per lane; add it to an Inbox."""
        session = self._router.session(spec)
        machine = LatestReceiver(spec, session) if spec.kind == "latest" else ReceiverLane(spec, session)
        lane = ReceiveLane(spec, machine, self._router)
        self._router.add_receiver(lane)
        return lane

    # Requests and notes

    async def request(self, host: str, kind: str, body: Any = None) -> Any:
        """Send a request to `host`, and return the answer of its handler for `kind`.

        Raises the handler's FlowrlError, FlowrlError with the remote traceback for any other exception,
        LaneFailed if the host's process fails. Cancelling this call cancels the handler.
        """
        return await self._control.request(host, kind, body)

    async def arrived(self, peers: Iterable[str]) -> None:
        """Wait until everything in transit from here to `peers` has arrived: their handlers for "ping" answer."""
        await asyncio.gather(*(self._arrived_at(peer) for peer in peers))

    async def _arrived_at(self, peer: str) -> None:
        """Frames of a link keep their order: an answer shows that what was sent before the request has arrived. After a
        connection was restored it does not, because frames that waited for it overtake those that were lost with the
        old one. `reconnected` is called before such an answer arrives; then the lanes find out, step by step, what is
        missing. An answer counts once they took no such step while it was awaited."""
        compared = -1
        try:
            while compared != (now := self._router.num_comparisons(peer)):
                compared = now
                await self.request(peer, "ping")
        except LaneFailed:
            if not self.has_left(peer):  # nothing is in transit any more to a host that has left
                raise

    def notify(self, host: str, kind: str, body: Any = None) -> None:
        """Send a note to `host`; there is no answer."""
        self._control.notify(host, kind, body)

    def on(self, kind: str, handler: Answer) -> None:
        """Answer `kind` with `handler(host, body)`: a coroutine function for requests, a plain one for notes."""
        self._control.on(kind, handler)

    # Statistics and stall reports

    def statistics(self) -> dict[str, LaneStatistics]:
        """Statistics by lane name; for a lane within this process, one entry covers both ends."""
        found = {lane.spec.name: lane.statistics() for lane in self._router.receivers.values()}
        for lane in self._router.senders.values():
            mine, other = lane.statistics(), found.get(lane.spec.name)
            found[lane.spec.name] = mine if other is None else replace(mine, received=other.received)
        return found

    def moves(self) -> int:
        """A count that grows with every message sent, taken or finished here, except on latest edges, and with every
        step in which lanes find out what was lost with a connection."""
        senders = [lane.machine for lane in self._router.senders.values()]
        receivers = [lane.machine for lane in self._router.receivers.values()]
        sent = sum(m.num_sent + m.num_taken + m.num_acked for m in senders if isinstance(m, SenderLane))
        received = sum(m.num_received + m.num_finished for m in receivers if isinstance(m, ReceiverLane))
        return sent + received + self._router.all_comparisons()

    def watch(self) -> list[LaneWait]:
        """All current waits of senders, receivers and requests here, with what each waits for."""
        now = time.monotonic()
        waits = [
            LaneWait("credit", lane.spec.name, now - since)
            for lane in self._router.senders.values()
            if (since := lane.gate.since()) is not None and not lane.machine.credits
        ]
        takers = {id(lane.taker): lane.taker for lane in self._router.receivers.values() if lane.taker is not None}
        waits += [
            LaneWait("item", taker.name, now - since)
            for taker in takers.values()
            if (since := taker.waiting_since()) is not None
        ]
        asked = self._control.waiting()
        return waits + [LaneWait("reply", f"{kind} of {host}", now - since) for host, kind, since in asked]

    # Frames that belong to no lane (`peer.ControlPeer`)

    def receive(self, host: str, frame: Frame) -> None:
        """Called by the router: process a frame that belongs to no lane."""
        if frame[0] == RELEASE:
            self._slab.free(host, frame[4])
        else:
            self._control.receive(host, frame)

    def unsaid(self, host: str, frame: Frame, error: WireError) -> None:
        """Called by the router: a frame that waited for `connect` cannot be sent. If it is a request, its caller
        gets the error as the answer."""
        if frame[0] == REQUEST:
            self._control.receive(host, (REPLY, 0, 0, frame[3], (False, {"type": "WireError", "text": str(error)})))
        else:
            self._failed(error)

    def gone(self, host: str, reason: str) -> None:
        """Called by the router: `host` no longer reads our shared memory or waits for our answers."""
        self._slab.take_back(host)
        self._attached.forget(host)
        self._control.peer_failed(host, reason)

    # Calls from outside the loop

    def deliver_from(self, loop: asyncio.AbstractEventLoop) -> Callable[[str, int, list[Frame]], None]:
        """The function that a link from an endpoint on `loop`, in this process, calls to deliver frames."""
        if loop is self._loop:
            return self._router.receive
        return lambda host, incarnation, frames: self._threadsafe(self._router.receive, host, incarnation, frames)

    def _threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        if not self._router.closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _arrived(self, parts: list[Any]) -> None:
        try:
            host, incarnation = self._decoder.sender(parts[0])
            self._router.receive(host, incarnation, self._decoder.decode(parts))
        except WireError as error:
            self._failed(error)

    def _unseen(self, host: str, incarnation: int, block: SlabBlock) -> None:
        """No array in this process refers to this block of a peer's slab any more. Called from any thread."""
        self._threadsafe(self._give_back, host, incarnation, block)

    def _give_back(self, host: str, incarnation: int, block: SlabBlock) -> None:
        if self._router.peer(host).incarnation == incarnation:
            self._router.post(host, (RELEASE, 0, 0, 0, (block,)))

    def _to_loop(self, error: BaseException) -> None:
        self._loop.call_exception_handler({"message": f"flowrl endpoint {self.host!r}: {error}", "exception": error})

"""Endpoint: connects one host process to the run, with lanes, requests and notes to every other host.

Everything runs on the event loop on which `open` was called. Calls from elsewhere (an endpoint on another
loop of this process, shared memory freed by a garbage collection) are forwarded to that loop.

Invariants
- Frames for a lane that is not open here yet are parked. So are frames from a process, or an incarnation of it, that
  `connect` has not named yet. Credits bound the number of parked frames.
- Frames from an earlier incarnation of a peer are dropped: the new incarnation repeats their content.
- Only the supervisor, or the peer's own BYE, declares a peer's process dead.

What ends a wait: see `edges` (sends and takes) and `control` (requests); `close` ends them all, and itself waits at
most a second for frames that are still to be sent.

Replacing a process
    A supervisor that lets a run go on after the death of a host's process does this, in this order:

    1. It makes sure that the old process and its children are gone, so that none of their frames can follow.
    2. It tells every other endpoint: `peer_failed(host, reason)`. Sends, takes and requests that need the host raise
       LaneFailed; everything sent to it and not acked stays kept. (`peer_left` instead is for good: what has arrived
       from the host still counts, and the run goes on without it.)
    3. It starts the new process, whose `Endpoint` has the next `incarnation`, and makes the lanes of its nodes there.
    4. It connects the new endpoint to all others, and all others to it: `connect(host, address)`. By the incarnation in
       the address each side sees that the process is another one, and restarts its lanes to it in a new session: kept
       messages are sent again, in their old order, and what the old process had sent and nobody has taken stays.

    A message that the new process makes again has the id that it had before (`message_id`), so its consumers drop it
    if they have it (`Seen`). Step 2 may be left out: `connect` alone replaces the process without an error in sends and
    takes. Without a new incarnation `connect` makes a new link to the same process, and restarts nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import zmq

from flowrl.errors import ConfigError, LaneFailed, WireError
from flowrl.wire.connection import Address, Connection, EndpointTransport, Flusher, IpcTransport, Listener, this_machine
from flowrl.wire.control import Answer, Control
from flowrl.wire.edges import EndOfStream
from flowrl.wire.encoding.multiparts import (
    BYE,
    CONFIRM,
    DATA,
    HELLO,
    RELEASE,
    REPLY,
    REQUEST,
    RESEND,
    SYNC,
    TO_RECEIVER,
    Frame,
    MessageDecoder,
    MessageEncoder,
    Refused,
)
from flowrl.wire.lanes import (
    LaneSpec,
    LaneStatistics,
    LatestReceiver,
    LatestSender,
    ReceiverLane,
    SenderLane,
    session_number,
)
from flowrl.wire.run_files import Presence, ipc_path, remove_socket, run_prefix
from flowrl.wire.slab import Attached, Slab, SlabBlock

__all__ = ["Address", "EndOfStream", "Endpoint", "LaneWait"]

LINGER_S = 1.0
COMPARES = frozenset((RESEND, SYNC))
"""Frames to a sender that ask for messages again, or for its `say_hello`."""

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
        self._flusher = Flusher()
        self._connections = self._flusher.connections
        self._connections[host] = Connection(host, self._flusher, incarnation)
        self._senders: dict[int, SenderLane] = {}
        self._receivers: dict[int, ReceiverLane] = {}
        self._parked: dict[tuple[bool, int], list[Frame]] = {}
        """(is for a sender, lane number): frames."""
        self._control = Control(lambda host, frame: self.connection(host).post_frame(frame), self._failed)
        prefix = run_prefix(run_id, driver_pid)
        self._slab = Slab(prefix, host, incarnation)
        self._attached = Attached(prefix, self._block_unseen)
        self._decoder = MessageDecoder(self._attached.array)
        self._left: set[str] = set()
        """Hosts for which `peer_left` was called."""

    # Opening and closing

    async def open(self) -> Address:
        """Start to listen. Returns the address for all other endpoints."""
        self._presence = Presence(self._run_id)
        self._slab.open()
        self._loop = self._flusher.loop = asyncio.get_running_loop()
        self._context: zmq.Context[Any] = zmq.Context()
        # A peer on another machine takes three sockets, and zmq allows 1,023 by default.
        self._context.set(zmq.MAX_SOCKETS, int(self._context.get(zmq.SOCKET_LIMIT)))
        _contexts.add(self._context)
        self._listener = Listener(self._context, self._receive_parts)
        path = ipc_path(self._run_id, self._driver_pid, self.host, self.incarnation)
        url = self._transport.open(self._listener, path)
        self.address = Address(self.host, self.incarnation, self._machine, os.getpid(), str(path), url)
        _local[self.address.ipc] = self
        self.connect(self.host, self.address)
        return self.address

    async def close(self) -> None:
        """Send all due frames, end every wait, release sockets and shared memory."""
        if self._flusher.closed or not hasattr(self, "address"):
            return
        await self._control.close()
        self._listener.drain_sockets()
        for connection in self._connections.values():
            connection.post_frame((BYE, 0, 0, 0, None))
        self._flusher.close()
        lanes: list[SenderLane | ReceiverLane] = [*self._senders.values(), *self._receivers.values()]
        for lane in lanes:
            lane.failed = lane.failed or "this endpoint was closed"
            _wake_waiters(lane)
        self._listener.close()
        for connection in self._connections.values():
            if connection.linked:  # frames that become due from here on are dropped
                connection.close_link(LINGER_S)
        _local.pop(self.address.ipc, None)
        await self._loop.run_in_executor(None, self._context.term)
        _contexts.discard(self._context)
        self._slab.close()
        self._attached.close()
        remove_socket(self.address.ipc)
        self._presence.close()

    # Connecting, and replacing a process (see the module)

    def connection(self, host: str) -> Connection:
        """The connection to `host`, which need not have joined yet."""
        known = self._connections.get(host)
        if known is None:
            known = self._connections[host] = Connection(host, self._flusher)
        return known

    def connect(self, host: str, address: Address) -> None:
        """Connect to `host` at `address`: in process, by ipc or by tcp, whichever is nearest.

        If `address` has another incarnation than before, the process was replaced. All kept messages are sent again, to
        the new one. Sends and takes continue without an error, unless `peer_failed` has ended them; requests to the
        previous process raise LaneFailed.
        """
        connection = self.connection(host)
        neighbour = _local.get(address.ipc) if address.pid == os.getpid() else None
        near = address.machine == self._machine
        target = None if neighbour is not None else self._transport.target(address, near=near)
        if connection.incarnation not in (None, address.incarnation):
            self._fail_peer(connection, "its process was restarted", ())
        if connection.linked:
            connection.close_link(LINGER_S)
        connection.failed, connection.incarnation = "", address.incarnation
        if neighbour is not None:
            deliver = neighbour.deliver_from(self._loop)
            connection.link_local(lambda frames: deliver(self.host, self.incarnation, frames))
        elif target is not None:
            place = self._slab.lender(host) if near else None
            encoder = MessageEncoder(self.host, self.incarnation, place)
            connection.link_socket(self._context, target, encoder, lambda: self._compare_lanes(host))

        for lane in self._lanes_of(host):
            session = self._session_of(lane.spec)
            if lane.session != session:
                lane.restart(session)
                _wake_waiters(lane)
            connection.unflushed.append(lane)
        for frame, error in connection.say_pending():
            if frame[0] == REQUEST:  # its caller gets the error as the answer
                told = False, {"type": "WireError", "text": str(error)}
                self._control.receive_frame(host, (REPLY, 0, 0, frame[3], told))
            else:
                self._failed(error)
        connection.send_due()
        early, connection.early = connection.early, []
        for sent_in, frames in early:
            self.receive_frames(host, sent_in, frames)

    def peer_failed(self, host: str, reason: str) -> None:
        """The supervisor reports that the process of `host` is dead: every call that waits for it raises LaneFailed.

        Messages kept for it stay kept, for `connect` to a new process.
        """
        self._fail_peer(self.connection(host), reason, self._lanes_of(host))

    def peer_left(self, host: str, reason: str) -> None:
        """Like `peer_failed`, for a process that the run continues without. Frames that have arrived still count.

        Do not call this from a handler of notes: it processes all frames that have arrived, even before the remaining
        frames that came together with the note.
        """
        self._listener.drain_sockets()
        self._left.add(host)
        self.peer_failed(host, reason)

    def has_left(self, host: str) -> bool:
        """Whether `peer_left` was called for `host`."""
        return host in self._left

    def _fail_peer(self, connection: Connection, reason: str, lanes: Iterable[SenderLane | ReceiverLane]) -> None:
        """The process of a host is gone: fail `lanes` and the requests to it. It reads no shared memory of ours, and
        waits for no answer."""
        connection.fail(reason)
        self._slab.take_back(connection.host)
        self._attached.forget(connection.host)
        self._control.peer_failed(connection.host, reason)
        for lane in lanes:
            lane.failed = f"the process at the other end failed: {reason}"
            _wake_waiters(lane)

    def _compare_lanes(self, host: str) -> None:
        """The connection to `host` was lost and restored: find out which frames are missing, and repeat them."""
        connection = self.connection(host)
        connection.num_comparisons += 1
        for lane in self._lanes_of(host):
            lane.say_hello()
            connection.unflushed.append(lane)
        connection.unflushed.append(connection.numbers)
        connection.send_due()
        connection.repeat_unconfirmed()  # after the lanes' frames, so that a request follows what was sent before it

    # Lanes

    def _session_of(self, spec: LaneSpec) -> int:
        """The session of a lane that starts or ends here."""
        producer, consumer = self.connection(spec.producer_host), self.connection(spec.consumer_host)
        return session_number(producer.incarnation or 0, consumer.incarnation or 0)

    def _lanes_of(self, host: str) -> list[SenderLane | ReceiverLane]:
        """Every lane to and from `host`."""
        senders = [lane for lane in self._senders.values() if lane.spec.consumer_host == host]
        return [*senders, *(lane for lane in self._receivers.values() if lane.spec.producer_host == host)]

    def sender(self, spec: LaneSpec) -> SenderLane:
        """Create the producer's end of a lane that starts here. Once per lane; give it to an `OutEdge`."""
        lane = (LatestSender if spec.kind == "latest" else SenderLane)(spec, self._session_of(spec))
        _register_lane(self._senders, lane)
        lane.on_out = self.connection(spec.consumer_host).send_lane
        lane.on_out(lane)
        for frame in self._parked.pop((True, spec.number), ()):
            self._pass_to_sender(lane, frame)
        return lane

    def receiver(self, spec: LaneSpec) -> ReceiverLane:
        """Create the consumer's end of a lane that ends here. Once per lane; add it to an `Inbox`."""
        lane = (LatestReceiver if spec.kind == "latest" else ReceiverLane)(spec, self._session_of(spec))
        _register_lane(self._receivers, lane)
        lane.on_unflushed = self.connection(spec.producer_host).flush_soon
        lane.on_open = self._deliver_parked
        return lane

    def _deliver_parked(self, lane: ReceiverLane) -> None:
        for frame in self._parked.pop((False, lane.spec.number), ()):
            self._pass_to_receiver(lane, frame)
        self._after_frames(lane)

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
            while compared != (now := self.connection(peer).num_comparisons):
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
        found = {lane.spec.name: lane.statistics() for lane in self._receivers.values()}
        for lane in self._senders.values():
            mine = lane.statistics(lane.edge.gate.blocked_s() if lane.edge is not None else 0.0)
            other = found.get(lane.spec.name)
            found[lane.spec.name] = mine if other is None else replace(mine, received=other.received)
        return found

    def moves(self) -> int:
        """A count that grows with every message sent, taken or finished here, except on latest edges, and with every
        step in which lanes find out what was lost with a connection."""
        senders = [lane for lane in self._senders.values() if lane.spec.kind == "queue"]
        receivers = [lane for lane in self._receivers.values() if lane.spec.kind == "queue"]
        return (
            sum(lane.num_sent + lane.num_taken + lane.num_acked for lane in senders)
            + sum(lane.num_received + lane.num_finished for lane in receivers)
            + sum(connection.num_comparisons for connection in self._connections.values())
        )

    def watch(self) -> list[LaneWait]:
        """All current waits of senders, receivers and requests here, with what each waits for."""
        now = time.monotonic()
        waits = [
            LaneWait("credit", lane.spec.name, now - since)
            for lane in self._senders.values()
            if lane.edge is not None and (since := lane.edge.gate.waiting_since()) is not None and not lane.credits
        ]
        inboxes = {id(lane.inbox): lane.inbox for lane in self._receivers.values() if lane.inbox is not None}
        waits += [
            LaneWait("item", inbox.name, now - since)
            for inbox in inboxes.values()
            if (since := inbox.waiting_since()) is not None
        ]
        asked = self._control.waiting_requests()
        return waits + [LaneWait("reply", f"{kind} of {host}", now - since) for host, kind, since in asked]

    # Frames in

    def _receive_parts(self, parts: list[Any]) -> None:
        """A multipart has arrived."""
        try:
            host, incarnation = self._decoder.sender(parts[0])
            self.receive_frames(host, incarnation, self._decoder.decode(parts))
        except WireError as error:
            self._failed(error)

    def receive_frames(self, host: str, incarnation: int, frames: Sequence[Frame | Refused]) -> None:
        """Process the frames that `host` sent in `incarnation`."""
        peer = self.connection(host)
        if peer.incarnation is None or incarnation > peer.incarnation:
            peer.early.append((incarnation, frames))  # its process has not joined yet: `connect` processes the frames
            return
        if incarnation < peer.incarnation or peer.failed or self._flusher.closed:
            return  # frames of a dead incarnation: the new incarnation repeats what was not acked
        self._flusher.tick += 1
        touched: dict[ReceiverLane, None] = {}
        lane: ReceiverLane | None = None
        number = -1
        for frame in frames:
            if isinstance(frame, Refused):
                self._refuse_message(host, frame)
            elif frame[0] in TO_RECEIVER:
                if frame[1] != number:  # frames of one lane arrive together: one look-up for all
                    number = frame[1]
                    lane = self._receivers.get(number)
                    if lane is not None and lane.inbox is not None:
                        touched[lane] = None
                    else:
                        lane = None
                if lane is None:
                    self._parked.setdefault((False, number), []).append(frame)
                elif frame[0] == DATA and frame[2] == lane.session:  # nearly all frames
                    lane.on_data(frame[3], frame[4])
                else:
                    self._pass_to_receiver(lane, frame)
            elif frame[0] == BYE:
                self._peer_closed(peer)
            elif frame[0] == CONFIRM:
                peer.numbers.on_confirm(frame[3])
            elif frame[0] == RELEASE:
                self._slab.free_blocks(host, frame[4])
            elif frame[0] >= REQUEST:
                if peer.numbers.admit_frame(frame):
                    self._control.receive_frame(host, frame)
            elif (sender := self._senders.get(frame[1])) is not None:
                self._pass_to_sender(sender, frame)
            else:
                self._parked.setdefault((True, frame[1]), []).append(frame)
        for lane in touched:
            self._after_frames(lane)
        if peer.numbers.has_unflushed:
            self._flusher.confirm_later()

    def _pass_to_receiver(self, lane: ReceiverLane, frame: Frame) -> None:
        if frame[0] == HELLO:
            self.connection(lane.spec.producer_host).num_comparisons += 1
        lane.take_frame(frame)

    def _after_frames(self, lane: ReceiverLane) -> None:
        """Wake the consumer, and flush credits or acks if any are due."""
        lane.on_change(lane)
        if lane.out or lane.has_unflushed:
            lane.on_unflushed(lane)

    def _pass_to_sender(self, lane: SenderLane, frame: Frame) -> None:
        lane.take_frame(frame)
        if lane.out and frame[2] == lane.session:
            connection = self.connection(lane.spec.consumer_host)
            connection.num_comparisons += frame[0] in COMPARES
            connection.send_lane(lane)

    def _peer_closed(self, peer: Connection) -> None:
        """The peer has closed its endpoint: fail the lanes that would otherwise wait for it forever."""
        if peer.linked and peer.host != self.host:
            cut_off = [lane for lane in self._lanes_of(peer.host) if not lane.closed]
            self._fail_peer(peer, "it closed its endpoint before the end of the stream", cut_off)

    def _refuse_message(self, host: str, frame: Refused) -> None:
        lane = self._receivers.get(frame.lane)
        if lane is None:
            self._failed(WireError(f"host {host!r} sent {frame.reason}"))
        elif frame.session == lane.session:
            lane.refuse(f"refused a message: {frame.reason}")
            lane.on_change(lane)

    # Calls from outside the loop

    def deliver_from(self, loop: asyncio.AbstractEventLoop) -> Callable[[str, int, list[Frame]], None]:
        """The function that an endpoint on `loop`, in this process, calls to deliver frames."""
        if loop is self._loop:
            return self.receive_frames
        return lambda host, incarnation, frames: self._call_on_loop(self.receive_frames, host, incarnation, frames)

    def _call_on_loop(self, call: Callable[..., None], *args: Any) -> None:
        if not self._flusher.closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _block_unseen(self, host: str, incarnation: int, block: SlabBlock) -> None:
        """No array in this process refers to this block of a peer's slab any more. Called from any thread."""
        self._call_on_loop(self._give_back, host, incarnation, block)

    def _give_back(self, host: str, incarnation: int, block: SlabBlock) -> None:
        connection = self.connection(host)
        if connection.incarnation == incarnation:
            connection.post_frame((RELEASE, 0, 0, 0, (block,)))

    def _to_loop(self, error: BaseException) -> None:
        self._loop.call_exception_handler({"message": f"flowrl endpoint {self.host!r}: {error}", "exception": error})


def _wake_waiters(lane: SenderLane | ReceiverLane) -> None:
    """Let those who wait at the lane see that it has failed or restarted."""
    if isinstance(lane, SenderLane):
        lane.on_change()
    else:
        lane.on_change(lane)


def _register_lane(lanes: dict[int, Any], lane: SenderLane | ReceiverLane) -> None:
    other = lanes.get(lane.spec.number)
    if other is not None:
        raise ConfigError(f"lanes {other.spec.name!r} and {lane.spec.name!r} have the same number; rename one node")
    lanes[lane.spec.number] = lane

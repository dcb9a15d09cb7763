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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import zmq

from flowrl.errors import ConfigError, LaneFailed, WireError
from flowrl.wire.connection import (
    Address,
    ControlPeer,
    EndpointTransport,
    Incoming,
    IpcTransport,
    Link,
    Listener,
    LocalLink,
    Outgoing,
    Peer,
    SocketLink,
    this_machine,
)
from flowrl.wire.control import Answer, Control
from flowrl.wire.edges import EndOfStream, ReceiveLane, SendLane
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
    to_receiver,
    to_sender,
)
from flowrl.wire.run_files import Presence, ipc_path, remove_socket, run_prefix
from flowrl.wire.slab import Attached, Slab, SlabBlock

LINGER_S = 1.0
LATER_S = 0.001
"""Delay before flushing credits and acks that nobody is blocked on; batching saves wake-ups of the peer."""
CONFIRM_S = 0.05
"""Delay before confirming frames of the control link: nobody is blocked on it, and one CONFIRM serves many."""
COMPARES = frozenset((RESEND, SYNC))
"""Frames to a sender that ask for messages again, or for its `say_hello`."""


class Router:
    """See the module. `control` gets the frames of the control link, `failed` the errors that no caller can receive."""

    def __init__(self, host: str, incarnation: int, failed: Callable[[BaseException], None]) -> None:
        self.host = host
        self.incarnation = incarnation
        self.loop: asyncio.AbstractEventLoop
        self.control: ControlPeer
        self.senders: dict[int, SendLane] = {}
        self.receivers: dict[int, ReceiveLane] = {}
        self.closed = False
        self._failed = failed
        self._peers: dict[str, Peer] = {host: Peer(host, incarnation)}
        self._parked: dict[tuple[bool, int], list[Frame]] = {}
        """(is for a sender, lane number): frames."""
        self._dirty: list[Peer] = []
        self._scheduled = False
        self._tick = 0
        """Number of ticks of the loop in which frames came in or left: a cheap clock."""
        self._later: asyncio.TimerHandle | None = None
        self._confirming: asyncio.TimerHandle | None = None

    # Peers

    def peer(self, host: str) -> Peer:
        peer = self._peers.get(host)
        if peer is None:
            peer = self._peers[host] = Peer(host)
        return peer

    def join(self, host: str, incarnation: int, link: Link) -> None:
        """`host` runs as `incarnation`, and `link` reaches it: send the waiting frames, and replay the kept ones."""
        peer = self.peer(host)
        if peer.link is not None:
            peer.link.close(LINGER_S if peer.incarnation == incarnation else 0)
        if peer.incarnation != incarnation:
            peer.outgoing, peer.incoming = Outgoing(), Incoming()
        peer.failed, peer.incarnation, peer.link = "", incarnation, link
        for lane in self.lanes(host):
            session = self.session(lane.spec)
            if lane.machine.session != session:
                lane.machine.restart(session)
                self._wake(lane)
            peer.unflushed.append(lane.machine)
        link.add(peer.outgoing.unconfirmed())
        for frame, error in peer.say_pending(link):
            self.control.unsaid(host, frame, error)
        self._send_due(peer)
        early, peer.early = peer.early, []
        for sent_in, frames in early:
            self.receive(host, sent_in, frames)

    def fail(self, host: str, reason: str, lanes: Iterable[SendLane | ReceiveLane]) -> None:
        """`host` is gone: fail `lanes` and the requests to it. Kept messages stay kept until `join` replays them."""
        peer = self.peer(host)
        peer.failed = reason
        if peer.link is not None:
            peer.link.close(0)
            peer.link = None
        peer.pending.clear()
        peer.unflushed.clear()
        peer.outgoing, peer.incoming = Outgoing(), Incoming()
        self.control.gone(host, reason)
        for lane in lanes:
            lane.machine.failed = f"the process at the other end failed: {reason}"
            self._wake(lane)

    def reconnected(self, host: str) -> None:
        """The connection to `host` was lost and restored: find out which frames are missing, and repeat them."""
        peer = self.peer(host)
        peer.num_comparisons += 1
        for lane in self.lanes(host):
            lane.machine.say_hello()
            peer.unflushed.append(lane.machine)
        peer.unflushed.append(peer.incoming)
        self._send_due(peer)
        if peer.link is not None:
            # After the lanes' frames, so that a request still follows the messages sent before it.
            peer.link.add(peer.outgoing.unconfirmed())
            peer.link.flush()

    def num_comparisons(self, host: str) -> int:
        """A count that grows whenever lanes to or from `host` compare what was sent with what has arrived, after a
        connection was lost or a process replaced."""
        return self.peer(host).num_comparisons

    def all_comparisons(self) -> int:
        """The sum of `num_comparisons` over all peers."""
        return sum(peer.num_comparisons for peer in self._peers.values())

    def close(self) -> None:
        """Send BYE and all due frames, and end every wait at a lane."""
        for host in self._peers:
            self.post(host, (BYE, 0, 0, 0, None))
        self._flush()
        for timer in (self._later, self._confirming):
            if timer is not None:
                timer.cancel()
        for peer in self._peers.values():
            self._send_due(peer)
        self.closed = True
        self._dirty.clear()
        lanes: list[SendLane | ReceiveLane] = [*self.senders.values(), *self.receivers.values()]
        for lane in lanes:
            lane.machine.failed = lane.machine.failed or "this endpoint was closed"
            self._wake(lane)

    def close_links(self) -> None:
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.close(LINGER_S)
                peer.link = None  # frames that become due from here on are dropped

    # Lanes

    def session(self, spec: LaneSpec) -> int:
        """The session of a lane that starts or ends here."""
        return session_number(
            self.peer(spec.producer_host).incarnation or 0, self.peer(spec.consumer_host).incarnation or 0
        )

    def lanes(self, host: str) -> list[SendLane | ReceiveLane]:
        """Every lane to and from `host`."""
        senders = [lane for lane in self.senders.values() if lane.spec.consumer_host == host]
        return [*senders, *(lane for lane in self.receivers.values() if lane.spec.producer_host == host)]

    def add_sender(self, lane: SendLane) -> None:
        _register(self.senders, lane)
        self.peer(lane.spec.consumer_host)
        self.sent(lane)
        for frame in self._parked.pop((True, lane.spec.number), ()):
            self._to_sender(lane, frame)

    def add_receiver(self, lane: ReceiveLane) -> None:
        _register(self.receivers, lane)

    def opened(self, lane: ReceiveLane) -> None:
        """See `ends.LaneOwner`."""
        for frame in self._parked.pop((False, lane.spec.number), ()):
            self._to_receiver(lane, frame)
        self._touched(lane)

    # Frames out

    def sent(self, lane: SendLane) -> None:
        """See `ends.LaneOwner`. Encodes here, so that a body which cannot be sent raises in the sender's own call."""
        peer = self._peers[lane.spec.consumer_host]
        link = peer.link
        if link is None:
            if not peer.failed:  # after a failure, `join` with the new process makes the lane send everything again
                peer.unflushed.append(lane.machine)
            return
        try:
            pending = link.add(lane.machine.flush())
        except WireError as error:
            lane.machine.failed = str(error)
            raise WireError(f"lane {lane.spec.name!r}: {error}") from error
        if peer.begun != self._tick and link.eager:
            self._begin(peer)  # the first message of a tick leaves at once: the peer works while we add the rest
        elif pending >= lane.burst and link.eager:
            link.flush()  # a full burst also leaves at once: a consumer must not idle while this loop is busy
        elif not peer.dirty:
            self._mark(peer)

    def flush_soon(self, lane: ReceiveLane) -> None:
        """See `ends.LaneOwner`."""
        peer = self._peers[lane.spec.producer_host]
        if peer.failed:
            return
        peer.unflushed.append(lane.machine)
        if peer.link is None or not peer.link.eager:
            self._mark(peer)
        elif lane.machine.urgent:
            self._send_due(peer)
        elif self._later is None:
            self._later = self.loop.call_later(LATER_S, self._flush_later)

    def _flush_later(self) -> None:
        """Send credits and acks that have waited; for a busy peer they leave with the next message."""
        self._later = None
        for peer in self._peers.values():
            if peer.unflushed and peer.busy:
                peer.busy, peer.flush_due = False, True
                self._later = self._later or self.loop.call_later(LATER_S, self._flush_later)
            elif peer.unflushed:
                self._send_due(peer)

    def _confirm(self) -> None:
        self._confirming = None
        for peer in self._peers.values():
            if peer.incoming.has_unflushed:
                peer.unflushed.append(peer.incoming)
                self._send_due(peer)

    def _begin(self, peer: Peer) -> None:
        """Send the added frames now, without waiting for the end of the tick."""
        peer.begun = self._tick
        peer.busy = True
        if peer.flush_due:
            self._send_due(peer)
        elif peer.link is not None:
            peer.link.flush()

    def _send_due(self, peer: Peer) -> None:
        if peer.link is not None:
            unflushed, peer.unflushed, peer.flush_due = peer.unflushed, [], False
            for end in unflushed:
                peer.link.add(end.flush())
            peer.link.flush()

    def post(self, host: str, frame: Frame) -> None:
        """Send a frame that belongs to no lane. Raises LaneFailed for a request to a host that is gone."""
        peer = self.peer(host)
        if peer.failed and frame[0] == REQUEST:
            raise LaneFailed(f"no request can be sent to host {host!r}: {peer.failed}")
        if self.closed:
            return
        if peer.link is not None:
            peer.say(peer.link, frame)
            peer.flush_due = True  # a request's handler has to see acks that were made before the request
            if peer.begun != self._tick and peer.link.eager:
                self._begin(peer)
            else:
                self._mark(peer)
        elif not peer.failed:
            peer.pending.append(frame)

    def _mark(self, peer: Peer) -> None:
        if not peer.dirty:
            peer.dirty = True
            self._dirty.append(peer)
            if not self._scheduled and not self.closed:
                self._scheduled = True
                self.loop.call_soon(self._flush)  # once a tick, for all peers with frames

    def _flush(self) -> None:
        self._scheduled = False
        self._tick += 1
        dirty, self._dirty = self._dirty, []
        for peer in dirty:
            peer.dirty = False
            self._send_due(peer)

    # Frames in

    def receive(self, host: str, incarnation: int, frames: Sequence[Frame | Refused]) -> None:
        """Process the frames that `host` sent in `incarnation`."""
        peer = self.peer(host)
        if peer.incarnation is None or incarnation > peer.incarnation:
            peer.early.append((incarnation, frames))  # its process has not joined yet: `join` processes the frames
            return
        if incarnation < peer.incarnation or peer.failed or self.closed:
            return  # frames of a dead incarnation: the new incarnation repeats what was not acked
        self._tick += 1
        touched: dict[ReceiveLane, None] = {}
        lane: ReceiveLane | None = None
        number = -1
        for frame in frames:
            if isinstance(frame, Refused):
                self._refused(host, frame)
            elif frame[0] in TO_RECEIVER:
                if frame[1] != number:  # frames of one lane arrive together: one look-up for all
                    number = frame[1]
                    lane = self.receivers.get(number)
                    if lane is not None and lane.changed is not None:
                        touched[lane] = None
                    else:
                        lane = None
                if lane is None:
                    self._parked.setdefault((False, number), []).append(frame)
                elif frame[0] == DATA and frame[2] == lane.machine.session:  # nearly all frames
                    lane.machine.on_data(frame[3], frame[4])
                else:
                    self._to_receiver(lane, frame)
            elif frame[0] == BYE:
                self._left(peer)
            elif frame[0] == CONFIRM:
                peer.outgoing.on_confirm(frame[3])
            elif frame[0] >= REQUEST:
                if peer.incoming.lets_in(frame):
                    self.control.receive(host, frame)
            elif (sender := self.senders.get(frame[1])) is not None:
                self._to_sender(sender, frame)
            else:
                self._parked.setdefault((True, frame[1]), []).append(frame)
        for lane in touched:
            self._touched(lane)
        if peer.incoming.has_unflushed and self._confirming is None:
            self._confirming = self.loop.call_later(CONFIRM_S, self._confirm)

    def _to_receiver(self, lane: ReceiveLane, frame: Frame) -> None:
        if frame[0] == HELLO:
            self._peers[lane.spec.producer_host].num_comparisons += 1
        lane.cancelled(to_receiver(lane.machine, frame))

    def _touched(self, lane: ReceiveLane) -> None:
        """Wake the consumer, and flush credits or acks if any are due."""
        if lane.changed is not None:
            lane.changed(lane)
        if lane.machine.out or lane.machine.has_unflushed:
            self.flush_soon(lane)

    def _to_sender(self, lane: SendLane, frame: Frame) -> None:
        machine = lane.machine
        if frame[2] != machine.session:
            return
        taken, acked = to_sender(machine, frame)
        lane.taken(taken)
        lane.acked(acked)
        if machine.failed:
            lane.gate.wake()
        if machine.out:
            if frame[0] in COMPARES:
                self._peers[lane.spec.consumer_host].num_comparisons += 1
            self.sent(lane)

    def _wake(self, lane: SendLane | ReceiveLane) -> None:
        if isinstance(lane, SendLane):
            lane.gate.wake()
        elif lane.changed is not None:
            lane.changed(lane)

    def _left(self, peer: Peer) -> None:
        """The peer has closed its endpoint: fail the lanes that would otherwise wait for it forever."""
        if peer.link is not None and peer.host != self.host:
            cut_off = [lane for lane in self.lanes(peer.host) if not lane.machine.closed]
            self.fail(peer.host, "it closed its endpoint before the end of the stream", cut_off)

    def _refused(self, host: str, frame: Refused) -> None:
        lane = self.receivers.get(frame.lane)
        if lane is None:
            self._failed(WireError(f"host {host!r} sent {frame.reason}"))
        elif frame.session == lane.machine.session:
            lane.fail(f"refused a message: {frame.reason}")
            self._wake(lane)


def _register(lanes: dict[int, Any], lane: SendLane | ReceiveLane) -> None:
    other = lanes.get(lane.spec.number)
    if other is not None:
        raise ConfigError(f"lanes {other.spec.name!r} and {lane.spec.name!r} have the same number; rename one node")
    lanes[lane.spec.number] = lane


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

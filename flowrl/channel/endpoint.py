"""Endpoint: one host process's place in the run. Lanes, requests and notes to every other host.

Everything runs on the event loop on which `open` was called.

Invariants
- Frames to one peer keep their order, whatever they belong to. Everything that becomes due for one peer
  within one turn of the loop leaves as one multipart.
- Frames for a lane that nobody has opened here yet wait for it, and frames from a process (or an epoch of
  it) that `connect` or `peer_restarted` has not named yet wait for that word. Credits bound both.
- Frames from an earlier epoch of a peer are dropped: what they said is said again.
- A peer's process is declared dead by the supervisor alone, through `peer_failed`.

Ends of waits: see `ends`, `inbox` and `control`; `close` ends them all.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from flowrl.channel.address import Address, CurveKeys, ipc_path, local_ip, remove_socket, run_prefix, this_machine
from flowrl.channel.control import Answer, Control
from flowrl.channel.ends import ReceiveLane, SendLane
from flowrl.channel.inbox import EndOfStream
from flowrl.channel.lane import LaneSpec, LaneStatistics, ReceiverLane, SenderLane, session_number
from flowrl.channel.latest import LatestReceiver, LatestSender
from flowrl.channel.link import Doorman, Inlet, Link, LocalLink, SocketLink
from flowrl.channel.slab import Attached, Block, Slab
from flowrl.channel.wire import (
    ACK,
    BYE,
    CANCEL,
    CLOSE,
    CREDIT,
    DATA,
    ERROR,
    HELLO,
    REFUSE,
    RELEASE,
    REQUEST,
    RESEND,
    SYNC,
    TO_RECEIVER,
    Frame,
    MessageDecoder,
    Refused,
)  # fmt: skip
from flowrl.errors import ConfigError, LaneFailed, WireError

__all__ = ["Address", "CurveKeys", "EndOfStream", "Endpoint", "Wait"]

LINGER_S = 1.0
_local: weakref.WeakValueDictionary[str, Endpoint] = weakref.WeakValueDictionary()
"""The open endpoints of this process, by their ipc path."""


@dataclass(frozen=True)
class Wait:
    """Something that cannot go on by itself, for stall reports."""

    kind: str
    """credit | item | reply"""
    what: str
    for_s: float


@dataclass(eq=False)
class Peer:
    """One other host, as known here."""

    host: str
    epoch: int | None = None
    link: Link | None = None
    failed: str = ""
    pending: list[Frame] = field(default_factory=list)
    """Frames of the control link that wait for `connect`."""
    early: list[tuple[int, list[Any]]] = field(default_factory=list)
    """(epoch, frames) that wait for the supervisor's word."""
    owing: list[SendLane | ReceiveLane] = field(default_factory=list)
    dirty: bool = False


class Endpoint:
    """See the module. `failed(error)` is told what has no other place to go (a note's handler raised,
    bytes that are no frame); by default the loop's exception handler."""

    def __init__(
        self,
        host: str,
        *,
        run_id: str,
        driver_pid: int,
        epoch: int = 0,
        machine: str | None = None,
        curve: CurveKeys | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.host = host
        self.epoch = epoch
        self._run_id = run_id
        self._driver_pid = driver_pid
        self._machine = machine if machine is not None else this_machine()
        self._curve = curve
        self._failed = failed or self._to_loop
        self._peers: dict[str, Peer] = {}
        self._senders: dict[int, SendLane] = {}
        self._receivers: dict[int, ReceiveLane] = {}
        self._parked: dict[int, list[Frame]] = {}
        self._dirty: list[Peer] = []
        self._scheduled = False
        self._closed = False
        self._control = Control(self._post, self._failed)
        self._slab = Slab(run_prefix(run_id, driver_pid), host, epoch)
        self._attached = Attached(run_prefix(run_id, driver_pid), self._release)
        self._decoder = MessageDecoder(self._attached.array)

    # Opening, peers, closing

    async def open(self, *, tcp: bool | str = False) -> Address:
        """Listen: on ipc, and with `tcp` (True, or the local IP to use) on tcp behind CURVE."""
        if tcp and self._curve is None:
            raise ConfigError(
                "an endpoint that listens on tcp needs the run's CURVE keys; pass `curve=CurveKeys.new()`"
            )
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[Any] = zmq.Context()
        self._inlet = Inlet(self._context, self._arrived)
        self._doorman = Doorman(self._context, self._curve) if tcp and self._curve is not None else None
        path = ipc_path(self._run_id, self._driver_pid, self.host, self.epoch)
        self._inlet.bind(f"ipc://{path}")
        url = ""
        if tcp:
            ip = tcp if isinstance(tcp, str) else local_ip()
            url = self._inlet.bind(f"tcp://{ip}:*", self._curve)
        self.address = Address(self.host, self.epoch, self._machine, os.getpid(), str(path), url)
        _local[str(path)] = self
        self.connect(self.host, self.address)
        return self.address

    def connect(self, host: str, address: Address) -> None:
        """Reach `host` at `address`: in process, by ipc or by tcp, whichever is nearest."""
        self._join(self._peer(host), address)

    def peer_failed(self, host: str, reason: str) -> None:
        """The supervisor's word that the process of `host` is dead: what waits for it fails.

        Everything kept for it stays kept, for `peer_restarted`.
        """
        peer = self._peer(host)
        peer.failed = reason
        if peer.link is not None:
            peer.link.close(0)
            peer.link = None
        peer.pending.clear()
        self._slab.take_back(host)
        self._attached.forget(host)
        self._control.peer_failed(host, reason)
        for lane in self._lanes(host):
            lane.machine.failed = f"the process at the other end failed: {reason}"
            self._tell(lane)

    def peer_restarted(self, host: str, address: Address, epoch: int | None = None) -> None:
        """The supervisor's word that `host` runs anew at `address`: replay to it all that is kept."""
        peer = self._peer(host)
        if not peer.failed:
            self._control.peer_failed(host, "its process was restarted")
            self._slab.take_back(host)
        assert epoch is None or epoch == address.epoch, "the address names the epoch"
        self._join(peer, address)

    def _join(self, peer: Peer, address: Address) -> None:
        if peer.link is not None:
            peer.link.close(LINGER_S if peer.epoch == address.epoch else 0)
        peer.failed = ""
        peer.epoch = address.epoch
        peer.link = self._link(address)
        for lane in self._lanes(peer.host):
            session = self._session(lane.spec)
            if lane.machine.session != session:
                lane.machine.restart(session)
                self._tell(lane)
            peer.owing.append(lane)
        peer.link.add(peer.pending)
        peer.pending = []
        self._mark(peer)
        early, peer.early = peer.early, []
        for epoch, frames in early:
            self._receive(peer.host, epoch, frames)

    def _link(self, address: Address) -> Link:
        neighbour = _local.get(address.ipc) if address.pid == os.getpid() else None
        if neighbour is not None:
            return LocalLink(neighbour.deliver_from(self._loop), self.host, self.epoch)
        near = address.machine == self._machine
        if not near and not address.tcp:
            raise ConfigError(
                f"host {address.host!r} is on another machine and not on tcp; open its endpoint with tcp=True"
            )
        place = self._slab.lender(address.host) if near else None
        url = f"ipc://{address.ipc}" if near else address.tcp
        return SocketLink(self._context, url, self.host, self.epoch, curve=self._curve, place=place)

    async def close(self) -> None:
        """Send what is due, end every wait, release sockets and shared memory."""
        if self._closed:
            return
        await self._control.close()
        for host in self._peers:
            self._post(host, (BYE, 0, 0, 0, None))
        self._flush()
        self._inlet.drain()
        self._closed = True
        ends: list[SendLane | ReceiveLane] = [*self._senders.values(), *self._receivers.values()]
        for lane in ends:
            lane.machine.failed = lane.machine.failed or "this endpoint was closed"
            self._tell(lane)
        self._inlet.close()
        if self._doorman is not None:
            self._doorman.close()
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.close(LINGER_S)
        _local.pop(self.address.ipc, None)
        await self._loop.run_in_executor(None, self._context.term)
        self._slab.close()
        self._attached.close()
        remove_socket(self.address.ipc)

    # Lanes

    def sender(self, spec: LaneSpec) -> SendLane:
        """The producer's end of a lane from here. Once per lane."""
        peer, session = self._peer(spec.consumer_host), self._session(spec)
        machine = LatestSender(spec, session) if spec.kind == "latest" else SenderLane(spec, session)
        lane = SendLane(spec, machine, self)
        self._register(self._senders, lane)
        peer.owing.append(lane)
        self._mark(peer)
        for frame in self._parked.pop(-spec.number, ()):
            self._to_sender(lane, frame)
        return lane

    def receiver(self, spec: LaneSpec) -> ReceiveLane:
        """The consumer's end of a lane to here. Once per lane; add it to an Inbox."""
        session = self._session(spec)
        machine = LatestReceiver(spec, session) if spec.kind == "latest" else ReceiverLane(spec, session)
        lane = ReceiveLane(spec, machine, self)
        self._register(self._receivers, lane)
        return lane

    def _register(self, lanes: dict[int, Any], lane: SendLane | ReceiveLane) -> None:
        other = lanes.get(lane.spec.number)
        if other is not None:
            raise ConfigError(f"lanes {other.spec.name!r} and {lane.spec.name!r} have the same number; rename one node")
        lanes[lane.spec.number] = lane

    def opened(self, lane: ReceiveLane) -> None:
        """See `ends.Owner`."""
        for frame in self._parked.pop(lane.spec.number, ()):
            self._to_receiver(lane, frame)
        self._touched(lane)

    def pump(self, lane: SendLane | ReceiveLane) -> None:
        """See `ends.Owner`. A sender's frames are encoded at once, so that its caller hears of a bad body."""
        if isinstance(lane, SendLane):
            peer = self._peers[lane.spec.consumer_host]
            if peer.link is not None:
                self._add(peer.link, lane)
            else:
                peer.owing.append(lane)
        else:
            peer = self._peers[lane.spec.producer_host]
            if lane.machine.hasty and peer.link is not None:
                peer.link.add(lane.machine.flush())
                peer.link.flush()
                return
            peer.owing.append(lane)
        self._mark(peer)

    def _add(self, link: Link, lane: SendLane) -> None:
        try:
            link.add(lane.machine.flush())
        except WireError as error:
            lane.machine.failed = str(error)
            raise WireError(f"lane {lane.spec.name!r}: {error}") from error
        if link.pending >= lane.burst:
            link.flush()

    # Requests and notes

    async def request(self, host: str, kind: str, body: Any = None) -> Any:
        """Ask `host` and wait for the answer of its handler for `kind`.

        Raises the handler's FlowrlError, FlowrlError with the remote traceback for any other exception,
        LaneFailed if the host's process fails. Cancelling it cancels the handler.
        """
        return await self._control.request(host, kind, body)

    def notify(self, host: str, kind: str, body: Any = None) -> None:
        """Tell `host`; nothing comes back."""
        self._control.notify(host, kind, body)

    def on(self, kind: str, handler: Answer) -> None:
        """Answer `kind` with `handler(host, body)`: a coroutine function for requests, a plain one for notes."""
        self._control.on(kind, handler)

    # What is going on

    def statistics(self) -> dict[str, LaneStatistics]:
        """By lane name; of a lane within this process both ends in one."""
        found = {lane.spec.name: lane.statistics() for lane in self._receivers.values()}
        for lane in self._senders.values():
            mine, other = lane.statistics(), found.get(lane.spec.name)
            found[lane.spec.name] = mine if other is None else replace(mine, received=other.received)
        return found

    def watch(self) -> list[Wait]:
        """What every waiting sender, receiver and request here waits for."""
        now = time.monotonic()
        waits = [
            Wait("credit", lane.spec.name, now - since)
            for lane in self._senders.values()
            if (since := lane.gate.since()) is not None and not lane.machine.credits
        ]
        inboxes = {id(lane.inbox): lane.inbox for lane in self._receivers.values() if lane.inbox is not None}
        waits += [
            Wait("item", inbox.name, now - since)
            for inbox in inboxes.values()
            if (since := inbox.waiting_since()) is not None
        ]
        return waits + [
            Wait("reply", f"{kind} of {host}", now - since) for host, kind, since in self._control.waiting()
        ]

    # Frames out

    def _peer(self, host: str) -> Peer:
        peer = self._peers.get(host)
        if peer is None:
            peer = self._peers[host] = Peer(host)
        return peer

    def _session(self, spec: LaneSpec) -> int:
        def epoch(host: str) -> int:
            return self.epoch if host == self.host else self._peer(host).epoch or 0

        return session_number(epoch(spec.producer_host), epoch(spec.consumer_host))

    def _lanes(self, host: str) -> list[SendLane | ReceiveLane]:
        senders = [lane for lane in self._senders.values() if lane.spec.consumer_host == host]
        return [*senders, *(lane for lane in self._receivers.values() if lane.spec.producer_host == host)]

    def _post(self, host: str, frame: Frame) -> None:
        peer = self._peer(host)
        if peer.failed and frame[0] == REQUEST:
            raise LaneFailed(f"host {host!r} cannot be asked: {peer.failed}")
        if peer.link is not None:
            peer.link.add([frame])
            self._mark(peer)
        elif not peer.failed:
            peer.pending.append(frame)

    def _mark(self, peer: Peer) -> None:
        if not peer.dirty:
            peer.dirty = True
            self._dirty.append(peer)
            if not self._scheduled and not self._closed:
                self._scheduled = True
                self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        dirty, self._dirty = self._dirty, []
        for peer in dirty:
            peer.dirty = False
            link = peer.link
            if link is None:
                continue
            owing, peer.owing = peer.owing, []
            for lane in owing:
                link.add(lane.machine.flush())
            link.flush()

    # Frames in

    def deliver_from(self, loop: asyncio.AbstractEventLoop) -> Callable[[str, int, list[Frame]], None]:
        """What a link from an endpoint on `loop` calls to hand frames over."""
        if loop is self._loop:
            return self._receive
        return lambda host, epoch, frames: self._threadsafe(self._receive, host, epoch, frames)

    def _threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        if not self._closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _arrived(self, parts: list[Any]) -> None:
        try:
            host, epoch = self._decoder.sender(parts[0])
            self._receive(host, epoch, list(self._decoder.decode(parts)))
        except WireError as error:
            self._failed(error)

    def _receive(self, host: str, epoch: int, frames: Sequence[Any]) -> None:
        peer = self._peer(host)
        if peer.epoch is None or epoch > peer.epoch:
            peer.early.append((epoch, list(frames)))
            return
        if epoch < peer.epoch or peer.failed or self._closed:
            return
        touched: dict[ReceiveLane, None] = {}
        for frame in frames:
            if isinstance(frame, Refused):
                self._refused(host, frame)
            elif frame[0] in TO_RECEIVER:
                lane = self._receivers.get(frame[1])
                if lane is None or lane.changed is None:
                    self._parked.setdefault(frame[1], []).append(frame)
                else:
                    self._to_receiver(lane, frame)
                    touched[lane] = None
            elif frame[0] >= REQUEST:
                self._to_control(host, frame)
            elif (sender := self._senders.get(frame[1])) is not None:
                self._to_sender(sender, frame)
            else:
                self._parked.setdefault(-frame[1], []).append(frame)
        for lane in touched:
            self._touched(lane)

    def _to_control(self, host: str, frame: Frame) -> None:
        if frame[0] == BYE:
            self._left(self._peer(host))
        elif frame[0] == RELEASE:
            self._slab.free(host, frame[4])
        else:
            self._control.receive(host, frame)

    def _left(self, peer: Peer) -> None:
        """The peer has closed its endpoint: what still waits for it would wait for ever."""
        if peer.link is None or peer.host == self.host:
            return
        peer.failed = "it has closed its endpoint"
        peer.link.close(0)
        peer.link = None
        self._slab.take_back(peer.host)
        self._control.peer_failed(peer.host, peer.failed)
        for lane in self._lanes(peer.host):
            if not lane.machine.closed:
                lane.machine.failed = "the process at the other end closed its endpoint before the end of the stream"
                self._tell(lane)

    def _to_receiver(self, lane: ReceiveLane, frame: Frame) -> None:
        kind, _, session, seq, payload = frame
        machine = lane.machine
        if session != machine.session:
            return
        if kind == DATA:
            machine.on_data(seq, payload)
        elif kind == CLOSE:
            machine.on_close(seq)
        elif kind == HELLO:
            machine.on_hello(seq, *payload)
        elif kind == CANCEL:
            lane.cancelled(machine.on_cancel(payload))
        elif kind == ERROR:
            machine.on_error(payload)

    def _touched(self, lane: ReceiveLane) -> None:
        """Wake who takes from the lane, and answer its producer where something is due."""
        self._tell(lane)
        if lane.machine.out or lane.machine.owes:
            self.pump(lane)

    def _tell(self, lane: SendLane | ReceiveLane) -> None:
        if isinstance(lane, SendLane):
            lane.gate.wake()
        elif lane.changed is not None:
            lane.changed(lane)

    def _to_sender(self, lane: SendLane, frame: Frame) -> None:
        kind, _, session, seq, payload = frame
        machine = lane.machine
        if session != machine.session:
            return
        if kind == CREDIT:
            lane.taken(machine.on_credit(seq))
        elif kind == ACK:
            lane.acked(machine.on_ack(payload))
        elif kind == RESEND:
            machine.on_resend(seq)
        elif kind == SYNC:
            machine.say_hello()
        elif kind == REFUSE:
            machine.on_error(payload)
            lane.gate.wake()
        if machine.out:
            self.pump(lane)

    def _refused(self, host: str, frame: Refused) -> None:
        lane = self._receivers.get(frame.lane)
        if lane is None:
            self._failed(WireError(f"host {host!r} sent {frame.reason}"))
        elif frame.session == lane.machine.session:
            lane.fail(f"refused a message: {frame.reason}")
            self._tell(lane)

    def _release(self, host: str, epoch: int, block: Block) -> None:
        """A block of a peer's slab is no longer seen by anybody here. Called from any thread."""
        self._threadsafe(self._give_back, host, epoch, block)

    def _give_back(self, host: str, epoch: int, block: Block) -> None:
        if self._peer(host).epoch == epoch:
            self._post(host, (RELEASE, 0, 0, 0, (block,)))

    def _to_loop(self, error: BaseException) -> None:
        self._loop.call_exception_handler({"message": f"flowrl endpoint {self.host!r}: {error}", "exception": error})

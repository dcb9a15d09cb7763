"""Links: carry frames to another endpoint. In this package, only this module uses zmq sockets.

Invariants
- A link delivers in order. zmq queues without a high-water mark: the lanes' credits bound the queues.
- zmq restores a tcp connection that breaks, and `reconnected` is called. Then the two ends of each lane compare
  their state, and the control link repeats the frames that were not confirmed.
- A tcp connection whose peer has vanished without a word (a machine that was switched off, a firewall that forgot the
  connection) breaks after SILENT_S; a peer that is merely busy or stopped loses nothing by such a break.
- A link to a process never outlives that process's incarnation: `Endpoint.connect` makes a new one.

Waits: none. A Listener is drained whenever its descriptor becomes readable, until nothing is left (the
descriptor signals only changes, not that messages remain).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import zmq
from zmq.utils import z85

from flowrl.channel.encoding.codec import ArrayPlace, Buffer
from flowrl.channel.encoding.multiparts import (
    DATA,
    MAX_PARTS,
    NOTIFY,
    REPLY,
    REQUEST,
    Frame,
    MessageEncoder,
    parts_follow,
)
from flowrl.channel.encoding.schema import freeze, freeze_inside
from flowrl.channel.links.address import CurveKeys

COPY_BELOW_BYTES = 1 << 18
"""Smaller frames are copied into zmq: that is cheaper than a callback into Python when zmq has released them."""
# Plain integers: arithmetic on the enums costs more than the zmq call.
EVENTS, POLLIN, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
SNDMORE, RCVMORE = int(zmq.SNDMORE), int(zmq.RCVMORE)
ZAP_DOMAIN = b"flowrl"
BEAT_EVERY_S = 10.0
SILENT_S = 30.0
"""Silence of the other end, after a heartbeat or with sent data unconfirmed, for which a tcp connection is replaced."""


class Link(Protocol):
    """Carries frames to one other endpoint."""

    eager: bool
    """Whether to send the first frames of a tick at once, so that another process can begin to work on them."""
    breaks: bool
    """Whether connections may break: then frames may be lost, and later frames may overtake earlier ones."""

    def add(self, frames: Iterable[Frame]) -> int:
        """Add frames to the next `flush`. Returns how many wait for it. Raises WireError for a value that cannot be
        sent."""

    def flush(self) -> None:
        """Send all added frames."""

    def close(self, linger_s: float) -> None:
        """Close the link; flushed frames may still leave within `linger_s`."""


class LocalLink:
    """Link to an endpoint in this process: it delivers the objects themselves, frozen."""

    eager = False
    breaks = False

    def __init__(self, deliver: Callable[[str, int, list[Frame]], None], host: str, incarnation: int) -> None:
        self._deliver = deliver
        self._host = host
        self._incarnation = incarnation
        self._frames: list[Frame] = []

    def add(self, frames: Iterable[Frame]) -> int:
        for frame in frames:
            if frame[0] == DATA:
                for envelope in frame[4]:
                    freeze(envelope.body)
            elif frame[0] in (REQUEST, REPLY, NOTIFY):
                freeze_inside(frame[4])
            self._frames.append(frame)
        return len(self._frames)

    def flush(self) -> None:
        frames, self._frames = self._frames, []
        if frames:
            self._deliver(self._host, self._incarnation, frames)

    def close(self, linger_s: float) -> None:
        self._frames.clear()


@dataclass(frozen=True)
class Target:
    """Where a socket connects or listens."""

    url: str
    """As zmq takes it: "ipc://PATH" or "tcp://IP:PORT"."""
    keys: CurveKeys | None = None
    """Keys that encrypt a tcp connection; None for other transports."""


class SocketLink:
    """Link to another process, over ipc or tcp."""

    eager = True

    def __init__(
        self,
        context: zmq.Context[Any],
        target: Target,
        host: str,
        incarnation: int,
        *,
        place: ArrayPlace | None,
        reconnected: Callable[[], None],
    ) -> None:
        self._encoder = MessageEncoder(host, incarnation, place)
        self.add = self._encoder.add  # bound directly: every frame passes here, and a wrapper costs a call
        self._monitor: Monitor | None = None
        self.breaks = target.keys is not None
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm = 0
        self._socket.linger = 0
        if target.keys is not None:
            self._socket.curve_serverkey = self._socket.curve_publickey = target.keys.public
            self._socket.curve_secretkey = target.keys.secret
            notice_silence(self._socket, beats=True)
            self._monitor = Monitor(self._socket, reconnected)
        self._socket.connect(target.url)

    def flush(self) -> None:
        for parts in self._encoder.multiparts():
            last = parts.pop()
            for part in parts:
                self._send(part, NOBLOCK | SNDMORE)
            self._send(last, NOBLOCK)

    def _send(self, part: Buffer, flags: int) -> None:
        self._socket.send(part, flags, copy=len(part) < COPY_BELOW_BYTES, track=False)

    def close(self, linger_s: float) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close(linger=int(linger_s * 1000))


def notice_silence(socket: zmq.Socket[Any], *, beats: bool) -> None:
    """Have the tcp connections of a socket break when their other end is silent.

    zmq's threads send and answer heartbeats, so a process that holds the GIL answers. Only the sending end beats: the
    answer to a heartbeat of the receiver would wait behind the frame that is being sent, which may take minutes. The
    kernel's own probes (keepalive; a limit for data that nobody confirms, while which zmq sends no heartbeat) do the
    rest.
    """
    every_s = max(1, round(BEAT_EVERY_S))
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = every_s
    socket.tcp_keepalive_cnt = max(1, round((SILENT_S - BEAT_EVERY_S) / every_s))
    socket.setsockopt(zmq.TCP_MAXRT, round(1000 * SILENT_S))
    if beats:
        socket.heartbeat_ivl = round(1000 * BEAT_EVERY_S)
        socket.heartbeat_timeout = round(1000 * SILENT_S)


class Monitor:
    """Calls `reconnected` when a lost connection was restored: frames in flight may be lost with the old connection."""

    def __init__(self, watched: zmq.Socket[Any], reconnected: Callable[[], None]) -> None:
        self._watched = watched
        self._events = watched.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._reconnected = reconnected
        self._connections = 0
        loop = asyncio.get_running_loop()
        loop.add_reader(self._events.fileno(), self._drain)
        loop.call_soon(self._drain)  # the descriptor does not signal events from before the reader was added

    def _drain(self) -> None:
        while not self._events.closed and self._events.getsockopt(EVENTS) & POLLIN:  # type: ignore[operator]
            self._events.recv_multipart(NOBLOCK)
            self._connections += 1
            if self._connections > 1:
                self._reconnected()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._events.fileno())
        self._watched.disable_monitor()
        self._events.close(linger=0)


class Listener:
    """The bound sockets of an endpoint: all multiparts from other processes arrive here."""

    def __init__(self, context: zmq.Context[Any], receive: Callable[[list[Any]], None]) -> None:
        self._context = context
        self._receive = receive
        self._sockets: list[zmq.Socket[Any]] = []
        self._authenticator: Authenticator | None = None
        self._overlong: set[zmq.Socket[Any]] = set()
        """Sockets that still hold the rest of a multipart with too many parts."""

    def bind(self, target: Target) -> str:
        """Listen at `target`, and return the url that was bound. Only peers that have the target's keys can connect."""
        socket = self._context.socket(zmq.PULL)
        socket.rcvhwm = 0
        socket.linger = 0
        if target.keys is not None:
            self._authenticator = self._authenticator or Authenticator(self._context, target.keys)
            socket.curve_server = True
            socket.curve_secretkey = target.keys.secret
            notice_silence(socket, beats=False)
            socket.zap_domain = ZAP_DOMAIN
        socket.bind(target.url)
        self._sockets.append(socket)
        loop = asyncio.get_running_loop()
        loop.add_reader(socket.fileno(), self._drain, socket)
        loop.call_soon(self._drain, socket)
        return str(socket.last_endpoint.rstrip(b"\0").decode())

    def _drain(self, socket: zmq.Socket[Any]) -> None:
        if socket.closed or (socket in self._overlong and not self._skipped(socket)):
            return
        recv, get, receive = socket.recv, socket.getsockopt, self._receive
        try:
            first = recv(NOBLOCK)  # a readable descriptor nearly always means a message: skip the check of EVENTS
        except zmq.Again:
            return
        while True:
            parts: list[Any] = [first]
            if parts_follow(first):
                self._add_parts(socket, parts)
            try:
                receive(parts)
            except BaseException:  # the loop's exception handler gets it; the messages after this one are still read
                asyncio.get_running_loop().call_soon(self._drain, socket)
                raise
            if self._overlong and not self._skipped(socket):
                return
            if not get(EVENTS) & POLLIN:  # type: ignore[operator]
                return
            first = recv(NOBLOCK)

    def _add_parts(self, socket: zmq.Socket[Any], parts: list[Any]) -> None:
        """Add the parts that follow the first. If there are too many, one part more than the limit is kept, so that
        decoding refuses the multipart."""
        while socket.getsockopt(RCVMORE):
            if len(parts) > MAX_PARTS + 1:
                self._overlong.add(socket)
                return
            parts.append(socket.recv(NOBLOCK, copy=False).buffer)

    def _skipped(self, socket: zmq.Socket[Any]) -> bool:
        """Drop the rest of a multipart with too many parts, up to MAX_PARTS in one tick. True if all is dropped."""
        for _ in range(MAX_PARTS):
            if not socket.getsockopt(RCVMORE):
                self._overlong.discard(socket)
                return True
            socket.recv(NOBLOCK)
        asyncio.get_running_loop().call_soon(self._drain, socket)
        return False

    def drain(self) -> None:
        """Receive everything that has arrived."""
        for socket in self._sockets:
            self._drain(socket)

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for socket in self._sockets:
            loop.remove_reader(socket.fileno())
            socket.close(linger=0)
        self._sockets.clear()
        if self._authenticator is not None:
            self._authenticator.close()


class Authenticator:
    """Answers zmq's authentication requests (ZAP): admits every peer that has the run's public key."""

    def __init__(self, context: zmq.Context[Any], curve: CurveKeys) -> None:
        self._key = z85.decode(curve.public)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._drain)
        loop.call_soon(self._drain)

    def _drain(self) -> None:
        while not self._socket.closed and self._socket.getsockopt(EVENTS) & POLLIN:
            self._socket.send_multipart(self._answer(self._socket.recv_multipart(NOBLOCK)))

    def _answer(self, parts: list[bytes]) -> list[bytes]:
        caller, empty, version, request, _domain, _ip, _identity, mechanism, *credentials = parts
        known = mechanism == b"CURVE" and credentials == [self._key]
        status, text = (b"200", b"OK") if known else (b"400", b"not of this run")
        return [caller, empty, version, request, status, text, b"", b""]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close(linger=0)

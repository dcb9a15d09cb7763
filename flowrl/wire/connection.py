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
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, gethostname
from socket import socket as Socket
from typing import Any, ClassVar, Protocol

import zmq
from zmq.utils import z85

from flowrl.errors import ConfigError, WireError
from flowrl.wire.encoding.codec import ArrayPlace, Buffer
from flowrl.wire.encoding.multiparts import (
    ABORT,
    CONFIRM,
    DATA,
    MAX_PARTS,
    NOTIFY,
    REPLY,
    REQUEST,
    Frame,
    MessageEncoder,
    parts_follow,
)
from flowrl.wire.encoding.schema import freeze, freeze_inside

NUMBERED = frozenset((REQUEST, REPLY, ABORT, NOTIFY))
"""Kinds that are numbered. Other frames between two processes may arrive twice, or late."""
LOW_BITS = 32
"""A number is sent in two fields of the header that the frames of lanes use for lane and session."""


class Outgoing:
    """The sending end. Numbering and keeping are two steps, so that a frame that cannot be sent uses no number."""

    def __init__(self) -> None:
        self._kept: deque[Frame] = deque()
        self._confirmed = 0

    def numbered(self, frame: Frame) -> Frame:
        """The frame as it is sent, with the next number."""
        kind, _, _, seq, payload = frame
        high, low = divmod(self._confirmed + len(self._kept) + 1, 1 << LOW_BITS)
        return kind, high, low, seq, payload

    def keep(self, frame: Frame) -> None:
        """Keep a frame that `numbered` returned and that was added to the link."""
        self._kept.append(frame)

    def unconfirmed(self) -> list[Frame]:
        """The frames to repeat over a new connection, oldest first."""
        return list(self._kept)

    def on_confirm(self, number: int) -> None:
        """The receiver has admitted all frames up to `number`."""
        for _ in range(min(number - self._confirmed, len(self._kept))):
            self._kept.popleft()
            self._confirmed += 1


class Incoming:
    """The receiving end."""

    def __init__(self) -> None:
        self.has_unflushed = False
        """True if a confirmation is to be sent."""
        self._number = 0

    def lets_in(self, frame: Frame) -> bool:
        """Whether `frame` is admitted, because it is the next one. A frame without a number is always admitted."""
        number = frame[1] << LOW_BITS | frame[2]
        if not number:
            return True
        self.has_unflushed = True  # also for a repetition: the confirmation may have been lost
        if number != self._number + 1:
            return False
        self._number = number
        return True

    def flush(self) -> list[Frame]:
        """The confirmation for the sender."""
        self.has_unflushed = False
        return [(CONFIRM, 0, 0, self._number, None)]


@dataclass(frozen=True)
class CurveKeys:
    """One key pair for the whole run: only processes that have it can connect."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> CurveKeys:
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True)
class Address:
    """The address of an open endpoint. Plain data: Ray carries it to the other processes."""

    host: str
    incarnation: int
    machine: str
    pid: int
    ipc: str
    tcp: str = ""
    """"tcp://host:port", "" if the endpoint listens only on its machine."""


def this_machine() -> str:
    """Identifies this machine: two processes with the same value share /dev/shm and can connect over ipc."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    shared = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0
    return f"{gethostname()}:{boot.read_text(encoding='utf-8').strip() if boot.exists() else ''}:{shared}"


def local_ip() -> str:
    """The IP address at which other machines reach this one (sends no packet).

    In a process that has joined Ray, the address that Ray uses for this machine: it may be of another network than the
    default route.
    """
    ray = sys.modules.get("ray")  # never imported here
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    with Socket(AF_INET, SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


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


class Debtor(Protocol):
    """A machine with frames to flush: a lane's, or the `Incoming` that confirms received frames."""

    def flush(self) -> list[Frame]: ...


@dataclass(eq=False)
class Peer:
    """What the router knows of one other host, or of its own."""

    host: str
    incarnation: int | None = None
    """None until `join`."""
    link: Link | None = None
    failed: str = ""
    pending: list[Frame] = field(default_factory=list)
    """Frames of the control link that wait for `join`."""
    early: list[tuple[int, Sequence[Any]]] = field(default_factory=list)
    """(incarnation, frames) that wait for `join`."""
    outgoing: Outgoing = field(default_factory=Outgoing)
    """Control frames to the peer's current incarnation, over a link that may break."""
    incoming: Incoming = field(default_factory=Incoming)
    unflushed: list[Debtor] = field(default_factory=list)
    dirty: bool = False
    """Frames may have to be sent at the end of the tick."""
    begun: int = -1
    """The last tick in which frames left at once: the tick's later frames leave together."""
    busy: bool = False
    """Frames left at once since the router last checked for delayed credits and acks."""
    num_comparisons: int = 0
    """Number of steps in which lanes to or from this peer compared what was sent with what has arrived: a step may
    send frames again, behind frames that were sent later at first."""
    flush_due: bool = False
    """Delayed credits and acks have waited long enough: they leave with the next message."""

    def say(self, link: Link, frame: Frame) -> None:
        """Add a frame of the control link to `link`. Raises WireError for a value that cannot be sent."""
        if link.breaks and frame[0] in NUMBERED:
            frame = self.outgoing.numbered(frame)
            link.add([frame])
            self.outgoing.keep(frame)
        else:
            link.add([frame])

    def say_pending(self, link: Link) -> list[tuple[Frame, WireError]]:
        """Add the frames that waited for `join`. Returns those that cannot be sent, with the error."""
        pending, self.pending = self.pending, []
        unsaid: list[tuple[Frame, WireError]] = []
        for frame in pending:
            try:
                self.say(link, frame)
            except WireError as error:
                unsaid.append((frame, error))
        return unsaid


class ControlPeer(Protocol):
    """Receives the frames that belong to no lane."""

    def receive(self, host: str, frame: Frame) -> None: ...
    def unsaid(self, host: str, frame: Frame, error: WireError) -> None: ...
    def gone(self, host: str, reason: str) -> None: ...


@dataclass(frozen=True)
class IpcTransport:
    """Every endpoint listens on a unix socket. All processes are on one machine."""

    spans_machines: ClassVar[bool] = False

    def open(self, listener: Listener, path: Path) -> str:
        """Listen at the unix socket `path`. Returns the url for other machines, "" if there is none."""
        listener.bind(Target(f"ipc://{path}"))
        path.chmod(0o600)
        return ""

    def target(self, there: Address, *, near: bool) -> Target:
        """What a link to the endpoint at `there` connects to; `near` if that endpoint is on this machine.

        Raises ConfigError if that endpoint is out of reach.
        """
        if near:
            return Target(f"ipc://{there.ipc}")
        raise ConfigError(
            f"host {there.host!r} is on another machine, which this endpoint cannot reach over ipc; give every "
            "endpoint of the run one TcpTransport"
        )


@dataclass(frozen=True)
class TcpTransport(IpcTransport):
    """Every endpoint also listens on tcp, encrypted with the run's keys, for links between machines."""

    keys: CurveKeys = field(default_factory=CurveKeys.new)
    ip: str = ""
    """Where to listen; "" is the IP address at which other machines reach this one."""
    spans_machines: ClassVar[bool] = True

    def open(self, listener: Listener, path: Path) -> str:
        super().open(listener, path)
        return listener.bind(Target(f"tcp://{self.ip or local_ip()}:*", self.keys))

    def target(self, there: Address, *, near: bool) -> Target:
        if near:
            return super().target(there, near=True)
        if there.tcp:
            return Target(there.tcp, self.keys)
        raise ConfigError(
            f"host {there.host!r} is on another machine and does not listen on tcp; give its endpoint the run's "
            "TcpTransport"
        )


EndpointTransport = IpcTransport | TcpTransport

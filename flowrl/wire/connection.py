"""Connections: what one endpoint knows of each other one, and how frames get there. Only this module uses zmq sockets.

Invariants
- All frames to one peer keep their order. Frames for one peer that become due within one tick of the loop leave as
  one multipart, or as several if they are large.
- Credits and acks leave after at most LATER_S. For a peer that was sent frames during that time, they leave with the
  next message instead, or after another LATER_S if none follows. They leave at once if the producer is about to run
  out of credit, and together with every request.
- zmq queues without a high-water mark: the lanes' credits bound the queues.
- zmq restores a tcp connection that breaks, and `reconnected` is called. Then the two ends of each lane compare
  their state, and the frames of no lane that were not confirmed are repeated (`NumberedFrames`).
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
from typing import Any, ClassVar

import zmq
from zmq.utils import z85

from flowrl.errors import ConfigError, LaneFailed, WireError
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
from flowrl.wire.lanes import ReceiverLane, SenderLane

LATER_S = 0.001
"""Delay before flushing credits and acks that nobody is blocked on; batching saves wake-ups of the peer."""
CONFIRM_S = 0.05
"""Delay before confirming frames of no lane: nobody is blocked on it, and one CONFIRM serves many."""
NUMBERED = frozenset((REQUEST, REPLY, ABORT, NOTIFY))
"""Kinds that are numbered. Other frames of no lane may arrive twice, or late."""
LOW_BITS = 32
"""A number is sent in two fields of the header that the frames of lanes use for lane and session."""
COPY_BELOW_BYTES = 1 << 18
"""Smaller frames are copied into zmq: that is cheaper than a callback into Python when zmq has released them."""
# Plain integers: arithmetic on the enums costs more than the zmq call.
EVENTS, POLLIN, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
SNDMORE, RCVMORE = int(zmq.SNDMORE), int(zmq.RCVMORE)
ZAP_DOMAIN = b"flowrl"
BEAT_EVERY_S = 10.0
SILENT_S = 30.0
"""Silence of the other end, after a heartbeat or with sent data unconfirmed, for which a tcp connection is replaced."""


class NumberedFrames:
    """Makes frames of no lane arrive once and in order between two incarnations, even over connections that break.

    Pure: nothing here waits. Links that never break do not need it: their frames carry no number.

    Invariants
    - Frames are numbered from 1 in the order in which they were made. The receiver admits each number once, and only
      after the previous number; it drops a frame that arrives early, because the sender repeats it.
    - The sender keeps a frame until the receiver has confirmed it. After every reconnection it sends all kept
      frames again, in order. The kept frames are those made until a confirmation arrives.
    - Frames are lost, repeated or overtaken only when a connection breaks, and the sender is notified of each new
      connection.
    """

    def __init__(self) -> None:
        self.has_unflushed = False
        """True if a confirmation is to be sent."""
        self._kept: deque[Frame] = deque()
        self._confirmed = 0
        self._admitted = 0

    def number_frame(self, frame: Frame) -> Frame:
        """The frame as it is sent, with the next number. A frame that cannot be sent uses none: `keep_frame` counts."""
        kind, _, _, seq, payload = frame
        high, low = divmod(self._confirmed + len(self._kept) + 1, 1 << LOW_BITS)
        return kind, high, low, seq, payload

    def keep_frame(self, frame: Frame) -> None:
        """Keep a frame that `number_frame` returned and that was added to the link."""
        self._kept.append(frame)

    def unconfirmed_frames(self) -> list[Frame]:
        """The frames to repeat over a new connection, oldest first."""
        return list(self._kept)

    def on_confirm(self, number: int) -> None:
        """The receiver has admitted all frames up to `number`."""
        for _ in range(min(number - self._confirmed, len(self._kept))):
            self._kept.popleft()
            self._confirmed += 1

    def admit_frame(self, frame: Frame) -> bool:
        """Whether `frame` is admitted, because it is the next one. A frame without a number is always admitted."""
        number = frame[1] << LOW_BITS | frame[2]
        if not number:
            return True
        self.has_unflushed = True  # also for a repetition: the confirmation may have been lost
        if number != self._admitted + 1:
            return False
        self._admitted = number
        return True

    def flush(self) -> list[Frame]:
        """The confirmation for the sender."""
        self.has_unflushed = False
        return [(CONFIRM, 0, 0, self._admitted, None)]


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


@dataclass(frozen=True)
class Target:
    """Where a socket connects or listens."""

    url: str
    """As zmq takes it: "ipc://PATH" or "tcp://IP:PORT"."""
    keys: CurveKeys | None = None
    """Keys that encrypt a tcp connection; None for other transports."""


class Flusher:
    """Decides when the frames of an endpoint's connections leave: at the end of a tick of the loop, or a bit later."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop
        self.connections: dict[str, Connection] = {}
        self.closed = False
        self.tick = 0
        """Number of ticks of the loop in which frames came in or left: a cheap clock."""
        self._dirty: list[Connection] = []
        self._scheduled = False
        self._later: asyncio.TimerHandle | None = None
        self._confirming: asyncio.TimerHandle | None = None

    def mark_dirty(self, connection: Connection) -> None:
        """Send the connection's frames at the end of the tick."""
        if not connection.dirty:
            connection.dirty = True
            self._dirty.append(connection)
            if not self._scheduled and not self.closed:
                self._scheduled = True
                self.loop.call_soon(self.flush_dirty)  # once a tick, for all connections with frames

    def flush_dirty(self) -> None:
        self._scheduled = False
        self.tick += 1
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.dirty = False
            connection.send_due()

    def flush_later(self) -> None:
        """Send credits and acks after LATER_S; for a busy peer they leave with the next message."""
        if self._later is None:
            self._later = self.loop.call_later(LATER_S, self._flush_waiting)

    def _flush_waiting(self) -> None:
        self._later = None
        for connection in self.connections.values():
            if connection.unflushed and connection.busy:
                connection.busy, connection.flush_due = False, True
                self.flush_later()
            elif connection.unflushed:
                connection.send_due()

    def confirm_later(self) -> None:
        """Confirm the frames of no lane after CONFIRM_S."""
        if self._confirming is None:
            self._confirming = self.loop.call_later(CONFIRM_S, self.send_confirmations)

    def send_confirmations(self) -> None:
        self._confirming = None
        for connection in self.connections.values():
            if connection.numbers.has_unflushed:
                connection.unflushed.append(connection.numbers)
                connection.send_due()

    def close(self) -> None:
        """Send everything that is due, and nothing after that."""
        self.flush_dirty()
        for timer in (self._later, self._confirming):
            if timer is not None:
                timer.cancel()
        for connection in self.connections.values():
            connection.send_due()
        self.closed = True
        self._dirty.clear()


class Connection:
    """What an endpoint knows of one other host, or of its own, and the link over which frames get there.

    Within a process the link delivers the objects themselves, frozen; else it is a socket, over ipc or tcp.
    """

    def __init__(self, host: str, flusher: Flusher, incarnation: int | None = None) -> None:
        self.host = host
        self.incarnation = incarnation
        """None until the host's process has joined."""
        self.failed = ""
        """Why the host's process is gone, "" if it is not."""
        self.linked = False
        self.early: list[tuple[int, Sequence[Any]]] = []
        """(incarnation, frames) that arrived from a process which has not joined yet."""
        self.numbers = NumberedFrames()
        """The frames of no lane to and from the peer's current incarnation, over a link that may break."""
        self.unflushed: list[SenderLane | ReceiverLane | NumberedFrames] = []
        """What has frames to be sent that are not in the link yet."""
        self.num_comparisons = 0
        """Number of steps in which lanes to or from this peer compared what was sent with what has arrived: a step may
        send frames again, behind frames that were sent later at first."""
        self.dirty = False
        """Frames may have to be sent at the end of the tick."""
        self.busy = False
        """Frames left at once since the flusher last checked for delayed credits and acks."""
        self.flush_due = False
        """Delayed credits and acks have waited long enough: they leave with the next message."""
        self._flusher = flusher
        self._begun = -1
        """The last tick in which frames left at once: the tick's later frames leave together."""
        self._pending: list[Frame] = []
        """Frames of no lane that wait for the link."""
        self._eager = False
        """Whether to send the first frames of a tick at once, so that another process can begin to work on them."""
        self._breaks = False
        """Whether the link may break: then frames may be lost, and later frames may overtake earlier ones."""
        self._add: Callable[[Iterable[Frame]], int] = self._add_frozen
        """Adds frames to those that leave next, and returns how many these are. Raises WireError for a value that
        cannot be sent."""
        self._added: list[Frame] = []
        self._deliver: Callable[[list[Frame]], None] | None = None
        self._encoder: MessageEncoder | None = None
        self._socket: zmq.Socket[Any] | None = None
        self._monitor: Monitor | None = None

    def link_local(self, deliver: Callable[[list[Frame]], None]) -> None:
        """Reach an endpoint in this process."""
        self._deliver = deliver
        self._eager = self._breaks = False
        self._add = self._add_frozen
        self.linked = True

    def link_socket(
        self,
        context: zmq.Context[Any],
        target: Target,
        encoder: MessageEncoder,
        reconnected: Callable[[], None],
    ) -> None:
        """Reach another process at `target`."""
        self._encoder = encoder
        self._add = encoder.add  # bound directly: every frame passes here, and a wrapper costs a call
        self._eager, self._breaks = True, target.keys is not None
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm = 0
        self._socket.linger = 0
        if target.keys is not None:
            self._socket.curve_serverkey = self._socket.curve_publickey = target.keys.public
            self._socket.curve_secretkey = target.keys.secret
            notice_silence(self._socket, beats=True)
            self._monitor = Monitor(self._socket, reconnected)
        self._socket.connect(target.url)
        self.linked = True

    def close_link(self, linger_s: float) -> None:
        """Close the link; flushed frames may still leave within `linger_s`. Frames that become due after it wait."""
        self.linked = False
        self._added.clear()
        self._deliver = self._encoder = None
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._socket is not None:
            self._socket.close(linger=int(linger_s * 1000))
            self._socket = None

    def fail(self, reason: str) -> None:
        """The host's process is gone: forget what was to be sent there."""
        self.failed = reason
        if self.linked:
            self.close_link(0)
        self._pending.clear()
        self.unflushed.clear()
        self.numbers = NumberedFrames()

    def _add_frozen(self, frames: Iterable[Frame]) -> int:
        for frame in frames:
            if frame[0] == DATA:
                for envelope in frame[4]:
                    freeze(envelope.body)
            elif frame[0] in (REQUEST, REPLY, NOTIFY):
                freeze_inside(frame[4])
            self._added.append(frame)
        return len(self._added)

    def _flush_link(self) -> None:
        """Send all added frames."""
        if self._encoder is not None and self._socket is not None:
            send: Callable[..., Any] = self._socket.send
            for parts in self._encoder.multiparts():
                last = parts.pop()
                for part in parts:
                    send(part, NOBLOCK | SNDMORE, copy=len(part) < COPY_BELOW_BYTES, track=False)
                send(last, NOBLOCK, copy=len(last) < COPY_BELOW_BYTES, track=False)
        elif self._deliver is not None:
            frames, self._added = self._added, []
            if frames:
                self._deliver(frames)

    def send_lane(self, lane: SenderLane) -> None:
        """Send the frames of a lane to this host. Encodes here, so that a body which cannot be sent raises in the
        sender's own call."""
        if not self.linked:
            if not self.failed:  # after a failure, the new process makes the lane send everything again
                self.unflushed.append(lane)
            return
        try:
            num_added = self._add(lane.flush())
        except WireError as error:
            lane.failed = str(error)
            raise WireError(f"lane {lane.spec.name!r}: {error}") from error
        if self._begun != self._flusher.tick and self._eager:
            self._send_at_once()  # the first message of a tick leaves at once: the peer works while we add the rest
        elif num_added >= lane.burst and self._eager:
            self._flush_link()  # a full burst also leaves at once: a consumer must not idle while this loop is busy
        elif not self.dirty:
            self._flusher.mark_dirty(self)

    def flush_soon(self, lane: ReceiverLane) -> None:
        """A lane from this host has credits, acks or other frames to flush soon."""
        if self.failed:
            return
        self.unflushed.append(lane)
        if not self._eager or not self.linked:
            self._flusher.mark_dirty(self)
        elif lane.urgent:
            self.send_due()
        else:
            self._flusher.flush_later()

    def _send_at_once(self) -> None:
        """Send the added frames now, without waiting for the end of the tick."""
        self._begun = self._flusher.tick
        self.busy = True
        if self.flush_due:
            self.send_due()
        else:
            self._flush_link()

    def send_due(self) -> None:
        """Send everything that is due now."""
        if self.linked:
            unflushed, self.unflushed, self.flush_due = self.unflushed, [], False
            for end in unflushed:
                self._add(end.flush())
            self._flush_link()

    def post_frame(self, frame: Frame) -> None:
        """Send a frame that belongs to no lane. Raises LaneFailed for a request to a host that is gone."""
        if self.failed and frame[0] == REQUEST:
            raise LaneFailed(f"no request can be sent to host {self.host!r}: {self.failed}")
        if self._flusher.closed:
            return
        if self.linked:
            self._add_unlaned(frame)
            self.flush_due = True  # a request's handler has to see acks that were made before the request
            if self._begun != self._flusher.tick and self._eager:
                self._send_at_once()
            else:
                self._flusher.mark_dirty(self)
        elif not self.failed:
            self._pending.append(frame)

    def _add_unlaned(self, frame: Frame) -> None:
        """Add a frame of no lane to the link. Raises WireError for a value that cannot be sent."""
        if self._breaks and frame[0] in NUMBERED:
            frame = self.numbers.number_frame(frame)
            self._add([frame])
            self.numbers.keep_frame(frame)
        else:
            self._add([frame])

    def say_pending(self) -> list[tuple[Frame, WireError]]:
        """Add the frames of no lane that were not confirmed, and those that waited for the link. Returns those that
        cannot be sent, with the error."""
        self._add(self.numbers.unconfirmed_frames())
        pending, self._pending = self._pending, []
        unsaid: list[tuple[Frame, WireError]] = []
        for frame in pending:
            try:
                self._add_unlaned(frame)
            except WireError as error:
                unsaid.append((frame, error))
        return unsaid

    def repeat_unconfirmed(self) -> None:
        """Send the frames of no lane again that may have been lost with a connection."""
        if self.linked:
            self._add(self.numbers.unconfirmed_frames())
            self._flush_link()


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
        loop.add_reader(self._events.fileno(), self._drain_events)
        loop.call_soon(self._drain_events)  # the descriptor does not signal events from before the reader was added

    def _drain_events(self) -> None:
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

    def bind_socket(self, target: Target) -> str:
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
        loop.add_reader(socket.fileno(), self._drain_socket, socket)
        loop.call_soon(self._drain_socket, socket)
        return str(socket.last_endpoint.rstrip(b"\0").decode())

    def _drain_socket(self, socket: zmq.Socket[Any]) -> None:
        if socket.closed or (socket in self._overlong and not self._skip_rest(socket)):
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
                asyncio.get_running_loop().call_soon(self._drain_socket, socket)
                raise
            if self._overlong and not self._skip_rest(socket):
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

    def _skip_rest(self, socket: zmq.Socket[Any]) -> bool:
        """Drop the rest of a multipart with too many parts, up to MAX_PARTS in one tick. True if all is dropped."""
        for _ in range(MAX_PARTS):
            if not socket.getsockopt(RCVMORE):
                self._overlong.discard(socket)
                return True
            socket.recv(NOBLOCK)
        asyncio.get_running_loop().call_soon(self._drain_socket, socket)
        return False

    def drain_sockets(self) -> None:
        """Receive everything that has arrived."""
        for socket in self._sockets:
            self._drain_socket(socket)

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
        loop.add_reader(self._socket.fileno(), self._drain_requests)
        loop.call_soon(self._drain_requests)

    def _drain_requests(self) -> None:
        while not self._socket.closed and self._socket.getsockopt(EVENTS) & POLLIN:
            self._socket.send_multipart(self._answer_request(self._socket.recv_multipart(NOBLOCK)))

    def _answer_request(self, parts: list[bytes]) -> list[bytes]:
        caller, empty, version, request, _domain, _ip, _identity, mechanism, *credentials = parts
        known = mechanism == b"CURVE" and credentials == [self._key]
        status, text = (b"200", b"OK") if known else (b"400", b"not of this run")
        return [caller, empty, version, request, status, text, b"", b""]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close(linger=0)


@dataclass(frozen=True)
class IpcTransport:
    """Every endpoint listens on a unix socket. All processes are on one machine."""

    spans_machines: ClassVar[bool] = False

    def open(self, listener: Listener, path: Path) -> str:
        """Listen at the unix socket `path`. Returns the url for other machines, "" if there is none."""
        listener.bind_socket(Target(f"ipc://{path}"))
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
        return listener.bind_socket(Target(f"tcp://{self.ip or local_ip()}:*", self.keys))

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
"""How the endpoints of a run reach each other. The driver chooses one for the whole run and passes it to every host in
the host's spec: plain data. CURVE keys are part of `TcpTransport`, so no endpoint listens or connects on tcp without
them."""

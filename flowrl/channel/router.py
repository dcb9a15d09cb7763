"""Router: moves the frames of one endpoint between its lanes and the links to its peers.

Invariants
- All frames to one peer keep their order. Frames for one peer that become due within one tick of the loop leave as
  one multipart, or as several if they are large.
- Credits and acks leave after at most LATER_S. For a peer that was sent frames during that time, they leave with the
  next message instead, or after another LATER_S if none follows. They leave at once if the producer is about to run
  out of credit, and together with every request.
- Over a link that may break, frames of the control link are numbered, kept until they are confirmed, and admitted
  once and in order (`links.numbered_frames`).
- Frames for a lane that is not open here yet are parked. So are frames from a process, or an incarnation of it, that
  `join` has not named yet. Credits bound the number of parked frames.
- Frames from an earlier incarnation of a peer are dropped: the new incarnation repeats their content.
- Only the supervisor, or the peer's own BYE, declares a peer's process dead.

Waits: none here. If a peer has failed or closed its endpoint, the router fails its lanes, which ends the waits there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flowrl.channel.encoding.multiparts import (
    BYE,
    CONFIRM,
    DATA,
    HELLO,
    REQUEST,
    RESEND,
    SYNC,
    TO_RECEIVER,
    Frame,
    Refused,
)
from flowrl.channel.lanes.ends import ReceiveLane, SendLane
from flowrl.channel.lanes.frame_switch import to_receiver, to_sender
from flowrl.channel.lanes.lane_spec import LaneSpec, session_number
from flowrl.channel.links.link import Link
from flowrl.channel.links.numbered_frames import Incoming, Outgoing
from flowrl.channel.links.peer import ControlPeer, Peer
from flowrl.errors import ConfigError, LaneFailed, WireError

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

"""Router: the frames of one endpoint, between its lanes and the links to its peers.

Invariants
- Frames to one peer keep their order, whatever they belong to. Everything that becomes due for one peer
  within one turn of the loop leaves as one multipart, or as several when it is much.
- Credits and acks leave with the first message after LATER_S, alone when there is none for as long again, and
  at once when the producer would stand still without them. Requests take along what was acked before.
- Over a link that may break, frames of the control link are numbered, kept until they are confirmed, and let in
  once and in order (`once`).
- Frames for a lane that nobody has opened here yet wait for it, and frames from a process (or an epoch of
  it) that `join` has not named yet wait for that word. Credits bound both.
- Frames from an earlier epoch of a peer are dropped: what they said is said again.
- A peer's process is declared dead by the supervisor alone, or by its own farewell.

Waits: none here. A failed or departed peer fails its lanes, which ends the waits at their ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flowrl.channel.ends import ReceiveLane, SendLane
from flowrl.channel.link import Link
from flowrl.channel.once import Incoming, Outgoing
from flowrl.channel.peer import Control, Peer
from flowrl.channel.spec import LaneSpec, session_number
from flowrl.channel.wire import (
    ACK,
    BYE,
    CANCEL,
    CLOSE,
    CONFIRM,
    CREDIT,
    DATA,
    ERROR,
    HELLO,
    REFUSE,
    REQUEST,
    RESEND,
    SYNC,
    TO_RECEIVER,
    Frame,
    Refused,
)
from flowrl.errors import ConfigError, LaneFailed, WireError

LINGER_S = 1.0
LATER_S = 0.001
"""So long credits and acks that nobody waits for wait for company, and then as long again for a message to
travel with: waking the other process costs more than telling it, and telling it twice more than once."""


CONFIRM_S = 0.05
"""So long frames of the control link that came in are not confirmed: nobody is blocked on it, one word serves many."""


class Router:
    """See the module. `control` gets the frames of the control link, `failed` errors without another place."""

    def __init__(self, host: str, epoch: int, failed: Callable[[BaseException], None]) -> None:
        self.host = host
        self.epoch = epoch
        self.loop: asyncio.AbstractEventLoop
        self.control: Control
        self.senders: dict[int, SendLane] = {}
        self.receivers: dict[int, ReceiveLane] = {}
        self.closed = False
        self._failed = failed
        self._peers: dict[str, Peer] = {host: Peer(host, epoch)}
        self._parked: dict[tuple[bool, int], list[Frame]] = {}
        """(is for a sender, lane number): frames."""
        self._dirty: list[Peer] = []
        self._scheduled = False
        self._turn = 0
        """Counts the turns of the loop in which frames came in or left together; a good enough clock."""
        self._later: asyncio.TimerHandle | None = None
        self._confirming: asyncio.TimerHandle | None = None

    # Peers

    def peer(self, host: str) -> Peer:
        peer = self._peers.get(host)
        if peer is None:
            peer = self._peers[host] = Peer(host)
        return peer

    def join(self, host: str, epoch: int, link: Link) -> None:
        """`host` is alive at `epoch` and reached by `link`: send what waits, replay what is kept."""
        peer = self.peer(host)
        if peer.link is not None:
            peer.link.close(LINGER_S if peer.epoch == epoch else 0)
        if peer.epoch != epoch:
            peer.outgoing, peer.incoming = Outgoing(), Incoming()
        peer.failed, peer.epoch, peer.link = "", epoch, link
        for lane in self.lanes(host):
            session = self.session(lane.spec)
            if lane.machine.session != session:
                lane.machine.restart(session)
                self._tell(lane)
            peer.owing.append(lane.machine)
        link.add(peer.outgoing.unconfirmed())
        for frame, error in peer.say_pending(link):
            self.control.unsaid(host, frame, error)
        self._send_due(peer)
        early, peer.early = peer.early, []
        for early_epoch, frames in early:
            self.receive(host, early_epoch, frames)

    def fail(self, host: str, reason: str, lanes: Iterable[SendLane | ReceiveLane]) -> None:
        """`host` is gone: fail `lanes` and the requests to it. What is kept stays kept, for `join`."""
        peer = self.peer(host)
        peer.failed = reason
        if peer.link is not None:
            peer.link.close(0)
            peer.link = None
        peer.pending.clear()
        self.control.gone(host, reason)
        for lane in lanes:
            lane.machine.failed = f"the process at the other end failed: {reason}"
            self._tell(lane)

    def reconnected(self, host: str) -> None:
        """A connection to `host` broke and was made anew: find out what was lost, and say it again."""
        peer = self.peer(host)
        for lane in self.lanes(host):
            lane.machine.say_hello()
            peer.owing.append(lane.machine)
        peer.owing.append(peer.incoming)
        self._send_due(peer)
        if peer.link is not None:  # behind the lanes' words: what was sent before a request is asked for before it
            peer.link.add(peer.outgoing.unconfirmed())
            peer.link.flush()

    def close(self) -> None:
        """Say farewell, send what is due, and end every wait at a lane."""
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
            self._tell(lane)

    def close_links(self) -> None:
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.close(LINGER_S)
                peer.link = None  # what comes to be due now has nobody to go to

    # Lanes

    def session(self, spec: LaneSpec) -> int:
        """The session of a lane from or to here."""
        return session_number(self.peer(spec.producer_host).epoch or 0, self.peer(spec.consumer_host).epoch or 0)

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
        """See `ends.Owner`."""
        for frame in self._parked.pop((False, lane.spec.number), ()):
            self._to_receiver(lane, frame)
        self._touched(lane)

    # Frames out

    def sent(self, lane: SendLane) -> None:
        """See `ends.Owner`. Frames are encoded here, so that the sender hears of a bad body."""
        peer = self._peers[lane.spec.consumer_host]
        link = peer.link
        if link is None:
            peer.owing.append(lane.machine)
            return
        try:
            pending = link.add(lane.machine.flush())
        except WireError as error:
            lane.machine.failed = str(error)
            raise WireError(f"lane {lane.spec.name!r}: {error}") from error
        if peer.begun != self._turn and link.eager:
            self._begin(peer)
        elif pending >= lane.burst and link.eager:
            link.flush()
        elif not peer.dirty:
            self._mark(peer)

    def owed(self, lane: ReceiveLane) -> None:
        """See `ends.Owner`."""
        peer = self._peers[lane.spec.producer_host]
        peer.owing.append(lane.machine)
        if peer.link is None or not peer.link.eager:
            self._mark(peer)
        elif lane.machine.hasty:
            self._send_due(peer)
        elif self._later is None:
            self._later = self.loop.call_later(LATER_S, self._flush_later)

    def _flush_later(self) -> None:
        """What is owed leaves now; where messages leave all the time, the next one takes it along."""
        self._later = None
        for peer in self._peers.values():
            if peer.owing and peer.busy:
                peer.busy, peer.ripe = False, True
                self._later = self._later or self.loop.call_later(LATER_S, self._flush_later)
            elif peer.owing:
                self._send_due(peer)

    def _confirm(self) -> None:
        self._confirming = None
        for peer in self._peers.values():
            if peer.incoming.owes:
                peer.owing.append(peer.incoming)
                self._send_due(peer)

    def _begin(self, peer: Peer) -> None:
        """Send what was added now, without waiting for the end of the turn."""
        peer.begun = self._turn
        peer.busy = True
        if peer.ripe:
            self._send_due(peer)
        elif peer.link is not None:
            peer.link.flush()

    def _send_due(self, peer: Peer) -> None:
        if peer.link is not None:
            owing, peer.owing, peer.ripe = peer.owing, [], False
            for debtor in owing:
                peer.link.add(debtor.flush())
            peer.link.flush()

    def post(self, host: str, frame: Frame) -> None:
        """Send a frame that belongs to no lane. Raises LaneFailed for a request to a host that is gone."""
        peer = self.peer(host)
        if peer.failed and frame[0] == REQUEST:
            raise LaneFailed(f"host {host!r} cannot be asked: {peer.failed}")
        if self.closed:
            return
        if peer.link is not None:
            peer.say(peer.link, frame)
            peer.ripe = True  # whoever is asked may look at what was acked before
            if peer.begun != self._turn and peer.link.eager:
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
                self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        self._turn += 1
        dirty, self._dirty = self._dirty, []
        for peer in dirty:
            peer.dirty = False
            self._send_due(peer)

    # Frames in

    def receive(self, host: str, epoch: int, frames: Sequence[Frame | Refused]) -> None:
        """Take in what `host` sent in `epoch`."""
        peer = self.peer(host)
        if peer.epoch is None or epoch > peer.epoch:
            peer.early.append((epoch, frames))
            return
        if epoch < peer.epoch or peer.failed or self.closed:
            return
        self._turn += 1
        touched: dict[ReceiveLane, None] = {}
        lane: ReceiveLane | None = None
        number = -1
        for frame in frames:
            if isinstance(frame, Refused):
                self._refused(host, frame)
            elif frame[0] in TO_RECEIVER:
                if frame[1] != number:
                    number = frame[1]
                    lane = self.receivers.get(number)
                    if lane is not None and lane.changed is not None:
                        touched[lane] = None
                    else:
                        lane = None
                if lane is None:
                    self._parked.setdefault((False, number), []).append(frame)
                elif frame[0] == DATA and frame[2] == lane.machine.session:  # most frames by far
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
        if peer.incoming.owes and self._confirming is None:
            self._confirming = self.loop.call_later(CONFIRM_S, self._confirm)

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
            self.owed(lane)

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
        if machine.failed:
            lane.gate.wake()
        if machine.out:
            self.sent(lane)

    def _tell(self, lane: SendLane | ReceiveLane) -> None:
        if isinstance(lane, SendLane):
            lane.gate.wake()
        elif lane.changed is not None:
            lane.changed(lane)

    def _left(self, peer: Peer) -> None:
        """The peer has closed its endpoint: what still waits for it would wait for ever."""
        if peer.link is not None and peer.host != self.host:
            cut_off = [lane for lane in self.lanes(peer.host) if not lane.machine.closed]
            self.fail(peer.host, "it closed its endpoint before the end of the stream", cut_off)

    def _refused(self, host: str, frame: Refused) -> None:
        lane = self.receivers.get(frame.lane)
        if lane is None:
            self._failed(WireError(f"host {host!r} sent {frame.reason}"))
        elif frame.session == lane.machine.session:
            lane.fail(f"refused a message: {frame.reason}")
            self._tell(lane)


def _register(lanes: dict[int, Any], lane: SendLane | ReceiveLane) -> None:
    other = lanes.get(lane.spec.number)
    if other is not None:
        raise ConfigError(f"lanes {other.spec.name!r} and {lane.spec.name!r} have the same number; rename one node")
    lanes[lane.spec.number] = lane

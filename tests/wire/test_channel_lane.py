"""The lane protocol under loss, duplication, reordering, crashes and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import LaneFailed
from flowrl.graph.dispatch_rules import SHARE
from flowrl.messages import Tombstone
from flowrl.wire.connection import Listener, Target
from flowrl.wire.edges import OutEdge
from flowrl.wire.encoding.multiparts import ACK, CREDIT, DATA, ERROR, RESEND, TO_SENDER, Frame
from flowrl.wire.encoding.schema import Envelope, source_id
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.lanes import (
    LaneSpec,
    LatestReceiver,
    LatestSender,
    ReceiverLane,
    Seen,
    SenderLane,
    session_number,
)
from tests.rigs.ticks import ticks
from tests.wire.channel_rig import inbox_of, lane, run, thing
from tests.wire.channel_rig import play as play_out

BODY = Tombstone("g", 0, "failed", "test", "node")


def spec(capacity: int = 4, kind: str = "queue", name: str = "a/0.out -> b/0.in") -> LaneSpec:
    return LaneSpec(name, "a.out -> b.in", "a/0", "b/0", "A", "B", capacity, kind)  # type: ignore[arg-type]


def envelope(index: int) -> Envelope:
    return Envelope(source_id("a", str(index)), index, "g", 0, BODY)


Sender = SenderLane | LatestSender
Receiver = ReceiverLane | LatestReceiver


def exchange(sender: Sender, receiver: Receiver) -> None:
    """Deliver everything until both sides are silent."""
    while frames := sender.flush() + receiver.flush():
        for frame in frames:
            if frame[0] in TO_SENDER:
                sender.take_frame(frame)
            else:
                receiver.take_frame(frame)


def kinds(frames: list[Frame]) -> list[int]:
    return [frame[0] for frame in frames]


# Single properties, by hand


def test_credit_returns_when_taken_and_ack_when_finished() -> None:
    sender, receiver = SenderLane(spec(2)), ReceiverLane(spec(2))
    first, second = envelope(0), envelope(1)
    sender.send(first)
    sender.send(second)
    assert sender.credits == 0
    exchange(sender, receiver)
    assert sender.credits == 0
    assert receiver.take() is first
    exchange(sender, receiver)
    assert sender.credits == 1
    assert sender.unacked() == [first, second]
    receiver.seen.finish_message(first.id)
    exchange(sender, receiver)
    assert sender.unacked() == [second]


def test_messages_that_come_together_are_taken_from_where_the_receiver_stands() -> None:
    receiver = ReceiverLane(spec(9))
    a, b, c, d, e, f = map(envelope, range(6))
    receiver.on_data(0, [a, b])
    receiver.on_data(0, [a, b, c])  # sent again, with more behind
    receiver.on_data(1, [b, c])
    assert receiver.num_received == 3 and not receiver.out
    receiver.on_data(4, [e, f])  # d is missing
    assert receiver.num_received == 3
    assert [frame[:4] for frame in receiver.flush()] == [(RESEND, receiver.spec.number, 0, 3)]
    receiver.on_data(2, [c, d, e, f])
    assert [receiver.take().id for _ in range(6)] == [message.id for message in (a, b, c, d, e, f)]
    assert not receiver.ready


def test_acks_come_in_any_order() -> None:
    sender, receiver = SenderLane(spec(3)), ReceiverLane(spec(3))
    items = [envelope(i) for i in range(3)]
    for item in items:
        sender.send(item)
    exchange(sender, receiver)
    for _ in items:
        receiver.take()
    receiver.seen.finish_message(items[2].id)
    receiver.seen.finish_message(items[0].id)
    exchange(sender, receiver)
    assert sender.unacked() == [items[1]]


def test_one_flush_holds_one_credit_and_one_ack_for_many_messages() -> None:
    sender, receiver = SenderLane(spec(8)), ReceiverLane(spec(8))
    for i in range(8):
        sender.send(envelope(i))
    exchange(sender, receiver)
    for _ in range(8):
        receiver.seen.finish_message(receiver.take().id)
    frames = receiver.flush()
    assert kinds(frames) == [CREDIT, ACK]
    assert frames[0][3] == 8
    assert frames[1][4] == list(range(8))


def test_end_of_stream_only_after_everything_was_taken() -> None:
    sender, receiver = SenderLane(spec()), ReceiverLane(spec())
    sender.send(envelope(0))
    sender.close()
    exchange(sender, receiver)
    assert receiver.ready and not receiver.ended
    receiver.take()
    assert receiver.ended


def test_error_is_no_end_of_stream() -> None:
    sender, receiver = SenderLane(spec()), ReceiverLane(spec())
    sender.fail("node raised")
    exchange(sender, receiver)
    assert receiver.failed == "node raised" and not receiver.ended


def test_sending_without_a_credit_is_a_broken_invariant() -> None:
    sender = SenderLane(spec(1))
    sender.send(envelope(0))
    with pytest.raises(AssertionError, match="without a credit"):
        sender.send(envelope(1))


def test_cancel_skips_what_waits_and_reports_what_is_being_worked_on() -> None:
    sender, receiver = SenderLane(spec(3)), ReceiverLane(spec(3))
    items = [envelope(i) for i in range(3)]
    for item in items:
        sender.send(item)
    exchange(sender, receiver)
    assert receiver.take() is items[0]
    assert receiver.on_cancel([items[0].id, items[1].id]) == [items[0].id]
    assert receiver.take() is items[2]
    exchange(sender, receiver)
    assert sender.unacked() == [items[0], items[2]]
    assert sender.credits == 3


def test_a_cancel_gives_no_credit_for_what_an_earlier_producer_sent() -> None:
    for again in (False, True):
        sender, receiver = SenderLane(spec()), ReceiverLane(spec())
        items = [envelope(i) for i in range(3)]
        for item in items:
            sender.send(item)
        exchange(sender, receiver)
        sender = SenderLane(spec(), session_number(1, 0))
        receiver.restart(sender.session)
        for item in items if again else ():
            sender.send(item)
        sender.cancel([items[0].id, items[1].id])
        exchange(sender, receiver)
        assert receiver.take() is items[2]
        receiver.seen.finish_message(items[2].id)
        exchange(sender, receiver)
        assert (sender.failed, sender.credits, sender.unacked()) == ("", 4, [])


def test_a_cancel_holds_for_a_replay() -> None:
    sender, receiver = SenderLane(spec(1)), ReceiverLane(spec(1))
    items = [envelope(i) for i in range(3)]
    for item in items:
        sender.send(item)
        exchange(sender, receiver)
        receiver.take()
        exchange(sender, receiver)
    again = ReceiverLane(spec(1), session_number(0, 1))
    sender.restart(again.session)
    sender.flush()  # lost, as is the first word of the cancel
    sender.cancel([items[0].id, items[2].id])
    sender.flush()
    sender.say_hello()
    exchange(sender, again)
    assert again.take() is items[1]
    exchange(sender, again)
    assert not again.ready
    assert sender.unacked() == [items[1]] and sender.credits == 1


def test_what_is_taken_in_again_after_a_replay_is_told_once() -> None:
    sender, receiver = SenderLane(spec(3)), ReceiverLane(spec(3))
    items = [envelope(i) for i in range(3)]
    for item in items:
        sender.send(item)
    receiver.on_data(0, items)
    receiver.take()
    assert sender.on_credit(1) == [items[0].id]
    sender.restart(session_number(0, 1))
    assert sender.on_credit(2) == [items[1].id]
    assert sender.on_credit(3) == [items[2].id]


def test_schema_mismatch_names_lane_and_type_and_fails_both_ends() -> None:
    sender = SenderLane(LaneSpec("lane", "e", "a/0", "b/0", "A", "B", 2, "queue", ("Tombstone",)))
    receiver = ReceiverLane(spec(2, name="lane"))
    exchange(sender, receiver)
    assert "'lane' carries Tombstone" in receiver.failed
    assert sender.failed == receiver.failed


def test_a_repetition_on_another_lane_is_acked_when_the_first_copy_is_finished() -> None:
    seen = Seen()
    senders = [SenderLane(spec(name=n)) for n in ("one", "two")]
    receivers = [ReceiverLane(spec(name=n), 0, seen) for n in ("one", "two")]
    item = envelope(0)
    for sender, receiver in zip(senders, receivers, strict=True):
        sender.send(item)
        exchange(sender, receiver)
    assert receivers[0].take() is item
    assert not receivers[1].ready
    exchange(senders[1], receivers[1])
    assert senders[1].credits == 4 and senders[1].unacked() == [item]
    seen.finish_message(item.id)
    for sender, receiver in zip(senders, receivers, strict=True):
        exchange(sender, receiver)
        assert sender.unacked() == []


def test_replay_keeps_order_and_comes_before_anything_new() -> None:
    sender, receiver = SenderLane(spec(2)), ReceiverLane(spec(2))
    items = [envelope(i) for i in range(6)]
    for item in items[:5]:
        if not sender.credits:
            exchange(sender, receiver)
            receiver.take()
            exchange(sender, receiver)
        sender.send(item)
    session = session_number(0, 1)
    sender.restart(session)
    assert sender.credits < 0  # the replay alone is beyond the capacity
    again = ReceiverLane(spec(2), session)
    got = []
    for _ in range(5):
        exchange(sender, again)
        got.append(again.take())
        exchange(sender, again)
    sender.send(items[5])
    exchange(sender, again)
    got.append(again.take())
    assert got == items


def test_seen_forgets_only_long_after() -> None:
    seen = Seen(remember=4)
    lane = ReceiverLane(spec(100), 0, seen)
    for i in range(9):
        assert seen.admit_copy(envelope(i).id, lane, i)
        seen.finish_message(envelope(i).id)
    assert not seen.admit_copy(envelope(8).id, lane, 9)
    assert not seen.admit_copy(envelope(4).id, lane, 10)
    assert seen.admit_copy(envelope(0).id, lane, 11)


# Peers that break the protocol


def test_a_credit_for_what_was_never_sent_fails_the_lane_and_wakes_its_sends() -> None:
    for sender in (SenderLane(spec()), LatestSender(spec(kind="latest"))):
        sender.send(envelope(0))
        sender.flush()
        assert sender.on_credit(9) == [envelope(0).id]
        assert sender.failed == "received a credit for 9 messages, but only 1 were sent"
        assert kinds(sender.flush()) == [ERROR]


def test_a_peer_that_breaks_the_protocol_fails_the_lane_and_is_still_heard() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        b.on("echo", lambda host, body: body)
        a.on("echo", lambda host, body: body)
        for to, (kind, seq, payload), reason in (
            ("b", (CREDIT, 9, None), "received a credit for 9 messages, but only 2 were sent"),
            ("c", (ACK, 0, "x"), "the consumer's process sent a frame of kind 4"),
        ):
            inbox_of(b, lane(2, to=to))
            sender = OutEdge([a.sender(lane(2, to=to))], SHARE)
            await sender.send(thing(0))
            await sender.send(thing(1))
            waiting = asyncio.ensure_future(sender.send(thing(2)))
            await a.request("B", "echo", 1)
            assert not waiting.done()
            b.connection("A").post_frame((kind, sender.lanes[0].spec.number, sender.lanes[0].session, seq, payload))
            assert await b.request("A", "echo", 2) == 2
            with pytest.raises(LaneFailed, match=reason):
                await waiting

    run(body)


def test_what_waits_behind_bytes_that_broke_the_receiver_is_read() -> None:
    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        reported: list[object] = []
        found: list[bytes] = []
        whole = asyncio.Event()

        def receive(parts: list[bytes]) -> None:
            found.append(bytes(parts[0]))
            if len(found) == 1:
                raise KeyError("broken")
            whole.set()

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: reported.append(context["exception"]))
        socket = Listener(context, receive)
        push = context.socket(zmq.PUSH)
        push.connect(socket.bind_socket(Target("inproc://broken")))
        await ticks()  # the look that follows the binding is over
        push.send(b"first..")
        push.send(b"second.")
        await whole.wait()
        assert found == [b"first..", b"second."]
        assert [str(error) for error in reported] == ["'broken'"]
        socket.close()
        push.close(0)
        context.term()

    play_out(main())


def test_a_send_goes_on_when_a_new_consumer_has_taken_what_the_one_before_had_taken() -> None:
    """No message is taken for the first time then, but its credits are back."""

    async def main() -> None:
        sender = SenderLane(spec(2))
        edge = OutEdge([sender], SHARE)
        for index in range(2):
            await edge.send(envelope(index))
        sender.take_frame((CREDIT, sender.spec.number, 0, 2, None))
        sender.restart(session_number(0, 1))
        waiting = asyncio.ensure_future(edge.send(envelope(2)))
        await ticks()
        assert not waiting.done() and sender.credits == 0
        assert sender.take_frame((CREDIT, sender.spec.number, sender.session, 2, None)) == ([], ())
        await asyncio.wait_for(waiting, 1)

    play_out(main())


# Latest


def test_latest_never_blocks_and_delivers_the_newest() -> None:
    sender, receiver = LatestSender(spec(1, "latest")), LatestReceiver(spec(1, "latest"))
    items = [envelope(i) for i in range(5)]
    for item in items:
        sender.send(item)
    assert kinds([f for f in sender.out if f[0] == DATA]) == [DATA]
    exchange(sender, receiver)
    assert receiver.take() is items[4]
    assert not receiver.ready
    assert receiver.newest is items[4]


def test_latest_acks_what_was_overwritten() -> None:
    sender, receiver = LatestSender(spec(1, "latest")), LatestReceiver(spec(1, "latest"))
    for i in range(5):
        sender.send(envelope(i))
        exchange(sender, receiver)
    assert (sender.num_acked, receiver.num_finished) == (4, 4)
    receiver.finish(receiver.take().id)
    exchange(sender, receiver)
    assert sender.num_acked == 5


def test_latest_gives_a_replaced_consumer_the_newest_again() -> None:
    sender, receiver = LatestSender(spec(1, "latest")), LatestReceiver(spec(1, "latest"))
    sender.send(envelope(0))
    exchange(sender, receiver)
    receiver.finish(receiver.take().id)
    exchange(sender, receiver)
    again = LatestReceiver(spec(1, "latest"), session_number(0, 1))
    sender.restart(again.session)
    exchange(sender, again)
    assert again.take() == envelope(0)


def test_latest_acks_each_copy_when_the_producer_goes_back_to_an_older_version() -> None:
    receiver = LatestReceiver(spec(1, "latest"))
    receiver.on_data(0, [envelope(1)])
    first = receiver.take()
    receiver.on_data(1, [envelope(2)])
    receiver.restart(session_number(1, 0))
    receiver.on_data(0, [envelope(1)])
    second = receiver.take()
    assert first == second
    receiver.flush()
    receiver.finish(first.id)
    assert receiver.flush() == []  # of the session before
    receiver.finish(second.id)
    assert receiver.flush() == [(ACK, receiver.spec.number, receiver.session, 0, [0])]


def test_latest_tells_once_that_a_message_has_arrived() -> None:
    sender = LatestSender(spec(1, "latest"))
    sender.send(envelope(0))
    assert sender.on_credit(1) == [envelope(0).id]
    sender.send(envelope(1))
    assert sender.on_credit(2) == [envelope(1).id]


def test_latest_ends_after_the_newest() -> None:
    sender, receiver = LatestSender(spec(1, "latest")), LatestReceiver(spec(1, "latest"))
    for i in range(3):
        sender.send(envelope(i))
    sender.close()
    exchange(sender, receiver)
    assert receiver.ready and not receiver.ended
    assert receiver.take() == envelope(2)
    assert receiver.ended


# Both machines on a bad network


@dataclass
class World:
    """A lane whose network loses, repeats and reorders, and whose processes are replaced."""

    random: Random
    capacity: int
    num_messages: int
    sender: SenderLane = field(init=False)
    receiver: ReceiverLane = field(init=False)
    wires: tuple[list[Frame], list[Frame]] = ([], [])
    sent: int = 0
    acked: set[bytes] = field(default_factory=set)
    took: list[bytes] = field(default_factory=list)
    open: list[bytes] = field(default_factory=list)
    finished: set[bytes] = field(default_factory=set)
    taken_by_consumer: set[bytes] = field(default_factory=set)
    redo: list[int] = field(default_factory=list)
    told: set[bytes] = field(default_factory=set)
    """What this incarnation of the producer was told to be taken in."""
    given_up: set[bytes] = field(default_factory=set)
    """What this incarnation of the producer cancelled while it kept it."""
    cancelled: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sender = SenderLane(spec(self.capacity))
        self.receiver = ReceiverLane(spec(self.capacity))
        self.wires = ([], [])

    def post(self) -> None:
        self.wires[0].extend(self.sender.flush())
        self.wires[1].extend(self.receiver.flush())
        if self.random.random() < 0.5:
            self.merge()

    def merge(self) -> None:
        """Messages that follow each other travel together."""
        wire = self.wires[0]
        for at in range(len(wire) - 1, 0, -1):
            (kind, lane, session, seq, payload), after = wire[at - 1], wire[at]
            if kind == DATA and after[:4] == (DATA, lane, session, seq + len(payload)):
                wire[at - 1 : at + 1] = [(DATA, lane, session, seq, [*payload, *after[4]])]

    def send(self) -> None:
        if self.sender.credits <= 0 or self.sender.closed:
            return
        if self.redo:
            self.sender.send(envelope(self.redo.pop(0)))
        elif self.sent < self.num_messages:
            self.sender.send(envelope(self.sent))
            self.sent += 1

    def deliver(self, direction: int, at: int = 0) -> None:
        wire = self.wires[direction]
        if not wire:
            return
        frame = wire.pop(min(at, len(wire) - 1))
        if direction == 0:
            self.receiver.take_frame(frame)
        else:
            taken, acked = self.sender.take_frame(frame)
            assert self.told.isdisjoint(taken), "a message is told to be taken in once"
            self.told.update(taken)
            self.acked.update(acked)
        assert self.receiver.depth <= 2 * self.capacity

    def cancel(self) -> None:
        if self.sent:
            id = envelope(self.random.randrange(self.sent)).id
            self.cancelled.add(id)
            if id in {kept.id for kept in self.sender.unacked()}:
                self.given_up.add(id)
            self.sender.cancel([id])

    def lose(self) -> None:
        wire = self.wires[self.random.randrange(2)]
        if wire:
            wire.pop(self.random.randrange(len(wire)))

    def repeat(self) -> None:
        wire = self.wires[self.random.randrange(2)]
        if wire:
            wire.append(self.random.choice(wire))

    def take(self) -> None:
        if self.receiver.ready:
            item = self.receiver.take()
            assert item.id not in self.took, "an incarnation of the consumer takes a message once"
            assert item.id not in self.acked, "what was acked never comes again"
            self.took.append(item.id)
            self.open.append(item.id)
            self.taken_by_consumer.add(item.id)

    def finish(self) -> None:
        if self.open:
            id = self.open.pop(self.random.randrange(len(self.open)))
            self.receiver.seen.finish_message(id)
            self.finished.add(id)

    def restart_consumer(self) -> None:
        session = self.sender.session + 1
        self.receiver = ReceiverLane(spec(self.capacity), session)
        self.took, self.open = [], []
        self.wires = ([], []) if self.random.random() < 0.5 else self.wires
        self.sender.restart(session)

    def restart_producer(self) -> None:
        """What was made from unfinished inputs is made again: all that was not taken in, and more."""
        session = self.sender.session + (1 << 16)
        self.sender = SenderLane(spec(self.capacity), session)
        self.receiver.restart(session)
        self.told, self.given_up = set(), set()
        ids = {envelope(i).id: i for i in range(self.sent)}
        self.redo = [i for id, i in ids.items() if id not in self.taken_by_consumer or self.random.random() < 0.3]

    def settle(self) -> None:
        """The network is good again: every reconnection makes both sides say where they stand."""
        for _ in range(10 * self.num_messages + 50):
            self.send()
            if self.sent == self.num_messages and not self.redo:
                self.sender.close()
            self.sender.say_hello()
            self.receiver.say_hello()
            self.post()
            while self.wires[0] or self.wires[1]:
                self.deliver(0)
                self.deliver(1)
                self.post()
            num_taken = len(self.took)
            self.take()
            assert self.given_up.isdisjoint(self.took[num_taken:]), "a cancel holds until the ack"
            self.finish()
            if self.receiver.ended and not self.open and not self.sender.unacked():
                assert self.sender.credits == self.capacity and self.sender.depth == 0
                return
        raise AssertionError("the lane does not come to rest")


def play(
    seed: int, capacity: int, num_messages: int, num_steps: int, cancels: bool, crash: Callable[[World], None] | None
) -> World:
    random = Random(seed)
    world = World(random, capacity, num_messages)
    for _ in range(num_steps):
        choice = random.random()
        if choice < 0.30:
            world.send()
        elif choice < 0.60:
            # mostly in order
            world.deliver(random.randrange(2), 0 if random.random() < 0.8 else random.randrange(4))
        elif choice < 0.72:
            world.take()
        elif choice < 0.82:
            world.finish()
        elif choice < 0.86:
            world.lose()
        elif choice < 0.90:
            world.repeat()
        elif choice < 0.93:
            world.sender.say_hello()
        elif choice < 0.96:
            world.receiver.say_hello()
        elif choice < 0.98 and cancels:
            world.cancel()
        elif crash is not None:
            crash(world)
        in_flight = world.sender._next - world.sender._taken
        assert 0 <= in_flight <= capacity
        world.post()
    world.settle()
    everything = {envelope(i).id for i in range(num_messages)}
    assert world.finished | world.cancelled == everything and world.cancelled >= everything - world.finished
    return world


arguments = {
    "seed": st.integers(0, 2**32),
    "capacity": st.integers(1, 6),
    "num_messages": st.integers(1, 30),
    "num_steps": st.integers(0, 400),
    "cancels": st.booleans(),
}


@given(**arguments)
@settings(max_examples=300, deadline=None)
def test_bad_network(seed: int, capacity: int, num_messages: int, num_steps: int, cancels: bool) -> None:
    world = play(seed, capacity, num_messages, num_steps, cancels, None)
    ids = [envelope(i).id for i in range(num_messages)]
    assert world.took == [id for id in ids if id not in world.cancelled or id in world.finished]


@given(**arguments)
@settings(max_examples=300, deadline=None)
def test_bad_network_and_consumers_that_die(
    seed: int, capacity: int, num_messages: int, num_steps: int, cancels: bool
) -> None:
    play(seed, capacity, num_messages, num_steps, cancels, World.restart_consumer)


@given(**arguments)
@settings(max_examples=300, deadline=None)
def test_bad_network_and_producers_that_die(
    seed: int, capacity: int, num_messages: int, num_steps: int, cancels: bool
) -> None:
    play(seed, capacity, num_messages, num_steps, cancels, World.restart_producer)


@dataclass
class LatestWorld:
    """A latest edge on a bad network whose processes are replaced; a producer may go back to an older message.

    A message's id follows from its version; `member` counts what was sent, repetitions included.
    """

    random: Random
    sender: LatestSender = field(default_factory=lambda: LatestSender(spec(1, "latest")))
    receiver: LatestReceiver = field(default_factory=lambda: LatestReceiver(spec(1, "latest")))
    wires: tuple[list[Frame], list[Frame]] = field(default_factory=lambda: ([], []))
    version: int = 0
    num_sent: int = 0
    newest: Envelope | None = None
    in_hand: list[bytes] = field(default_factory=list)
    took: int = -1
    acked: set[tuple[int, int]] = field(default_factory=set)

    def send(self) -> None:
        self.newest = replace(envelope(self.version), member=self.num_sent)
        self.sender.send(self.newest)
        self.version += 1
        self.num_sent += 1

    def deliver(self) -> None:
        direction = self.random.randrange(2)
        if self.wires[direction]:
            frame = self.wires[direction].pop(0)
            if self.random.random() > 0.2:
                self.receiver.take_frame(frame) if direction == 0 else self.sender.take_frame(frame)

    def take(self) -> None:
        if self.receiver.ready:
            item = self.receiver.take()
            assert item.member > self.took, "never an older one after a newer one"
            self.took = item.member
            self.in_hand.append(item.id)

    def finish(self) -> None:
        if self.in_hand:
            self.receiver.finish(self.in_hand.pop(self.random.randrange(len(self.in_hand))))

    def restart_consumer(self) -> None:
        self.receiver = LatestReceiver(spec(1, "latest"), self.receiver.session + 1)
        self.sender.restart(self.receiver.session)
        self.in_hand, self.took = [], -1

    def restart_producer(self) -> None:
        self.sender = LatestSender(spec(1, "latest"), self.sender.session + (1 << 16))
        self.receiver.restart(self.sender.session)
        self.version = self.random.randint(0, self.version)
        self.send()

    def post(self) -> None:
        self.wires[0].extend(self.sender.flush())
        frames = self.receiver.flush()
        for kind, _, session, _, seqs in frames:
            if kind == ACK:
                assert self.acked.isdisjoint((session, seq) for seq in seqs), "a copy is acked once"
                self.acked.update((session, seq) for seq in seqs)
        self.wires[1].extend(frames)
        assert len([f for f in self.wires[0] if f[0] == DATA and f[2] == self.sender.session]) <= 1

    def settle(self) -> None:
        self.sender.close()
        for _ in range(3):
            self.sender.say_hello()
            self.receiver.say_hello()
            exchange(self.sender, self.receiver)
        self.take()
        while self.in_hand:
            self.finish()
        exchange(self.sender, self.receiver)


@given(seed=st.integers(0, 2**32), num_steps=st.integers(0, 300))
@settings(max_examples=300, deadline=None)
def test_latest_on_a_bad_network_and_processes_that_die(seed: int, num_steps: int) -> None:
    world = LatestWorld(Random(seed))
    for _ in range(num_steps):
        choice = world.random.random()
        if choice < 0.3:
            world.send()
        elif choice < 0.6:
            world.deliver()
        elif choice < 0.75:
            world.take()
        elif choice < 0.85:
            world.finish()
        elif choice < 0.9:
            world.restart_consumer()
        elif choice < 0.95:
            world.restart_producer()
        world.post()
    world.settle()
    assert world.receiver.newest is None if world.newest is None else world.receiver.newest.id == world.newest.id
    assert world.receiver.ended and not world.receiver._open

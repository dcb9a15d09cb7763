"""Custody: nothing is lost and nothing happens twice, whichever process dies, at whichever step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.messages import Message
from flowrl.wire.encoding.multiparts import Frame
from flowrl.wire.encoding.schema import Envelope, message_id, source_id
from flowrl.wire.items import Custody
from flowrl.wire.lanes import LaneSpec, ReceiverLane, SenderLane, session_number

# The bookkeeping by itself


def test_due_when_ended_and_all_children_arrived() -> None:
    custody: Custody[str] = Custody()
    custody.begin("item")
    custody.child(["item"], "a", 1)
    custody.child(["item"], "b", 2)
    assert not custody.end("item")
    assert not custody.arrived("b")
    assert not custody.arrived("a")
    assert list(custody.arrived("b")) == ["item"]
    assert len(custody) == 0


def test_an_item_without_children_is_due_at_its_end() -> None:
    custody: Custody[str] = Custody()
    custody.begin("item")
    assert list(custody.end("item")) == ["item"]


def test_a_group_finishes_all_its_members_at_once() -> None:
    custody: Custody[str] = Custody()
    for member in "xyz":
        custody.begin(member)
    custody.child("xyz", "group")
    for member in "xyz":
        assert not custody.end(member)
    assert list(custody.arrived("group")) == ["x", "y", "z"]


def test_several_edges_add_up() -> None:
    custody: Custody[str] = Custody()
    custody.begin("item")
    custody.child(["item"], "child", 1)
    custody.child(["item"], "child", 3)
    custody.end("item")
    assert [list(custody.arrived("child")) for _ in range(4)] == [[], [], [], ["item"]]


def test_arrivals_before_the_end_and_of_strangers() -> None:
    custody: Custody[str] = Custody()
    custody.begin("item")
    custody.child(["item"], "child")
    assert not custody.arrived("stranger")
    assert not custody.arrived("child")
    assert not custody.arrived("child")
    assert list(custody.end("item")) == ["item"]


def test_a_child_that_owes_no_arrival() -> None:
    custody: Custody[str] = Custody()
    custody.begin("item")
    custody.child(["item"], "weights", 0)
    assert list(custody.end("item")) == ["item"]


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(1, 3)), max_size=8), st.randoms())
@settings(deadline=None)
def test_each_item_is_due_once_and_last(children: list[tuple[set[int], int]], random: object) -> None:
    custody: Custody[object] = Custody()
    owed: dict[object, int] = dict.fromkeys(range(6), 1)
    events: list[tuple[str, object]] = [("end", item) for item in range(6)]
    for item in range(6):
        custody.begin(item)
    for number, (parents, lanes) in enumerate(children):
        custody.child(sorted(parents), f"c{number}", lanes)
        events += [("arrived", f"c{number}")] * lanes
        for parent in parents:
            owed[parent] += 1
    left = {f"c{number}": lanes for number, (_, lanes) in enumerate(children)}
    random.shuffle(events)  # type: ignore[attr-defined]
    for event, key in events:
        due = list(getattr(custody, event)(key))
        if event == "end":
            owed[key] -= 1
            expected = [key] if owed[key] == 0 else []
        else:
            assert isinstance(key, str)
            left[key] -= 1
            expected = []
            for parent in sorted(children[int(key[1:])][0]) if left[key] == 0 else ():
                owed[parent] -= 1
                expected += [parent] if owed[parent] == 0 else []
        assert due == expected
    assert len(custody) == 0


# source -> map -> group -> batch -> sink, each a process that may die

NUM_GROUPS, K, P = 4, 2, 2
NAMES = ("source", "map", "group", "batch", "sink")


@dataclass(frozen=True)
class Text(Message):
    text: str
    index: int = 0


class Process:
    """One incarnation of one stage: its ends of lanes, custody and node state. Dies with all of it."""

    def __init__(self, stage: int, incarnation: int, sessions: Callable[[int], int], store: Store) -> None:
        self.stage, self.incarnation, self.store = stage, incarnation, store
        self.custody: Custody[bytes] = Custody()
        self.inbound = ReceiverLane(spec(stage - 1), sessions(stage - 1)) if stage > 0 else None
        self.outbound = SenderLane(spec(stage), sessions(stage)) if stage < 4 else None
        self.wishes: deque[tuple[Envelope, Sequence[bytes]]] = deque()
        self.waiting: dict[int, list[Envelope]] = {}
        self.ended = False
        if stage == 0:
            for index in range(NUM_GROUPS * K):
                item = Envelope(
                    source_id("source", str(index)), index // K, str(index // K), index % K, Text(f"{index}")
                )
                self.wishes.append((item, ()))

    def work(self) -> bool:
        """One step of the node: send one message, or take one in. False if there is nothing to do."""
        if self.wishes:
            assert self.outbound is not None
            if self.outbound.credits <= 0:
                return False
            item, parents = self.wishes.popleft()
            if parents:
                self.custody.child(parents, item.id)
            self.outbound.send(item)
            for parent in parents:
                self.acknowledge(self.custody.end(parent))
            return True
        if self.inbound is not None and self.inbound.ready:
            item = self.inbound.take()
            self.custody.begin(item.id)
            self.take(item)
            return True
        if not self.ended and self.outbound is not None and (self.inbound is None or self.inbound.ended):
            self.ended = True
            self.outbound.close()
            return True
        return False

    def take(self, item: Envelope) -> None:
        if self.stage == 1:
            self.make([item], f"f({text(item)})")
        elif self.stage == 2:
            self.join(item, item.ticket, K)
        elif self.stage == 3:
            self.join(item, item.ticket // P, P)
        else:
            self.store.record(item, self)
            self.acknowledge(self.custody.end(item.id))

    def join(self, item: Envelope, key: int, size: int) -> None:
        group = self.waiting.setdefault(key, [])
        group.append(item)
        if len(group) == size:
            group.sort(key=lambda member: (member.ticket, member.member))
            self.make(self.waiting.pop(key), "+".join(map(text, group)))

    def make(self, parents: list[Envelope], content: str) -> None:
        ids = [parent.id for parent in parents]
        first = parents[0]
        child = Envelope(
            message_id(ids, NAMES[self.stage], 0), first.ticket, first.group_id, first.member, Text(content)
        )
        self.wishes.append((child, ids))

    def acknowledge(self, ids: Sequence[bytes]) -> None:
        for id in ids:
            assert self.inbound is not None
            self.inbound.seen.finish_message(id)

    def receive(self, frame: Frame, *, forward: bool) -> None:
        if forward:
            assert self.inbound is not None
            self.inbound.take_frame(frame)
        else:
            assert self.outbound is not None
            taken, _ = self.outbound.take_frame(frame)
            for id in taken:
                self.acknowledge(self.custody.arrived(id))


def text(item: Envelope) -> str:
    assert isinstance(item.body, Text)
    return item.body.text


def spec(lane: int) -> LaneSpec:
    ends = NAMES[lane], NAMES[lane + 1]
    return LaneSpec(" -> ".join(ends), "edge", *ends, *ends, capacity=2, types=("Text",))


class Store:
    """What lies outside all processes: the effects."""

    def __init__(self) -> None:
        self.effects: list[tuple[str, int]] = []

    def record(self, item: Envelope, process: Process) -> None:
        self.effects.append((text(item), process.incarnation))


class Chain:
    """The five processes and the wires between them, advanced one protocol step at a time."""

    def __init__(self) -> None:
        self.incarnations = [0] * 5
        self.store = Store()
        self.wires: dict[tuple[int, bool], deque[Frame]] = {
            (lane, way): deque() for lane in range(4) for way in (True, False)
        }
        self.processes = [self.start(stage) for stage in range(5)]

    def session(self, lane: int) -> int:
        return session_number(self.incarnations[lane], self.incarnations[lane + 1])

    def start(self, stage: int) -> Process:
        return Process(stage, self.incarnations[stage], self.session, self.store)

    def steps(self) -> list[Callable[[], bool]]:
        """Every kind of step, last stage first so that little is in flight, and in a fixed order."""
        found: list[Callable[[], bool]] = []
        for stage in reversed(range(5)):
            found += [
                self.processes[stage].work,
                lambda stage=stage: self.flush(stage),  # type: ignore[misc]
            ]
            if stage < 4:
                found += [lambda s=stage: self.deliver(s, True), lambda s=stage: self.deliver(s, False)]  # type: ignore[misc]
        return found

    def flush(self, stage: int) -> bool:
        process = self.processes[stage]
        out = process.outbound.flush() if process.outbound is not None else []
        back = process.inbound.flush() if process.inbound is not None else []
        if out:
            self.wires[stage, True].extend(out)
        if back:
            self.wires[stage - 1, False].extend(back)
        return bool(out or back)

    def deliver(self, lane: int, forward: bool) -> bool:
        wire = self.wires[lane, forward]
        if not wire:
            return False
        self.processes[lane + forward].receive(wire.popleft(), forward=forward)
        return True

    def run(self, until: int | None = None) -> int:
        """Steps until nothing moves, or `until` of them are done. Returns how many."""
        done = 0
        moved = True
        while moved:
            moved = False
            for step in self.steps():
                if until is not None and done >= until:
                    return done
                if step():
                    moved = True
                    done += 1
        return done

    def kill(self, stage: int, *, frames_survive: bool) -> None:
        """The process dies and is replaced. What was on the wire to it is lost; from it, as asked."""
        self.incarnations[stage] += 1
        for (lane, forward), wire in self.wires.items():
            into = lane + forward == stage
            out_of = lane + (not forward) == stage
            if into or (out_of and not frames_survive):
                wire.clear()
        self.processes[stage] = self.start(stage)
        if stage > 0:
            sender = self.processes[stage - 1].outbound
            assert sender is not None
            # Frames the dead process still got out arrive before the supervisor's word.
            while self.deliver(stage - 1, False):
                pass
            sender.restart(self.session(stage - 1))
        if stage < 4:
            receiver = self.processes[stage + 1].inbound
            assert receiver is not None
            while self.deliver(stage, True):
                pass
            receiver.restart(self.session(stage))


EXPECTED = [
    "+".join(f"f({g * K + m})" for g in range(b * P, (b + 1) * P) for m in range(K)) for b in range(NUM_GROUPS // P)
]


def test_without_deaths() -> None:
    chain = Chain()
    chain.run()
    assert [effect for effect, _ in chain.store.effects] == EXPECTED
    assert_at_rest(chain)


def assert_at_rest(chain: Chain) -> None:
    for process in chain.processes:
        assert len(process.custody) == 0
        assert process.outbound is None or process.outbound.unacked() == []
        assert process.inbound is None or process.inbound.ended


@pytest.mark.parametrize("frames_survive", [True, False])
@pytest.mark.parametrize("stage", range(5), ids=NAMES)
def test_kill_each_process_at_every_step(stage: int, frames_survive: bool) -> None:
    total = Chain().run()
    assert total > 150
    for step in range(total + 1):
        chain = Chain()
        chain.run(until=step)
        chain.kill(stage, frames_survive=frames_survive)
        chain.run()
        effects = [effect for effect, _ in chain.store.effects]
        if stage == 4:
            # A sink that dies between its effect and the ack sees the message again, under the same id.
            assert sorted(set(effects)) == EXPECTED, f"killed at step {step}"
            assert len({(effect, incarnation) for effect, incarnation in chain.store.effects}) == len(effects)
        else:
            assert effects == EXPECTED, f"killed at step {step}"
        assert_at_rest(chain)

"""Frames of the control link on connections that lose, repeat and reorder, and are made anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.wire.connection import NumberedFrames
from flowrl.wire.encoding.multiparts import CONFIRM, NOTIFY, Frame


def note(index: int) -> Frame:
    return NOTIFY, 0, 0, 0, ("note", index)


@dataclass
class World:
    """One direction of a control link, and the words that confirm on the way back."""

    random: Random
    outgoing: NumberedFrames = field(default_factory=NumberedFrames)
    incoming: NumberedFrames = field(default_factory=NumberedFrames)
    there: list[Frame] = field(default_factory=list)
    back: list[Frame] = field(default_factory=list)
    num_made: int = 0
    heard: list[int] = field(default_factory=list)

    def make(self) -> None:
        frame = self.outgoing.number_frame(note(self.num_made))
        if self.random.random() < 0.1:
            return  # it cannot be sent: the next one gets its number
        self.outgoing.keep_frame(frame)
        self.there.append(frame)
        self.num_made += 1

    def deliver(self, at: int = 0) -> None:
        frame = self.there.pop(min(at, len(self.there) - 1))
        if self.incoming.admit_frame(frame):
            self.heard.append(frame[4][1])
        if self.incoming.has_unflushed and self.random.random() < 0.5:
            self.back += self.incoming.flush()

    def confirm(self) -> None:
        kind, _, _, number, _ = self.back.pop(0)
        assert kind == CONFIRM
        self.outgoing.on_confirm(number)

    def spoil(self, wire: list[Frame]) -> None:
        """A connection breaks: of what is under way some is lost, some comes later or again."""
        survivors = [frame for frame in wire if self.random.random() < 0.5]
        again = [frame for frame in survivors if self.random.random() < 0.3]
        wire[:] = [*survivors, *again]
        self.random.shuffle(wire)

    def reconnect(self) -> None:
        """The sender hears that a connection was made anew; what is left of the one before mixes in."""
        old, self.there = self.there, self.outgoing.unconfirmed_frames()
        for frame in old:
            self.there.insert(self.random.randint(0, len(self.there)), frame)

    def settle(self) -> None:
        self.reconnect()
        while self.there:
            self.deliver()
        self.back += self.incoming.flush()
        while self.back:
            self.confirm()


@given(seed=st.integers(0, 2**32), num_steps=st.integers(0, 300))
@settings(max_examples=300, deadline=None)
def test_each_frame_is_let_in_once_and_in_order_and_kept_no_longer_than_that(seed: int, num_steps: int) -> None:
    world = World(Random(seed))
    for _ in range(num_steps):
        choice = world.random.random()
        if choice < 0.4:
            world.make()
        elif choice < 0.75 and world.there:
            world.deliver()
        elif choice < 0.9 and world.back:
            world.confirm()
        elif choice < 0.93:
            world.spoil(world.there)
            world.reconnect()
        elif choice < 0.96:
            world.spoil(world.back)
        assert world.heard == list(range(len(world.heard)))
        kept = [frame[4][1] for frame in world.outgoing.unconfirmed_frames()]
        assert kept == list(range(world.num_made - len(kept), world.num_made))
        assert world.num_made - len(kept) <= len(world.heard), "what has not come in is kept"
    world.settle()
    assert world.heard == list(range(world.num_made))
    assert world.outgoing.unconfirmed_frames() == []


def test_frames_without_a_number_always_come_in_and_are_not_confirmed() -> None:
    incoming = NumberedFrames()
    assert incoming.admit_frame(note(0)) and incoming.admit_frame(note(0))
    assert not incoming.has_unflushed


def test_numbers_go_beyond_what_one_field_of_a_header_holds() -> None:
    outgoing, incoming = NumberedFrames(), NumberedFrames()
    outgoing._confirmed = incoming._admitted = (1 << 32) - 2
    for index in range(4):
        frame = outgoing.number_frame(note(index))
        assert max(frame[1], frame[2]) < 1 << 32
        outgoing.keep_frame(frame)
        assert incoming.admit_frame(frame) and not incoming.admit_frame(frame)
    [(_, _, _, number, _)] = incoming.flush()
    outgoing.on_confirm(number)
    assert outgoing.unconfirmed_frames() == []


def test_a_word_for_more_than_was_made_confirms_what_was_made() -> None:
    outgoing = NumberedFrames()
    outgoing.keep_frame(outgoing.number_frame(note(0)))
    outgoing.on_confirm(9)
    assert outgoing.unconfirmed_frames() == [] and outgoing.number_frame(note(1))[1:3] == (0, 2)

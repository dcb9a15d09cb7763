"""Samples joined over branches: by the real ports of one node replica, on inboxes and an edge in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from flowrl.errors import FlowrlError
from flowrl.graph.dispatch_rules import SHARE
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import In, Members, Out, join
from flowrl.messages import Message, Sample, Scored, Tombstone
from flowrl.runtime.process.context import ReplicaPlace
from flowrl.runtime.process.replica import Replica
from flowrl.runtime.telemetry.trace import TraceBuffer
from flowrl.testing import sample, scored
from flowrl.wire.activity import Lease
from flowrl.wire.edges import EndOfStream
from flowrl.wire.encoding.schema import Envelope
from flowrl.wire.in_ports import Inbound, Joined
from flowrl.wire.out_ports import Outbound
from tests.rigs.ticks import ticks

PLACE = ReplicaPlace("meet", 0, 1, "", 0, None, (), (), None, 0, "join-test")


@dataclass(eq=False)
class Delivered:
    envelope: Envelope
    acks: int = 0

    def ack(self) -> None:
        self.acks += 1


class Branch:
    """An inbox that gives its deliveries, each after a random number of ticks of the loop, and ends."""

    def __init__(self, name: str, bodies: Sequence[Message], dice: random.Random) -> None:
        self.deliveries = [
            Delivered(Envelope(f"{name}{number:014d}".encode(), 0, body.group_id, body.member, body))  # type: ignore[attr-defined]
            for number, body in enumerate(bodies)
        ]
        self._left = list(self.deliveries)
        self._dice = dice

    async def take(self) -> Delivered:
        await ticks(self._dice.randrange(4))
        if not self._left:
            raise EndOfStream
        return self._left.pop(0)


class Sent:
    """An edge that lists what is sent and takes it in at once."""

    name, rule = "meet.out -> next.samples", SHARE

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []
        self.replica: Replica

    async def send(self, envelope: Envelope) -> None:
        self.envelopes.append(envelope)
        self.replica.open_items.note_arrivals([envelope.id])

    def ids(self, envelope: Envelope) -> list[bytes]:
        return [envelope.id]

    def close(self) -> None:
        pass


class Ledger:
    def __init__(self) -> None:
        self.lost: list[Tombstone] = []

    def request(self, *what: Any) -> None: ...
    def notify(self, host: str, kind: str, body: Any) -> None:
        if kind == "ledger":
            self.lost += [event for event in body["events"] if event[0] == "lost"]


class Meet(Node):
    """Sends on what was joined, by `body`."""

    scored: In[Scored]
    valued: In[Sample]
    out: Out[Message]

    def facts(self) -> Facts:
        return Facts(joins=("scored", "valued"))

    async def run(self) -> None:
        async for first, second in join(self.scored, self.valued):
            assert (type(first), type(second)) == (Scored, Sample) and first.sample_id == second.sample_id
            if first.reward < 0:
                self.valued.drop(second, "negative", state="filtered")
            else:
                await self.out.send(first)


class MeetGroups(Meet):
    """The same by groups: one message for the members that are left."""

    def __init__(self) -> None:
        self.seen: list[Members[tuple[Scored, Sample]]] = []

    async def run(self) -> None:
        async for members in join(self.scored, self.valued).groups(3):
            self.seen.append(members)
            firsts = [first for first, _ in members.items]
            for first in firsts:
                if first.reward < 0:
                    self.scored.drop(first, "negative", state="filtered")
            kept = [first for first in firsts if first.reward >= 0]
            if kept:
                await self.out.send(kept[0], made_from=kept)


class Rig:
    """A replica of `node` fed by two branches."""

    def __init__(self, node: Meet, first: Sequence[Message], second: Sequence[Message], seed: int = 0) -> None:
        dice = random.Random(seed)
        endpoint: Any = Ledger()
        edge: Any = Sent()
        lease = Lease("", "core", endpoint)
        self.node, self.ledger, self.sent = node, endpoint, edge
        self.replica = edge.replica = Replica(node, PLACE, endpoint, TraceBuffer(), lease)
        self.replica.trainers = frozenset({"trainer"})
        self.branches = {"scored": Branch("a", first, dice), "valued": Branch("b", second, dice)}
        for port, branch in self.branches.items():
            inbox: Any = branch
            node.ports[port].live = self.replica.inbound[port] = Inbound(
                f"meet.{port}", inbox, self.replica.open_items, self.replica.activity, self.replica, lease, sink=False
            )
            self.replica.inbound[port].joined = Joined
        node.ports["out"].live = self.replica.outbound["out"] = Outbound(
            "meet.out", [edge], self.replica, ["trainer"], counted=True
        )

    def run(self) -> Rig:
        asyncio.run(self.replica.run())
        return self

    def acks(self) -> list[int]:
        return [delivered.acks for branch in self.branches.values() for delivered in branch.deliveries]

    def bodies(self, kind: type[Message]) -> list[Any]:
        return [envelope.body for envelope in self.sent.envelopes if isinstance(envelope.body, kind)]


def lost(member: int, group: str = "g") -> Tombstone:
    return Tombstone(group, member, "failed", "timeout", "elsewhere/0", (f"{group}:{member}",), 3)


@pytest.mark.parametrize("seed", range(20))
def test_samples_meet_whatever_the_order_of_the_branches(seed: int) -> None:
    dice = random.Random(seed)
    numbers = list(range(12))
    first = [scored(n, 1.0) for n in dice.sample(numbers, 12)]
    second = [sample(n) for n in dice.sample(numbers, 12)]
    rig = Rig(Meet(), first, second, seed).run()
    assert sorted(body.member for body in rig.bodies(Scored)) == numbers
    assert rig.acks() == [1] * 24, "both parts of every sample are finished, once"
    assert {envelope.member for envelope in rig.sent.envelopes} == set(numbers)


def test_what_is_sent_has_the_same_id_whichever_branch_came_first() -> None:
    ids = {
        tuple(sorted(envelope.id for envelope in rig.sent.envelopes))
        for rig in (Rig(Meet(), [scored(0, 1.0)], [sample(0)], seed).run() for seed in range(8))
    }
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([lost(0), scored(1, 1.0)], [sample(1), sample(0)]),
        ([scored(0, 1.0), scored(1, 1.0)], [lost(0), sample(1)]),
        ([lost(0), scored(1, 1.0)], [lost(0), sample(1)]),
    ],
    ids=["first branch", "second branch", "both"],
)
def test_a_sample_lost_on_any_branch_is_lost_once(first: list[Message], second: list[Message]) -> None:
    rig = Rig(Meet(), first, second).run()
    assert [marker.member for marker in rig.bodies(Tombstone)] == [0]
    assert [body.member for body in rig.bodies(Scored)] == [1]
    assert rig.acks() == [1] * 4
    came = any(isinstance(body, Sample) and body.member == 0 for body in (*first, *second))
    assert [event[3] for event in rig.ledger.lost] == [0] * came, "what did come of it is lost here"


def test_a_drop_ends_all_parts_and_is_booked_once() -> None:
    rig = Rig(Meet(), [scored(0, -1.0), scored(1, 1.0)], [sample(0), sample(1)]).run()
    assert [(m.member, m.state, m.reason) for m in rig.bodies(Tombstone)] == [(0, "filtered", "negative")]
    assert len(rig.ledger.lost) == 1
    assert rig.acks() == [1] * 4


def test_what_one_branch_lost_is_booked_for_the_part_that_came() -> None:
    rig = Rig(Meet(), [scored(0, 1.0), lost(1)], [lost(0), sample(1)]).run()
    assert sorted((event[1], event[2], event[3]) for event in rig.ledger.lost) == [
        (["trainer"], "g", 0),
        (["trainer"], "g", 1),
    ]
    assert rig.acks() == [1] * 4


@pytest.mark.parametrize("seed", range(10))
def test_groups_of_joined_samples_count_what_either_branch_lost(seed: int) -> None:
    node = MeetGroups()
    first = [scored(0, 1.0), lost(1), scored(2, -1.0), *(scored(n, 1.0, group="h") for n in range(3))]
    second = [*(sample(n, group="h") for n in range(3)), sample(1), lost(2), sample(0)]
    random.Random(seed).shuffle(second)
    rig = Rig(node, first, second, seed).run()
    by_group = {members.group_id: members for members in node.seen}
    assert [pair[0].member for pair in by_group["g"].items] == [0]
    assert sorted(marker.member for marker in by_group["g"].lost) == [1, 2]
    assert len(by_group["h"].items) == 3
    assert rig.acks() == [1] * 12
    assert rig.bodies(Tombstone) == [], "the send for the group stands for its lost members too"


def test_a_group_of_which_nothing_is_left_travels_on_as_one_marker() -> None:
    node = MeetGroups()
    rig = Rig(node, [lost(0), scored(1, -1.0), lost(2)], [sample(0), sample(1), lost(2)]).run()
    assert [len(members.items) for members in node.seen] == [1]
    (marker,) = rig.bodies(Tombstone)
    assert (marker.member, marker.state, len(marker.sample_ids)) == (-1, "filtered", 3)
    assert rig.acks() == [1] * 6


def test_branches_that_pass_on_the_very_same_object_keep_two_items() -> None:
    class Same(Meet):
        async def run(self) -> None:
            async for first, second in join(self.scored, self.valued):
                assert first is not second
                self.scored.hold(first)
                await self.out.send(second, made_from=[first])

    one = scored(0, 1.0)
    assert Rig(Same(), [one], [one]).run().acks() == [1, 1]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([scored(0, 1.0)], [], "meet.scored received member 0 of group 'g', but the streams of meet.valued ended"),
        ([scored(0, 1.0)] * 2, [sample(1)], "meet.scored received member 0 of group 'g' twice"),
        ([scored(-1, 1.0)], [sample(0)], "received a Scored that belongs to no single sample"),
    ],
)
def test_a_branch_that_breaks_its_word_is_named(first: list[Message], second: list[Message], words: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        Rig(Meet(), first, second).run()
    (error,) = caught.value.exceptions
    assert isinstance(error, FlowrlError) and words in str(error)

"""What a node derives: ids, numbers, places, ends, and every mistake at the moment that it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from flowrl import Call, Facts, In, Node, Out, Prompt, Sample
from flowrl.errors import FlowrlError, SampleFailed
from flowrl.messages import Tombstone
from flowrl.messages.episode import Reply, Turn, make_sample
from flowrl.runtime.checkpoints.snapshots import read_state
from flowrl.runtime.process.replica import Replica
from flowrl.testing import NodeRecord, NodeRig, lost, run_node, sample
from flowrl.wire.derived_samples import DerivedNumbers

KIND = "not_derived"


class Branching(Node):
    """Derives up to three samples from each and sends prompts for them."""

    rollouts: In[Sample]
    trunks: Out[Sample]
    prompts: Out[Prompt]

    def __init__(self, number: int = 2) -> None:
        self.number = number

    def facts(self) -> Facts:
        return Facts(drops=True, derives={"branch": 3}, group_size=2)

    async def run(self) -> None:
        await self.rollouts.each(self.branch)

    async def branch(self, trunk: Sample) -> None:
        children = await self.context.derive(trunk, self.number) if self.number else []
        await self.send(trunk, children)

    async def send(self, trunk: Sample, children: Sequence[Prompt]) -> None:
        for child in children:
            await self.prompts.send(replace(child, token_ids=trunk.token_ids[:4]))
        await self.trunks.send(trunk)


def ran(node: Node, *members: int) -> NodeRecord:
    return run_node(node, {"rollouts": [sample(member, group_size=2, response=3) for member in members or (0,)]})


def failing(node: Node) -> str:
    with pytest.raises((FlowrlError, ValueError)) as failed:
        ran(node)
    return str(failed.value)


def test_a_derived_sample_is_a_member_of_its_parents_group_with_an_id_a_seed_and_a_number_of_its_own() -> None:
    record = ran(Branching(), 0, 1)
    prompts = record.sent("prompts")
    assert [one.sample_id for one in prompts] == [f"g:{m}/branch.{i}" for m in (0, 1) for i in (0, 1)]
    assert [one.member for one in prompts] == [2, 3, 5, 6]
    assert {one.group_id for one in prompts} == {"g"} and len({one.seed for one in prompts}) == 4
    assert [(one.parent_id, one.derived_under) for one in prompts[1:3]] == [("g:0", "branch"), ("g:1", "branch")]
    assert record.derived == [(f"g:{m}", "branch", [f"g:{m}/branch.{i}" for i in (0, 1)]) for m in (0, 1)]
    assert [one.sample_id for one in record.sent("trunks")] == ["g:0", "g:1"]
    assert [one.ticket for one in record.outputs["prompts"]] == [0] * 6
    assert [one.seed for one in ran(Branching()).sent("prompts")] == [one.seed for one in prompts[:2]]


@pytest.mark.parametrize(("number", "places"), [(0, [2, 3, 4]), (1, [3, 4]), (3, [])])
def test_the_place_of_what_was_not_derived_is_taken_by_a_tombstone(number: int, places: list[int]) -> None:
    record = ran(Branching(number))
    for port in ("trunks", "prompts"):
        never = [one for one in record.tombstones(port) if one.reason == KIND]
        assert [one.member for one in never] == places
        assert [one.sample_ids for one in never] == [(f"g:0/branch.{member - 2}",) for member in places]
    assert record.lost == [], "the ledger has no such samples"


def test_what_a_lost_sample_would_have_had_derived_is_lost_with_it() -> None:
    record = run_node(Branching(), {"rollouts": [lost(1, reason="timeout")]})
    gone = {one.member: one.reason for one in record.tombstones("prompts")}
    assert gone == {1: "timeout", 5: KIND, 6: KIND, 7: KIND}


def test_numbers_differ_for_all_members_also_of_what_is_derived_from_derived_samples() -> None:
    numbers = DerivedNumbers(4, {"branch": 2, "hint": 3})
    level = [sample(member, group_size=4) for member in range(4)]
    seen = [one.member for one in level]
    for _ in range(3):
        level = [
            replace(parent, member=numbers.member_of(parent, label, ordinal))
            for parent in level
            for label, most in numbers.derives.items()
            for ordinal in range(most)
        ]
        seen += [one.member for one in level]
    assert len(set(seen)) == len(seen) == 4 + 20 + 100 + 500


class Forgets(Branching):
    async def send(self, trunk: Sample, children: Sequence[Prompt]) -> None:
        await super().send(trunk, children[:1])


class SendsFirst(Branching):
    async def branch(self, trunk: Sample) -> None:
        await self.trunks.send(trunk)
        await super().branch(trunk)


class DropsFirst(Branching):
    async def branch(self, trunk: Sample) -> None:
        self.rollouts.drop(trunk, "useless")
        await super().branch(trunk)


class DropsBetween(Branching):
    async def send(self, trunk: Sample, children: Sequence[Prompt]) -> None:
        self.rollouts.drop(trunk, "useless")


class Again(Branching):
    async def send(self, trunk: Sample, children: Sequence[Prompt]) -> None:
        await self.context.derive(trunk, len(children) + 1)


class Another(Branching):
    async def branch(self, trunk: Sample) -> None:
        await self.context.derive(trunk, 1, "twig")


class Copies(Branching):
    async def branch(self, trunk: Sample) -> None:
        await self.context.derive(replace(trunk), 1)


class FromDerived(Branching):
    async def send(self, trunk: Sample, children: Sequence[Prompt]) -> None:
        await self.context.derive(children[0], 1)


class SendsTwice(Branching):
    async def send(self, trunk: Sample, children: Sequence[Prompt]) -> None:
        self.rollouts.finish(children[0])  # type: ignore[arg-type]
        await super().send(trunk, children)


class Undeclared(Branching):
    def facts(self) -> Facts:
        return Facts(group_size=2)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (
            Forgets(),
            "finished 'g:0' without a send, hold or drop of 'g:0/branch.1', which it derived from it (test_der",
        ),
        (
            SendsFirst(),
            "nothing can be derived from 'g:0': something made from it was sent on node.trunks; ",
        ),
        (DropsFirst(), "nothing can be derived from 'g:0': it is dropped (useless); derive before you drop it"),
        (DropsBetween(), "dropped a Sample before the samples that it derived from it; send or drop these first"),
        (Again(), "3 samples were derived from 'g:0' under 'branch', but 2 before (test_derived_samples.py:"),
        (
            Another(),
            "samples are derived under 'twig', but the node declares branch; add it to derives= ",
        ),
        (Branching(4), "4 samples are derived from 'g:0' under 'branch', but the node declares 1 to 3; raise derives="),
        (Copies(), "nothing can be derived from 'g:0': node 'node/0': this Sample is not open here"),
        (FromDerived(), "nothing can be derived from 'g:0/branch.0': it is derived itself; derive from it in a node"),
        (SendsTwice(), "this Prompt is not open here"),
        (Undeclared(), "derives samples, but declares none; return Facts(derives={'branch': 2}) from its facts()"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Node) else "",
)
def test_a_mistake_is_refused_when_it_is_made(node: Node, text: str) -> None:
    assert text in failing(node)


class Failing(Branching):
    async def send(self, trunk: Sample, children: Sequence[Prompt]) -> None:
        await self.prompts.send(children[0])
        raise SampleFailed("broken")


def test_what_was_derived_from_a_sample_that_fails_is_lost_unless_it_was_sent() -> None:
    record = ran(Failing())
    assert [one.sample_id for one in record.sent("prompts")] == ["g:0/branch.0"]
    assert [(one.message.sample_id, one.state, one.reason) for one in record.lost] == [  # type: ignore[attr-defined]
        ("g:0", "failed", "broken"),
        ("g:0/branch.1", "failed", "broken"),
    ]
    gone = {one.member: one.reason for one in record.tombstones("trunks")}
    assert gone == {0: "broken", 3: "broken", 4: KIND}


class Holding(Branching):
    """Sends a derived sample when the next comes."""

    waiting: Sequence[Prompt] = ()

    async def send(self, trunk: Sample, children: Sequence[Prompt]) -> None:
        for child in children:
            self.rollouts.hold(child)  # type: ignore[arg-type]
        before, self.waiting = self.waiting, children
        for child in before:
            await self.prompts.send(child, made_from=[child])
        await self.trunks.send(trunk)


def test_a_held_derived_sample_outlives_the_invocation_and_its_parent_ends_after_it() -> None:
    async def body() -> None:
        node = Holding()
        async with NodeRig(node) as rig:
            rig.feed("rollouts", sample(0, group_size=2, response=3))
            await rig.receive("trunks")
            await rig.taken("rollouts")
            assert rig.record.sent("prompts") == []
            rig.feed("rollouts", sample(1, group_size=2, response=3))
            assert [(await rig.receive("prompts")).sample_id for _ in range(2)] == ["g:0/branch.0", "g:0/branch.1"]
            await rig.finished(leftovers=True)

    asyncio.run(body())


class HoldsAndSends(Branching):
    """Its derived samples end with their sends, before their parent."""

    async def send(self, trunk: Sample, children: Sequence[Prompt]) -> None:
        for child in children:
            self.rollouts.hold(child)  # type: ignore[arg-type]
        await super().send(trunk, children)


@pytest.mark.parametrize("kind", [Branching, HoldsAndSends])
def test_a_resumed_invocation_gets_its_samples_again_and_sends_only_what_was_not_sent(
    kind: type[Branching], tmp_path: Path
) -> None:
    """The snapshot is taken while the second prompt waits for credit."""

    async def first() -> None:
        async with NodeRig(kind(3), unread=["prompts"]) as rig:
            rig.feed("rollouts", sample(0, group_size=2, response=3))
            await rig.taken("rollouts")
            await rig.until(lambda record: bool(record.derived))
            await asyncio.sleep(0.1)  # real time, as the lanes need it
            await rig.snapshot(tmp_path / "saved")

    asyncio.run(first())
    sent = read_state(tmp_path / "saved")["sent"]
    assert sent, "a repeated invocation knows what it has sent, whichever replica took that"
    record = run_node(kind(3), resume=tmp_path / "saved")
    assert sorted(one.sample_id for one in record.sent("prompts")) == [f"g:0/branch.{i}" for i in range(3)]
    assert [one.sample_id for one in record.sent("trunks")] == ["g:0"]


class Returns(Branching):
    """Does nothing again if the last of its messages was sent."""

    async def branch(self, trunk: Sample) -> None:
        if not self.trunks.was_sent():
            await super().branch(trunk)


def test_an_invocation_that_returns_because_all_was_sent_leaves_no_second_place(tmp_path: Path) -> None:
    """The snapshot is taken while the trunk waits for credit: the checkpoint has all messages."""

    async def first() -> None:
        async with NodeRig(Returns(2), unread=["trunks"]) as rig:
            rig.feed("rollouts", sample(0, group_size=2, response=3))
            rig.feed("rollouts", sample(1, group_size=2, response=3))
            await rig.until(lambda record: len(record.sent("prompts")) == 4)
            await rig.snapshot(tmp_path / "saved")

    asyncio.run(first())
    with mock.patch.object(Replica, "use_up", autospec=True, side_effect=Replica.use_up) as use_up:
        record = run_node(Returns(2), resume=tmp_path / "saved")
    ended = [item.derived_as.sample_id for call in use_up.call_args_list for item in call.args[1] if item.derived_as]
    sent = [f"g:{member}/branch.{ordinal}" for member in (0, 1) for ordinal in (0, 1)]
    assert sorted(ended) == sent, "as sent samples: other trainers are told that they do not come"
    assert record.derived == []
    assert [one.sample_id for one in record.sent("trunks")] == ["g:0", "g:1"]
    assert not {one.member for one in record.tombstones("prompts")} & {2, 3, 5, 6}


class Asking(Node):
    """Asks for a continuation of a part of each rollout, turn by turn."""

    rollouts: In[Sample]
    done: Out[Sample]
    generate: Call[Turn, Reply]

    def __init__(self, shared: int = 0) -> None:
        self.shared = shared
        """Tokens of the trunk that the branch's mask has as well."""

    def facts(self) -> Facts:
        return Facts(derives={"branch": 1})

    async def run(self) -> None:
        async for trunk in self.rollouts:
            (child,) = await self.context.derive(trunk, 1)
            prefix = trunk.token_ids[: trunk.prompt_tokens + 2]
            place = (child.sample_id, child.group_id, 0, 0, self.rollouts.ticket(trunk), child.seed)
            reply = await self.generate(Turn(child.sample_id, *place, token_ids=prefix, max_tokens=3))
            reply = replace(reply, context_ids=prefix, sample_id=child.sample_id)
            branch = make_sample(child, [reply])
            if self.shared:
                branch = replace(branch, policy_mask=np.arange(len(branch.token_ids)) >= len(prefix) - self.shared)
            await self.done.send(branch)
            await self.done.send(trunk)


def reply(turn: Turn) -> Reply:
    ids = np.array([7, 8, 9], np.int32)
    logprobs, versions = np.full(3, -0.5, np.float32), np.zeros(3, np.int32)
    return Reply(turn.request_id, ids, logprobs, versions, "stop", {}, "", 0, 0.0, 0.0, "generator/0")


def asked(node: Node) -> NodeRecord:
    return run_node(node, {"rollouts": [sample(0, group_size=1, response=3)]}, answers={"generate": reply})


def test_a_rollout_of_a_derived_sample_is_reported_when_it_is_sent() -> None:
    record = asked(Asking())
    branch, trunk = record.sent("done")
    assert branch.token_ids.tolist() == [*trunk.token_ids[: trunk.prompt_tokens + 2], 7, 8, 9]
    assert branch.policy_mask.sum() == 3 and branch.prompt_tokens == trunk.prompt_tokens + 2
    assert (branch.parent_id, branch.generator, branch.truncated) == (trunk.sample_id, "generator/0", False)
    reports: list[Any] = [event for event in record.ledger if event[0] == "episode"]
    assert [(event[1], event[3], event[7], event[8]) for event in reports] == [
        (branch.sample_id, 3, branch.prompt_tokens, None)
    ]


def test_a_branch_that_has_the_trunks_tokens_in_its_mask_is_refused_at_its_send() -> None:
    with pytest.raises(FlowrlError, match=r"marks 4 tokens after its first .* its policy_mask may be true for its own"):
        asked(Asking(shared=1))


def test_a_tombstone_never_has_the_number_of_another_member() -> None:
    numbers = DerivedNumbers(None, {"branch": 2})
    gone = Tombstone("g", 1, "failed", "x", "n", ("g:1",), 3)
    assert numbers.member_of(gone, "branch", 1) == 3 + 2 + 1

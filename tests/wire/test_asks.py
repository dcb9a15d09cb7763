"""Nodes that ask a policy: what is booked, what is refused, and what a checkpoint keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl import (
    Ask,
    ConfigError,
    Facts,
    FlowrlError,
    Graph,
    Group,
    In,
    Node,
    Out,
    Prompt,
    Sample,
    SampleFailed,
    Scored,
    Serve,
    check,
)
from flowrl.messages.episode import Reply, Turn, join_replies
from flowrl.messages.sampling import ReplySchema, Sampling
from flowrl.testing import EIGHT_CORES, NodeRig, prompt, run_node, said, sample, script


class Judge(Node):
    """Asks what a sample is worth."""

    rollouts: In[Sample]
    scored: Out[Scored]
    judge: Ask

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def run(self) -> None:
        await self.rollouts.each(self.score, concurrency=4)

    async def score(self, one: Sample) -> None:
        reply = await self.judge.ask(f"{one.response_text}?", schema=ReplySchema(choice=("1", "2")))
        await self.scored.send(Scored.of(one, float(reply.text), asked=1.0))


class Solver(Node):
    """Makes samples of replies, as its `plan` says."""

    prompts: In[Prompt]
    samples: Out[Sample]
    policy: Ask

    def __init__(self, plan: Callable[[Solver, Prompt], Any]) -> None:
        self.plan = plan

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def run(self) -> None:
        await self.prompts.each(self.solve, concurrency=4)

    async def solve(self, one: Prompt) -> None:
        if (made := await self.plan(self, one)) is not None:
            await self.samples.send(made)


class Turns:
    """A policy that says what its script has, and keeps what it was asked."""

    def __init__(self, *texts: str) -> None:
        self.turns: list[Turn] = []
        self._script = script(*texts)

    def __call__(self, turn: Turn) -> Reply:
        self.turns.append(turn)
        return self._script(turn)


async def once(node: Solver, one: Prompt) -> Sample:
    return node.policy.make_sample(one, [await node.policy.ask("2+2", trained=True)])


def test_a_judges_tokens_belong_to_no_sample() -> None:
    turns = Turns("1", "2")
    record = run_node(Judge(), {"rollouts": [sample(0), sample(1)]}, answers={"judge": turns})
    assert sorted(one.reward for one in record.sent("scored")) == [1.0, 2.0]
    assert [turn.trained for turn in turns.turns] == [False, False]
    assert {turn.messages[0]["content"] for turn in turns.turns} == {"2?"}
    assert turns.turns[0].schema == ReplySchema(choice=("1", "2")) and turns.turns[0].group_id == "g"
    assert len({turn.request_id for turn in turns.turns}) == len({turn.seed for turn in turns.turns}) == 2
    assert not record.events("episode") and not record.events("abandoned")


def test_the_oldest_ticket_comes_first() -> None:
    turns = Turns("1")
    feed = {"rollouts": [(5, sample(0, group="a")), (3, sample(0, group="b"))]}
    run_node(Judge(), feed, answers={"judge": turns})
    assert {turn.group_id: turn.priority for turn in turns.turns} == {"a": 5, "b": 3}


def test_a_sample_is_made_of_replies_with_their_own_tokens() -> None:
    async def plan(node: Solver, one: Prompt) -> Sample:
        first = await node.policy.ask(one.token_ids, trained=True)
        second = await node.policy.ask([{"role": "user", "content": "more"}], after=first, trained=True)
        other = await node.policy.ask(one.token_ids, trained=True, sampling=Sampling(max_tokens=1))
        return node.policy.make_sample(one, [first, second, other], metrics={"asked": 3.0})

    record = run_node(Solver(plan), {"prompts": [prompt(0)]}, answers={"policy": script("ab", "cd", "ef")})
    (made,) = record.sent("samples")
    assert made.response_text == "abcde" and made.prompt_tokens == 3 and made.truncated
    assert made.token_ids.tolist() == [0, 1, 2, *map(ord, "ab<user>morecd")]
    assert made.policy_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 10 + [True] * 2
    assert made.behavior_logprobs[made.policy_mask].tolist() == [-0.5] * 4 and made.versions.max() == 0
    (branch,) = made.branches
    assert branch.token_ids.tolist() == [0, 1, 2, ord("e")] and branch.policy_mask.tolist() == [False] * 3 + [True]
    ((_, _, tokens, *_, row),) = record.events("episode")
    assert tokens == 5 and row[:4] == ("node", 1, 3, "tokens")


def test_a_reply_right_after_another_begins_a_sequence() -> None:
    """One span of both would be tokens that no request has sampled."""
    turn = Turn("s/0.0", "s", "g", 0, 0, 1, 0, np.arange(3, dtype=np.int32), 8)
    first = said(turn, "ab")
    at_once = said(replace(turn, token_ids=np.concatenate([first.context_ids, first.token_ids])), "c")
    assert [one.policy_mask.sum() for one in join_replies([first, at_once])] == [2, 1]


def test_replies_that_are_left_out_are_redone() -> None:
    async def plan(node: Solver, one: Prompt) -> Sample:
        replies = await asyncio.gather(*(node.policy.ask("2+2", trained=True) for _ in range(3)))
        return node.policy.make_sample(one, replies[1:2])

    turns = Turns("a")
    record = run_node(Solver(plan), {"prompts": [prompt(0)]}, answers={"policy": turns})
    assert sorted(turn.request_id for turn in turns.turns) == ["g:0/0.0", "g:0/0.1", "g:0/0.2"]
    assert len({turn.seed for turn in turns.turns}) == 3, "equal asks are different draws"
    assert record.events("abandoned") == [("g:0/0.0", "not_used"), ("g:0/0.2", "not_used")]


def test_a_lost_sample_voids_what_was_asked_for_it() -> None:
    async def plan(node: Solver, one: Prompt) -> None:
        await node.policy.ask("2+2", trained=True)
        raise SampleFailed("too_hard")

    record = run_node(Solver(plan), {"prompts": [prompt(0)]}, answers={"policy": script("a")})
    assert record.events("void") == [("g:0", 0, "too_hard")]


def test_an_ask_that_is_cancelled_leaves_no_number_out() -> None:
    async def plan(node: Solver, one: Prompt) -> Sample:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await node.policy.ask("slow", trained=True)
        return await once(node, one)

    async def answer(turn: Turn) -> Reply:
        if turn.messages[0]["content"] == "slow":
            await asyncio.get_running_loop().create_future()
        return said(turn, "4")

    record = run_node(Solver(plan), {"prompts": [prompt(0)]}, answers={"policy": answer})
    assert set(record.events("abandoned")) == {("g:0/0.0", "cancelled")}
    ((request_id, *_),) = record.events("request")
    assert request_id == "g:0/0.0" and len(record.sent("samples")) == 1


def test_a_refused_ask_leaves_no_number_out() -> None:
    async def plan(node: Solver, one: Prompt) -> Sample:
        with pytest.raises(SampleFailed, match="vLLM refused"):
            await node.policy.ask("long", trained=True)
        return await once(node, one)

    def answer(turn: Turn) -> Reply:
        if turn.messages[0]["content"] == "long":
            raise SampleFailed("vLLM refused the request: it is too long")
        return said(turn, "4")

    record = run_node(Solver(plan), {"prompts": [prompt(0)]}, answers={"policy": answer})
    assert set(record.events("abandoned")) == {("g:0/0.0", "cancelled")} and len(record.sent("samples")) == 1


async def without_a_sample(node: Solver, one: Prompt) -> None:
    await node.policy.ask("2+2", trained=True)
    await node.samples.send(sample(0))


async def twice(node: Solver, one: Prompt) -> Sample:
    reply = await node.policy.ask("2+2", trained=True)
    node.policy.make_sample(one, [reply])
    return node.policy.make_sample(one, [reply])


async def after_it_is_made(node: Solver, one: Prompt) -> Sample:
    made = await once(node, one)
    await node.policy.ask("3+3", trained=True)
    return made


async def of_an_untrained_reply(node: Solver, one: Prompt) -> Sample:
    return node.policy.make_sample(one, [await node.policy.ask("2+2")])


async def of_one_reply_twice(node: Solver, one: Prompt) -> Sample:
    return node.policy.make_sample(one, [await node.policy.ask("2+2", trained=True)] * 2)


async def of_nothing(node: Solver, one: Prompt) -> Sample:
    return node.policy.make_sample(one, [])


async def with_a_schema(node: Solver, one: Prompt) -> Sample:
    return node.policy.make_sample(one, [await node.policy.ask("2+2", trained=True, schema={"type": "object"})])


async def outside_of_invocations(node: Solver, one: Prompt) -> Sample:
    from contextvars import Context

    task = asyncio.get_running_loop().create_task(node.policy.ask("2+2", trained=True, sample=one), context=Context())
    return node.policy.make_sample(one, [await task])


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (without_a_sample, "asked with trained=True for sample 'g:0', whose item has ended without the sample"),
        (twice, "made sample 'g:0' a second time"),
        (after_it_is_made, "for sample 'g:0' after make_sample"),
        (of_an_untrained_reply, "which was asked with trained=False"),
        (of_one_reply_twice, "was made of one reply twice"),
        (of_nothing, "was made of no replies"),
        (with_a_schema, "a masked distribution that the trainer does not compute"),
        (outside_of_invocations, "trained=True for no item"),
    ],
)
def test_what_the_audit_would_reject_is_refused_at_once(plan: Any, text: str) -> None:
    with pytest.raises(FlowrlError, match=text):
        run_node(Solver(plan), {"prompts": [prompt(0)]}, answers={"policy": script("4")})


def test_trained_tokens_need_a_prompt() -> None:
    class Again(Judge):
        async def score(self, one: Sample) -> None:
            await self.judge.ask("2+2", trained=True)

    with pytest.raises(FlowrlError, match=r"node\.judge was asked with trained=True for a Sample; tokens are trained"):
        run_node(Again(), {"rollouts": [sample(0)]}, answers={"judge": script("1")})


def test_a_schema_is_of_one_kind() -> None:
    with pytest.raises(ConfigError, match="was given nothing"):
        ReplySchema()
    with pytest.raises(ConfigError, match="regex and choice"):
        ReplySchema(regex="a", choice=("b",))


# Checkpoints


class Pairs(Node):
    """Asks twice about a group; between the asks, `between` is something outside that it waits for."""

    rollouts: In[Sample]
    groups: Out[Group]
    judge: Ask
    between: asyncio.Future[None] | None = None

    def facts(self) -> Facts:
        return Facts(group_size=2, keeps_lineage=False)

    async def run(self) -> None:
        async for members in self.rollouts.groups(2):
            found = [(await self.judge.ask("question 1")).text]
            self.context.metric("answered", 1)
            if self.between is not None:
                with self.context.outside("a second thought"):
                    await self.between
            found.append((await self.judge.ask("question 2")).text)
            metrics = dict.fromkeys(found, 1.0)
            await self.groups.send(Group(members.group_id, (), 2, metrics), made_from=members.items)


def live_twice(tmp_path: Path) -> tuple[list[list[str]], Any]:
    """What is asked before and after a resume of a group whose first ask is answered, and what is then sent."""
    asked: list[list[str]] = [[], []]

    def answers(life: int) -> Any:
        def answer(turn: Turn) -> Reply:
            asked[life].append(turn.messages[0]["content"])
            return said(turn, f"{asked[life][-1]} in life {life}")

        return {"judge": answer}

    async def lives() -> Any:
        first, state = Pairs(), tmp_path / "state"
        first.between = asyncio.get_running_loop().create_future()
        async with NodeRig(first, answers=answers(0)) as rig:
            rig.feed("rollouts", sample(1, group_size=2), sample(0, group_size=2))
            await rig.until(lambda record: "answered" in record.metrics)
            await rig.snapshot(state)
        async with NodeRig(Pairs(), answers=answers(1), resume=state) as rig:
            sent = await rig.receive("groups")
            await rig.finished()
            return sent

    sent = asyncio.run(lives())
    return asked, sent


def test_a_reply_that_the_checkpoint_has_is_not_asked_for_again(tmp_path: Path) -> None:
    (before, after), sent = live_twice(tmp_path)
    assert before == ["question 1"] and after == ["question 2"]
    assert set(sent.metrics) == {"question 1 in life 0", "question 2 in life 1"}


def test_a_sample_that_the_checkpoint_has_booked_is_not_booked_again(tmp_path: Path) -> None:
    async def plan(node: Solver, one: Prompt) -> Sample:
        made = await once(node, one)
        node.context.metric("made", 1)
        if first:
            with node.context.outside("a second thought"):
                await asyncio.get_running_loop().create_future()
        return made

    first, state = True, tmp_path / "state"

    async def before() -> None:
        async with NodeRig(Solver(plan), answers={"policy": script("4")}) as rig:
            rig.feed("prompts", prompt(0))
            await rig.until(lambda record: "made" in record.metrics)
            await rig.snapshot(state)
            assert rig.record.events("episode")

    asyncio.run(before())
    first = False
    record = run_node(Solver(plan), answers={"policy": script("another")}, resume=state)
    assert [one.response_text for one in record.sent("samples")] == ["4"] and not record.events("episode")


def test_what_was_asked_is_found_whatever_the_order() -> None:
    from flowrl.wire.items import ItemAsks

    turn = Turn("g:0/0.2", "g:0", "g", 2, 0, 1, 0, np.arange(3, dtype=np.int32), 8)
    first, second, other = (replace(said(turn, text), sample_id="g:0") for text in "abc")
    before = ItemAsks()
    names = [before.name_call(digest) for digest in (b"x", b"x", b"y")]
    for name, reply in ((names[2], other), (names[1], second), (names[0], first)):  # in the order of coming
        before.note_reply(name, reply)
    asks = ItemAsks(before.make_record())
    found = [asks.take_known(asks.name_call(digest)) for digest in (b"y", b"x", b"x", b"x")]
    assert [one and one.text for one in found] == ["c", "a", "b", None], "equal asks in the order of asking"
    assert [asks.next_turn("g:0") for _ in range(3)] == [0, 1, 3], "numbers that are taken are passed over"
    assert set(asks.make_record().request_ids) == {"g:0/0.2"}


# What check says


def asking_graph(*, connect: bool = True, takes_schema: bool = True) -> list[str]:
    class Answerer(Node):
        turns: Serve[Turn, Reply]

        def facts(self) -> Facts:
            return Facts(takes_schema=takes_schema)

        async def run(self) -> None:
            await self.turns.each(self.answer)

        async def answer(self, turn: Turn) -> Reply:
            return said(turn, "1")

    class Source(Node):
        rollouts: Out[Sample]

        async def run(self) -> None: ...

    class Strict(Judge):
        def facts(self) -> Facts:
            return replace(super().facts(), asks_schema=True)

    class Sink(Node):
        scored: In[Scored]

        async def run(self) -> None: ...

    g = Graph("asking")
    source, judge, answerer, sink = Source(), Strict(), Answerer(), Sink()
    for name, node in (("source", source), ("judged", judge), ("judge", answerer), ("sink", sink)):
        g.add(name, node)
    g.connect(source.rollouts, judge.rollouts)
    g.connect(judge.scored, sink.scored)
    if connect:
        g.call(judge.judge, answerer.turns)
    return list(check(g, EIGHT_CORES).problems)


def test_check_knows_what_an_ask_needs() -> None:
    assert asking_graph() == []
    unconnected, *_ = asking_graph(connect=False)
    wanted = "judged.judge, an Ask[Turn, Reply] port, is not connected; connect it with g.call (judge.turns would fit)"
    assert unconnected.startswith(wanted)
    (refused,) = asking_graph(takes_schema=False)
    assert refused.startswith("judged.judge asks with a schema, but judge cannot force a reply into one")


def test_asks_do_not_wait_for_each_other_in_a_cycle() -> None:
    class Both(Node):
        turns: Serve[Turn, Reply]
        other: Ask

        async def run(self) -> None: ...

    g = Graph("circle")
    first, second = g.add("first", Both()), g.add("second", Both())
    g.call(first.other, second.turns)
    g.call(second.other, first.turns)
    assert any("wait for each other in a cycle" in text for text in check(g, EIGHT_CORES).problems)


# Without a ticket


class Examined(Solver):
    """Also answers held-out prompts."""

    requests: Serve[Prompt, Sample]

    async def run(self) -> None:
        await self.requests.each(self.answer)

    async def answer(self, one: Prompt) -> Sample:
        first, second = [await self.policy.ask("2+2", trained=True, sample=one) for _ in range(2)]
        return self.policy.make_sample(one, [first, second])


def test_held_out_samples_are_made_alike_and_are_not_booked() -> None:
    turns = Turns("4")
    node = Examined(once)
    record = run_node(
        node, {"requests": [prompt(0), prompt(0)]}, answers={"policy": turns}, ignore=("prompts", "samples")
    )
    assert [len(one.sequences) for one in record.replies["requests"]] == [2, 2]
    assert [turn.ticket for turn in turns.turns] == [-1] * 4 and all(turn.trained for turn in turns.turns)
    seeds = [turn.seed for turn in turns.turns]
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1]
    assert not record.events("episode") and not record.events("abandoned")


def test_asks_of_no_item_come_last_and_differ() -> None:
    class Musing(Judge):
        async def run(self) -> None:
            self.said = await asyncio.gather(*(self.judge.ask("hm?") for _ in range(2)))
            await super().run()

    turns = Turns("1")
    run_node(Musing(), {"rollouts": [sample(0)]}, answers={"judge": turns})
    first, second, judged = turns.turns
    assert first.seed != second.seed and first.priority == second.priority > judged.priority
    assert first.group_id == "" and not first.trained


def test_an_ask_asks_something() -> None:
    async def plan(node: Solver, one: Prompt) -> None:
        await node.policy.ask([])

    with pytest.raises(FlowrlError, match=r"node\.policy was asked nothing"):
        run_node(Solver(plan), {"prompts": [prompt(0)]}, answers={"policy": script("4")})


# Derived samples


class Brancher(Node):
    """Derives two samples from each, one of them with two replies; the other is dropped if `drops`."""

    rollouts: In[Sample]
    samples: Out[Sample]
    policy: Ask

    def __init__(self, *, drops: bool = False) -> None:
        self.drops = drops

    def facts(self) -> Facts:
        return Facts(derives={"branch": 2}, drops=True)

    async def run(self) -> None:
        await self.rollouts.each(self.branch)

    async def branch(self, trunk: Sample) -> None:
        first, second = await self.context.derive(trunk, 2)
        half = trunk.token_ids[:4]
        begun = await self.policy.ask(half, trained=True, sample=first)
        more = await self.policy.ask("more", after=begun, trained=True, sample=first)
        await self.samples.send(self.policy.make_sample(first, [begun, more]))
        other = await self.policy.ask(half, trained=True, sample=second)
        if self.drops:
            self.rollouts.drop(second, "useless")
        else:
            await self.samples.send(self.policy.make_sample(second, [other]))
        await self.samples.send(trunk)


def test_asks_for_derived_samples_are_theirs() -> None:
    turns = Turns("ab", "cd", "ef")
    record = run_node(Brancher(), {"rollouts": [sample(0)]}, answers={"policy": turns}, num_groups=None)
    first, second, trunk = record.sent("samples")
    assert [turn.request_id for turn in turns.turns] == [
        f"{one}" for one in ("g:0/branch.0/0.0", "g:0/branch.0/0.1", "g:0/branch.1/0.0")
    ]
    assert first.parent_id == second.parent_id == trunk.sample_id
    assert first.response_text == "abcd" and first.response_tokens == 4 and second.response_tokens == 2
    assert [event[0] for event in record.events("episode")] == ["g:0/branch.0", "g:0/branch.1"]
    assert not record.events("void") and not record.events("abandoned")


def test_what_was_asked_for_a_dropped_derived_sample_is_void() -> None:
    record = run_node(Brancher(drops=True), {"rollouts": [sample(0)]}, answers={"policy": script("ab")})
    assert record.events("void") == [("g:0/branch.1", 0, "useless")]

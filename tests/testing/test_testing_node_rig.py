"""The rig for one node: what a user's test of a node sees, and how each mistake is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowrl import (
    Call,
    ConfigError,
    FlowrlError,
    GraphError,
    In,
    Message,
    Node,
    NodeFailed,
    Out,
    Sample,
    SampleFailed,
    Scored,
    Serve,
    Weights,
    join,
)
from flowrl.graph.node import Facts
from flowrl.testing import Leaked, NodeRecord, NodeRig, RigTimeout, VirtualClock, lost, run_node, sample, scored
from tests.rigs.ticks import ticks


class TooShort(Node):
    """Filters samples with fewer than `least` tokens."""

    samples: In[Sample]
    kept: Out[Sample]

    def __init__(self, least: int = 2) -> None:
        self.least = least

    def check(self, facts: Any) -> list[str]:
        return [] if self.least > 0 else [f"least is {self.least}; it has to be above 0"]

    async def run(self) -> None:
        async for one in self.samples:
            if one.response_tokens < self.least:
                self.samples.drop(one, "too_short", state="filtered")
            else:
                await self.kept.send(one)


def in_rig(
    node: Node, body: Callable[[NodeRig], Awaitable[Any]], *, clock: VirtualClock | None = None, **options: Any
) -> Any:
    async def main() -> Any:
        async with NodeRig(node, **options) as rig:
            return await body(rig)

    return asyncio.run(main()) if clock is None else clock.run(main())


def test_what_came_out_what_was_lost_and_what_it_was_made_from() -> None:
    short, long = sample(0, response=1), sample(1, response=5)
    node = TooShort()
    record = run_node(node, {"samples": [short, long]})
    assert [one.sample_id for one in record.sent(node.kept)] == ["g:1"]
    assert [[one is long for one in made] for made in record.made_from("kept")] == [[True]]
    (drop,) = record.lost
    assert drop.message is short and (drop.state, drop.reason) == ("filtered", "too_short")
    assert [event[3:] for event in record.events("lost")] == [(("g:0",), "filtered", "too_short", 1)]
    (marker,) = record.tombstones("kept")
    assert (marker.member, marker.reason) == (0, "too_short")


def test_the_nodes_own_ports_name_them_too_and_a_node_can_be_run_again() -> None:
    node = TooShort()
    for _ in range(2):
        record = run_node(node, {node.samples: [sample(0)]})
        assert len(record.sent(node.kept)) == 1
    assert run_node(TooShort(), {}).sent("kept") == []


def test_problems_of_the_settings_and_of_the_preflight_come_before_anything_runs() -> None:
    class Picky(TooShort):
        def preflight(self) -> None:
            asyncio.run(asyncio.sleep(0))  # some do
            raise ConfigError("there is no such file")

        async def setup(self) -> None:
            raise AssertionError("it was set up")

    with pytest.raises(GraphError, match="node filter: least is 0"):
        run_node(TooShort(0), {"samples": []}, name="filter")
    with pytest.raises(ConfigError, match="there is no such file"):
        run_node(Picky())
    with pytest.raises(AssertionError, match="it was set up"):
        run_node(Picky(), preflight=False)


@pytest.mark.parametrize(
    ("feed", "error", "says"),
    [
        ({"sample": []}, ValueError, "node 'node' has no port 'sample'; it has samples, kept"),
        ({"kept": [sample(0)]}, ValueError, "port 'kept' of node 'node' is no In port"),
        ({TooShort().samples: [sample(0)]}, ValueError, "has no port 'samples'"),
        ({"samples": [Weights("p", 0, 0, "full", "shm:x", 0, 0)]}, TypeError, r"In\[Sample\] was fed a Weights"),
    ],
    ids=["unknown", "an out port", "another node's", "another message"],
)
def test_a_test_that_feeds_wrongly_is_told(feed: Any, error: type[Exception], says: str) -> None:
    if "sample" in feed:
        feed = {"sample": [sample(0)]}
    with pytest.raises(error, match=says):
        run_node(TooShort(), feed)


def test_what_the_node_raises_is_raised_in_the_test_with_its_name_and_ticket() -> None:
    class Fails(TooShort):
        async def run(self) -> None:
            async for one in self.samples:
                await self.kept.send(one)
                if one.member == 1:
                    raise KeyError("column")

    with pytest.raises(KeyError) as caught:
        run_node(Fails(), {"samples": [(7, sample(0)), (8, sample(1))]}, name="fails")
    assert caught.value.__notes__ == ["raised by node 'fails', which worked on ticket 8"]

    async def waits(rig: NodeRig) -> None:
        rig.feed("samples", sample(0), sample(1))
        for _ in range(3):
            await rig.receive("kept")

    with pytest.raises(KeyError):
        in_rig(Fails(), waits)


@pytest.mark.parametrize("where", ["setup", "close", "task", "after the test"])
def test_a_failure_outside_of_the_body_is_raised_too(where: str) -> None:
    class Fails(TooShort):
        async def setup(self) -> None:
            if where == "setup":
                raise OSError("no device")

        async def run(self) -> None:
            if where == "after the test":
                raise OSError("no device")
            if where == "task":
                task = asyncio.create_task(self.fail())
                await asyncio.wait((task,))
                await asyncio.Event().wait()
            await super().run()

        async def fail(self) -> None:
            raise OSError("no device")

        async def close(self) -> None:
            if where == "close":
                raise OSError("no device")

    async def nothing(rig: NodeRig) -> None:
        await ticks(3)

    with pytest.raises((OSError, NodeFailed), match="no device"):
        if where == "after the test":
            in_rig(Fails(), nothing)
        else:
            run_node(Fails(), {}, clock=VirtualClock(), timeout_s=100)


class Holds(TooShort):
    async def run(self) -> None:
        async for one in self.samples:
            self.samples.hold(one)


class ReturnsEarly(TooShort):
    async def run(self) -> None:
        async for one in self.samples:
            await self.kept.send(one)
            return


class Collects(Node):
    scored: In[Scored]
    kept: Out[Sample]

    async def run(self) -> None:
        async for members in self.scored.groups(3):
            await self.kept.send(members.items[0], made_from=members.items)


@pytest.mark.parametrize(
    ("node", "port", "says"),
    [
        (Holds(), "samples", r"ended with 2 unfinished message\(s\): Sample g:0 of node.samples, Sample g:1 of"),
        (ReturnsEarly(), "samples", r"1 message\(s\) on port 'samples' that it did not take"),
        (Collects(), "scored", r"2 unfinished message\(s\): Scored g:0"),
    ],
)
def test_messages_that_a_node_leaves_unfinished_fail_the_test(node: Node, port: str, says: str) -> None:
    messages = [scored(0, 1.0), scored(1, 1.0)] if port == "scored" else [sample(0), sample(1)]
    with pytest.raises(Leaked, match=says):
        run_node(node, {port: messages})
    assert run_node(node, {port: messages}, leftovers=True).lost == []


def test_an_item_let_go_of_is_the_engines_error() -> None:
    class LetsGo(TooShort):
        async def run(self) -> None:
            async for _ in self.samples:
                pass

    with pytest.raises(FlowrlError, match=r"it finished a Sample .* without a send, hold or drop"):
        run_node(LetsGo(), {"samples": [sample(0)]})


def test_a_message_of_another_type_on_an_out_port_is_an_error() -> None:
    class Wrong(TooShort):
        async def run(self) -> None:
            async for one in self.samples:
                await self.kept.send(Weights("p", 0, 0, "full", "", 0, 0), made_from=[one])  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"wrong.kept: Out\[Sample\] sent a Weights"):
        run_node(Wrong(), {"samples": [sample(0)]}, name="wrong")


def test_a_wait_that_takes_too_long_tells_what_the_node_waits_for() -> None:
    async def waits(rig: NodeRig) -> None:
        rig.feed("samples", sample(0, response=1))
        await rig.receive("kept")

    with pytest.raises(RigTimeout) as caught:
        in_rig(TooShort(), waits, timeout_s=0.05, name="filter")
    assert str(caught.value).startswith(
        "port 'kept' of node 'filter' got no message within 0.05 s; the node waits for item of filter.samples for 0."
    )
    assert str(caught.value).endswith("port 'samples' took 1 of 1 message(s)")


def test_with_a_clock_the_timeout_takes_no_time_and_names_code_that_stands() -> None:
    class Sleeps(TooShort):
        async def run(self) -> None:
            async for _ in self.samples:
                await asyncio.Event().wait()

    clock = VirtualClock()
    with pytest.raises(
        RigTimeout, match=r"has not ended with its streams within 3600 s.*in its own code: .*Event.*wait|run"
    ):
        run_node(Sleeps(), {"samples": [sample(0)]}, clock=clock, timeout_s=3600)
    assert clock.now_s >= 3600


def test_a_node_that_cannot_be_cancelled_is_told() -> None:
    class Stays(TooShort):
        async def run(self) -> None:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if free:
                        raise

    async def main() -> None:
        with pytest.raises(RigTimeout, match=r"node 'node' has not ended 0\.05 s after it was cancelled"):
            async with NodeRig(Stays(), timeout_s=0.05):
                await ticks()
        free.append(True)

    free: list[bool] = []
    asyncio.run(main())


@dataclass(frozen=True)
class Question(Message):
    text: str


@dataclass(frozen=True)
class Reply(Message):
    text: str


class Desk(Node):
    """Answers questions, with the help of an oracle where there is one."""

    asked: Serve[Question, Reply]
    oracle: Call[Question, Reply]

    def facts(self) -> Facts:
        return Facts(optional=("oracle",))

    async def run(self) -> None:
        await self.asked.each(self.answer)

    async def answer(self, question: Question) -> Reply:
        if question.text == "nonsense":
            raise SampleFailed("no answer to nonsense")
        if not self.oracle.connected:
            return Reply("ask the oracle")
        reply = await self.oracle(question)
        return Reply(f"{reply.text}!")


def test_serve_ports_are_asked_and_call_ports_answered() -> None:
    async def consult(rig: NodeRig) -> NodeRecord:
        reply = await rig.ask(desk.asked, Question("why"))
        assert reply.text == "because of why!"
        with pytest.raises(SampleFailed, match="no answer to nonsense"):
            await rig.ask("asked", Question("nonsense"))
        return await rig.finished()

    async def because(question: Question) -> Reply:
        return Reply(f"because of {question.text}")

    desk = Desk()
    in_rig(desk, consult, answers={"oracle": because})
    record = run_node(Desk(), {"asked": [Question("why"), Question("when")]})
    assert [reply.text for reply in record.replies["asked"]] == ["ask the oracle"] * 2
    record = run_node(Desk(), {"asked": [Question("a")]}, answers={"oracle": lambda question: Reply(question.text)})
    assert [reply.text for reply in record.replies["asked"]] == ["a!"]


def test_an_answer_that_raises_fails_the_test_with_what_it_raised() -> None:
    def broken(question: Question) -> Reply:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_node(Desk(), {"asked": [Question("a")]}, answers={"oracle": broken})


def test_groups_count_members_that_were_lost_before_and_travel_under_their_tickets() -> None:
    node = Collects()
    record = run_node(
        node, {node.scored: [scored(0, 1.0), (5, scored(0, 1.0, group="h")), lost(1), lost(2)]}, leftovers=True
    )
    assert [one.ticket for one in record.outputs["kept"]] == [0]
    seven = [(7, scored(member, 1.0)) for member in range(3)]
    assert [one.ticket for one in run_node(Collects(), {"scored": seven}).outputs["kept"]] == [7]


class Meets(Node):
    scored: In[Scored]
    valued: In[Sample]
    out: Out[Scored]

    def facts(self) -> Facts:
        return Facts(joins=("scored", "valued"))

    async def run(self) -> None:
        async for first, _ in join(self.scored, self.valued):
            await self.out.send(first)


def test_joined_ports_meet_by_sample() -> None:
    record = run_node(Meets(), {"scored": [scored(0, 1.0), scored(1, 1.0)], "valued": [sample(1), lost(0)]})
    assert [one.member for one in record.sent("out")] == [1]
    assert [marker.member for marker in record.tombstones("out")] == [0]


class Copies(TooShort):
    """Makes two messages of each, the first after some work."""

    def __init__(self) -> None:
        super().__init__()
        self.worked: list[str] = []
        self.seen = 0

    async def run(self) -> None:
        await self.samples.each(self.copy, concurrency=4)

    async def copy(self, one: Sample) -> None:
        if not self.kept.was_sent():
            self.worked.append(one.sample_id)
            await self.kept.send(one)
        await self.kept.send(one)
        self.seen += 1

    def state(self) -> Mapping[str, Any]:
        return {"seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_snapshot_holds_state_unfinished_messages_and_what_was_sent(tmp_path: Path) -> None:
    """The first send fits its edge, the second waits; the other invocation waits in its first."""

    async def until_it_stands(rig: NodeRig) -> None:
        rig.feed(first.samples, sample(0), ticket=3)
        rig.feed(first.samples, sample(1))
        await rig.taken(first.samples)
        await rig.snapshot(tmp_path / "saved")
        rig.read("kept")
        assert len((await rig.finished()).sent("kept")) == 4, "the first life goes on undisturbed"

    async def goes_on(rig: NodeRig) -> NodeRecord:
        rig.feed(again.samples, sample(2))
        return await rig.finished()

    first, again = Copies(), Copies()
    in_rig(first, until_it_stands, unread=["kept"])
    assert first.worked == ["g:0", "g:1"]
    record: NodeRecord = in_rig(again, goes_on, resume=tmp_path / "saved")
    assert again.worked == ["g:2"], "what was sent, or waited to be, is not made again"
    assert sorted(one.sample_id for one in record.sent("kept")) == ["g:0", "g:0", "g:1", "g:1", "g:2", "g:2"]
    assert {one.ticket for one in record.outputs["kept"] if one.message.sample_id == "g:0"} == {3}  # type: ignore[attr-defined]
    assert again.seen == 3


def test_a_state_is_restored_and_one_that_cannot_be_stored_is_told(tmp_path: Path) -> None:
    class Unstorable(Copies):
        def state(self) -> Mapping[str, Any]:
            return {"seen": {1, 2}}

    async def work(rig: NodeRig) -> None:
        rig.feed("samples", sample(0))
        await rig.receive("kept")
        await rig.receive("kept")
        await rig.snapshot(tmp_path / type(rig.node).__name__)

    in_rig(Copies(), work)
    again = Copies()
    assert run_node(again, {}, resume=tmp_path / "Copies").sent("kept") == []
    assert again.seen == 1
    with pytest.raises(FlowrlError, match=r"(?s)`state\(\)` cannot be stored in a checkpoint.*set"):
        in_rig(Unstorable(), work)


def test_a_paused_node_takes_nothing_until_it_is_resumed() -> None:
    async def body(rig: NodeRig) -> None:
        async with rig.paused():
            rig.feed("samples", sample(0))
            with pytest.raises(RigTimeout, match=r"waits for .*the driver, which keeps its ports closed"):
                await rig.receive("kept")
        await rig.receive("kept")

    in_rig(TooShort(), body, timeout_s=0.1)


def test_a_group_that_another_node_drops_is_cancelled_here() -> None:
    class Works(TooShort):
        async def run(self) -> None:
            await self.samples.each(self.work, concurrency=2)

        async def work(self, one: Sample) -> None:
            if one.group_id == "doomed":
                await asyncio.Event().wait()
            await self.kept.send(one)

    async def body(rig: NodeRig) -> None:
        rig.feed("samples", sample(0, group="doomed"), sample(0))
        await rig.receive("kept")
        rig.give_up("doomed", reason="hopeless")
        record = await rig.finished()
        assert record.reasons() == [("dropped", "hopeless")]

    in_rig(Works(), body)


def test_a_latest_edge_brings_the_newest_weights() -> None:
    class Reads(Node):
        weights: In[Weights]

        def __init__(self) -> None:
            self.versions: list[int] = []

        async def run(self) -> None:
            async for manifest in self.weights:
                self.versions.append(manifest.version)
                await asyncio.sleep(1)

    def manifest(version: int) -> Weights:
        return Weights("policy", version, version, "full", "shm:none", 0, 0)

    async def body(rig: NodeRig) -> None:
        rig.feed(node.weights, manifest(0))
        await rig.taken(node.weights)
        rig.feed(node.weights, manifest(1), manifest(2))
        await rig.finished()

    node = Reads()
    in_rig(node, body, clock=VirtualClock())
    assert node.versions == [0, 2]


def test_a_node_finds_its_surroundings_and_what_it_reports_is_kept() -> None:
    class Reports(TooShort):
        async def run(self) -> None:
            context = self.context
            async with context.exclusive("disk"):
                context.metric("rows", 2)
                context.metric("rows", 1)
            context.gauge("depth", 3.0)
            context.gauge("depth", 5.0)
            context.progress(f"{context.replica} of {context.num_replicas}, seed {context.seed}, {context.run_dir}")
            with context.busy("work"), context.outside("a service"):
                assert await self.blocking(sum, [1, 2]) == 3
            await context.step_done(1)

    around: Any = {"replica": 1, "num_replicas": 3, "seed": 9, "run_dir": "runs/x"}
    record = run_node(Reports(), **around)
    assert (record.metrics, record.gauges) == ({"rows": 3}, {"depth": [3.0, 5.0]})
    assert record.progress == ["1 of 3, seed 9, runs/x"]


def test_a_rig_leaves_the_event_loop_as_it_was() -> None:
    async def main() -> None:
        loop, told = asyncio.get_running_loop(), list[Any]()
        loop.set_exception_handler(lambda loop, context: told.append(context))
        handler, tasks = loop.get_exception_handler(), asyncio.all_tasks()
        async with NodeRig(TooShort()) as rig:
            rig.feed("samples", sample(0))
            await rig.receive("kept")
        assert loop.get_exception_handler() is handler
        assert asyncio.all_tasks() == tasks and not told

    asyncio.run(main())

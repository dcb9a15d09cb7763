"""Graphs whose runs are snapshot and gone on with: nothing lost, nothing taken for something else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowrl.errors import FlowrlError, NodeFailed, WireError
from flowrl.graph.analysis.place import HostPlan
from flowrl.messages.episode import EpisodeRecord
from flowrl.runtime.checkpoints import snapshots
from flowrl.runtime.driver.run_checkpoints import Snapshotter
from flowrl.runtime.driver.run_processes import Orders
from flowrl.runtime.process import engine
from flowrl.testing import VirtualClock
from flowrl.testing.rig_engine import NoAccounting
from flowrl.wire.activity import Activity
from flowrl.wire.encoding import codec
from flowrl.wire.encoding.schema import Envelope
from tests.runtime.checkpoints.graphs_snapshot.parts import NUM_PROMPTS
from tests.runtime.checkpoints.snapshot_rig import LOST, SEEN, TOLD, run_with_cuts, running
from tests.wire.channel_rig import Thing

ALL = [f"s{index}" for index in range(NUM_PROMPTS)]


@pytest.mark.parametrize("cut_s", [0.06, 0.11, 0.25])
def test_two_consumers_of_one_stream_each_have_their_own(cut_s: float, tmp_path: Path) -> None:
    run_with_cuts("fan", tmp_path, cut_s)
    assert sorted(SEEN) == sorted(ALL)


def test_two_ports_of_one_node_each_have_their_own(tmp_path: Path) -> None:
    run_with_cuts("fan", tmp_path, 0.05, 0.05, one_node=True)
    assert {name for who, name in SEEN if who == "fast"} == set(ALL) == {name for who, name in SEEN if who == "slow"}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("cuts_s", [(), (0.1,), (0.1, 0.1)])
def test_what_is_sent_outside_of_turns_arrives_once(replicas: int, cuts_s: tuple[float, ...], tmp_path: Path) -> None:
    run_with_cuts("line", tmp_path, *cuts_s, kind="plain", replicas=replicas)
    wanted = [f"r{replica}{name}" for replica in range(replicas) for name in ALL]
    assert sorted(SEEN) == sorted(wanted)


@pytest.mark.parametrize("cuts_s", [(), (0.1,), (0.2, 0.1)])
def test_each_replica_has_its_copy_of_a_broadcast(cuts_s: tuple[float, ...], tmp_path: Path) -> None:
    run_with_cuts("line", tmp_path, *cuts_s, kind="broadcast")
    worked = [note for note in SEEN if isinstance(note, tuple)]
    assert sorted(worked) == sorted((replica, name) for replica in (0, 1) for name in ALL)
    assert sorted(note for note in SEEN if isinstance(note, str)) == sorted(2 * ALL)


@pytest.mark.parametrize("cuts_s", [(), (0.015,), (0.06,), (0.05, 0.02, 0.05)])
def test_each_rank_of_a_gang_does_its_own_part_once(cuts_s: tuple[float, ...], tmp_path: Path) -> None:
    """A snapshot finds the ranks at different parts, and what they have made of them under way."""
    run_with_cuts("line", tmp_path, *cuts_s, kind="gang")
    arrived = [note for note in SEEN if isinstance(note, str)]
    assert sorted(arrived) == sorted(ALL)
    parts = [note for note in SEEN if isinstance(note, tuple)]
    assert {(rank, int(name[1:]) % 2) for rank, names in parts for name in names} == {(0, 0), (1, 1)}


@pytest.mark.parametrize("cuts_s", [(0.02,), (0.06,), (0.03, 0.03, 0.03)])
def test_a_loss_that_is_booked_stays_one(cuts_s: tuple[float, ...], tmp_path: Path) -> None:
    run_with_cuts("line", tmp_path, *cuts_s, kind="losses")
    groups = [note for note in SEEN if isinstance(note[0], list)]
    assert sorted(name for came, lost in groups for name in (*came, *lost)) == sorted(ALL)
    failed = sorted(name for index, name in enumerate(ALL) if index % 3 == 0)
    assert sorted(name for _, lost in groups for name in lost) == failed
    tried = [note[1] for note in SEEN if not isinstance(note[0], list)]
    assert sorted(name for name in tried if name in failed) == failed
    assert len(LOST) == len(failed)


@pytest.mark.parametrize("cuts_s", [(0.05,), (0.05, 0, 0, 0.02), (0.1, 0.03, 0.03)])
def test_a_turn_that_had_sent_sends_only_the_rest_however_often_it_is_cut(
    cuts_s: tuple[float, ...], tmp_path: Path
) -> None:
    run_with_cuts("line", tmp_path, *cuts_s, kind="several")
    assert sorted(SEEN) == sorted(f"{part}{name}" for name in ALL for part in "abc")


MOMENTS = [number * 0.007 for number in range(1, 25)]


@pytest.mark.parametrize(
    ("name", "kind", "wanted"),
    [
        ("fan", {}, ALL),
        ("line", {"kind": "plain"}, [f"r0{name}" for name in ALL]),
        ("line", {"kind": "broadcast"}, 2 * ALL),
        ("line", {"kind": "gang"}, ALL),
        ("line", {"kind": "several"}, [f"{part}{name}" for name in ALL for part in "abc"]),
    ],
    ids=["fan", "plain", "broadcast", "gang", "several"],
)
def test_a_cut_at_any_moment_loses_nothing(name: str, kind: dict[str, Any], wanted: list[str], tmp_path: Path) -> None:
    for moment in MOMENTS:
        run_with_cuts(name, tmp_path / str(moment), moment, **kind)
        assert sorted(note for note in SEEN if isinstance(note, str)) == sorted(wanted), moment


@pytest.mark.parametrize("limit", ["PAGE_BYTES", "PAGE_MESSAGES"])
def test_a_large_cut_travels_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(snapshots, limit, 1)
    run_with_cuts("line", tmp_path, 0.1, kind="plain")
    assert len(snapshots.read_state(tmp_path / "cut0")["messages"]) > 5
    assert sorted(SEEN) == sorted(f"r0{name}" for name in ALL)


def test_a_state_that_cannot_be_stored_is_told_with_its_node(tmp_path: Path) -> None:
    with pytest.raises(NodeFailed, match=r"(?s)sink.*`state\(\)` cannot be stored in a checkpoint.*set"):
        run_with_cuts("line", tmp_path, 0.02, kind="plain", state=True)


def test_a_cut_says_whose_turns_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "TOLD_EVERY_S", 0.05)

    async def body() -> None:
        async with running("line", {"kind": "plain", "sink_s": 0.3}, None) as (snapshotter, _):
            await asyncio.sleep(0.02)  # of virtual time: the sink works on something
            await snapshotter.take({}, tmp_path, NoAccounting())

    TOLD.clear()
    VirtualClock().run(body())
    assert TOLD and all("sink/0: a checkpoint waits for its invocations to end" in line for line in TOLD)


def test_a_checkpoint_leaves_closed_what_an_evaluation_has_closed() -> None:
    async def body() -> None:
        async with running("line", {"kind": "plain"}, None) as (snapshotter, task):
            orders = snapshotter._orders
            await orders.ask("core", "gate", {"replica_id": "sink/0", "by": "evaluation", "open": False})
            await orders.ask("core", "pause")
            seen = len(SEEN)
            await orders.ask("core", "resume")
            await asyncio.sleep(10)  # of virtual time
            assert len(SEEN) == seen
            await orders.ask("core", "gate", {"replica_id": "sink/0", "by": "evaluation", "open": True})
            assert await task is None
            assert len(SEEN) == NUM_PROMPTS

    SEEN.clear()
    VirtualClock().run(body())


def test_a_turn_that_waits_twice_at_once_stands_and_counts_once() -> None:
    async def body() -> None:
        activity = Activity("node/0")
        turn, other = activity.begin(), activity.begin()
        with activity.waiting("credit", "a", inside=turn):
            with activity.waiting("credit", "b", inside=turn):
                assert activity.working == 1, "the other turn"
            assert activity.working == 1
            other.end()
            assert activity.working == 0
            turn.end()
            assert activity.working == 0
        turn.end()
        assert activity.working == 0

    asyncio.run(body())


class Called(Orders):
    """Orders to one host; notes what is asked."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), cast(Any, None), ("A",), cast(Any, None))
        self.asked: list[str] = []

    def host_of(self, replica_id: str) -> str:
        return "A"

    def replicas(self, node: str) -> list[str]:
        return [f"{node}/0"]

    async def ask(self, host: str, kind: str, body: Any = None) -> Any:
        self.asked.append(kind)
        keys = ("ended", "lost", "parts", "sent", "sent_before", "left_out")
        return [] if kind == "kept" else {key: [] for key in keys} | {"cursors": {}, "states": {}}

    async def ask_all(self, kind: str, body: Any = None) -> list[Any]:
        if kind == "snapshot":
            return [await self.ask("A", kind)]
        self.asked.append(kind)
        return [[0, 0]]

    async def on_node(self, replica_id: str, method: str, **arguments: Any) -> Any:
        self.asked.append(f"{method} of {replica_id}")
        return {}


def test_nodes_that_stand_write_their_files_when_the_others_go_on(tmp_path: Path) -> None:
    """A trainer's files may be of hundreds of gigabytes: nobody waits for them."""
    files, turns = SimpleNamespace(checkpoint=None), SimpleNamespace(snapshot=None)
    nodes: Any = {"trainer": files, "mine": files, "generator": turns}
    orders = Called()
    asyncio.run(Snapshotter(orders, nodes, tmp_path, ("trainer",), keep=0).take({}, tmp_path, NoAccounting()))
    order = [asked for asked in orders.asked if asked != "quiesce"]
    assert order == [
        "snapshot of generator/0",
        "pause",
        "snapshot",
        "checkpoint of mine/0",
        "resume",
        "resume of generator/0",
        "kept",
        "checkpoint of trainer/0",
    ]


def test_records_are_of_the_moment_at_which_pages_are_made_and_messages_are_packed_when_they_travel() -> None:
    steps: list[Mapping[str, Any]] = [{"reward": 1.0}]
    record = EpisodeRecord(steps=cast(Any, steps))
    message = Thing(7)
    found = snapshots.pack_pages(
        [("a/0", "in", "", Envelope(b"r", body=record)), ("a/0", "e", "", Envelope(b"m", 0, "", 0, message))]
    )
    steps.append({"reward": 2.0})
    one, other = [envelope.body for page in found for *_, envelope in snapshots.unpack_page(page)]
    assert isinstance(one, EpisodeRecord) and list(one.steps) == [{"reward": 1.0}]
    assert isinstance(other, Thing) and other.index == 7


def test_a_host_gets_the_states_of_its_own_replicas_alone() -> None:
    """States may be of gigabytes, and a run may have hundreds of hosts."""
    given: dict[str, Any] = {}

    class TwoHosts(Orders):
        async def ask_all(self, kind: str, body: Callable[[str], Any] = lambda host: {}) -> list[Any]:
            given.update({host: body(host) for host in self.processes} if kind == "restore" else {})
            return []

    hosts = tuple(HostPlan(name, nodes) for name, nodes in (("A", ("a/0", "a/1")), ("B", ("a/10", "b/0"))))
    cursors = {"a/1 out": 3, "a/10 out": 4, "b/0 out": 5, "gone/0 out": 6}
    states = {"a/0": b"x", "a/10": b"yz", "gone/0": b"nobody's"}
    orders = TwoHosts(cast(Any, None), cast(Any, SimpleNamespace(hosts=hosts)), ["A", "B"], cast(Any, None))
    snapshotter = Snapshotter(orders, {}, Path("/tmp"), keep=0)
    asyncio.run(
        snapshotter.put_back({"messages": [], "asked": [], "sent": [b"1"], "cursors": cursors, "states": states})
    )
    assert {host: body["cursors"] for host, body in given.items()} == {
        "A": {"a/1 out": 3},
        "B": {"a/10 out": 4, "b/0 out": 5},
    }
    found = {host: {name: bytes(state) for name, state in body["states"].items()} for host, body in given.items()}
    assert found == {"A": {"a/0": b"x"}, "B": {"a/10": b"yz"}}
    assert all(body["sent"] == [b"1"] for body in given.values())


def test_a_message_that_is_too_large_for_a_checkpoint_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MOST_STORED_BYTES", 100)
    with pytest.raises(FlowrlError, match=r"a \w+ of more than .* GiB cannot be stored in a checkpoint"):
        run_with_cuts("line", tmp_path, 0.1, kind="plain")


@pytest.mark.parametrize("kind", ["EXT data", "bytes object"])
def test_so_is_one_array_of_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(value: Any) -> bytes:
        raise ValueError(f"{kind} is too large")  # as msgpack does from 4 GiB on

    monkeypatch.setattr(codec, "Encoder", lambda beside: SimpleNamespace(pack=pack))
    with pytest.raises(WireError, match="a Thing of more than 4 GiB cannot be stored in a checkpoint"):
        codec.dump_value(Thing(1))

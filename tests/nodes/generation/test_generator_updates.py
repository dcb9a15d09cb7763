"""The order of a weight update, and what happens to manifests that come late, twice or without content."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from flowrl.messages import Weights
from flowrl.nodes.generation.responses import UpdateGate, WeightUpdates, skips_version
from flowrl.weights.probe import ProbeMismatch
from flowrl.weights.publish import Publisher
from flowrl.weights.receive import SegmentReceiver
from flowrl.weights.shm import Segment
from tests.nodes.generation.generator_rig import RecordingContext
from tests.weights.test_weights_publish import Engine, published


class Recorder:
    """A sampler that writes down what it is told, and whether the gate was open then."""

    dtype = "float32"

    def __init__(self, gate: UpdateGate) -> None:
        self.gate = gate
        self.events: list[str] = []
        self.logprob = -1.0

    def note(self, event: str) -> None:
        self.events.append(event if self.gate.is_open else f"closed:{event}")

    async def pause(self) -> None:
        self.note("pause")

    async def wait_for_room(self) -> None:
        self.note("room")

    async def load_version(self, update: Mapping[str, Any], manifest: Weights) -> float:
        segment = Segment(update["segment"])
        self.note(f"load {segment.version}")
        segment.close()
        return 0.0

    async def label_tokens(self, version: int) -> None:
        self.note(f"label {version}")

    async def resume(self) -> None:
        self.note("resume")

    async def score_sequences(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.note("score")
        return [[self.logprob] * (len(sequence) - 1) for sequence in sequences]


class Rig:
    def __init__(self, *, running: bool = True) -> None:
        self.gate = UpdateGate()
        self.sampler = Recorder(self.gate)
        self.context = RecordingContext()
        sampler: Any = self.sampler
        context: Any = self.context
        self.updates = WeightUpdates(
            sampler, SegmentReceiver("unit"), self.gate, context, "generator/0", running=lambda: running
        )

    def take(self, manifest: Weights) -> bool:
        self.sampler.events.clear()
        return asyncio.run(self.updates.take_version(manifest))


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(Engine(), "policy", run_id="unit", probe_every=0)
    yield publisher
    publisher.close()


def test_pause_apply_label_resume_behind_a_closed_gate(publisher: Publisher) -> None:
    rig = Rig()
    assert rig.take(published(publisher, 3))
    assert rig.sampler.events == [f"closed:{event}" for event in ("room", "pause", "load 3", "label 3", "resume")]
    assert rig.gate.is_open and rig.updates.version == 3
    assert rig.context.held == [("generator/0", "policy", 3)]
    assert len(rig.context.gauges["weight_update_pause_s"]) == 1


def test_an_old_or_repeated_version_is_passed_over(publisher: Publisher) -> None:
    rig = Rig()
    manifest = published(publisher, 3)
    assert rig.take(manifest)
    assert not rig.take(manifest) and rig.sampler.events == []


def test_an_unchanged_version_is_only_a_label_for_who_has_the_content(publisher: Publisher) -> None:
    rig, late = Rig(), Rig()
    rig.take(published(publisher, 3))
    unchanged = published(publisher, 4, "unchanged")
    assert rig.take(unchanged) and late.take(unchanged)
    assert "closed:load 3" not in rig.sampler.events and "closed:label 4" in rig.sampler.events
    assert "closed:load 3" in late.sampler.events and late.updates.version == 4


def test_a_lost_segment_leaves_the_version_as_it_is(publisher: Publisher) -> None:
    rig = Rig()
    rig.take(published(publisher, 0))
    lost = published(publisher, 1)
    published(publisher, 2)
    newest = published(publisher, 3)
    assert not rig.take(lost) and rig.updates.version == 0 and rig.gate.is_open
    assert rig.take(newest) and rig.updates.version == 3


@pytest.mark.parametrize(("running", "turns"), [(True, 1), (False, 0)])
def test_only_a_replica_with_running_requests_waits_for_its_turn(
    running: bool, turns: int, publisher: Publisher
) -> None:
    rig = Rig(running=running)
    rig.take(published(publisher, 0))
    assert rig.context.exclusive_uses == turns


def test_the_probe_is_scored_after_the_pause() -> None:
    publisher = Publisher(Engine(), "policy", run_id="unit", probe_every=1)
    rig = Rig()
    rig.take(published(publisher, 0))
    assert rig.sampler.events[-1] == "score"
    assert rig.context.gauges["logprob_mismatch"] == [0.0]
    rig.sampler.logprob = -1.5
    with pytest.raises(ProbeMismatch, match="generator/0 loaded version 1"):
        rig.take(published(publisher, 1))
    publisher.close()


def test_the_gate_opens_when_all_have_opened_it() -> None:
    gate = UpdateGate()
    gate.close_for("checkpoint")
    gate.open_for("weights")
    assert not gate.is_open
    gate.open_for("checkpoint")
    assert gate.is_open


def taken(versions: Sequence[int], *, every: int) -> list[int]:
    """Those of the versions that arrive which a generator takes; the latest edge has lost the others."""
    held = [-1]
    for version in versions:
        if not skips_version(held[-1], version, every=every):
            held.append(version)
    return held[1:]


def test_a_generator_may_take_every_nth_version() -> None:
    assert taken(range(8), every=1) == list(range(8))
    assert taken(range(8), every=3) == [0, 3, 6]
    assert taken([5, 6, 7, 8, 9, 13], every=3) == [5, 6, 9, 13], "begins with the newest, and takes up what it has lost"


def test_a_version_that_is_left_out_holds_no_ticket_back(publisher: Publisher) -> None:
    rig = Rig()
    rig.updates.skip_version(published(publisher, 4))
    assert rig.context.held == [("generator/0", "policy", 4)]
    assert rig.updates.version == -1 and not rig.sampler.events

"""Weights fetched from another machine: over a real encrypted TCP connection, on one machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl.errors import FlowrlError
from flowrl.graph.routes import WeightRoute, WeightTransport
from flowrl.messages import Weights
from flowrl.weights.publish import Publisher
from flowrl.weights.receive import SegmentReceiver
from flowrl.weights.shm import DATA_OFFSET, SHM, Segment, SegmentLost, view_tensors
from flowrl.weights.tcp import CHUNK_BYTES, Origin


class Engine:
    """One tensor of several chunks and a bit, filled with the version."""

    rank = 0
    vocab_size = 10

    def __init__(self) -> None:
        self.value = 0.0

    def buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[torch.Tensor]]]:
        yield ("weight",), (torch.full((10 * CHUNK_BYTES // 4 + 3,), self.value),)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[0.0] * (len(sequence) - 1) for sequence in sequences]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    routes = [WeightRoute("generator/0", WeightTransport.SHM), WeightRoute("generator/1", WeightTransport.TCP)]
    publisher = Publisher(Engine(), "policy", run_id="tcp", routes=routes, probe_every=0)
    yield publisher
    publisher.close()


def publish(publisher: Publisher, version: int) -> Weights:
    engine = publisher._source
    assert isinstance(engine, Engine)
    engine.value = float(version)
    manifest = publisher.publish_version(version)
    assert manifest is not None
    return manifest


def value(receiver: SegmentReceiver, manifest: Weights) -> float:
    fetched = receiver.fetch_version(manifest)
    segment = Segment(fetched.update["segment"])
    ((_, tensor),) = view_tensors(segment.map_file(), fetched.update["tensors"], start=DATA_OFFSET)
    assert tensor.min() == tensor.max()
    segment.close()
    fetched.close()
    return float(tensor[0])


def elsewhere() -> SegmentReceiver:
    return SegmentReceiver("tcp", machine="another")


def test_a_version_arrives_whole_on_another_machine(publisher: Publisher) -> None:
    reader = elsewhere()
    assert [value(reader, publish(publisher, version)) for version in (1, 2, 3)] == [1.0, 2.0, 3.0]
    reader.close()


def test_on_the_trainers_machine_the_segment_itself_is_read(publisher: Publisher) -> None:
    manifest = publish(publisher, 1)
    fetched = SegmentReceiver("tcp").fetch_version(manifest)
    assert fetched.update["segment"] == Origin.parse_place(manifest.transport.removeprefix("tcp:")).segment
    fetched.close()


def test_one_reader_a_machine_copies_and_the_others_read_its_copy(publisher: Publisher) -> None:
    first, second = elsewhere(), elsewhere()
    manifest = publish(publisher, 1)
    one, two = first.fetch_version(manifest), second.fetch_version(manifest)
    assert one.update["segment"] == two.update["segment"]
    one.close()
    two.close()
    assert value(second, publish(publisher, 2)) == 2.0
    first.close()
    second.close()


def test_a_version_written_over_is_lost_to_a_remote_reader_too(publisher: Publisher) -> None:
    reader = elsewhere()
    first = publish(publisher, 1)
    publish(publisher, 2)
    publish(publisher, 3)
    with pytest.raises(SegmentLost, match="was overwritten"):
        reader.fetch_version(first)
    assert value(reader, publish(publisher, 4)) == 4.0
    reader.close()


def test_nobody_without_the_key_is_answered(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.weights.tcp.SILENCE_S", 0.3)
    manifest = publish(publisher, 1)
    origin = Origin.parse_place(manifest.transport.removeprefix("tcp:"))
    wrong = replace(manifest, transport=f"tcp:{replace(origin, public_key='00' * 32)}")
    reader = elsewhere()
    with pytest.raises(FlowrlError, match=r"did not answer for 0.3 s"):
        reader.fetch_version(wrong)
    reader.close()


def test_nothing_is_left_behind(publisher: Publisher) -> None:
    reader = elsewhere()
    value(reader, publish(publisher, 1))
    prefix = Origin.parse_place(publish(publisher, 2).transport.removeprefix("tcp:")).segment.rsplit("-", 1)[0]
    publisher.close()
    reader.close()
    assert not list(SHM.glob(f"{prefix}*"))


def copy_and_die(manifest: Weights, copied: Any) -> None:
    copied.send(elsewhere().fetch_version(manifest).update["segment"])
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_copies_of_a_reader_that_was_killed_are_removed_by_the_next(publisher: Publisher) -> None:
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.get_context("fork").Process(target=copy_and_die, args=(publish(publisher, 1), theirs))
    reader.start()
    assert ours.poll(30)
    left = SHM / ours.recv()
    reader.join(30)
    assert left.exists()
    others = [elsewhere(), elsewhere()]
    for version in range(2, 6):  # a note names a copy until its origin is written again
        manifest = publish(publisher, version)
        assert [value(other, manifest) for other in others] == [version, version]
    assert not left.exists()
    for other in others:
        other.close()

"""From an engine's buckets to a verified version: manifest, checksum, unchanged versions, the probe."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flowrl.graph.routes import WeightRoute, WeightTransport
from flowrl.messages import TensorTable, Weights
from flowrl.weights import probe
from flowrl.weights.publish import Publisher
from flowrl.weights.receive import SegmentReceiver, make_receiver
from flowrl.weights.send import AS_IT_IS, Narrowing, kept_in_float32
from flowrl.weights.shm import (
    DATA_OFFSET,
    SHM,
    Checksum,
    ChecksumMismatch,
    Segment,
    SegmentLost,
    view_tensors,
    word_sum,
)


class Engine:
    """Two buckets of odd sizes and dtypes; scores every token with -version."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.vocab_size = 50
        self.gathered = 0
        self.value = 1.0

    def tensors(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {
            "a.weight": torch.randn(3, 5, generator=generator) * self.value,
            "a.bias": (torch.randn(7, generator=generator) * self.value).to(torch.bfloat16),
            "b.weight": torch.randn(4, 4, generator=generator).t() * self.value,
        }

    def buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[torch.Tensor]]]:
        self.gathered += 1
        tensors = self.tensors()
        yield ("a.weight", "a.bias"), (tensors["a.weight"], tensors["a.bias"])
        yield ("b.weight",), (tensors["b.weight"],)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-self.value] * (len(sequence) - 1) for sequence in sequences]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def publisher(engine: Engine) -> Iterator[Publisher]:
    publisher = Publisher(engine, "policy", run_id="unit", probe_every=3)
    yield publisher
    publisher.close()


def published(publisher: Publisher, version: int, kind: str = "full") -> Weights:
    manifest = publisher.publish_version(version, kind)
    assert manifest is not None
    return manifest


def loaded(manifest: Weights) -> dict[str, torch.Tensor]:
    """As vLLM's worker does it: from the update that a receiver makes of the manifest."""
    fetched = SegmentReceiver("unit").fetch_version(manifest)
    segment = Segment(fetched.update["segment"])
    rows = fetched.update["tensors"]
    tensors = {name: tensor.clone() for name, tensor in view_tensors(segment.map_file(), rows, start=DATA_OFFSET)}
    segment.close()
    fetched.close()
    return tensors


def test_what_is_fetched_is_what_was_published(publisher: Publisher, engine: Engine) -> None:
    manifest = published(publisher, 4)
    assert (manifest.version, manifest.base_version, manifest.kind, manifest.policy) == (4, 4, "full", "policy")
    assert all(row[3] % 64 == 0 for row in manifest.tensors)
    for name, tensor in loaded(manifest).items():
        expected = engine.tensors()[name]
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name


def test_one_segment_serves_a_reader_that_uses_each_version(engine: Engine) -> None:
    """Trainer and generator of one machine, from their routes on: half of the memory that two versions take."""
    routes = [WeightRoute("generator/0", WeightTransport.SHM)]
    publisher = Publisher(engine, "policy", run_id="unit", routes=routes, probe_every=0)
    receiver = make_receiver(routes, "generator/0", "unit")
    try:
        places = set()
        for version in range(3):
            fetched = receiver.fetch_version(published(publisher, version))
            places.add(fetched.update["segment"])
            fetched.close()
        assert len(places) == 1
    finally:
        publisher.close()


def test_another_dtype_on_the_wire(engine: Engine) -> None:
    publisher = Publisher(engine, "policy", run_id="unit", narrowing=Narrowing("bfloat16"), probe_every=0)
    manifest = published(publisher, 0)
    assert {row[1] for row in manifest.tensors} == {"bfloat16"}
    assert [row[4] for row in manifest.tensors] == [2 * 15, 2 * 7, 2 * 16]
    assert torch.equal(loaded(manifest)["b.weight"], engine.tensors()["b.weight"].to(torch.bfloat16))
    publisher.close()


def test_what_is_sent_is_never_wider_and_what_a_model_keeps_in_float32_stays_so() -> None:
    narrow, wide = Narrowing("bfloat16", ("router.bias", "norm")), Narrowing("float32")
    assert narrow.narrow_dtype("layers.0.q_proj.weight", torch.float32) is torch.bfloat16
    assert narrow.narrow_dtype("layers.0.router.bias", torch.float32) is torch.float32
    assert narrow.narrow_dtype("layers.0.norm.weight", torch.float32) is torch.float32
    assert narrow.narrow_dtype("layers.0.layernorm.weight", torch.float32) is torch.bfloat16, "a part is a whole word"
    assert (
        wide.narrow_dtype("x", torch.bfloat16) is torch.bfloat16
        and narrow.narrow_dtype("x", torch.int32) is torch.int32
    )
    assert (
        narrow.narrow_dtype("x", torch.float16) is torch.float16
        and AS_IT_IS.narrow_dtype("x", torch.float32) is torch.float32
    )
    network = SimpleNamespace(_keep_in_fp32_modules=["a"], _keep_in_fp32_modules_strict={"b", "a"})
    assert kept_in_float32(network) == ("a", "b") and kept_in_float32(SimpleNamespace()) == ()


def test_other_ranks_gather_and_write_nothing() -> None:
    engine = Engine(rank=1)
    before = set(SHM.glob("flowrl-*"))
    publisher = Publisher(engine, "policy", run_id="rank 1", probe_every=1)
    assert publisher.publish_version(0) is None and publisher.publish_version(1, "unchanged") is None
    assert engine.gathered == 1 and not [path for path in set(SHM.glob("flowrl-*")) - before if "policy" in path.name]


def test_an_unchanged_version_names_the_content_it_has(publisher: Publisher, engine: Engine) -> None:
    published(publisher, 6)
    manifest = published(publisher, 7, "unchanged")
    assert (manifest.version, manifest.base_version, manifest.kind) == (7, 6, "unchanged")
    assert engine.gathered == 1
    assert torch.equal(loaded(manifest)["a.weight"], engine.tensors()["a.weight"])


def test_the_first_publication_is_complete_whatever_it_is_called(publisher: Publisher) -> None:
    assert published(publisher, 0, "unchanged").kind == "full"


def test_the_probe_comes_with_the_first_and_every_third_publication(publisher: Publisher) -> None:
    carrying = [bool(published(publisher, version).probe_logprobs) for version in range(7)]
    assert carrying == [True, False, False, True, False, False, True]


def test_a_byte_changed_in_the_segment_is_refused(publisher: Publisher) -> None:
    manifest = published(publisher, 1)
    path = SHM / manifest.transport.removeprefix("shm:")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[DATA_OFFSET + 3] ^= 1
    with pytest.raises(ChecksumMismatch, match="Nothing was loaded"):
        SegmentReceiver("unit").fetch_version(manifest)


def test_an_overwritten_manifest_is_lost(publisher: Publisher) -> None:
    first = published(publisher, 0)
    published(publisher, 1)
    published(publisher, 2)
    with pytest.raises(SegmentLost, match="take the newest manifest"):
        SegmentReceiver("unit").fetch_version(first)


def test_word_sum_counts_every_byte() -> None:
    data = np.arange(21, dtype=np.uint8)
    expected = sum(int.from_bytes(bytes(data[i : i + 8]).ljust(8, b"\0"), "little") for i in (0, 8, 16)) % 2**64
    assert word_sum(data) == expected
    assert word_sum(data[:3]) == 0x020100
    assert word_sum(data[:0]) == 0


def test_the_checksum_knows_which_tensor_is_which() -> None:
    def of(*tensors: tuple[str, bytes]) -> int:
        checksum = Checksum()
        for name, data in tensors:
            checksum.add_tensor(name, "uint8", (len(data),), np.frombuffer(data, np.uint8))
        return checksum.value

    assert of(("a", b"one"), ("b", b"two")) != of(("a", b"two"), ("b", b"one"))
    assert 0 <= of(("a", b"one")) < 2**63


def probed(value: float) -> Weights:
    sequences = probe.probe_sequences(50)
    rows = tuple((value,) * (len(sequence) - 1) for sequence in sequences)
    return Weights("policy", 9, 9, "full", "shm:x", 0, 0, TensorTable(), sequences, rows)


def test_the_probe_is_the_same_for_ever() -> None:
    assert probe.probe_sequences(50) == probe.probe_sequences(50)
    assert probe.probe_sequences(50)[0] == (42, 14, 11, 38, 36)
    assert all(0 <= token < 7 for sequence in probe.probe_sequences(7) for token in sequence)


def test_the_mismatch_is_a_mean_over_tokens() -> None:
    found = [list(row) for row in probed(-2.0).probe_logprobs]
    num_tokens = sum(map(len, found))
    found[2][5] += 0.001
    difference = probe.ProbeCheck("generator/0", "float32").check(probed(-2.0), found)
    assert difference == pytest.approx(0.001 / num_tokens)


@pytest.mark.parametrize("wrong", [0.1, float("nan")])
def test_a_mismatch_above_rounding_stops_the_run(wrong: float) -> None:
    found = [list(row) for row in probed(-2.0).probe_logprobs]
    found[3][0] += wrong
    with pytest.raises(probe.ProbeMismatch, match=r"generator/1 loaded version 9 .* not hold the trainer's weights"):
        probe.ProbeCheck("generator/1", "float32").check(probed(-2.0), found)


def off_by(difference: float, dtype: str = "float32") -> tuple[Weights, list[list[float]]]:
    """A probe published in `dtype`, and logprobs that differ from it by so much at every token."""
    manifest = replace(probed(-2.0), tensors=TensorTable.of([("a.weight", dtype, (1,), 0, 4)]))
    return manifest, [[-2.0 - difference] * len(row) for row in manifest.probe_logprobs]


def test_the_coarser_dtype_decides_whichever_side_has_it() -> None:
    assert probe.ProbeCheck("g/0", "float32").check(*off_by(0.027, "bfloat16")) == pytest.approx(0.027)
    assert probe.ProbeCheck("g/0", "bfloat16").check(*off_by(0.027)) == pytest.approx(0.027)
    with pytest.raises(probe.ProbeMismatch, match=r"with bfloat16, rounding explains up to 0\.25"):
        probe.ProbeCheck("g/0", "float32").check(*off_by(0.3, "bfloat16"))


def test_float32_on_a_gpu_may_be_tf32() -> None:
    assert probe.ProbeCheck("g/0", "float32", on_gpu=True).check(*off_by(0.0018)) == pytest.approx(0.0018)
    with pytest.raises(probe.ProbeMismatch, match=r"with float32 on a GPU, attention in TF32 explains up to 0\.01"):
        probe.ProbeCheck("g/0", "float32", on_gpu=True).check(*off_by(0.02))


def test_later_probes_are_compared_with_the_first() -> None:
    check = probe.ProbeCheck("g/0", "bfloat16")
    for difference in (0.2, 0.5, 0.1):
        check.check(*off_by(difference))
    with pytest.raises(probe.ProbeMismatch, match=r"first probe differed by 0.2, which explains up to 0.6.*a layer"):
        check.check(*off_by(0.7))
    with pytest.raises(probe.ProbeMismatch, match=r"It is the first probe, so usual causes are: .* different models"):
        probe.ProbeCheck("g/0", "bfloat16").check(*off_by(0.5))


def test_an_own_tolerance_replaces_all_others() -> None:
    assert probe.ProbeCheck("g/0", "float32", tolerance=2.0).check(*off_by(1.5)) == pytest.approx(1.5)
    with pytest.raises(probe.ProbeMismatch, match=r"probe_tolerance allows up to 1e-05"):
        probe.ProbeCheck("g/0", "bfloat16", tolerance=1e-5).check(*off_by(0.001))

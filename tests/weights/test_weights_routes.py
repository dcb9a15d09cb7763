"""Who reads a trainer's weights, and what the ranks of a broadcast are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl import Cluster, Machine
from flowrl.errors import ConfigError
from flowrl.graph.analysis.memory_use import find_residents
from flowrl.graph.analysis.plan import make_plan, routes_of
from flowrl.graph.routes import (
    WeightRoute,
    WeightTransport,
    common_transport,
    rank_offset,
    readers_dtype,
    world_size,
)
from flowrl.messages import TensorTable, Weights
from flowrl.models.model_layout import CHARACTER_SHAPE
from flowrl.nodes.engine_options import Engine as EngineOptions
from flowrl.nodes.engine_options import EngineDtype
from flowrl.options import EvaluationOptions, GeneratorOptions, RewardKLLoss, Size
from flowrl.recipes.grpo import GRPO
from flowrl.recipes.grpo import graph as grpo_graph
from flowrl.recipes.ppo import PPO
from flowrl.recipes.ppo import graph as ppo_graph
from flowrl.weights.publish import Publisher, make_sender
from flowrl.weights.receive import NcclReceiver, SegmentReceiver, make_receiver
from flowrl.weights.send import AS_IT_IS, Narrowing, SegmentSender, copy_tensors
from tests.graph.graph_nodes import grpo
from tests.weights.test_weights_publish import Engine


def test_trainer_and_generators_are_told_the_same_routes() -> None:
    plan = make_plan(grpo().graph)
    routes = routes_of(plan, "trainer")
    assert routes and routes == routes_of(plan, "generator")
    assert {route.transport for route in routes} == {"shm"}
    assert routes_of(plan, "reward") == ()


SHM, TCP, NCCL = WeightTransport


def routed(*transports: WeightTransport) -> list[WeightRoute]:
    return [WeightRoute(f"generator/{index}", transport) for index, transport in enumerate(transports)]


@pytest.mark.parametrize(
    ("kinds", "transport"),
    [((), SHM), ((SHM,), SHM), ((TCP,), TCP), ((SHM, TCP), TCP), ((NCCL, NCCL), NCCL)],
)
def test_one_transport_serves_all_readers(kinds: tuple[WeightTransport, ...], transport: WeightTransport) -> None:
    assert common_transport(routed(*kinds)) is transport


def test_the_dtype_of_readers_is_the_widest_of_them() -> None:
    assert readers_dtype(["bfloat16"], auto="float32") == "bfloat16"
    assert readers_dtype(["auto", "float32"], auto="bfloat16") == "float32"
    assert readers_dtype(["auto"], auto="bfloat16") == "bfloat16"
    assert readers_dtype(["auto"], auto="auto") is None, "a config.json that names none"
    assert readers_dtype(["bfloat16", "float16"], auto="") is None and readers_dtype([], auto="float32") is None
    assert readers_dtype(["bfloat16", ""], auto="") is None, "a node of the user's that does not say"


def test_a_trainer_knows_the_dtype_of_each_reader() -> None:
    cfg = PPO(generator=GeneratorOptions(engine=EngineOptions(dtype="bfloat16")))
    plan = make_plan(ppo_graph(cfg))
    assert {route.consumer: route.dtype for route in routes_of(plan, "actor")} == {"generator/0": "bfloat16"}
    assert {route.dtype for route in routes_of(plan, "critic_trainer")} == {"float32"}


@pytest.mark.parametrize(("dtype", "element"), [("auto", 4), ("bfloat16", 2)])
def test_published_weights_are_estimated_in_the_dtype_in_which_they_are_sent(dtype: EngineDtype, element: int) -> None:
    graph = grpo_graph(GRPO(generator=GeneratorOptions(engine=EngineOptions(dtype=dtype))))
    cluster = Cluster((Machine(tuple(range(8))),))
    found = find_residents(graph, make_plan(graph, cluster), cluster)
    (shm,) = (term for one in found for term in one.footprint.terms if term.place == "shm")
    assert shm.num_bytes == 3 * element * CHARACTER_SHAPE.num_parameters


def test_different_gpu_transports_are_refused() -> None:
    routes = routed(NCCL, SHM)
    with pytest.raises(ConfigError, match="generator/0 by nccl, generator/1 by shm"):
        common_transport(routes)


def test_both_ends_choose_the_same_backend() -> None:
    ends = {SHM: SegmentReceiver, TCP: SegmentReceiver, NCCL: NcclReceiver}
    assert {kind: type(make_receiver(routed(kind), "generator/0", "run")) for kind in WeightTransport} == ends
    assert isinstance(make_receiver(routed(NCCL), "critic/0", "run"), SegmentReceiver)
    for kind in (SHM, TCP):
        assert isinstance(make_sender(routed(kind), "run", "policy", narrowing=AS_IT_IS), SegmentSender)


@pytest.mark.parametrize("transport", WeightTransport)
def test_a_location_is_read_as_it_was_written(transport: WeightTransport) -> None:
    assert WeightTransport.parse(transport.at("there:1/2")) == (transport, "there:1/2")


def test_every_worker_has_a_rank_of_its_own_after_the_sender() -> None:
    routes = [WeightRoute("generator/0", NCCL, 2), WeightRoute("generator/1", NCCL, 4)]
    assert world_size(routes) == 7
    ranks = [rank_offset(routes, route.consumer) + worker for route in routes for worker in range(route.num_workers)]
    assert ranks == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="generator/9 is not among the readers"):
        rank_offset(routes, "generator/9")


class RecordingSender:
    """A sender whose `transmit` would not return before every reader has taken part."""

    copy_s = 0.0

    def __init__(self) -> None:
        self.transmitted: list[int] = []
        self._version = -1

    def stage_version(self, source: Engine, policy: str, version: int) -> Weights:
        self._version = version
        return Weights(
            policy=policy,
            version=version,
            base_version=version,
            kind="full",
            transport="nccl:127.0.0.1/1",
            num_bytes=0,
            checksum=0,
            tensors=TensorTable(),
        )

    def transmit_tensors(self) -> None:
        self.transmitted.append(self._version)

    def close(self) -> None: ...


def test_nobody_waits_for_readers_of_an_unchanged_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have its tensors and take part in no transfer, so a broadcast of it would never end."""
    recording = RecordingSender()
    monkeypatch.setattr("flowrl.weights.publish.make_sender", lambda *args, **options: recording)
    publisher = Publisher(Engine(), "policy", run_id="unit", routes=routed(NCCL), probe_every=0)
    for version, kind in ((0, "full"), (1, "unchanged"), (2, "unchanged"), (3, "full"), (4, "unchanged")):
        manifest = publisher.publish_version(version, kind)
        assert manifest is not None and manifest.version == version
        publisher.transmit_tensors()
    assert recording.transmitted == [0, 3]


def test_tensors_are_copied_between_synchronizations() -> None:
    """Before the optimizer's stream is done nothing is gathered; no bucket is released before its copies are made."""
    events: list[str] = []

    class Gathered(Engine):
        def buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[torch.Tensor]]]:
            for index, (names, tensors) in enumerate(super().buckets(max_bytes)):
                events.append(f"gather {index}")
                yield names, tensors
                events.append(f"release {index}")
                for tensor in tensors:
                    tensor.zero_()  # as memory that is used again

    engine, found = Gathered(), dict[str, torch.Tensor]()
    for name, tensor in copy_tensors(engine, 1, lambda: events.append("synchronize"), AS_IT_IS):
        found[name] = tensor
        events.append(name)
    assert found.keys() == engine.tensors().keys()
    assert all(torch.equal(tensor, engine.tensors()[name]) for name, tensor in found.items()), "copies, not views"
    assert events == [
        *("synchronize", "gather 0", "synchronize", "a.weight", "a.bias", "synchronize", "release 0"),
        *("gather 1", "synchronize", "b.weight", "synchronize", "release 1"),
    ]


def test_a_trainer_in_turns_with_its_reference_broadcasts_to_generators_of_their_own() -> None:
    generator, loss = GeneratorOptions(Size(2, 1)), RewardKLLoss(reward_kl_coef=0.1)
    g = grpo_graph(GRPO(generator=generator, loss=loss, evaluation=EvaluationOptions(evaluate=0)))
    plan = make_plan(g, Cluster((Machine(tuple(range(8)), gpus=4),)))
    assert plan.host_of("trainer/0").lease == plan.host_of("reference/0").lease != ""
    assert {weights.transport for weights in plan.weights} == {NCCL}


def planned(
    num_generators: int, *, time_shared: bool = False, trainer: float = 1, generator: float = 1
) -> set[str | None]:
    """The transports by which the readers of a trainer on a GPU get its weights."""
    parts = grpo(num_generators=num_generators)
    for name, gpus in (("trainer", trainer), ("generator", generator)):
        parts.graph.placed[name] = replace(parts.graph.placed[name], cpus=1, gpus=gpus)
    if time_shared:
        parts.graph.time_share(parts.generator, parts.trainer)
    plan = make_plan(parts.graph, Cluster((Machine(tuple(range(8)), gpus=4),)))
    assert common_transport(routes_of(plan, "trainer"))
    return {weights.transport for weights in plan.weights}


def test_readers_that_cannot_all_take_part_in_a_broadcast_read_host_memory() -> None:
    assert planned(2) == {NCCL}
    assert planned(1, time_shared=True) == {SHM}, "never at the same time"
    assert planned(3, time_shared=True) == {SHM}, "also those on other GPUs than the trainer"
    assert planned(1, trainer=0.5, generator=0.5) == {SHM}, "NCCL refuses two ranks on one GPU"
    assert planned(3, trainer=0.5, generator=0.5) == {SHM}, "one is on the trainer's GPU, and so no other takes part"


def test_a_reader_in_turns_with_another_node_than_the_trainer_reads_host_memory() -> None:
    """It would keep its GPU from that node while it waits for the broadcast."""
    parts = grpo()
    for name in ("trainer", "generator", "reward"):
        parts.graph.placed[name] = replace(parts.graph.placed[name], cpus=1, gpus=1)
    cluster = Cluster((Machine(tuple(range(8)), gpus=4),))
    assert {weights.transport for weights in make_plan(parts.graph, cluster).weights} == {NCCL}
    parts.graph.time_share(parts.generator, parts.reward)
    assert {weights.transport for weights in make_plan(parts.graph, cluster).weights} == {SHM}


@pytest.mark.slow
def test_a_sender_gives_vllm_synchronized_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factory at vLLM's edge is replaced by one that records; vLLM's own classes are imported."""
    from flowrl.weights import device

    events: list[str] = []
    sent: set[str] = set()

    class Recording:
        def __init__(self, info: Any, client: Any, source: Any) -> None:
            events.append(f"group of {info.world_size}, {info.packed_buffer_size_bytes >> 20} MiB")
            self.source = source

        def send_weights(self) -> None:
            for name, tensor in self.source:
                events.append(name)
                sent.add(str(tensor.dtype).removeprefix("torch."))

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))
    monkeypatch.setattr(device.WeightTransferTrainerFactory, "trainer_init", Recording)
    sender = device.NcclSender([WeightRoute("generator/0", NCCL, 2)], narrowing=Narrowing("bfloat16"))
    source: Any = Engine()
    manifest = sender.stage_version(source, "policy", 3)
    sender.transmit_tensors()
    assert manifest is not None and manifest.transport.startswith("nccl:") and len(manifest.tensors) == 3
    assert {row[1] for row in manifest.tensors} == {"bfloat16"} == sent and manifest.num_bytes == 2 * (15 + 7 + 16)
    assert events == [
        "group of 3, 256 MiB",
        *("synchronize", "synchronize", "a.weight", "a.bias", "synchronize"),
        *("synchronize", "b.weight", "synchronize"),
    ]

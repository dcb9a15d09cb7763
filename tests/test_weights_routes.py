"""Who reads a trainer's weights, and what the ranks of a broadcast are."""

from __future__ import annotations

import pytest

from flowrl.errors import ConfigError
from flowrl.graph.analysis.plan import make_plan, routes_of
from flowrl.graph.routes import WeightRoute, WeightTransport, common_transport, rank_offset, world_size
from flowrl.weights.backends import BACKENDS, receiver, sender
from flowrl.weights.device_receive import CudaHandleReceiver, NcclReceiver
from flowrl.weights.receive import SegmentReceiver
from flowrl.weights.send import SegmentSender
from tests.graph_nodes import grpo


def test_trainer_and_generators_are_told_the_same_routes() -> None:
    plan = make_plan(grpo().graph)
    routes = routes_of(plan, "trainer")
    assert routes and routes == routes_of(plan, "generator")
    assert {route.transport for route in routes} == {"shm"}
    assert routes_of(plan, "reward") == ()


SHM, TCP, NCCL, HANDLES = WeightTransport


def routed(*transports: WeightTransport) -> list[WeightRoute]:
    return [WeightRoute(f"generator/{index}", transport) for index, transport in enumerate(transports)]


@pytest.mark.parametrize(
    ("kinds", "transport"),
    [((), SHM), ((SHM,), SHM), ((TCP,), TCP), ((SHM, TCP), TCP), ((NCCL, NCCL), NCCL), ((HANDLES,), HANDLES)],
)
def test_one_transport_serves_all_readers(kinds: tuple[WeightTransport, ...], transport: WeightTransport) -> None:
    assert common_transport(routed(*kinds)) is transport


def test_different_gpu_transports_are_refused() -> None:
    routes = routed(NCCL, SHM)
    with pytest.raises(ConfigError, match="generator/0 by nccl, generator/1 by shm"):
        common_transport(routes)


def test_there_is_a_backend_for_every_transport() -> None:
    assert list(BACKENDS) == list(WeightTransport)


def test_both_ends_choose_the_same_backend() -> None:
    ends = {SHM: SegmentReceiver, TCP: SegmentReceiver, NCCL: NcclReceiver, HANDLES: CudaHandleReceiver}
    assert {kind: type(receiver(routed(kind), "generator/0", "run")) for kind in WeightTransport} == ends
    assert isinstance(receiver(routed(NCCL), "critic/0", "run"), SegmentReceiver)
    for kind in (SHM, TCP):
        assert isinstance(sender(routed(kind), "run", "policy", dtype=None), SegmentSender)


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

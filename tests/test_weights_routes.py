"""Who reads a trainer's weights, and what the ranks of a broadcast are."""

from __future__ import annotations

import pytest

from flowrl.errors import ConfigError
from flowrl.graph.analysis.plan import make_plan, routes_of
from flowrl.graph.routes import WeightRoute, common_transport, rank_offset, world_size
from tests.graph_nodes import grpo


def test_trainer_and_generators_are_told_the_same_routes() -> None:
    plan = make_plan(grpo().graph)
    routes = routes_of(plan, "trainer")
    assert routes and routes == routes_of(plan, "generator")
    assert {route.transport for route in routes} == {"shm"}
    assert routes_of(plan, "reward") == ()


@pytest.mark.parametrize(
    ("kinds", "transport"),
    [((), "shm"), (("shm",), "shm"), (("shm", "tcp"), "tcp"), (("nccl", "nccl"), "nccl"), (("ipc",), "ipc")],
)
def test_one_transport_serves_all_readers(kinds: tuple[str, ...], transport: str) -> None:
    routes = [WeightRoute(f"generator/{index}", kind) for index, kind in enumerate(kinds)]
    assert common_transport(routes) == transport


def test_different_gpu_transports_are_refused() -> None:
    routes = [WeightRoute("generator/0", "nccl"), WeightRoute("generator/1", "shm")]
    with pytest.raises(ConfigError, match="generator/0 by nccl, generator/1 by shm"):
        common_transport(routes)


def test_every_worker_has_a_rank_of_its_own_after_the_sender() -> None:
    routes = [WeightRoute("generator/0", "nccl", 2), WeightRoute("generator/1", "nccl", 4)]
    assert world_size(routes) == 7
    ranks = [rank_offset(routes, route.consumer) + worker for route in routes for worker in range(route.num_workers)]
    assert ranks == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="generator/9 is not among the readers"):
        rank_offset(routes, "generator/9")

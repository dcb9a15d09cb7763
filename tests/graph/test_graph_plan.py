"""Placement, cores, lanes and transports of a plan, as numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import Cluster, Machine
from flowrl.graph.analysis.plan import Plan, make_plan
from flowrl.graph.machine import GB
from flowrl.models import Policy
from flowrl.nodes import Environment, Generator
from tests.graph.graph_nodes import MACHINE, Evaluation, Grpo, grpo

TWO_CORES = Cluster((Machine((0, 1), memory_bytes=8 * GB),))


def place(parts: Grpo, name: str, **changes: Any) -> None:
    parts.graph.placed[name] = replace(parts.graph.placed[name], **changes)


def cores(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {host.name: host.cores for host in plan.hosts}


def test_cheap_nodes_share_a_host_and_the_others_have_their_own() -> None:
    plan = make_plan(grpo(num_generators=2).graph, MACHINE)
    assert {host.name: host.nodes for host in plan.hosts} == {
        "core": ("prompts/0", "reward/0", "reward/1", "advantage/0", "batcher/0"),
        "generator/0": ("generator/0",),
        "generator/1": ("generator/1",),
        "trainer/0": ("trainer/0",),
    }


def test_cores_are_handed_out_once_and_the_core_host_gets_the_rest() -> None:
    assert cores(make_plan(grpo(num_generators=2).graph, MACHINE)) == {
        "core": (3, 4, 5, 6, 7),
        "generator/0": (0,),
        "generator/1": (1,),
        "trainer/0": (2,),
    }


def test_without_a_core_left_the_core_host_runs_on_any() -> None:
    assert cores(make_plan(grpo().graph, TWO_CORES)) == {"core": (0, 1), "generator/0": (0,), "trainer/0": (1,)}


def test_ranks_of_a_default_gang_share_a_core_before_anything_oversubscribes() -> None:
    plan = make_plan(grpo(num_trainers=2).graph, TWO_CORES)
    assert cores(plan) == {"core": (0, 1), "generator/0": (0,), "trainer/0": (1,), "trainer/1": (1,)}
    assert [host.cpus for host in plan.hosts[1:]] == [1, 0.5, 0.5]
    assert plan.homeless == ()


def test_what_the_user_asked_for_is_never_squeezed() -> None:
    parts = grpo(num_trainers=2)
    place(parts, "trainer", cpus=1)
    assert len(make_plan(parts.graph, TWO_CORES).homeless) == 1


def test_parts_of_a_core_are_shared() -> None:
    parts = grpo(num_generators=2)
    place(parts, "generator", cpus=0.5)
    place(parts, "trainer", cpus=1.5)
    plan = make_plan(parts.graph, MACHINE)
    assert [cores(plan)[name] for name in ("generator/0", "generator/1", "trainer/0")] == [(0,), (0,), (1, 2)]


def test_turns_share_devices_and_a_lease() -> None:
    parts = grpo(num_generators=2, num_trainers=2)
    place(parts, "generator", cpus=1, gpus=1)
    place(parts, "trainer", cpus=1, gpus=1)
    parts.graph.time_share(parts.generator, parts.trainer)
    plan = make_plan(parts.graph, Cluster((Machine((0, 1), gpus=2),)))
    assert {(h.name, h.cores, h.gpus, h.lease) for h in plan.hosts if h.name != "core"} == {
        (f"{name}/{i}", (i,), (i,), "generator+trainer") for name in ("generator", "trainer") for i in (0, 1)
    }
    assert {way.transport for way in plan.weights} == {"shm"}


def test_together_is_one_host() -> None:
    parts = grpo()
    parts.graph.together(parts.generator, parts.reward)
    place(parts, "reward", replicas=1)
    plan = make_plan(parts.graph, MACHINE)
    assert plan.host_of("reward/0").name == "generator/0"
    assert plan.host_of("reward/0").nodes == ("generator/0", "reward/0")
    lanes = {lane.edge.split(" ")[0]: lane.transport for lane in plan.lanes}
    assert (lanes["generator.rollouts"], lanes["prompts.prompts"]) == ("process", "ipc")


def test_lanes_join_every_replica() -> None:
    plan = make_plan(grpo(num_generators=2, num_trainers=2).graph, MACHINE)
    names = [lane.name for lane in plan.lanes if lane.edge.startswith("generator.rollouts")]
    assert names == [f"generator/{g}.rollouts -> reward/{r}.rollouts" for g in (0, 1) for r in (0, 1)]
    lane = plan.lanes[0]
    assert (lane.producer_host, lane.consumer_host, lane.kind, lane.types) == (
        "core",
        "generator/0",
        "queue",
        ("Prompt",),
    )


def test_a_gang_publishes_with_one_voice() -> None:
    plan = make_plan(grpo(num_generators=2, num_trainers=2).graph, MACHINE)
    assert [lane.name for lane in plan.lanes if lane.kind == "latest"] == [
        "trainer/0.weights -> generator/0.weights",
        "trainer/0.weights -> generator/1.weights",
    ]
    assert plan.consumers == (("generator/0", "trainer"), ("generator/1", "trainer"))


def test_calls_join_askers_and_servers() -> None:
    parts = grpo(num_generators=2)
    evaluation = parts.graph.add("evaluation", Evaluation())
    parts.graph.call(evaluation.generate, parts.generator.requests, affinity_margin=2, capacity=3)
    calls = make_plan(parts.graph, MACHINE).calls
    assert [(call.caller, call.server) for call in calls] == [
        ("evaluation/0", "generator/0"),
        ("evaluation/0", "generator/1"),
    ]
    assert (calls[0].capacity, calls[0].affinity_margin, calls[0].types) == (3, 2, ("Prompt", "Sample"))


@pytest.mark.parametrize(
    ("chosen", "margin"), [({}, 2), ({"affinity_margin": None}, None), ({"affinity_margin": 0}, 0)]
)
def test_the_turns_of_an_episode_stay_on_a_replica_without_being_told_to(chosen: Any, margin: int | None) -> None:
    parts = grpo(num_generators=2)
    plays = parts.graph.add("environment", Environment("gymnasium/FrozenLake-v1", Policy("tiny")))
    answers = parts.graph.add("answers", Generator(Policy("tiny")), replicas=2)
    evaluation = parts.graph.add("evaluation", Evaluation())
    parts.graph.call(plays.generate, answers.turns, **chosen)
    parts.graph.call(evaluation.generate, parts.generator.requests)
    turns, prompts = parts.graph.edges[-2:]
    assert (turns.affinity_margin, prompts.affinity_margin) == (margin, None)


def test_other_machines_are_reached_by_tcp() -> None:
    plan = make_plan(grpo().graph, Cluster((Machine((0,)), Machine((0,)))))
    assert {host.name: host.machine for host in plan.hosts} == {"core": 0, "generator/0": 0, "trainer/0": 1}
    assert {lane.transport for lane in plan.lanes if lane.edge.startswith("batcher")} == {"tcp"}
    assert [way.transport for way in plan.weights] == ["tcp"]


def test_weights_on_one_machine_go_through_shared_memory() -> None:
    assert [way.transport for way in make_plan(grpo().graph, MACHINE).weights] == ["shm"]


def test_retained_bytes_are_bounded_by_the_tickets() -> None:
    plan = make_plan(grpo(group_size=4, groups=4, staleness=1).graph, MACHINE)
    rollouts = next(edge for edge in plan.edges if edge.out == "generator.rollouts")
    assert rollouts.retained_bytes == 8 * 4 * rollouts.message_bytes
    assert plan.retained_bytes == sum(edge.retained_bytes for edge in plan.edges)


def test_graph_json_has_the_derived_numbers_by_name() -> None:
    plan = make_plan(grpo(groups=4, staleness=1).graph, MACHINE)
    text = json.loads(json.dumps(plan.to_json()))
    assert (text["tickets"], text["window"], text["max_staleness"]) == (8, 1, 1)
    assert text["admission"]["until"] == ["generator.weights"]
    assert [node["name"] for node in text["nodes"]] == [
        "prompts", "generator", "reward", "advantage", "batcher", "trainer"
    ]  # fmt: skip
    assert text["edges"][0]["capacity"] == 32
    assert text["edges"][0]["capacity_derived"] is True
    assert text["num_processes"] == 4


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.25, 0.5, 1, 1.5, 2])), min_size=2, max_size=2),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_no_core_is_given_out_twice(asks: list[tuple[int, float]], machines: list[int]) -> None:
    parts = grpo()
    for name, (replicas, cpus) in zip(("generator", "trainer"), asks, strict=True):
        place(parts, name, replicas=replicas, cpus=cpus)
    cluster = Cluster(tuple(Machine(tuple(range(count))) for count in machines))
    plan = make_plan(parts.graph, cluster)
    for index, machine in enumerate(cluster.machines):
        mine = [h for h in plan.hosts if h.machine == index and h.name != "core" and h.name not in plan.homeless]
        assert sum(host.cpus for host in mine) <= len(machine.cores)
        assert all(len(host.cores) == math.ceil(host.cpus) for host in mine)
        whole = [host.cores for host in mine if host.cpus >= 1 and host.cpus == int(host.cpus)]
        for one in whole:
            assert all(other is one or not set(one) & set(other) for other in (h.cores for h in mine))

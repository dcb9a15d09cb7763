"""Cores that nobody asked for go to hosts with GPUs: vLLM and a trainer need more than one for each."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from flowrl import Cluster, Machine
from flowrl.graph.analysis.plan import Plan, make_plan
from flowrl.runtime.driver.resources import process_slots
from tests.graph.graph_nodes import grpo


def on_gpus(cores: int, gpus: int, *, cpus: float | None = None, turns: bool = False, replicas: int = 1) -> Plan:
    """A generator and `replicas` ranks with a GPU each, on a machine with so many cores and GPUs."""
    parts = grpo(num_trainers=replicas)
    placed = parts.graph.placed
    for name in ("generator", "trainer"):
        placed[name] = dataclasses.replace(placed[name], cpus=cpus, gpus=1)
    if turns:
        parts.graph.time_share(parts.generator, parts.trainer)
    return make_plan(parts.graph, Cluster((Machine(tuple(range(cores)), gpus=gpus),)))


def test_hosts_with_gpus_have_the_cores_that_are_left() -> None:
    hosts = {host.name: host for host in on_gpus(20, 2).hosts}
    assert [len(hosts[name].cores) for name in ("generator/0", "trainer/0", "core")] == [7, 7, 6]
    assert not set(hosts["generator/0"].cores) & set(hosts["trainer/0"].cores), "each GPU has its own"
    assert hosts["generator/0"].cpus == 7, "Ray reserves them"
    assert [len(host.cores) for host in on_gpus(100, 2).hosts if host.gpus] == [16, 16], "no process uses more"
    assert [len(host.cores) for host in on_gpus(20, 8).hosts if host.gpus] == [3, 3], "the other GPUs' are left alone"


def test_a_number_of_cores_that_a_user_has_set_stays() -> None:
    assert [host.cpus for host in on_gpus(20, 2, cpus=2).hosts if host.gpus] == [2, 2]


def test_a_small_machine_with_a_gpu_still_runs() -> None:
    plan = on_gpus(2, 2)
    assert plan.homeless == () and [len(host.cores) for host in plan.hosts if host.gpus] == [1, 1]


@given(st.integers(2, 40), st.integers(2, 8), st.booleans(), st.integers(1, 4))
def test_cores_that_are_left_are_reserved_once(cores: int, gpus: int, turns: bool, replicas: int) -> None:
    plan = on_gpus(cores, gpus, turns=turns, replicas=replicas)
    if plan.homeless:
        return
    assert sum(slot.cpus for slot in process_slots(plan.hosts)) <= cores
    mine = [host for host in plan.hosts if host.gpus]
    for one, other in itertools.combinations(mine, 2):
        ranks = one.name.startswith("trainer") and other.name.startswith("trainer")  # on few cores they share them
        if not (set(one.gpus) & set(other.gpus) or one.lease or ranks):
            assert not set(one.cores) & set(other.cores)

"""Cores that nobody asked for: on GPUs vLLM and a trainer need more than one for each, and on a machine without GPUs
nodes that never work at the same time have all of them in turns."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import Cluster, Machine
from flowrl.graph.analysis.check import check
from flowrl.graph.analysis.plan import Plan, make_plan
from flowrl.graph.analysis.report import render_report
from flowrl.graph.load import load_file
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


def on_cpus(graph: str, *options: str, cores: int = 2) -> dict[str, tuple[int, ...]]:
    """Host -> its cores, of a shipped graph on a machine without GPUs."""
    file = load_file(graph)
    plan = make_plan(file.build(file.parse(options, prog="test")), Cluster((Machine(tuple(range(cores))),)))
    assert not plan.homeless
    assert sum(slot.cpus for slot in process_slots(plan.hosts)) <= cores
    return {host.name: host.cores for host in plan.hosts if host.name != "core"}


SYNCHRONOUS = ("--staleness", "0")
AGENTS = "agent_openai", "agent_tools", "agent_game"


@pytest.mark.parametrize("graph", ["grpo", "dapo", "distill", "iterative_dpo", "raft", "reinforce_pp", "rloo", *AGENTS])
def test_in_a_synchronous_step_each_half_has_all_cores(graph: str) -> None:
    hosts = on_cpus(graph, *SYNCHRONOUS)
    assert {(0, 1)} == set(hosts.values()), "one of the two would always idle on a core of its own"
    eight = on_cpus(graph, *SYNCHRONOUS, cores=8)
    assert eight["trainer/0"] == eight["generator/0"] == tuple(range(8))


@pytest.mark.parametrize("graph", ["grpo", *AGENTS])
def test_nodes_that_work_at_once_have_cores_of_their_own(graph: str) -> None:
    for options in (("--staleness", "1"), (*SYNCHRONOUS, "--on-limit", "mask"), (*SYNCHRONOUS, "--time-share")):
        hosts = on_cpus(graph, *options)
        assert len(hosts["generator/0"]) == len(hosts["trainer/0"]) == 1, options
        assert hosts["generator/0"] != hosts["trainer/0"], options


def test_a_window_that_uses_up_the_staleness_makes_steps_synchronous() -> None:
    assert on_cpus("grpo", "--staleness", "1", "--look-ahead", "2")["trainer/0"] == (0, 1)


def test_what_was_given_stays() -> None:
    for option, host in (("--trainer.cpus", "trainer/0"), ("--generator.cpus", "generator/0")):
        hosts = on_cpus("grpo", *SYNCHRONOUS, option, "1")
        assert len(hosts[host]) == 1 and hosts["trainer/0"] != hosts["generator/0"]
    hosts = on_cpus("grpo", *SYNCHRONOUS, "--accumulate", "on")
    assert hosts["generator/0"] != hosts["trainer/0"], "the trainer begins while others are sampled"
    hosts = on_cpus("grpo", "--staleness", "1", "--time-share", "generator", "trainer")
    assert hosts["generator/0"] == hosts["trainer/0"] == (0, 1)


def test_replicas_of_a_node_divide_the_cores() -> None:
    ranks = on_cpus("grpo", *SYNCHRONOUS, "--trainer.replicas", "2", cores=8)
    assert {*ranks["trainer/0"]} | {*ranks["trainer/1"]} == set(range(8)) == {*ranks["generator/0"]}
    assert not {*ranks["trainer/0"]} & {*ranks["trainer/1"]}, "ranks work at the same time"
    served = on_cpus("agent_tools", *SYNCHRONOUS, "--generator.replicas", "3", cores=8)
    parts = [set(served[f"generator/{replica}"]) for replica in range(3)]
    assert not any(one & other for one, other in itertools.combinations(parts, 2))
    assert [len(part) for part in parts] == [2, 2, 2] and len(served["trainer/0"]) == 8


def test_several_trainers_take_turns_and_several_generators_do_not() -> None:
    assert set(on_cpus("ppo", *SYNCHRONOUS).values()) == {(0, 1)}
    players = on_cpus("self_play", *SYNCHRONOUS, "--opponent-every", "1", "--evaluate", "0", cores=4)
    assert not {*players["generator/0"]} & {*players["opponent/0"]}, "both answer within every game"
    alone = on_cpus("self_play", *SYNCHRONOUS, "--evaluate", "0")
    assert alone["generator/0"] == alone["trainer/0"] == (0, 1)


def test_check_prints_where_the_cores_come_from() -> None:
    def shown(*options: str) -> dict[str, str]:
        file = load_file("grpo")
        report = check(file.build(file.parse(options, prog="test")), Cluster.parse("1x cpus=8 memory=64"))
        lines = [re.split("  +", line.strip()) for line in render_report(report).splitlines()]
        rows = itertools.takewhile(any, lines[lines.index(["process", "nodes", "cores", "from", "GPUs", "machine"]) :])
        return {row[0]: " ".join(row[2:4]) for row in rows if len(row) > 3 and "/" in row[0]}

    assert shown(*SYNCHRONOUS) == {"generator/0": "0-7 in turns", "trainer/0": "0-7 in turns"}
    assert shown("--trainer.cpus", "3") == {"generator/0": "0 default", "trainer/0": "3-5 given"}


@given(st.integers(2, 40), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_cores_without_gpus_are_given_once(cores: int, generators: int, ranks: int, turns: bool) -> None:
    parts = grpo(num_trainers=ranks)
    placed = parts.graph.placed
    placed["generator"] = dataclasses.replace(placed["generator"], replicas=generators)
    if turns:
        parts.graph.time_share(parts.generator, parts.trainer)
    plan = make_plan(parts.graph, Cluster((Machine(tuple(range(cores))),)))
    if plan.homeless:
        return
    assert sum(slot.cpus for slot in process_slots(plan.hosts)) <= cores
    for one, other in itertools.combinations([host for host in plan.hosts if host.name != "core"], 2):
        alike = one.name.split("/")[0] == other.name.split("/")[0]
        shrunk = alike and one.cpus < 1  # ranks of a gang on few cores
        if not shrunk and (alike or not turns):
            assert not set(one.cores) & set(other.cores)

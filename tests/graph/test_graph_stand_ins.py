"""Which nodes go on without one of their replicas, and which processes may end."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl import Cluster, Machine
from flowrl.graph.analysis.branches import may_end
from flowrl.graph.analysis.plan import Plan, make_plan
from flowrl.graph.load import load_file
from flowrl.graph.machine import GB

GRAPHS = Path(__file__).parents[2] / "graphs"
EIGHT = Cluster((Machine(tuple(range(8)), memory_bytes=64 * GB),))
GPUS = Cluster((Machine(tuple(range(32)), gpus=8, memory_bytes=512 * GB, gpu_bytes=80 * GB),))
TWO = ("--generator.replicas", "2")


def planned(name: str, *options: str, cluster: Cluster = EIGHT) -> Plan:
    file = load_file(GRAPHS / f"{name}.py")
    return make_plan(file.build(file.parse(options)), cluster)


@pytest.mark.parametrize("name", ["agent_tools", "agent_game", "agent_openai"])
def test_generators_that_only_answer_requests_stand_in_for_each_other(name: str) -> None:
    assert planned(name, *TWO).stand_ins == ("generator",)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("agent_tools", ()),
        ("grpo", TWO),
        ("agent_tools", (*TWO, "--time-share", "generator", "trainer")),
        ("agent_tools", (*TWO, "--generator.gpus", "1", "--trainer.gpus", "1")),
    ],
    ids=["alone", "prompts are sent to it", "in turns", "over NCCL"],
)
def test_others_do_not(name: str, options: tuple[str, ...]) -> None:
    assert planned(name, *options, cluster=GPUS).stand_ins == ()


def test_adapters_go_through_host_memory_whatever_the_devices_are() -> None:
    options = (*TWO, "--generator.gpus", "1", "--trainer.gpus", "1", "--lora.rank", "4")
    assert planned("agent_tools", *options, cluster=GPUS).stand_ins == ("generator",)


def test_a_process_may_end_while_others_have_replicas_of_all_its_nodes() -> None:
    plan = planned("agent_tools", *TWO)
    hosts = {host.name: host for host in plan.hosts}

    def ends(host: str, *ended: str) -> bool:
        return may_end(hosts[host], ended=ended, hosts=plan.hosts, stand_ins=plan.stand_ins)

    assert ends("generator/0") and ends("generator/1")
    assert not ends("generator/0", "generator/1") and not ends("generator/1", "generator/0")
    assert [host for host in hosts if not host.startswith("generator")]
    assert not any(ends(host) for host in hosts if not host.startswith("generator"))

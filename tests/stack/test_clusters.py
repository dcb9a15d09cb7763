"""Runs on two and three machines (`benchmarks.channels.machines`); skipped where namespaces are not allowed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.channels.learning_apart import learned
from benchmarks.channels.machines import OTHERS, are_possible, machines
from tests.faults.fault_parts import Fault
from tests.rigs.run_process import ROOT, Run, audit, states

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

GRAPH = ROOT / "tests" / "stack" / "graphs_cluster" / "apart.py"
FAULTY = ROOT / "tests" / "runtime" / "runs" / "graphs_episodes" / "faulty.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which a run joins a cluster of three machines with two cores each, two of them with a GPU."""
    if not are_possible():
        pytest.skip("this user may not make namespaces")
    with machines(3, gpus=1) as environment:
        yield environment


@pytest.mark.parametrize(
    ("options", "driver_apart"),
    [(("--generators", "2"), False), (("--gpus", "1"), True)],
    ids=["on three machines", "the driver without a GPU"],
)
def test_messages_and_weights_go_between_machines(
    tmp_path: Path, cluster: dict[str, str], options: tuple[str, ...], driver_apart: bool
) -> None:
    """The trainer and each generator are on machines of their own; the driver's is one unless they need GPUs."""
    run = Run(GRAPH, tmp_path / "run", "--steps", "6", *options, env=cluster, timeout_s=150)
    assert run.wait() == 0, run.stdout + run.stderr
    places = dict(re.findall(r"(trainer/0|generator/[01])\S*\s+on (\S+)", run.stdout))
    readers = places.keys() - {"trainer/0"}
    assert len(set(places.values())) == len(places) and set(OTHERS) <= set(places.values()), run.stdout
    assert len(places) == (2 if driver_apart else 3) and (set(places.values()) == set(OTHERS)) == driver_apart
    assert set(re.findall(r"version \d+: (\w+)", run.stdout)) == {"tcp"}, run.stdout
    plan = json.loads((tmp_path / "run" / "graph.json").read_text())
    assert [way["transport"] for way in plan["weights"]] == ["tcp"] * len(readers)
    between = {lane["transport"] for lane in plan["lanes"] if lane["name"].startswith("trainer/0.weights")}
    assert between == {"tcp"}
    assert "audit: ok" in audit(tmp_path / "run")
    strangers = re.findall(r"strangers admitted: (.*)", run.stdout)
    assert strangers == ["none"] * len(places), "at the trainer and every generator"
    assert "weights without keys: refused" in run.stdout


def test_a_generator_on_another_machine_may_die(tmp_path: Path, cluster: dict[str, str]) -> None:
    """Its messages go over tcp; another host name and another /dev/shm, but the kernel that tells of its end is one."""
    fault = Fault("replica", "kill", "generating", str(tmp_path), 1)
    apart = ("--generators", "2", "--generator-cpus", "2", "--reset-s", "60")
    options = ("--steps", "6", "--save-every", "1", "--fault", fault.told, *apart)
    run = Run(FAULTY, tmp_path / "run", *options, env=cluster, timeout_s=150)
    assert run.wait() == 0, run.stdout + run.stderr
    hosts = json.loads((tmp_path / "run" / "graph.json").read_text())["hosts"]
    assert {host["name"]: host["machine"] for host in hosts}["generator/1"] > 0, "it is on another machine"
    assert "warning: generator/1: out of service, its requests go to the other replicas" in run.stdout
    assert (tmp_path / "fault-0").exists() and "audit: ok" in audit(tmp_path / "run")
    assert states(tmp_path / "run") == {("trained", None): 36}


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_trainer_and_vllm_are_on_machines_of_their_own() -> None:
    """The job of `clusters --learn`, for a few steps: real ZeRO-3, real vLLM, real weights over tcp."""
    if not are_possible():
        pytest.skip("this user may not make namespaces")
    with machines(shm="1g") as environment:
        found = learned(environment, cores=2, steps=3, evaluate=64)
    assert found.machines.keys() == {"trainer", "generator"} and len(set(found.machines.values())) == 2
    assert found.weights == "tcp" and found.audit.startswith("audit: ok"), found
    assert found.gain.prompts == 64


def test_doctor_tries_the_links_of_all_machines(tmp_path: Path, cluster: dict[str, str]) -> None:
    command = [sys.executable, "-m", "flowrl.cli", "doctor", "--json"]
    environment = {**os.environ, **cluster, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=150)
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["machines"]["found"].startswith("the same versions on 3"), done.stdout
    links = [one for name, one in found.items() if name.startswith("tcp, CURVE")]
    assert [link["status"] for link in links] == ["ok"] * 6, "in both directions"

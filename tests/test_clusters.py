"""Runs on two machines (`benchmarks.two_machines`); skipped where namespaces are not allowed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.learning_apart import learned
from benchmarks.two_machines import are_possible, two_machines
from tests.run_process import ROOT, Run, audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

GRAPH = ROOT / "tests" / "graphs_cluster" / "apart.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which a run joins a cluster of two machines with two cores each."""
    if not are_possible():
        pytest.skip("this user may not make namespaces")
    with two_machines() as environment:
        yield environment


def test_messages_and_weights_go_between_machines(tmp_path: Path, cluster: dict[str, str]) -> None:
    run = Run(GRAPH, tmp_path / "run", "--steps", "6", env=cluster, timeout_s=150)
    assert run.wait() == 0, run.stdout + run.stderr
    machines = dict(re.findall(r"(trainer/0|generator/0)\S*\s+on (\S+)", run.stdout))
    assert len(set(machines.values())) == 2 and "flowrl-second" in machines.values(), run.stdout
    assert set(re.findall(r"version \d+: (\w+)", run.stdout)) == {"tcp"}, run.stdout
    plan = json.loads((tmp_path / "run" / "graph.json").read_text())
    assert {way["transport"] for way in plan["weights"]} == {"tcp"}
    between = {lane["transport"] for lane in plan["lanes"] if lane["name"].startswith("trainer/0.weights")}
    assert between == {"tcp"}
    assert "audit: ok" in audit(tmp_path / "run")
    assert re.findall(r"strangers admitted: (.*)", run.stdout) == ["none", "none"], "at trainer and generator"
    assert "weights without keys: refused" in run.stdout


@pytest.mark.timeout(400)
def test_trainer_and_vllm_are_on_machines_of_their_own() -> None:
    """The job of `benchmarks.clusters --learn`, for a few steps: real ZeRO-3, real vLLM, real weights over tcp."""
    if not are_possible():
        pytest.skip("this user may not make namespaces")
    with two_machines(shm="1g") as environment:
        found = learned(environment, cores=2, steps=3, evaluate=64)
    assert found.machines.keys() == {"trainer", "generator"} and len(set(found.machines.values())) == 2
    assert found.weights == "tcp" and found.audit.startswith("audit: ok"), found
    assert found.gain.prompts == 64


def test_doctor_tries_the_links_of_all_machines(tmp_path: Path, cluster: dict[str, str]) -> None:
    command = [sys.executable, "-m", "flowrl.cli", "doctor", "--json"]
    environment = {**os.environ, **cluster, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=150)
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["machines"]["found"].startswith("the same versions on 2"), done.stdout
    links = [one for name, one in found.items() if name.startswith("tcp, CURVE")]
    assert [link["status"] for link in links] == ["ok", "ok"], "in both directions"

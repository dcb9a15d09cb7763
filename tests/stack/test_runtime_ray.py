"""The Ray of a run: where it listens, who may read what it leaves, and what its death does."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.channels.machines import HEAD, free_ports
from flowrl.wire.run_files import SHM
from tests.rigs.run_process import GRAPHS, ROOT, Run, audit, is_loopback, listening, pids_of, states
from tests.wire.test_channel_presence import heirs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAULTS = GRAPHS / "faults.py"
OPTIONS = ["--processes", "--generators", "2", "--save-every", "1"]
OWN_DIES_WITHIN_S = 10
"""With the time that a busy machine takes; Ray's own shutdown would take 10 to 20 s."""


@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
def test_a_run_whose_ray_dies_says_so_and_can_be_resumed(tmp_path: Path, ray: dict[str, str], victim: str) -> None:
    before = os.umask(0)  # the loosest that a user can have
    run = Run(FAULTS, tmp_path / "run", *OPTIONS, "--steps", "100000", timeout_s=280)
    os.umask(before)
    run.until("checkpoint step_000004")
    by_address = listening(pids_of(run.mark))
    assert {"gcs_server", "raylet"} <= set().union(*by_address.values())
    assert {address: names for address, names in by_address.items() if not is_loopback(address)} == {}
    assert open_to_others(tmp_path / "run") == []

    start_s = time.monotonic()
    os.kill(run.pid_of(victim), signal.SIGKILL)
    assert run.wait() == 2, run.stdout
    assert time.monotonic() - start_s < OWN_DIES_WITHIN_S
    assert run.stderr.startswith(f"flowrl: Ray's {victim} has ended"), run.stderr
    assert run.stderr.count("\n") == 1 and "--resume" in run.stderr
    assert "audit: ok" in audit(tmp_path / "run")
    assert not run.socket_dirs
    assert open_to_others(tmp_path / "run") == []

    newest = max(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    steps = int(newest.removeprefix("step_")) + 2
    again = Run(FAULTS, tmp_path / "run", *OPTIONS, "--steps", str(steps), "--resume", env=ray)
    assert again.wait() == 0, again.stderr
    assert states(tmp_path / "run") == {("trained", None): steps * 4}


@pytest.mark.parametrize("moment", ["training", "step 2/"])
@pytest.mark.parametrize("also", ["", "guard.py"])
def test_a_killed_driver_leaves_no_memory_and_no_socket(tmp_path: Path, also: str, moment: str) -> None:
    """Nor does one that is killed together with its guard: Ray's processes then end by themselves."""
    run = Run(FAULTS, tmp_path / "run", "--processes", "--ranks", "2", "--steps", "100000", timeout_s=280)
    run.until(moment)
    segment = run.words("trainer-0")[1]
    name = segment.split("-")[1]
    (heir,) = heirs(name)
    assert (SHM / segment).exists() and run.socket_dirs
    if also:
        (guard,) = [pid for pid in pids_of(run.mark) if also in Path(f"/proc/{pid}/cmdline").read_bytes().decode()]
        os.kill(guard, signal.SIGKILL)
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert select.select([heir], [], [], OWN_DIES_WITHIN_S if not also else 60)[0], "the heir waits for a process"
    os.close(heir)
    assert list(SHM.glob(f"flowrl-{name}*")) == [] and not run.socket_dirs
    assert run.left_after(90) == []


def test_sigterm_to_the_process_group_reaches_the_driver_alone_which_writes_a_checkpoint(tmp_path: Path) -> None:
    """As `timeout` sends it. Ray's raylet would end some seconds later, before a slow step is over."""
    run = Run(FAULTS, tmp_path / "run", "--processes", "--steps", "100000", timeout_s=280)
    run.until("step 2/")
    assert [pid for pid in pids_of(run.mark) if os.getpgid(pid) == run.process.pid] == [run.process.pid]
    assert {"raylet", "gcs_server"} <= programs(run) and not {
        "dashboard.py",
        "monitor.py",
        "log_monitor.py",
    } & programs(run)
    run.signal(signal.SIGTERM)
    assert run.wait() == 0, run.stderr
    newest = max(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    steps = int(newest.removeprefix("step_"))
    trained = states(tmp_path / "run")["trained", None]
    assert (steps - 1) * 4 < trained <= steps * 4, "the last batch has what was left"
    assert "audit: ok" in audit(tmp_path / "run")
    assert run.left_after(5) == []


def programs(run: Run) -> set[str]:
    """File names in the command lines of a run's processes, Ray's among them."""
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in pids_of(run.mark)]
    return {Path(word).name for words in lines for word in words if word}


OWN = """
from tests.runtime.runs.graphs_episodes.played import Unsteady

class Own(Unsteady):
    pass
"""


def test_files_are_those_of_the_users_directory_on_a_ray_that_was_joined(tmp_path: Path, ray: dict[str, str]) -> None:
    """The graph is elsewhere, and Ray starts processes in its own copy of the graph's directory."""
    (tmp_path / "own.py").write_text(OWN)
    graph, options = (
        ROOT / "tests" / "runtime" / "runs" / "graphs_episodes" / "played.py",
        ("--environment", "own.py:Own", "--steps", "2"),
    )
    run = Run(graph, tmp_path / "run", *options, env=ray, cwd=tmp_path)
    assert run.wait() == 0, run.stderr
    assert states(tmp_path / "run") == {("trained", None): 2 * 2 * 3}


def open_to_others(directory: Path) -> list[tuple[str, str]]:
    """(file, mode) of what other users may read, write or list."""
    return [
        (str(path), oct(path.stat().st_mode))
        for path in [directory, *directory.rglob("*")]
        if path.stat().st_mode & 0o077
    ]


@pytest.fixture
def head() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, address) of the head of a cluster that may be killed."""
    port, client, agent, grpc = free_ports(4)
    ports = [f"--port={port}", f"--ray-client-server-port={client}"]
    agents = [f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={grpc}"]
    quiet = ["--include-dashboard=false", "--disable-usage-stats"]
    process = subprocess.Popen(
        [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=8", *ports, *agents, *quiet],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **HEAD, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "Ray runtime started" in line:
            break
    yield process, f"127.0.0.1:{port}"
    os.killpg(process.pid, signal.SIGKILL)
    process.stdout.read()
    process.wait()


def test_a_run_ends_in_order_before_ray_gives_up_the_head_of_its_cluster(
    tmp_path: Path, head: tuple[subprocess.Popen[str], str]
) -> None:
    cluster, address = head
    joined = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    run = Run(FAULTS, tmp_path / "run", *OPTIONS, "--steps", "100000", env=joined, timeout_s=280)
    run.until("checkpoint step_000004")
    start_s = time.monotonic()
    os.kill(child_of(cluster.pid, "gcs_server"), signal.SIGKILL)
    assert run.wait() == 2, run.stdout
    assert time.monotonic() - start_s < 10
    assert run.stderr.startswith("flowrl: Ray's head has ended"), run.stderr
    assert "audit: ok" in audit(tmp_path / "run")


def child_of(parent: int, name: str) -> int:
    found = subprocess.run(["pgrep", "-P", str(parent), name], capture_output=True, text=True, check=True)
    return int(found.stdout)

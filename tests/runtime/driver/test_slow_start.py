"""A start of Ray on a busy machine: it has its time, says what it waits for, and is made again for want of a port."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrl.errors import FlowrlError
from flowrl.runtime.driver import ray_start
from flowrl.runtime.driver.ray_cluster import RayCluster
from flowrl.runtime.driver.ray_start import AGAIN, NEEDS_A_PORT, PORTS, STARTS, change_library, ray_settings


class Started:
    """What `ray.init` does when the raylet ends during it: it raises once it has looked for the raylet long enough."""

    def __init__(self, directory: Path, says: list[str]) -> None:
        self.directory, self.says = directory, says
        self.raylet = directory / "raylet"  # the kernel calls a process by its file
        shutil.copy("/bin/sleep", self.raylet)
        self.others: list[subprocess.Popen[bytes]] = []
        self.calls = 0
        self.seen = threading.Event()
        """The raylet's end was told."""

    def __call__(self) -> None:
        said, self.calls = self.says[self.calls] if self.calls < len(self.says) else None, self.calls + 1
        if said is None:
            return
        logs = self.directory / f"session_{self.calls}_{os.getpid()}" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text(said)
        self.others.append(subprocess.Popen(["/bin/sleep", "60"]))
        self.seen.clear()
        subprocess.Popen([self.raylet, "0.3"]).wait(30)
        self.seen.wait(30)
        raise RuntimeError("The current node timed out during startup")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RayCluster]:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    one = RayCluster()
    one.owned = True
    yield one
    if one._guard is not None:
        one._guard.dismiss()


@pytest.fixture
def start(cluster: RayCluster, tmp_path: Path) -> Callable[..., tuple[Started, list[str]]]:
    def started(*says: str) -> tuple[Started, list[str]]:
        init = Started(tmp_path, list(says))
        told: list[str] = []

        def tell(text: str) -> None:
            told.append(text)
            init.seen.set()

        try:
            cluster._start_own(init, tell)
        except FlowrlError as error:
            tell(str(error))
        return init, told

    return started


@pytest.mark.parametrize("said", NEEDS_A_PORT)
def test_a_start_without_a_port_is_made_again_without_what_is_left_of_it(
    cluster: RayCluster, start: Callable[..., tuple[Started, list[str]]], said: str
) -> None:
    init, told = start(f"Check failed: {said} metrics_agent_port_1")
    assert init.calls == 2 and told == [AGAIN]
    assert init.others[0].wait(10) == -9, "what the start left is ended"
    assert not cluster.processes() and not cluster.lost


def test_a_start_that_never_gets_its_ports_shows_what_ray_has_logged(
    start: Callable[..., tuple[Started, list[str]]],
) -> None:
    init, told = start(*[NEEDS_A_PORT[0]] * STARTS)
    assert init.calls == STARTS and told[:-1] == [AGAIN] * (STARTS - 1)
    assert told[-1].startswith("Ray's raylet has ended while it started") and "the load of this machine is" in told[-1]
    assert f"\n  raylet.err: {NEEDS_A_PORT[0]}" in told[-1]
    init.others[-1].kill()
    init.others[-1].wait()


def test_a_raylet_that_ends_for_another_reason_is_not_started_again(
    start: Callable[..., tuple[Started, list[str]]], tmp_path: Path
) -> None:
    init, (told,) = start("out of memory")
    assert init.calls == 1 and told.startswith("Ray's raylet has ended")
    assert f"Ray's logs in {tmp_path}/session_1_{os.getpid()}/logs:\n  raylet.err: out of memory" in told
    init.others[-1].kill()
    init.others[-1].wait()


def test_a_start_that_takes_too_long_says_what_it_waited_for(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it are the processes of Ray that it has by then; once it takes long, the user is told so."""
    monkeypatch.setattr(ray_start, "TOLD_AFTER_S", 0.1)
    told, ended = list[str](), threading.Event()
    shutil.copy("/bin/sleep", tmp_path / "gcs_server")
    cluster.limit_s = 1.0
    with subprocess.Popen([tmp_path / "gcs_server", "60"]) as gcs:
        with pytest.raises(FlowrlError) as found:
            cluster._start_own(lambda: ended.wait(60), told.append)
        gcs.kill()
    ended.set()
    (line,) = told
    assert re.match(r"Ray has not started after 0 s: it waits for its .*; the load of this machine is \d+ on \d+", line)
    began = "Ray has not started on this machine within 1 s: it waits for its gcs_server, which does not answer yet; "
    assert str(found.value).startswith(f"{began}the load")
    assert str(found.value).endswith("give it more time with --start-minutes"), "no logs of another run"


class Node:
    """What a node of Ray's library is, as far as the start changes it."""

    def __init__(self, directory: Path, **ports: int) -> None:
        self._session_dir, self._node_id = str(directory), "ab" * 28
        self._ray_params = SimpleNamespace(**dict.fromkeys(PORTS, 0) | ports)
        self.given: list[int] = []

    def start_ray_processes(self) -> None:
        self.given = [getattr(self._ray_params, name) for name in PORTS]


def test_a_raylet_is_told_the_ports_of_its_agents_and_looked_for_until_the_limit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import node as rays_nodes
    from ray._private import services

    asked: list[str] = []

    def registers_late(address: str, node_id: str) -> str:
        asked.append(node_id)
        if len(asked) < 3:
            raise RuntimeError("not registered")
        return "found"

    monkeypatch.setattr(rays_nodes, "Node", Node)
    monkeypatch.setattr(services, "get_node", registers_late)
    with change_library(60.0, given_up := threading.Event(), logs=True):
        (node := Node(tmp_path, metrics_export_port=7)).start_ray_processes()
        assert services.get_node("address", "id") == "found" and len(asked) == 3
        asked.clear()
        given_up.set()
        with pytest.raises(RuntimeError, match="not registered"):
            services.get_node("address", "id")
    assert len({*node.given}) == len(PORTS) and node.given[1] == 7 and 0 not in node.given
    files = [(tmp_path / f"{name}_{node._node_id}").read_text() for name in PORTS]
    assert [int(text) for text in files] == node.given, "what the raylet reads, as its agents would have written it"
    assert services.get_node is registers_late and Node.start_ray_processes.__name__ == "start_ray_processes"


def test_the_settings_of_a_start_are_those_of_the_installed_ray() -> None:
    """A setting that another version does not know would be ignored."""
    import ray

    raylet = (Path(ray.__file__).parent / "core/src/ray/raylet/raylet").read_bytes()
    library = "".join(path.read_text() for path in (Path(ray.__file__).parent / "_private").glob("*.py"))
    for name in ray_settings(600):
        assert name.removeprefix("RAY_").encode() in raylet or name in library, name


def test_the_logs_of_earlier_rays_do_not_accumulate(tmp_path: Path) -> None:
    ended = [f"session_2026-11-{day:02}_10-00-00_000123_{2**22 + day}" for day in range(1, 16)]
    alive = f"session_2026-10-01_10-00-00_000123_{os.getpid()}"
    for name in [*ended, alive]:
        (tmp_path / name / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(tmp_path / ended[-1])
    ray_start.remove_old_logs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        alive,
        *ended[-ray_start.LOGS_KEPT :],
        "session_latest",
    ]

"""Ray is started again where the machine was too slow for the time that its raylet gives its agents."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowrl.errors import FlowrlError
from flowrl.runtime.driver.ray_cluster.cluster import RayCluster
from flowrl.runtime.driver.ray_cluster.slow_start import AGAIN, SAID, STARTS


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


def test_a_start_that_was_too_slow_is_made_again_without_what_is_left_of_it(
    cluster: RayCluster, start: Callable[..., tuple[Started, list[str]]]
) -> None:
    init, told = start(f"Check failed: {SAID} metrics_agent_port_1")
    assert init.calls == 2 and told == [AGAIN]
    assert init.others[0].wait(10) == -9, "what the start left is ended"
    assert not cluster.processes() and not cluster.lost


def test_a_machine_that_is_always_too_slow_is_told_so(start: Callable[..., tuple[Started, list[str]]]) -> None:
    init, told = start(*[SAID] * STARTS)
    assert init.calls == STARTS and told[:-1] == [AGAIN] * (STARTS - 1)
    assert "3 times in a row: the machine is too busy" in told[-1]
    init.others[-1].kill()
    init.others[-1].wait()


def test_a_raylet_that_ends_for_another_reason_is_not_started_again(
    start: Callable[..., tuple[Started, list[str]]], tmp_path: Path
) -> None:
    init, (told,) = start("out of memory")
    assert init.calls == 1 and told.startswith("Ray's raylet has ended")
    assert f"its logs are in {tmp_path}/session_1_{os.getpid()}/logs" in told
    init.others[-1].kill()
    init.others[-1].wait()

"""How the hosts of a run are stopped, in virtual time and without processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowrl.errors import FlowrlError, NodeFailed
from flowrl.runtime.driver import run_processes as hosts_module
from flowrl.runtime.driver.run_processes import RunProcesses
from flowrl.testing import VirtualClock


class Cluster:
    """Notes which hosts it has killed."""

    lost = ""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def kill(self, host: str) -> None:
        self.killed.append(host)


class SlowHosts(RunProcesses):
    """Those whose name begins with "slow" take a minute to close."""

    async def ask_one(self, host: str, method: str, *args: Any) -> Any:
        if host.startswith("slow"):
            await asyncio.sleep(60)  # in virtual time
        return []


@pytest.mark.parametrize("died", [False, True])
def test_hosts_of_a_run_that_lost_a_process_have_half_as_long_to_close(died: bool) -> None:
    cluster, clock = Cluster(), VirtualClock()
    places = [SimpleNamespace(node="generator", replica=0, replica_id="generator/0")]

    async def body() -> list[NodeFailed]:
        hosts = SlowHosts(cast(Any, cluster), cast(Any, None))
        hosts._actors.update({"core": None, "slow": None})
        hosts._specs.update({name: cast(Any, SimpleNamespace(places=places)) for name in hosts._actors})
        hosts.death = FlowrlError("a process died") if died else None
        return await hosts.stop()

    failed = clock.run(body())
    assert clock.now_s == (hosts_module.AFTER_DEATH_S if died else hosts_module.STOP_WITHIN_S)
    assert cluster.killed == ["core", "slow"]
    if died:
        assert failed == [], "the death is what is told"
    else:
        assert [str(one) for one in failed] == [
            "node 'generator', replica 0, failed: it did not close within 6 s and was killed"
        ]


def test_hosts_that_close_in_time_are_not_waited_for() -> None:
    cluster, clock = Cluster(), VirtualClock()

    async def body() -> list[NodeFailed]:
        hosts = SlowHosts(cast(Any, cluster), cast(Any, None))
        hosts._actors.update({"core": None})
        return await hosts.stop()

    assert clock.run(body()) == [] and clock.now_s == 0

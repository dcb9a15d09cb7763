"""However the code of a node ends, other than by returning: the run fails at once, and names the node."""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import NodeFailed
from flowrl.graph.analysis.plan import make_plan
from flowrl.graph.load import load_file, rebuild_graph
from flowrl.runtime.driver.driver import Outcome
from flowrl.runtime.driver.job import RunOptions
from flowrl.runtime.driver.launch import Launch, RunStart
from flowrl.runtime.driver.local_cluster import LocalCluster
from flowrl.runtime.process.actor import ProcessActor
from flowrl.runtime.process.context import ReplicaPlace
from flowrl.runtime.process.engine import ProcessEngine, ProcessSpec
from flowrl.testing import EIGHT_CORES, GraphRun, run_graph
from flowrl.wire import activity
from flowrl.wire.connection import IpcTransport
from flowrl.wire.endpoint import Endpoint
from tests.runtime.runs.graphs_alive.odd import RAISED
from tests.runtime.runs.test_runtime_episodes import PLAYED

NAMES = {"exit": "SystemExit", "interrupt": "KeyboardInterrupt"}
ODD = Path(__file__).parent / "graphs_alive" / "odd.py"


def ran(directory: Path, where: str, what: str, *, steps: int = 6, **options: Any) -> GraphRun:
    config = {"where": where, "what": what}
    return run_graph(ODD, directory, config, steps=steps, timeout_s=20, must_succeed=False, **options)


def failure(done: GraphRun, *, before: int = 3) -> NodeFailed:
    """What ended the run, before its step `before`."""
    assert isinstance(done.error, NodeFailed), repr(done.error)
    assert done.error.node == "odd" and done.steps[-1:] < [before], "it went on"
    return done.error


@pytest.mark.parametrize(
    ("where", "what"),
    [
        *((where, what) for where in ("turn", "each", "setup") for what in (*RAISED, "awaited")),
        *((where, what) for where in ("blocking", "state") for what in RAISED),
    ],
)
def test_nothing_but_a_return_ends_a_nodes_code(tmp_path: Path, where: str, what: str) -> None:
    found = failure(ran(tmp_path, where, what, save_every=1))
    if what in ("cancelled", "awaited"):
        assert "although nobody cancelled it" in found.reason, found.reason
    assert "odd.py" in found.remote_traceback, "the place is shown"
    if where in ("turn", "each", "blocking"):
        assert found.ticket == 4


def test_a_state_that_is_not_taken_up_ends_the_run(tmp_path: Path) -> None:
    ran(tmp_path, "", "", steps=2, save_every=1).raise_for_error()
    for what in ("memory", "exit"):
        found = failure(ran(tmp_path, "load", what, steps=4, resume=True))
        assert "odd.py" in found.remote_traceback


def test_a_turn_that_cancels_itself_ends_the_run(tmp_path: Path) -> None:
    for where in ("each", "turn"):
        assert "CancelledError" in failure(ran(tmp_path / where, where, "itself")).reason


def test_finite_data_do_not_end_early_over_a_cancellation(tmp_path: Path) -> None:
    config = {"where": "turn", "what": "awaited", "groups": 8}
    done = run_graph(ODD, tmp_path, config, timeout_s=20, must_succeed=False)
    failure(done)


@pytest.mark.parametrize("what", ["cancelled", "awaited", "memory", "generator exit"])
def test_the_death_of_a_task_that_nobody_awaits_ends_the_run(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "UNOBSERVED_S", 0.01)
    failure(ran(tmp_path, "task", what, steps=100000), before=1000)  # a garbage collection finds some of them


def test_an_exception_in_close_is_told_and_changes_nothing_else(tmp_path: Path) -> None:
    for what in ("memory", "awaited", "exit"):
        done = ran(tmp_path / what, "close", what).raise_for_error()
        assert done.steps == [1, 2, 3, 4, 5, 6] and done.audit().ok
        (told,) = done.view.warnings
        assert "when the run was closed, node 'odd', replica 0, failed" in told


def test_what_ends_a_program_in_a_task_leaves_the_hosts_loop_running(tmp_path: Path) -> None:
    """SystemExit passes through the loop whatever awaits the task; here on the loop and thread of a real host."""
    for what in ("exit", "interrupt"):
        failed = asyncio.run(_host_runs(tmp_path, {"where": "task", "what": what, "groups": 12}))
        assert failed["node"] == "odd" and NAMES[what] in failed["reason"], failed


async def _host_runs(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What the one host of the graph answers to `run`, with a driver that admits everything."""
    plan = make_plan(rebuild_graph(str(ODD), config)[0], EIGHT_CORES)
    (host,) = plan.hosts
    run_id = uuid.uuid4().hex[:10]
    endpoint = Endpoint("driver", run_id=run_id, driver_pid=os.getpid())
    await endpoint.open()
    admitted: list[str] = []

    async def admit(host: str, body: Any) -> int:
        admitted.append(body["group_id"])
        return len(admitted) - 1

    async def passes(host: str, body: Any) -> None:
        pass

    endpoint.on("admit", admit)
    endpoint.on("step_done", passes)
    for kind in ("ledger", "ended", "statistics", "warning", "progress"):
        endpoint.on(kind, lambda host, body: None)
    places = tuple(
        ReplicaPlace(node, 0, 1, str(directory), 0, None, (), (), None, 0, run_id, max_staleness=1, window=1)
        for node in (replica_id.split("/")[0] for replica_id in host.nodes)
    )
    actor = ProcessActor(
        ProcessSpec(host.name, run_id, os.getpid(), str(ODD), config, places, plan, (), IpcTransport())
    )
    address = (await actor.open())["address"]
    endpoint.connect(host.name, address)
    try:
        await actor.wire({"driver": endpoint.address, host.name: address}, dict.fromkeys([p.node for p in places], ""))
        await actor.setup()
        async with asyncio.timeout(10):
            answer = await actor.run()
            assert answer is not None, "it ended as if nothing had happened"
        assert [report["replica_id"] for report in await actor.waits()], "the loop answers"
        failed: dict[str, Any] = answer["failure"]
        return failed
    finally:
        await actor.stop()
        await endpoint.close()


def test_a_process_that_does_not_begin_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(engine: ProcessEngine) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(ProcessEngine, "open", never)
    monkeypatch.setattr(LocalCluster, "limit_s", 0.05)
    done = ran(tmp_path, "", "")
    assert re.match(r"after 0 s 1 of 1 processes had not begun: \S+; the load of this machine is", str(done.error))
    assert "--start-minutes" in str(done.error)


class GivenBack:
    """Stands for Ray: notes when it is stopped."""

    started = False

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def start(self, **options: Any) -> None:
        self.started = True

    def stop(self) -> None:
        self.order.append("stopped" if self.started else "stopped again")
        self.started = False


def test_the_cluster_is_given_back_before_the_books_are_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def driven(launch: Launch, start: RunStart, cluster: object, view: object) -> Outcome:
        return Outcome(1, {}, False, 1.0)

    monkeypatch.setattr("flowrl.runtime.driver.ray_cluster.RayCluster", lambda: GivenBack(order))
    monkeypatch.setattr("flowrl.runtime.audit.audit.audit", lambda run_dir: order.append("proven"))
    monkeypatch.setattr(Launch, "drive_run", driven)
    loaded = load_file(PLAYED)
    config = loaded.config_type()
    options = RunOptions(steps=1, run_dir=tmp_path / "run", plain=True)
    Launch(loaded.path, loaded.build(config), config, options).run()
    assert order == ["stopped", "proven", "stopped again"]

"""What the ports of a replica are told when they are joined to their lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from flowrl import Cluster, Machine
from flowrl.graph.analysis.plan import make_plan
from flowrl.graph.machine import GB
from flowrl.runtime.process.actor import enter_directory
from flowrl.runtime.process.context import ReplicaPlace
from flowrl.runtime.process.engine import ProcessSpec
from flowrl.runtime.process.replica import Replica, connect_ports
from flowrl.runtime.telemetry.trace import TraceBuffer
from flowrl.wire.activity import Lease
from flowrl.wire.connection import IpcTransport
from tests.graph.graph_nodes import grpo

CLUSTER = Cluster((Machine((0, 1), memory_bytes=8 * GB),))


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("latest", [True, False])
def test_all_ranks_agree_on_whether_their_weights_go_anywhere(replica: int, latest: bool) -> None:
    """Rank 1 has no lane of the weights edge, and still takes part in gathering them."""
    graph = grpo(num_trainers=2, latest=latest, admit=latest).graph
    place = ReplicaPlace("trainer", replica, 2, "", 0, None, (1,), (), None, 0, "run")
    endpoint: Any = MagicMock()
    trainer: Any = graph.nodes["trainer"]
    joined = Replica(trainer, place, endpoint, TraceBuffer(), Lease("", "trainer", endpoint))
    connect_ports(joined, graph, make_plan(graph, CLUSTER), endpoint)
    assert trainer.weights.connected is latest
    assert bool(joined.outbound["weights"].edges) is (latest and replica == 0)
    assert trainer.batches.connected


@pytest.mark.parametrize(("has_graph", "has_directory"), [(True, True), (True, False), (False, True)])
def test_relative_paths_are_the_drivers_where_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_graph: bool, has_directory: bool
) -> None:
    """/root is on every machine, and need not be the same one."""
    driver, copy, graph = tmp_path / "driver", tmp_path / "copy", tmp_path / "graph.py"
    copy.mkdir()
    if has_directory:
        driver.mkdir()
    if has_graph:
        graph.touch()
    monkeypatch.chdir(copy)
    enter_directory(ProcessSpec("A", "run", 1, str(graph), {}, (), None, (), IpcTransport(), directory=str(driver)))
    assert Path.cwd() == (driver if has_graph and has_directory else copy)

"""What `benchmarks.channels.clusters` reads off a run; test_clusters runs the graph on two machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.channels.across import MB, Apart, begins, graph, sizes
from benchmarks.channels.clusters import GRAPH, LEAST_MESSAGES, main, rates, table
from flowrl import Cluster, check
from flowrl.testing.graph_run import run_graph

TOLD = """
generator/0: version 0: tcp, fetched at 90 MB/s
generator/0: measured 1024 bytes: 51234 messages/s, 52 MB/s
generator/0: measured 4194304 bytes: 120 messages/s, 503 MB/s
generator/0: version 1: tcp, fetched at 400 MB/s
generator/0: version 2: tcp, fetched at 420 MB/s
generator/0: version 3: tcp, fetched at 410 MB/s
"""


def test_rates_are_read_and_the_first_version_does_not_count() -> None:
    found = rates(TOLD)
    assert found == {"messages/s, 1 KB": 51234, "MB/s, messages of 4 MB": 503, "MB/s, weights": 410}
    twice, thrice = ({name: factor * value for name, value in found.items()} for factor in (2, 3))
    lines = table([twice, thrice, found], [found, found, found]).splitlines()
    assert len(lines) == 4 and all(line.endswith("50%") for line in lines[1:])
    assert "820 (410-1,230)" in lines[3] and "410 (410-410)" in lines[3]
    with pytest.raises(SystemExit, match="did not print"):
        rates("generator/0: version 1: tcp, fetched at 400 MB/s")


def test_the_graph_tells_what_is_read(tmp_path: Path) -> None:
    """In this process, so the messages are handed over as objects."""
    ran = run_graph(GRAPH, tmp_path / "run", {"messages": 200, "megabytes": 1, "cores": 1.0}, steps=4)
    found = rates("\n".join(ran.view.lines))
    assert len(found) == 3 and all(rate > 0 for rate in found.values()) and ran.audit().ok


def test_more_large_messages_are_sent_than_are_in_flight_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, _), (large, _) = sizes(LEAST_MESSAGES)
    plan = check(graph(Apart(messages=LEAST_MESSAGES)), Cluster.parse("2x cpus=2")).plan
    (edge,) = (edge for edge in plan.edges if edge.out == "flood.payloads")
    assert large >= 3 * edge.capacity and begins(large) == edge.capacity
    monkeypatch.setattr("sys.argv", ["clusters", "--messages", str(LEAST_MESSAGES - 1)])
    with pytest.raises(SystemExit):
        main()


def test_sender_and_receiver_are_apart_where_there_are_two_machines() -> None:
    report = check(graph(Apart(messages=1000)), Cluster.parse("2x cpus=2"))
    assert report.problems == ()
    places = {node.partition("/")[0]: host.machine for host in report.plan.hosts for node in host.nodes}
    assert places["flood"] == places["trainer"] != places["generator"] == places["gauge"]
    assert sizes(1000) == ((1000, 1024), (10, 4 * MB)) and sizes(0) == ()

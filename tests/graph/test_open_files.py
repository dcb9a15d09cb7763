"""A run may have hundreds of processes on other machines: sockets and open files are enough, or too few are told."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import Cluster
from flowrl.errors import ConfigError
from flowrl.graph import machine
from flowrl.graph.analysis.check import check
from flowrl.graph.machine import ENOUGH, OF_A_PEER, files_needed, most_files, raise_limit, require_files
from flowrl.machine.orphans import has_ended
from flowrl.wire.connection import Authenticator
from tests.graph.graph_nodes import MACHINE, grpo
from tests.wire.channel_rig import opened, via

NUM_PEERS = 400
Limits = Callable[[int, int], None]


@pytest.fixture
def raised() -> Iterator[None]:
    """The limit of this process as a host raises it, for one test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_limit()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    def told(soft: int, hard: int) -> None:
        monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (soft, hard))

    return told


def open_now() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(most_files() < files_needed(2 * NUM_PEERS), reason="the machine's hard limit is too small")
def test_an_endpoint_has_hundreds_of_peers_on_other_machines(raised: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, asked = Authenticator._answer_request, []

    async def main() -> int:
        """The descriptors that the peers take. Both ends of each connection are in this process."""
        all_there = asyncio.Event()

        def counted(self: Authenticator, parts: list[bytes]) -> list[bytes]:
            asked.append(1)
            if len(asked) == NUM_PEERS:
                all_there.set()
            return answer(self, parts)

        monkeypatch.setattr(Authenticator, "_answer_request", counted)
        endpoint, other = await opened("A", "tcp"), await opened("B", "tcp")
        before = open_now()
        address = via("tcp", other.address)
        for index in range(NUM_PEERS):
            endpoint.connect(f"B{index}", replace(address, host=f"B{index}"))
        async with asyncio.timeout(60):
            await all_there.wait()
        there = open_now()
        for each in (endpoint, other):
            await each.close()
        return there - before

    gc.collect()
    # zmq's threads may still close sockets of earlier tests; one descriptor more or less for each peer would be 400.
    assert asyncio.run(main()) == pytest.approx(OF_A_PEER * NUM_PEERS, abs=40)


def test_the_soft_limit_is_raised_up_to_the_hard_one_and_to_enough(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(machine.resource, "setrlimit", lambda which, limit: made.append(limit))
    unlimited = resource.RLIM_INFINITY
    for soft, hard in ((1024, 4096), (1024, 1 << 20), (1024, unlimited), (4096, 4096), (1 << 20, 1 << 20), (64, 64)):
        limits(soft, hard)
        raise_limit()
    assert made == [(4096, 4096), (ENOUGH, 1 << 20), (ENOUGH, unlimited)]
    limits(unlimited, unlimited)
    assert most_files() > 1 << 60


def test_too_few_for_the_peers_is_one_sentence(limits: Limits) -> None:
    limits(1024, 1024)
    require_files(153)
    with pytest.raises(ConfigError, match=r"connected to 154 others needs 1026 open files, .* allows 1024; raise"):
        require_files(154)


def test_check_refuses_a_graph_of_more_processes_than_can_be_connected() -> None:
    graph = grpo().graph
    few = Cluster((replace(MACHINE.machines[0], max_files=files_needed(2)),))
    enough = Cluster((replace(MACHINE.machines[0], max_files=files_needed(3)),))
    assert len(check(graph, enough).plan.hosts) == 3
    assert [problem for problem in check(graph, enough).problems if "open files" in problem] == []
    assert any("needs" in problem and "open files" in problem for problem in check(graph, few).problems)


@pytest.mark.skipif(most_files() < 2048, reason="the machine's hard limit is too small")
def test_ends_of_processes_are_seen_by_a_process_with_many_open_files(raised: None) -> None:
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        mine = os.pidfd_open(os.getpid())
        assert mine > 1023 and not has_ended(mine) and not has_ended(mine, 0.001)
        os.close(mine)
    finally:
        for handle in many:
            os.close(handle)

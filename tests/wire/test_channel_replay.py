"""Replay between real processes: a stage is killed again and again, and the sink sees everything once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from flowrl.graph.dispatch_rules import SHARE
from flowrl.wire import connection
from flowrl.wire.edges import EndOfStream, Inbox, OutEdge
from flowrl.wire.encoding.schema import Envelope, source_id
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.run_files import remove_run, run_prefix
from flowrl.wire.slab import FROM_BYTES
from tests.wire.channel_rig import TCP, via
from tests.wire.channel_stage import BEATS, INTO, OUT, Item, from_text, run_id, to_text

pytestmark = pytest.mark.slow
NUM_ITEMS = 120


def item(index: int) -> Envelope:
    """Every tenth is large enough for the slab."""
    size = FROM_BYTES // 4 if index % 10 == 0 else 50
    return Envelope(source_id("source", str(index)), body=Item(index, np.full(size, index, np.float32)))


async def send_all(edge: OutEdge) -> None:
    for index in range(NUM_ITEMS):
        await edge.send(item(index))
    edge.close()


async def take_all(inbox: Inbox) -> list[int]:
    """What the sink sees. An ack only after a few more, so that some are always open."""
    found, open_ = [], []
    try:
        while True:
            delivery = await inbox.take()
            body = delivery.envelope.body
            assert isinstance(body, Item)
            assert np.all(body.values == np.sqrt(np.float32(body.index)))
            found.append(body.index)
            open_.append(delivery)
            if len(open_) > 3:
                open_.pop(0).ack()
    except EndOfStream:
        for delivery in open_:
            delivery.ack()
        return found


async def lives(endpoint: Endpoint, fates: list[tuple[str, int]]) -> list[int]:
    """Run the stage once for each fate, each time as soon as the life before has ended; exit codes."""
    codes = []
    for incarnation, (step, count) in enumerate(fates):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.wire.channel_stage", to_text(endpoint.address), str(incarnation), step, str(count)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            endpoint.connect("M", from_text((await process.stdout.readline()).decode()))
            codes.append(await process.wait())
        finally:
            if process.returncode is None:
                process.kill()
    return codes


def test_a_process_that_is_stopped_for_longer_than_the_heartbeat_loses_and_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is on another machine: connections to it break and are made again while it sleeps, and when it goes on."""
    run, reconnections = run_id(os.getpid()), list[str]()
    monkeypatch.setattr(connection, "BEAT_EVERY_S", BEATS[0])
    monkeypatch.setattr(connection, "SILENT_S", BEATS[1])

    async def main() -> None:
        endpoint = Endpoint("A", run_id=run, driver_pid=os.getpid(), transport=TCP)
        away = to_text(via("tcp", await endpoint.open()))
        endpoint.on("done", lambda host, body: None)
        reconnected = endpoint._compare_lanes
        monkeypatch.setattr(endpoint, "_compare_lanes", lambda host: (reconnections.append(host), reconnected(host)))
        edge, inbox = OutEdge([endpoint.sender(INTO)], SHARE), Inbox("sink.in")
        inbox.add_lane(endpoint.receiver(OUT))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.wire.channel_stage", away, "0", "take", "20", to_text(TCP), stdout=-1
        )
        assert process.stdout is not None
        try:
            endpoint.connect("M", via("tcp", from_text((await process.stdout.readline()).decode())))
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                tasks.create_task(send_all(edge))
                found = tasks.create_task(take_all(inbox))
                await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
                await asyncio.sleep(4 * sum(BEATS))  # under test: it sleeps for longer than connections may be silent
                process.send_signal(signal.SIGCONT)
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert reconnections, "the connection to it was replaced"
        assert sorted(found.result()) == list(range(NUM_ITEMS))
        assert edge.unacked() == []
        await endpoint.close()

    try:
        asyncio.run(main())
    finally:
        remove_run(run)


@pytest.mark.parametrize(
    "deaths",
    [
        [("take", 1)],
        [("take", 30), ("take", 9)],
        [("send", 1), ("send", 40)],
        [("ack", 1), ("ack", 25)],
        [("send", 100), ("ack", 1), ("take", 1), ("send", 8)],
    ],
    ids=lambda deaths: "-".join(f"{step}{count}" for step, count in deaths),
)
def test_a_stage_that_is_killed_loses_and_repeats_nothing(deaths: list[tuple[str, int]]) -> None:
    run = run_id(os.getpid())

    async def main() -> None:
        endpoint = Endpoint("A", run_id=run, driver_pid=os.getpid())
        await endpoint.open()
        endpoint.on("done", lambda host, body: None)
        edge, inbox = OutEdge([endpoint.sender(INTO)], SHARE), Inbox("sink.in")
        inbox.add_lane(endpoint.receiver(OUT))
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(send_all(edge))
            found = tasks.create_task(take_all(inbox))
            codes = tasks.create_task(lives(endpoint, [*deaths, ("none", 0)]))
        assert codes.result() == [-9] * len(deaths) + [0]
        assert sorted(found.result()) == list(range(NUM_ITEMS))
        assert edge.unacked() == []
        await endpoint.close()

    try:
        asyncio.run(main())
    finally:
        remove_run(run)
    assert not list(Path("/dev/shm").glob(f"flowrl-{run_prefix(run, os.getpid())}-*"))

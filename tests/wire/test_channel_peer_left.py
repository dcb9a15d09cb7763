"""A peer that the run goes on without: what is told of it keeps its order, and nothing is kept for it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from flowrl.errors import LaneFailed
from flowrl.runtime.process.engine import ProcessEngine
from tests.wire.channel_rig import opened, play, via

HOSTS = ("driver", "core", "gone")


async def joined(transport: str) -> list[Any]:
    """An endpoint for each of HOSTS, connected to the others."""
    ends = [await opened(host, transport) for host in HOSTS]
    for one in ends:
        for other in ends:
            if one is not other:
                one.connect(other.host, via(transport, other.address))
    return ends


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_what_comes_with_the_loss_of_a_peer_and_after_it_stays_in_order(transport: str) -> None:
    """In one multipart: a note, the loss, another note. In the next one a third, which has arrived meanwhile."""

    async def body() -> None:
        driver, core, _ = await joined(transport)
        engine = ProcessEngine.__new__(ProcessEngine)
        engine.endpoint, engine.replicas = core, {}
        heard: list[int] = []
        core.on("lost", engine._drop_lost_peer)
        core.on("note", lambda host, number: heard.append(number))
        core.on("ask", lambda host, body: core.has_left("gone"))
        assert await driver.request("core", "ask") is False
        driver.notify("core", "note", 0)
        driver.notify("core", "lost", {"host": "gone", "reason": "died", "replica_ids": []})
        driver.notify("core", "note", 1)
        driver._flusher.flush_dirty()
        driver.notify("core", "note", 2)
        driver._flusher.flush_dirty()
        time.sleep(0.2)  # noqa: ASYNC251 (core is busy until all of it has arrived)
        async with asyncio.timeout(10):
            assert await driver.request("core", "ask") is True
        assert heard == [0, 1, 2]

    play(body())


def test_nothing_is_kept_for_a_peer_that_has_left() -> None:
    async def body() -> None:
        driver, core, gone = await joined("tcp")
        arrived = asyncio.Event()
        core.on("note", lambda host, body: arrived.set())
        gone.notify("core", "note")
        await arrived.wait()
        core.notify("gone", "note", "unconfirmed")
        core.peer_left("gone", "died")
        peer = core.connection("gone")
        for _ in range(5):
            arrived.clear()
            driver.notify("core", "note")
            await arrived.wait()
            core.notify("gone", "note", 1)
            core._flusher.send_confirmations()
        assert (peer.unflushed, peer._pending, peer.numbers.unconfirmed_frames()) == ([], [], [])
        with pytest.raises(LaneFailed, match="died"):
            await core.request("gone", "ask")
        await core.arrived(["gone"])

    play(body())

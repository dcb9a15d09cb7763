"""How a cut is taken through the running hosts, and put back; what a cut is, `flowrl.runtime.checkpoint` explains.

Waits: for turns to end or stand in a wait, and for what is under way to arrive.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.runtime import checkpoint

if TYPE_CHECKING:
    from flowrl.runtime.driver import Driver

ASKED_FOR = 50
"""Rounds in which hosts are asked whether anything moves at all; after them, whether messages do."""


class Cutter:
    """Cuts of one run. The trainers stand at a batch's end and admission is closed whenever one is taken."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def take(self, version: int, directory: Path) -> None:
        """Freeze the graph, write everything below `directory`, and let it go on."""
        driver, cut = self._driver, checkpoint.Cut()
        generators = self._with_method("snapshot")
        for prefixes in await asyncio.gather(*(driver.on_node(track, "snapshot") for track in generators)):
            cut.prefixes.update(prefixes)
        await driver.ask_hosts("freeze")
        await self._until_still()
        await asyncio.gather(*(self._take_from(host, cut) for host in driver.hosts))
        await asyncio.gather(
            *(driver.on_node(track, "checkpoint", path=str(directory)) for track in self._with_method("checkpoint"))
        )
        driver.books.commit()
        driver.books.backup(directory)
        checkpoint.write_state(directory, cut, {"version": version})
        await driver.ask_hosts("thaw")
        await asyncio.gather(*(driver.on_node(track, "resume") for track in generators))

    async def _take_from(self, host: str, cut: checkpoint.Cut) -> None:
        part = await self._driver.ask(host, "snapshot")
        while page := await self._driver.ask(host, "kept"):
            cut.messages += checkpoint.unpage(page)
        cut.add(part)

    async def _until_still(self) -> None:
        """Until nothing is under way between any two hosts: a credit or an ack may call for another when it arrives.

        The hosts are frozen, so that comes to an end. Requests made outside of turns may go on for ever; the
        cut holds nothing of them, and they are waited for ASKED_FOR rounds only.
        """
        hosts = list(self._driver.hosts)
        before: list[list[int]] = []
        for number in itertools.count():
            moved = await self._driver.ask_hosts("settle", lambda host: {"peers": hosts})
            if moved == before or (number >= ASKED_FOR and [m for m, _ in moved] == [m for m, _ in before]):
                return
            before = moved

    async def put_back(self, directory: Path) -> int:
        """Give states and messages of a checkpoint to the hosts, before their nodes run. Returns how many messages."""
        driver, state = self._driver, checkpoint.read_state(directory)
        driver.books.kept(*checkpoint.made(state["messages"]))
        messages: dict[str, list[checkpoint.Saved]] = {host: [] for host in driver.hosts}
        for producer, edge, consumer, envelope in state["messages"]:
            name, replica = producer.split("/")
            index = int(replica) % len(driver.replicas(name))
            track = f"{name}/{index}"
            messages[driver.job.plan.host_of(track).name].append((track, edge, consumer, envelope))
        await driver.ask_hosts("restore", lambda host: {name: state[name] for name in ("sent", "cursors", "states")})
        await asyncio.gather(*(self._give(host, kept) for host, kept in messages.items()))
        return len(state["messages"])

    async def _give(self, host: str, kept: list[checkpoint.Saved]) -> None:
        for page in checkpoint.pages(kept):
            await self._driver.ask(host, "send again", page)

    def _with_method(self, method: str) -> list[str]:
        """The replicas of the nodes that have it."""
        nodes = self._driver.job.graph.nodes
        return [track for name, node in nodes.items() if hasattr(node, method) for track in self._driver.replicas(name)]

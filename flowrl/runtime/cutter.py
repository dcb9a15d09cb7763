"""How a cut is taken through the running hosts, and put back; what a cut is, `flowrl.runtime.checkpoint` explains.

Waits: for turns to end or stand in a wait, for what is under way to arrive, and for the threads that write.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flowrl.runtime import checkpoint, resume
from flowrl.runtime.best import Best
from flowrl.runtime.ledger_file import LEDGER

if TYPE_CHECKING:
    from flowrl.runtime.driver import Driver

T = TypeVar("T")

ASKED_FOR = 50
"""Rounds in which hosts are asked whether anything moves at all; after them, whether messages do."""


class Cutter:
    """Cuts of one run. The trainers stand at a batch's end and admission is closed whenever one is taken."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def write(self, version: int, best: Best | None) -> str:
        """Make a cut the newest checkpoint, and `best` what best.json says; returns the checkpoint's name."""
        job = self._driver.job
        final = job.run_dir / "checkpoints" / f"step_{version:06d}"
        temporary = final.with_name(f".{final.name}.tmp")
        named = best or self._driver.best

        def publish(stop: threading.Event) -> None:
            checkpoint.publish(temporary, final, {"step": version, "ledger_head": head}, stop)
            if best is not None:
                best.write(job.run_dir)
            checkpoint.prune(final.parent, job.options.keep, spared=() if named is None else (named.step,))

        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            head = await self.take(resume.facts(version, job.plan, job.options.seed), temporary)
            await to_its_end(publish)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final.name

    async def take(self, facts: Mapping[str, Any], directory: Path) -> str:
        """Freeze the graph, let it go on, and write all that it was, with `facts`, below `directory`.

        What nodes write themselves they write while everything stands. Returns the head of the ledger there.
        """
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
        frozen, versions = driver.books.frozen(), driver.tickets.versions
        head = driver.books.ledger.head
        await driver.ask_hosts("thaw")
        await asyncio.gather(*(driver.on_node(track, "resume") for track in generators))

        def write(stop: threading.Event) -> None:
            frozen.copy(directory / LEDGER)
            checkpoint.write_state(directory, cut, {**facts, "versions": versions})

        await to_its_end(write)
        return head

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

    async def put_back(self, state: Mapping[str, Any]) -> None:
        """Give states and messages of a checkpoint (`read_state`) to the hosts, before their nodes run."""
        driver = self._driver
        messages: dict[str, list[checkpoint.Saved]] = {host: [] for host in driver.hosts}
        for producer, edge, consumer, envelope in state["messages"]:
            name, replica = producer.split("/")
            index = int(replica) % len(driver.replicas(name))
            track = f"{name}/{index}"
            messages[driver.job.plan.host_of(track).name].append((track, edge, consumer, envelope))
        states = {track: checkpoint.beside(data) for track, data in state["states"].items()}
        told = {"sent": state["sent"], "cursors": state["cursors"], "states": states}
        await driver.ask_hosts("restore", lambda host: told)
        await asyncio.gather(*(self._give(host, kept) for host, kept in messages.items()))

    async def _give(self, host: str, kept: list[checkpoint.Saved]) -> None:
        for page in checkpoint.pages(kept):
            await self._driver.ask(host, "send again", page)

    def _with_method(self, method: str) -> list[str]:
        """The replicas of the nodes that have it."""
        nodes = self._driver.job.graph.nodes
        return [track for name, node in nodes.items() if hasattr(node, method) for track in self._driver.replicas(name)]


async def to_its_end(work: Callable[[threading.Event], T]) -> T:
    """What `work(stop)` returns, in a thread. Cancelled, this sets `stop`, and ends when the thread has ended."""
    stop = threading.Event()
    # No task, but the executor's own future: the end of a loop cancels tasks, which does not end their threads.
    thread = asyncio.get_running_loop().run_in_executor(None, work, stop)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        stop.set()
        while not thread.done():
            with suppress(asyncio.CancelledError):  # once more is no reason to leave it writing
                await asyncio.wait((thread,))
        thread.exception()  # nobody waits for what it says now
        raise

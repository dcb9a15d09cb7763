"""Takes snapshots of the running hosts and restores them; `checkpoints.checkpoint` defines what a snapshot is.

If a host is lost while the snapshot is collected, the other hosts resume, and the snapshot is taken again: what the
lost host has not reported is reported by other hosts, once they know of the loss and are not paused.

Waits: for invocations to end or to wait, for messages in transit to arrive, and for the threads that write.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flowrl.graph.node import Node
from flowrl.runtime.checkpoints import checkpoint
from flowrl.runtime.checkpoints.rundir import Best
from flowrl.runtime.driver.processes.orders import Orders
from flowrl.runtime.driver.saving.shared_devices import SharedDevices
from flowrl.runtime.ledger.accounting import Accounting

T = TypeVar("T")

ASKED_FOR = 50
"""Number of rounds in which both messages and waits of the hosts must stop moving; later only messages must."""


class Snapshotter:
    """Snapshots of one run. While one is taken, the trainers wait at a batch's end and admission is closed.

    `halted` nodes do nothing until the snapshot is written, so their files may be written after the other nodes resume.
    """

    def __init__(
        self,
        orders: Orders,
        nodes: Mapping[str, Node],
        run_dir: Path,
        halted: Collection[str] = (),
        *,
        keep: int,
        shared: SharedDevices | None = None,
    ) -> None:
        self._orders = orders
        self._shared = shared
        self._nodes = nodes
        self._run_dir = run_dir
        self._keep = keep
        self._halted = frozenset(halted)

    async def write(
        self,
        facts: Mapping[str, Any],
        accounting: Accounting,
        *,
        best: Best | None,
        spared: Collection[int],
        unchanged: bool = False,
    ) -> str:
        """Write a snapshot as the newest checkpoint, and `best` to best.json; returns the checkpoint's name.

        The newest `keep` checkpoints stay, including this one, and so do those of the `spared` steps; `keep` 0 keeps
        all. If the halted nodes are `unchanged` since the checkpoint of this step, their files are taken from there.
        """
        version = facts["version"]
        final = self._run_dir / "checkpoints" / f"step_{version:06d}"
        temporary = final.with_name(f".{final.name}.tmp")

        def publish(stop: threading.Event) -> None:
            checkpoint.publish(temporary, final, {"step": version, "ledger_head": head}, stop)
            if best is not None:
                best.write(self._run_dir)
            checkpoint.prune(final.parent, self._keep, spared=spared)

        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            async with self._shared.for_trainers() if self._shared is not None else nullcontext():
                head = await self.take(facts, temporary, accounting, unchanged_in=final if unchanged else None)
            await to_its_end(publish)
            accounting.ledger.published(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final.name

    async def take(
        self,
        facts: Mapping[str, Any],
        directory: Path,
        accounting: Accounting,
        *,
        unchanged_in: Path | None = None,
    ) -> str:
        """Pause the graph, collect its state, resume it, and write the state and `facts` below `directory`.

        Nodes write their own files: halted nodes after the others have resumed, all other nodes while the graph is
        paused. If a checkpoint is given as `unchanged_in`, the files of the halted nodes are those that it has.
        Returns the head of the ledger in the snapshot.
        """
        num_lost = self._orders.num_lost
        snapshot = await self._collected(directory)
        while self._orders.num_lost != num_lost:
            num_lost = self._orders.num_lost
            await self._go_on()
            snapshot = await self._collected(directory)
        with accounting.as_of_now() as ledger:
            versions, head = accounting.tickets.versions, accounting.ledger.head
            await self._go_on()

            def write(stop: threading.Event) -> None:
                ledger.write(directory)
                checkpoint.write_state(directory, snapshot, {**facts, "versions": versions})

            await asyncio.gather(*(self._take_kept(host, snapshot) for host in self._orders.hosts))
            await to_its_end(write)
            if unchanged_in is None or not await to_its_end(partial(checkpoint.link, unchanged_in, directory)):
                await self._files(directory, halted=True)
            return head

    async def _collected(self, directory: Path) -> checkpoint.Snapshot:
        """Pause the graph and collect its state, except what `_take_kept` takes."""
        orders, snapshot = self._orders, checkpoint.Snapshot()
        for prefixes in await orders.on_nodes(self._with_method("snapshot"), "snapshot"):
            snapshot.prefixes.update(prefixes)
        await orders.ask_all("pause")
        await self._until_still()
        for part in await orders.ask_all("snapshot"):
            snapshot.add(part)
        await self._files(directory, halted=False)
        return snapshot

    async def _go_on(self) -> None:
        """Resume the graph."""
        await self._orders.ask_all("resume")
        await self._orders.on_nodes(self._with_method("snapshot"), "resume")

    async def _files(self, directory: Path, *, halted: bool) -> None:
        """Have the halted nodes, or the others, write their own files."""
        chosen = [
            replica_id
            for replica_id in self._with_method("checkpoint")
            if (replica_id.partition("/")[0] in self._halted) == halted
        ]
        await self._orders.on_nodes(chosen, "checkpoint", path=str(directory))

    async def _take_kept(self, host: str, snapshot: checkpoint.Snapshot) -> None:
        """Take the messages and records that the host has set aside for this snapshot; the host runs meanwhile."""
        while page := await self._orders.page(host, "kept"):
            snapshot.take(checkpoint.unpage(page))

    async def _until_still(self) -> None:
        """Wait until nothing is in transit between any two hosts: an arriving credit or ack may trigger another.

        The hosts are paused, so this traffic ends. Requests made outside of invocations may continue forever. The
        snapshot contains nothing of such requests, so the wait for them is limited to ASKED_FOR rounds.
        """
        before: list[list[int]] = []
        for number in itertools.count():
            moved = await self._orders.ask_all("quiesce", lambda host: {"peers": list(self._orders.hosts)})
            if moved == before or (number >= ASKED_FOR and [m for m, _ in moved] == [m for m, _ in before]):
                return
            before = moved

    async def put_back(self, state: Mapping[str, Any]) -> None:
        """Send the states and messages of a checkpoint (`read_state`) to the hosts, before their nodes run."""
        orders = self._orders
        messages: dict[str, list[checkpoint.SavedMessage]] = {host: [] for host in orders.hosts}
        for producer, edge, consumer, envelope in state["messages"]:
            name, replica = producer.split("/")
            index = int(replica) % len(orders.replicas(name))
            replica_id = f"{name}/{index}"
            messages[orders.host_of(replica_id)].append((replica_id, edge, consumer, envelope))
        await orders.ask_all("restore", lambda host: self._kept_of(host, state))
        await asyncio.gather(*(self._give(host, kept) for host, kept in messages.items()))

    def _kept_of(self, host: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """The states and cursors of the replicas in that host, and all ids in "sent", whose sender is not known."""
        mine = self._orders.replicas_in(host)
        return {
            "sent": state["sent"],
            "cursors": {out: cursor for out, cursor in state["cursors"].items() if out.partition(" ")[0] in mine},
            "states": {name: checkpoint.beside(state["states"][name]) for name in mine if name in state["states"]},
        }

    async def _give(self, host: str, kept: list[checkpoint.SavedMessage]) -> None:
        for page in checkpoint.pages(kept):
            await self._orders.ask(host, "send again", page)

    def _with_method(self, method: str) -> list[str]:
        """The replicas of all nodes that have this method."""
        names = [name for name, node in self._nodes.items() if hasattr(node, method)]
        return [replica_id for name in names for replica_id in self._orders.replicas(name)]


async def to_its_end(work: Callable[[threading.Event], T]) -> T:
    """Run `work(stop)` in a thread; returns its result. A cancel sets `stop` and waits until the thread has ended."""
    stop = threading.Event()
    # Use the executor's future, not a task: a closing loop cancels tasks, and that does not end their threads.
    thread = asyncio.get_running_loop().run_in_executor(None, work, stop)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        stop.set()
        while not thread.done():
            with suppress(asyncio.CancelledError):  # a second cancel must not leave the thread writing
                await asyncio.wait((thread,))
        thread.exception()  # mark its exception as retrieved: nothing else awaits it
        raise

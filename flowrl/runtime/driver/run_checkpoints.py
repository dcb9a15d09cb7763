"""The checkpoints of one run: when one is due, what it waits for, how it is taken, and which is the best so far.

`RunCheckpoints` decides and writes, `Snapshotter` takes a snapshot of the running processes and restores one;
`checkpoints.snapshots` defines what a snapshot is. If a process is lost while the snapshot is collected, the others
resume, and the snapshot is taken again: what the lost one has not reported is reported by others, once they know of the
loss and are not paused.

All ranks of a gang must have finished the same batches. The main trainer, and trainers that train the same batches,
wait at a barrier (`locks.BatchEnd`). The other trainers count their own versions, so no version of the main trainer
tells which batch they are at. They are halted: each rank's gate closes, and a rank that has taken fewer batches than
another rank also takes the missing batches. All ranks of a gang are sent their parts of a batch together, so a missing
part has arrived or is in transit.

Time-shared GPUs are lent to the trainers, one after the other, to export their weights. A trainer gets its GPU when the
node that has it gives it back, at the end of that node's last open invocation. During a pause, that end might never
come, because an invocation may wait for something that is paused. So the other nodes give their GPUs back first, while
the graph still runs: they take nothing new, and get the GPUs again after the checkpoint.

Waits: for the missing parts of a batch, for the open invocations of nodes that have a GPU that a trainer also uses, for
invocations to end or to wait, for messages in transit to arrive, and for the threads that write.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flowrl.errors import FlowrlError
from flowrl.graph.node import Node
from flowrl.runtime.checkpoints import checkpoint, resume, snapshots
from flowrl.runtime.checkpoints.rundir import Best, convert_write_errors, read_best, sync_records
from flowrl.runtime.driver.job import Job, RunOptions, RunState
from flowrl.runtime.driver.locks import Locks
from flowrl.runtime.driver.lookout import Lookout
from flowrl.runtime.driver.run_processes import Orders
from flowrl.runtime.driver.run_records import RunRecords
from flowrl.runtime.ledger.accounting import Accounting
from flowrl.runtime.telemetry.view import View

T = TypeVar("T")

ASKED_FOR = 50
"""Number of rounds in which both messages and waits of the processes must stop moving; later only messages must."""


class Snapshotter:
    """Snapshots of one run. While one is taken, the trainers wait at a batch's end and admission is closed.

    `halted` nodes do nothing until the snapshot is written, so their files may be written after the other nodes resume.
    Inside `lend()`, time-shared GPUs go only to trainers.
    """

    def __init__(
        self,
        orders: Orders,
        nodes: Mapping[str, Node],
        run_dir: Path,
        halted: Collection[str] = (),
        *,
        keep: int,
        lend: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._orders = orders
        self._lend = lend
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
            checkpoint.publish_checkpoint(temporary, final, {"step": version, "ledger_head": head}, stop)
            if best is not None:
                best.write(self._run_dir)
            checkpoint.prune_checkpoints(final.parent, self._keep, spared=spared)

        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            async with self._lend():
                head = await self.take(facts, temporary, accounting, unchanged_in=final if unchanged else None)
            await to_its_end(publish)
            accounting.ledger.note_published(final)
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
        snapshot = await self._collect_state(directory)
        while self._orders.num_lost != num_lost:
            num_lost = self._orders.num_lost
            await self._resume_graph()
            snapshot = await self._collect_state(directory)
        with accounting.as_of_now() as ledger:
            versions, head = accounting.tickets.versions, accounting.ledger.head
            await self._resume_graph()

            def write(stop: threading.Event) -> None:
                ledger.write(directory)
                snapshots.write_state(directory, snapshot, {**facts, "versions": versions})

            await asyncio.gather(*(self._take_kept(host, snapshot) for host in self._orders.processes))
            await to_its_end(write)
            if unchanged_in is None or not await to_its_end(partial(checkpoint.link_files, unchanged_in, directory)):
                await self._write_node_files(directory, halted=True)
            return head

    async def _collect_state(self, directory: Path) -> snapshots.Snapshot:
        """Pause the graph and collect its state, except what `_take_kept` takes."""
        orders, snapshot = self._orders, snapshots.Snapshot()
        for prefixes in await orders.on_nodes(self._replicas_with("snapshot"), "snapshot"):
            snapshot.prefixes.update(prefixes)
        await orders.ask_all("pause")

        # Wait until nothing is in transit between any two processes: an arriving credit or ack may trigger another. The
        # processes are paused, so this traffic ends. Requests made outside of invocations may continue forever. The
        # snapshot contains nothing of such requests, so the wait for them is limited to ASKED_FOR rounds.
        before: list[list[int]] = []
        for number in itertools.count():
            moved = await orders.ask_all("quiesce", lambda host: {"peers": list(orders.processes)})
            if moved == before or (number >= ASKED_FOR and [m for m, _ in moved] == [m for m, _ in before]):
                break
            before = moved

        for part in await orders.ask_all("snapshot"):
            snapshot.add_part(part)
        await self._write_node_files(directory, halted=False)
        return snapshot

    async def _resume_graph(self) -> None:
        """Resume the graph."""
        await self._orders.ask_all("resume")
        await self._orders.on_nodes(self._replicas_with("snapshot"), "resume")

    async def _write_node_files(self, directory: Path, *, halted: bool) -> None:
        """Have the halted nodes, or the others, write their own files."""
        chosen = [
            replica_id
            for replica_id in self._replicas_with("checkpoint")
            if (replica_id.partition("/")[0] in self._halted) == halted
        ]
        await self._orders.on_nodes(chosen, "checkpoint", path=str(directory))

    async def _take_kept(self, host: str, snapshot: snapshots.Snapshot) -> None:
        """Take the messages and records that the process has set aside for this snapshot; it runs meanwhile."""
        while page := await self._orders.ask_for_page(host, "kept"):
            snapshot.add_saved(snapshots.unpack_page(page))

    async def put_back(self, state: Mapping[str, Any]) -> None:
        """Send the states and messages of a checkpoint (`read_state`) to the processes, before their nodes run."""
        orders = self._orders
        messages: dict[str, list[snapshots.SavedMessage]] = {host: [] for host in orders.processes}
        for producer, edge, consumer, envelope in state["messages"]:
            name, replica = producer.split("/")
            index = int(replica) % len(orders.replicas(name))
            replica_id = f"{name}/{index}"
            messages[orders.host_of(replica_id)].append((replica_id, edge, consumer, envelope))
        for _, port, consumer, envelope in state["asked"]:
            for replica_id in orders.replicas(port.partition(".")[0]):  # whichever of them takes the item
                messages[orders.host_of(replica_id)].append((replica_id, port, consumer, envelope))

        def states_in(host: str) -> dict[str, Any]:
            """What the replicas there had; all ids in "sent", because nobody knows who has sent them."""
            mine = next(one.nodes for one in orders.plan.hosts if one.name == host)
            return {
                "sent": state["sent"],
                "cursors": {out: cursor for out, cursor in state["cursors"].items() if out.partition(" ")[0] in mine},
                "states": {name: snapshots.as_frame(state["states"][name]) for name in mine if name in state["states"]},
            }

        async def send_messages(host: str) -> None:
            for page in snapshots.pack_pages(messages[host]):
                await orders.ask(host, "send again", page)

        await orders.ask_all("restore", states_in)
        await asyncio.gather(*map(send_messages, messages))

    def _replicas_with(self, method: str) -> list[str]:
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


@asynccontextmanager
async def lend_to_trainers(locks: Locks, orders: Orders) -> AsyncIterator[None]:
    """Inside, the GPUs that trainers share with other nodes go only to trainers."""
    trainers = set(orders.plan.trainers)
    sharing = [host for host in orders.plan.hosts if host.lease and host.gpus]
    nodes = {host.name: {replica.partition("/")[0] for replica in host.nodes} for host in sharing}
    training = {host.lease: set[str]() for host in sharing}
    for host in sharing:
        if trainers & nodes[host.name]:
            training[host.lease].add(host.name.split("/")[0])
    others = [host for host in sharing if training[host.lease] and not trainers & nodes[host.name]]
    replicas = [replica for host in others for replica in host.nodes]
    try:
        await asyncio.gather(*(orders.set_gate(replica, "devices", open_=False) for replica in replicas))
        async with AsyncExitStack() as stack:
            for lease, parties in training.items():
                if parties:
                    await stack.enter_async_context(locks.reserve_lock(lease, parties))
            yield
    finally:
        await asyncio.gather(*(orders.set_gate(replica, "devices", open_=True) for replica in replicas))


@asynccontextmanager
async def halt_gangs(orders: Orders, gangs: Sequence[str]) -> AsyncIterator[None]:
    """Inside, no gang of these trainers starts a batch, and all ranks of a gang have started the same batches."""
    ranks_of = [orders.replicas(name) for name in gangs]
    try:
        await asyncio.gather(*(_halt_gang(orders, ranks) for ranks in ranks_of))
        yield
    finally:
        await asyncio.gather(*(orders.set_gate(rank, "halt", open_=True) for ranks in ranks_of for rank in ranks))


async def _halt_gang(orders: Orders, ranks: Sequence[str]) -> None:
    taken = await asyncio.gather(*(orders.set_gate(rank, "halt", open_=False) for rank in ranks))
    wanted = {port: max(counts[port] for counts in taken) for port in taken[0]}
    await asyncio.gather(*(orders.reach_counts(rank, wanted) for rank in ranks))


RANKS_APART = 8
"""Largest number of batches between the ranks of a gang."""
TOLD_FROM_S = 1.0
"""Checkpoints that take at least this long report their cost."""


class CheckpointClock:
    """Asked at the end of each batch, by each rank."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._soon = False
        self._answers: dict[int, bool] = {}
        self._saved_s = time.monotonic()
        """When the last checkpoint was complete; at first, when the run began."""

    def is_due(self, version: int) -> bool:
        """Whether a checkpoint follows the batch that made `version`.

        The answer to the first rank that asks holds for all ranks, because they have to wait together. No checkpoint
        follows the last step, because the end of the run makes one.
        """
        if version not in self._answers:
            self._answers = {other: due for other, due in self._answers.items() if other > version - RANKS_APART}
            every, minutes = self._options.save_every, self._options.save_minutes
            by_step = every > 0 and version % every == 0
            by_time = minutes > 0 and time.monotonic() - self._saved_s >= 60 * minutes
            self._answers[version] = version != self._options.steps and (by_step or by_time or self._soon)
        return self._answers[version]

    def make_due(self) -> None:
        """Make a checkpoint due after the next batch."""
        self._soon = True

    def note_saved(self, began_s: float) -> str:
        """Note that a checkpoint that was started at `began_s` is complete. Returns its cost in words."""
        now_s = time.monotonic()
        took_s, since_s = now_s - began_s, now_s - self._saved_s
        self._saved_s, self._soon = now_s, False
        share = f", {took_s / since_s:.1%} of the time since the one before" if took_s >= TOLD_FROM_S else ""
        return f"in {took_s:.1f} s{share}"


class RunCheckpoints:
    """`fail(error)` ends the run with `error`, which an error that follows from it would hide."""

    def __init__(
        self,
        job: Job,
        orders: Orders,
        lend: Callable[[], AbstractAsyncContextManager[None]],
        lookout: Lookout,
        records: RunRecords,
        state: RunState,
        view: View,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.best = read_best(job.run_dir, newest_step=job.start_version)
        self._job = job
        self._orders = orders
        self._lookout = lookout
        self._records = records
        self._state = state
        self._view = view
        self._fail = fail
        self.clock = CheckpointClock(job.options)
        self._resumed = dict(job.start_versions) if job.resume_from is not None else None
        self._written: dict[str, int] | None = None
        """Trainer -> its version in the newest checkpoint that this run has written; None: it has written none."""
        plan, nodes = job.plan, job.graph.nodes
        self._own_clocks = [name for name in plan.own_clock if nodes[name].gang]
        """The trainers that have to be halted; the others wait at the end of a batch."""
        at_barrier = [name for name in plan.trainers if name not in plan.own_clock]
        self._snapshotter = Snapshotter(
            orders, nodes, job.run_dir, (*at_barrier, *self._own_clocks), keep=job.options.keep, lend=lend
        )

    async def put_back(self) -> tuple[list[Any], list[Any]]:
        """Send the processes the content of the checkpoint that the run resumes. Returns its messages, and replies to
        what was asked for them."""
        if self._job.resume_from is None:
            return [], []
        state = await asyncio.to_thread(snapshots.read_state, self._job.resume_from)
        await self._snapshotter.put_back(state)
        return state["messages"], state["asked"]

    async def keep_best(self, best: Best) -> None:
        """Write a checkpoint of the current version, which is the best so far; the trainers take no batch."""
        await self.at_batch_end(self._state.version, best=best)
        self._view.progress("driver", f"best so far: {best.score:.3f} at step {best.step}")

    async def at_batch_end(self, version: int, *, best: Best | None = None) -> None:
        """Write a checkpoint while the trainers wait at the end of the batch that made `version`."""
        accounting = self._records.accounting
        accounting.tickets.pause("checkpoint")
        try:
            async with halt_gangs(self._orders, self._own_clocks):
                await self.write_checkpoint(version, best=best)
        except FlowrlError as error:
            self._fail(error)  # the trainer that waits for the checkpoint is not the cause
            raise
        finally:
            accounting.resume_admission("checkpoint")

    async def write_trained(self, version: int) -> None:
        """Write a checkpoint after the last batch, unless the newest checkpoint has these weights."""
        if self._records.accounting.tickets.versions not in (self._written, self._resumed):
            await self.write_checkpoint(version)

    async def write_checkpoint(self, version: int, *, best: Best | None = None) -> None:
        """Write one consistent snapshot through the graph, and make it the newest checkpoint.

        The weights are not written again if this run has written them in its newest checkpoint.
        The metrics lines of all steps until then are written first: a run that resumes from here never writes them.
        """
        start_s = time.monotonic()
        with self._lookout.note_work(f"the checkpoint of step {version}"), convert_write_errors(self._job.run_dir):
            await self._records.wait_until_written()
            await asyncio.to_thread(sync_records, self._job.run_dir)
            versions = self._records.accounting.tickets.versions
            facts = resume.resume_facts(version, self._job.plan, self._job.options.seed)
            named = best or self.best
            spared = () if named is None else (named.step,)
            name = await self._snapshotter.write(
                facts, self._records.accounting, best=best, spared=spared, unchanged=versions == self._written
            )
        self.best, self._written = best or self.best, versions
        self._view.progress("driver", f"checkpoint {name} {self.clock.note_saved(start_s)}")

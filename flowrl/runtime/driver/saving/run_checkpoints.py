"""The checkpoints of one run: when one is due, what it waits for, and which is the best so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from flowrl.errors import FlowrlError
from flowrl.runtime.checkpoints import checkpoint, resume
from flowrl.runtime.checkpoints.rundir import Best, read_best, sync_records, writing
from flowrl.runtime.driver.job import Job
from flowrl.runtime.driver.processes.lookout import Lookout
from flowrl.runtime.driver.processes.orders import Orders
from flowrl.runtime.driver.run_records import RunRecords
from flowrl.runtime.driver.run_state import RunState
from flowrl.runtime.driver.saving.checkpoint_clock import CheckpointClock
from flowrl.runtime.driver.saving.halt import halted
from flowrl.runtime.driver.saving.shared_devices import SharedDevices
from flowrl.runtime.driver.saving.snapshotter import Snapshotter
from flowrl.runtime.telemetry.view import View


class RunCheckpoints:
    """`fail(error)` ends the run with `error`, which an error that follows from it would hide."""

    def __init__(
        self,
        job: Job,
        orders: Orders,
        shared: SharedDevices,
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
        self._clock = CheckpointClock(job.options)
        self._resumed = dict(job.start_versions) if job.resume_from is not None else None
        self._written: dict[str, int] | None = None
        """Trainer -> its version in the newest checkpoint that this run has written; None: it has written none."""
        plan, nodes = job.plan, job.graph.nodes
        self._own_clocks = [name for name in plan.own_clock if nodes[name].gang]
        """The trainers that have to be halted; the others wait at the end of a batch."""
        at_barrier = [name for name in plan.trainers if name not in plan.own_clock]
        self._snapshotter = Snapshotter(
            orders, nodes, job.run_dir, (*at_barrier, *self._own_clocks), keep=job.options.keep, shared=shared
        )

    def is_due(self, version: int) -> bool:
        """Whether a checkpoint follows the batch that made `version`."""
        return self._clock.is_due(version)

    def soon(self) -> None:
        """Make a checkpoint due after the next batch."""
        self._clock.soon()

    async def put_back(self) -> list[Any]:
        """Send the hosts the content of the checkpoint that the run resumes. Returns its messages, or []."""
        if self._job.resume_from is None:
            return []
        state = await asyncio.to_thread(checkpoint.read_state, self._job.resume_from)
        await self._snapshotter.put_back(state)
        messages: list[Any] = state["messages"]
        return messages

    async def keep(self, best: Best) -> None:
        """Write a checkpoint of the current version, which is the best so far; the trainers take no batch."""
        await self.at_batch_end(self._state.version, best=best)
        self._view.progress("driver", f"best so far: {best.score:.3f} at step {best.step}")

    async def at_batch_end(self, version: int, *, best: Best | None = None) -> None:
        """Write a checkpoint while the trainers wait at the end of the batch that made `version`."""
        accounting = self._records.accounting
        accounting.pause_admission("checkpoint")
        try:
            async with halted(self._orders, self._own_clocks):
                await self.write(version, best=best)
        except FlowrlError as error:
            self._fail(error)  # the trainer that waits for the checkpoint is not the cause
            raise
        finally:
            accounting.resume_admission("checkpoint")

    async def write_trained(self, version: int) -> None:
        """Write a checkpoint after the last batch, unless the newest checkpoint has these weights."""
        if self._records.accounting.tickets.versions not in (self._written, self._resumed):
            await self.write(version)

    async def write(self, version: int, *, best: Best | None = None) -> None:
        """Write one consistent snapshot through the graph, and make it the newest checkpoint.

        The weights are not written again if this run has written them in its newest checkpoint.
        The metrics lines of all steps until then are written first: a run that resumes from here never writes them.
        """
        start_s = time.monotonic()
        with self._lookout.doing(f"the checkpoint of step {version}"), writing(self._job.run_dir):
            await self._records.settled()
            await asyncio.to_thread(sync_records, self._job.run_dir)
            versions = self._records.accounting.tickets.versions
            facts = resume.facts(version, self._job.plan, self._job.options.seed)
            named = best or self.best
            spared = () if named is None else (named.step,)
            name = await self._snapshotter.write(
                facts, self._records.accounting, best=best, spared=spared, unchanged=versions == self._written
            )
        self.best, self._written = best or self.best, versions
        self._view.progress("driver", f"checkpoint {name} {self._clock.saved(start_s)}")

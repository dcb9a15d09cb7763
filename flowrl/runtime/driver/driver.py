"""The driver: one run from its first process to its last record.

It keeps accounting and records, lets the phases follow each other, and ends everything when one
part fails. Phases: start, restore, evaluation before, training, evaluation after, last checkpoint, end.
Admission is closed in all of them but training.

Waits: for hosts to answer or end (their death ends it), for the trainers to end, for generators to
hold the last weights. An interrupt ends admission, and what is in flight is finished.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from flowrl.channel.endpoint import Endpoint
from flowrl.errors import FlowrlError, LaneFailed, Stalled
from flowrl.runtime.checkpoints import checkpoint, resume
from flowrl.runtime.checkpoints.best import Best, read_best
from flowrl.runtime.checkpoints.rundir import writing
from flowrl.runtime.driver.barrier import BatchEnd, Locks
from flowrl.runtime.driver.checkpoint_clock import CheckpointClock
from flowrl.runtime.driver.cluster import RayCluster
from flowrl.runtime.driver.early_stop import EarlyStop
from flowrl.runtime.driver.first_failure import first_failure
from flowrl.runtime.driver.halt import halted
from flowrl.runtime.driver.hosts import Hosts
from flowrl.runtime.driver.job import Job
from flowrl.runtime.driver.lookout import LOOK_EVERY_S, Lookout
from flowrl.runtime.driver.losses import HostLosses
from flowrl.runtime.driver.orders import Orders
from flowrl.runtime.driver.phases import Phases
from flowrl.runtime.driver.shared_devices import SharedDevices
from flowrl.runtime.driver.snapshotter import Snapshotter
from flowrl.runtime.driver.stall import Topology
from flowrl.runtime.ledger.accounting import Accounting
from flowrl.runtime.samples.kept_samples import KeptSamples
from flowrl.runtime.telemetry.kept_episodes import KeptEpisodes
from flowrl.runtime.telemetry.metrics import Metrics, roles
from flowrl.runtime.telemetry.sinks import open_sinks
from flowrl.runtime.telemetry.statistics import Statistics
from flowrl.runtime.telemetry.trace_file import open_trace
from flowrl.runtime.telemetry.tracking import SampleTables
from flowrl.runtime.telemetry.view import View

STOP_AT_ONCE_S = 1.0


@dataclass
class Outcome:
    """How a run ended."""

    steps: int
    evaluations: dict[str, dict[str, float]]
    interrupted: bool
    seconds: float


class Driver:
    """Runs one job. `interrupt` may be called from a signal handler."""

    def __init__(
        self, job: Job, cluster: RayCluster, endpoint: Endpoint, view: View, config: Mapping[str, Any]
    ) -> None:
        self.job = job
        self.view = view
        self.hosts = Hosts(cluster, endpoint, self.fail)
        self.version = job.start_version
        self.statistics = Statistics()
        self.tickets = job.make_tickets()
        self.accounting: Accounting
        """With `metrics` the records of the run: opened when all hosts are set up, so that it can begin."""
        self.metrics: Metrics
        self.best = read_best(job.run_dir, newest_step=job.start_version)
        self._endpoint = endpoint
        self._config = config
        self.begun = False
        """The records are open."""
        self.running = False
        """All nodes are set up."""
        self._episodes = KeptEpisodes(job.run_dir, job.options.keep_episodes, view.warning)
        self._samples: KeptSamples
        """Opened with the other records."""
        self._tables = SampleTables(job.options.tracking)
        self._trace = open_trace(job.options.trace, job.run_dir / "trace.json", self._send_trace_level)
        self._interrupted = False
        self._clock = CheckpointClock(job.options)
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lookout = Lookout(self.hosts, endpoint, Topology.of(job.plan), view.warning, view.progress)
        self.orders = Orders(endpoint, job.plan, self.hosts, self.lookout, lost=self.hosts.lost)
        self.phases = Phases(self, job.graph, job.plan, job.options, self.orders, view)
        self._locks = Locks()
        self.hosts.losses = HostLosses(self, job.plan, self.hosts, endpoint, self._locks, view.warning)
        shared = SharedDevices(self._locks, self.orders)
        halted, keep = self.phases.at_checkpoint, job.options.keep
        self.snapshotter = Snapshotter(self.orders, job.graph.nodes, job.run_dir, halted, keep=keep, shared=shared)
        self._records: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._start_s = time.monotonic()

    def _open_records(self) -> None:
        """Accounting and metrics as a fresh run has them, or as the checkpoint left them."""
        job = self.job
        self.accounting = Accounting(
            job.run_dir,
            self.tickets,
            on_step=self.on_step,
            on_closed=lambda *sample: samples.closed(*sample),
            bound=job.plan.numbers.max_staleness,
            own_clock=job.plan.own_clock,
            resume=job.resume_from is not None,
        )
        in_flight = job.plan.numbers.samples_in_flight
        self._samples = samples = KeptSamples(
            job.run_dir, self.accounting, in_flight=in_flight, warn=self.view.warning, shown=self._show_sample
        )
        self._early_stop = EarlyStop(job.options.stop, self.stop_early)
        if job.resume_from is not None:
            self._early_stop.recall(job.run_dir)
        self.metrics = Metrics(
            job.run_dir,
            self.statistics,
            roles=roles(job.graph),
            sinks=open_sinks(job.options.track, job.run_dir, self._config, job.options.tracking),
            tables=self._tables,
            watch=self._early_stop.look,
            watch_evaluation=self._early_stop.evaluated,
            limits=job.options.alarms,
            record_line=self.accounting.line,
        )
        self.accounting.serve(self._endpoint)
        self.lookout.accounting = self.accounting
        self.begun = True

    async def run(self) -> Outcome:
        """The whole run. Raises NodeFailed or Stalled; hosts and records are closed in any case."""
        try:
            evaluations = await self._work()
        except BaseException as error:  # whatever ends the run, the hosts and the records are closed
            if isinstance(error, asyncio.CancelledError):
                await self.hosts.stop(within_s=STOP_AT_ONCE_S)
            else:
                await self._stop_hosts()
            with suppress(FlowrlError):  # what ended the run is the one thing to tell
                self._close_records(orderly=False)
            if isinstance(error, LaneFailed) and self.hosts.death is not None:
                raise self.hosts.death from None
            raise
        await self._stop_hosts()
        self._close_records(orderly=True)
        if metric := self._early_stop.unseen:
            self.view.warning(f"--stop.metric {metric} had no value in this run; names are those of metrics.jsonl")
        if self._interrupted:
            self.view.progress("driver", f"ended after step {self.version}; --resume continues from there")
        return Outcome(self.version, evaluations, self._interrupted, time.monotonic() - self._start_s)

    async def _stop_hosts(self) -> None:
        """What goes wrong when nodes close no longer changes how the run ended; it is told."""
        for failed in await self.hosts.stop():
            self.view.warning(f"when the run was closed, {failed}")

    async def _work(self) -> dict[str, dict[str, float]]:
        """Everything between the first process and the last record; ended by what fails first."""
        await first_failure(self._start_hosts(), self._broken)
        watch, lines = asyncio.create_task(self.lookout.watch(LOOK_EVERY_S)), asyncio.create_task(self._write_lines())
        try:
            evaluations: dict[str, dict[str, float]] = await first_failure(self._lead(), watch, lines, self._broken)
            self._records.put_nowait(None)
            await first_failure(lines, watch, self._broken)
            self._require_sound()
        except Stalled as error:
            raise Stalled("\n".join(filter(None, [self.accounting.unbooked(), str(error)]))) from None
        finally:
            watch.cancel()
            lines.cancel()
            await asyncio.gather(watch, lines, return_exceptions=True)  # a line that waits is written before the next
        return evaluations

    def _require_sound(self) -> None:
        """Raise what broke the run together with the last of what was awaited, or a trainer's mistake."""
        if self._broken.done():
            self._broken.result()
        if mistake := self.accounting.unbooked():
            raise FlowrlError(mistake)

    def fail(self, error: BaseException) -> None:
        """An exception that nobody waits for (a note's handler, a timer) ends the run."""
        if not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # it counts as retrieved: the run may be ending already

    def unless_cancelled(self, task: asyncio.Task[Any]) -> None:
        """The end of a task that nobody waits for."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def unretrieved(self, context: Mapping[str, Any]) -> None:
        """The event loop's exception handler."""
        error = context.get("exception")
        self.fail(error if isinstance(error, Exception) else FlowrlError(str(context["message"])))

    def _close_records(self, *, orderly: bool) -> None:
        """Every record is closed, whatever happens to the others; raises what happened last."""
        with writing(self.job.run_dir), ExitStack() as records:
            records.callback(self._trace.close)
            records.callback(self._episodes.close)
            if not self.begun:
                return
            records.callback(self.metrics.close)
            records.callback(self._samples.close)
            records.callback(self.accounting.close, orderly=orderly)
            records.callback(self._write_last_lines)
            records.callback(self.accounting.commit)

    def interrupt(self) -> None:
        """End admission; what is in flight is finished, then the run ends in order."""
        self.view.progress("driver", "interrupted: finishing what is in flight (interrupt again to stop at once)")
        self._finish()

    def _finish(self) -> None:
        self._interrupted = True
        self.tickets.close()
        if self.begun:
            self.accounting.end_admission()

    def stop_early(self, reason: str) -> None:
        """End as by an interrupt, unless the run is ending anyway."""
        if not self._interrupted:
            self.view.progress("driver", f"ending early: {reason}; an interrupt stops at once")
            self._clock.soon()
            self._finish()

    def terminate(self) -> None:
        """As `interrupt`, with a checkpoint at the next batch's end: the run may be killed before it has ended."""
        self.stop_early("terminated; a checkpoint follows the current batch")

    @property
    def interrupted(self) -> bool:
        return self._interrupted

    async def _start_hosts(self) -> None:
        plan = self.job.plan
        num_ranks = sum(len(self.orders.replicas(name)) for name in plan.trainers if name not in plan.own_clock)
        batch_end = BatchEnd(num_ranks, self._waits_at, self._at_batch_end, passing=plan.own_clock)
        self.tickets.pause("start")
        for kind, handler in (
            ("warning", lambda host, body: self.view.warning(f"{body['node']}: {body['text']}")),
            ("statistics", self._absorb),
            ("episode", lambda host, body: self._episodes.add(**body)),
            ("samples", lambda host, body: self._samples.add(body)),
            ("give up", self._broadcast),
            ("lock", self._locks.take),
            ("unlock", self._locks.release),
            ("step_done", batch_end.arrive),
            ("ended", self.phases.node_ended),
        ):
            self._endpoint.on(kind, handler)
        self.view.progress("driver", f"starting {len(self.job.slots)} processes")
        await self.hosts.start(self.job.slots, self.job.specs)
        self._send_trace_level(self._trace.level)

    async def _lead(self) -> dict[str, dict[str, float]]:
        with self.lookout.doing("the set-up of the nodes"):
            await self.hosts.ask("setup")
            await self._begin()
        running = {host: asyncio.create_task(self.hosts.ask_one(host, "run")) for host in self.hosts}
        self.running = True
        try:
            evaluations: dict[str, dict[str, float]] = await first_failure(self.phases.run(running), *running.values())
            return evaluations
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    async def _begin(self) -> None:
        """All hosts are set up: open the run's files, from the checkpoint if it resumes, and begin."""
        source = self.job.resume_from
        state = {"messages": []} if source is None else await asyncio.to_thread(checkpoint.read_state, source)
        if source is not None:
            await self.snapshotter.put_back(state)
        with writing(self.job.run_dir):
            await asyncio.to_thread(self.job.rewind)
            self._open_records()
        self.accounting.kept(*checkpoint.made(state["messages"]), checkpoint.kept_requests(state["messages"]))
        if source is not None:
            self.view.progress("driver", f"resumed from {source.name}: {len(state['messages'])} messages in flight")

    # Records

    def on_step(self, record: dict[str, Any]) -> None:
        """A batch is finished and booked: whatever follows from its number, and its line."""
        self.version = int(record["step"])
        self._records.put_nowait(record | {"ledger_head": self.accounting.ledger.head})

    async def _write_lines(self) -> None:
        """One line a batch, in order, each with what every host has counted until now. Ended by `_stop`."""
        while (record := await self._records.get()) is not None:
            try:
                await self.orders.ask_all("report")
            finally:  # of a step that is booked there is a line, whatever ends the run
                self._write_line(record)
            self._records.task_done()

    def _write_last_lines(self) -> None:
        while not self._records.empty() and (record := self._records.get_nowait()) is not None:
            self._write_line(record)

    def _write_line(self, record: dict[str, Any]) -> None:
        with writing(self.job.run_dir):
            line = self.metrics.line(record)
        self.view.step(line)

    def _absorb(self, host: str, body: dict[str, Any]) -> None:
        self.statistics.absorb(body, time.monotonic())
        self.view.statistics(self.statistics, self.tickets.why_waiting)
        with writing(self.job.run_dir):
            self._trace.write(body["trace"])

    def _show_sample(self, row: dict[str, Any]) -> None:
        self._tables.add(row)
        self.view.sample(row)

    def _send_trace_level(self, level: int) -> None:
        for host in self.hosts:
            self._endpoint.notify(host, "trace level", level)

    # Checkpoints

    def _waits_at(self, version: int) -> bool:
        return self._clock.is_due(version) or self.phases.due(version)

    async def _at_batch_end(self, version: int) -> None:
        """The trainers stand at the end of the batch that made `version`: do what is due there."""
        await self.accounting.booked()
        await self.phases.taken(version)
        if self._clock.is_due(version):
            await self._checkpoint(version)
        if self.phases.due(version):
            await self.phases.hold(version)

    async def keep(self, best: Best) -> None:
        """A checkpoint of the current version, which is the best so far; the trainers take no batch."""
        await self._checkpoint(self.version, best=best)
        self.view.progress("driver", f"best so far: {best.score:.3f} at step {best.step}")

    async def _checkpoint(self, version: int, best: Best | None = None) -> None:
        """Write a checkpoint while the trainers stand at the end of the batch that made `version`."""
        self.accounting.pause_admission("checkpoint")
        try:
            async with halted(self.orders, self.phases.own_clocks):
                await self.write_checkpoint(version, best=best)
        except FlowrlError as error:
            self.fail(error)  # the trainer that waits for the checkpoint is not the cause
            raise
        finally:
            self.accounting.resume_admission("checkpoint")

    async def write_checkpoint(self, version: int, *, best: Best | None = None) -> None:
        """One consistent snapshot through the graph, made the newest checkpoint.

        The lines of all steps until then are written first: a run that goes on from here never writes them.
        """
        start_s = time.monotonic()
        with self.lookout.doing(f"the checkpoint of step {version}"), writing(self.job.run_dir):
            await self.accounting.booked()
            await self._records.join()
            await self._samples.flush()
            facts = resume.facts(version, self.job.plan, self.job.options.seed)
            named = best or self.best
            spared = () if named is None else (named.step,)
            name = await self.snapshotter.write(facts, self.accounting, best=best, spared=spared)
        self.best = best or self.best
        self.view.progress("driver", f"checkpoint {name} {self._clock.saved(start_s)}")

    def _broadcast(self, host: str, body: dict[str, Any]) -> None:
        """A node has dropped a whole group: every host ends what it has of it."""
        for other in self.hosts:
            self._endpoint.notify(other, "give up", body)

"""The driver: one run from its first process to its last record.

It keeps accounting and records, runs the phases one after the other, and ends everything when one part fails. Phases:
start, restore, evaluation before, training, checkpoint of what is trained, evaluation after, last checkpoint, end.
Admission is closed in all phases except training.

Waits: for processes to answer or end (the death of one ends the wait), for the trainers to end, for generators to hold
the last weights. An interrupt ends admission, and the groups in flight are finished. After SIGTERM, --term-minutes end
every wait.

The run continues without a process if other replicas stand in for its replicas; `flowrl.graph.analysis.branches` says
which processes these are. Callers send the requests that the lost process had not answered to another replica, and
report those that it had answered but not reported. Tickets and locks no longer wait for it. Invariant: each process
drops everything from the lost one that arrives after it was told of the loss. So an answer is reported either by the
lost process, before that, or by its caller, but not by both.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from flowrl.errors import FlowrlError, LaneFailed, Stalled
from flowrl.graph.analysis.branches import may_end
from flowrl.runtime.checkpoints import checkpoint, snapshots
from flowrl.runtime.checkpoints.rundir import convert_write_errors
from flowrl.runtime.driver.job import Job, RunState
from flowrl.runtime.driver.locks import BatchEnd, Locks
from flowrl.runtime.driver.lookout import LOOK_EVERY_S, Lookout, Topology
from flowrl.runtime.driver.phases import Phases
from flowrl.runtime.driver.ray_cluster import RayCluster
from flowrl.runtime.driver.run_checkpoints import RunCheckpoints, lend_to_trainers
from flowrl.runtime.driver.run_processes import Orders, RunProcesses
from flowrl.runtime.driver.run_records import RunRecords
from flowrl.runtime.telemetry import trace
from flowrl.runtime.telemetry.view import View
from flowrl.wire.endpoint import Endpoint

Evaluations = dict[str, dict[str, float]]
"""Phase -> the figures of its evaluation."""

STOP_AT_ONCE_S = 1.0
GENERATORS_LOST = "generators_lost"
"""Counter of lost generators: one whose engine has died counts itself; the driver counts one whose process has died."""


@dataclass
class Outcome:
    """How a run ended."""

    steps: int
    evaluations: Evaluations
    interrupted: bool
    seconds: float


class Driver:
    """Runs one job. `interrupt` may be called from a signal handler."""

    def __init__(
        self, job: Job, cluster: RayCluster, endpoint: Endpoint, view: View, config: Mapping[str, Any]
    ) -> None:
        self.job = job
        self.view = view
        self.loop = asyncio.get_running_loop()
        self.processes = RunProcesses(cluster, endpoint, self.fail)
        self.tickets = job.make_tickets()
        self._state = state = RunState(job.start_version)
        self._endpoint = endpoint
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start_s = time.monotonic()
        self._ends_by: asyncio.TimerHandle | None = None
        """Ends the run without a checkpoint when the time to end in order is over; None: that time has not begun."""
        self._overdue = False
        self._locks = locks = Locks()
        self.records = records = RunRecords(job, self.tickets, state, view, config, self._send_trace_level)
        self.lookout = lookout = Lookout(self.processes, endpoint, Topology.of(job.plan), view.warning, view.progress)
        self.orders = orders = Orders(endpoint, job.plan, self.processes, view.warning, lost=self.processes.lost)
        lend = functools.partial(lend_to_trainers, locks, orders)
        self.checkpoints = RunCheckpoints(job, orders, lend, lookout, records, state, view, self.fail)
        self.phases = Phases(
            job.graph,
            job.plan,
            job.options,
            orders,
            view,
            records=records,
            checkpoints=self.checkpoints,
            state=state,
            resumed=job.resume_from is not None,
            unless_cancelled=self.unless_cancelled,
        )
        self.processes.may_lose, self.processes.on_lost = self.may_lose_process, self.drop_lost_process

    async def run(self) -> Outcome:
        """The whole run. Raises NodeFailed or Stalled; processes and records are closed in any case."""
        try:
            evaluations = await self._run_phases()
        except BaseException as error:  # the processes and the records are closed after any failure
            if isinstance(error, asyncio.CancelledError) or self._overdue:
                await self.processes.stop(within_s=STOP_AT_ONCE_S)
            else:
                await self._stop_processes()
            with suppress(FlowrlError):  # only the cause of the run's end is reported
                self.records.close(orderly=False)
            if isinstance(error, LaneFailed) and self.processes.death is not None:
                raise self.processes.death from None
            raise
        await self._stop_processes()
        self.records.close(orderly=True)
        if metric := self.records.early_stop.unseen:
            self.view.warning(f"--stop.metric {metric} had no value in this run; names are those of metrics.jsonl")
        state = self._state
        if state.interrupted:
            self.view.progress("driver", f"ended after step {state.version}; --resume continues from there")
        return Outcome(state.version, evaluations, state.interrupted, time.monotonic() - self._start_s)

    async def _stop_processes(self) -> None:
        """Stop the processes. Failures of nodes to close do not change how the run ended; they become warnings."""
        for failed in await self.processes.stop():
            self.view.warning(f"when the run was closed, {failed}")

    async def _run_phases(self) -> Evaluations:
        """Everything between the first process and the last record; the first failure ends it."""
        await first_failure(self._start_processes(), self._broken)
        watch = asyncio.create_task(self.lookout.watch_run(LOOK_EVERY_S))
        lines = asyncio.create_task(self.records.write_lines(lambda: self.orders.ask_all("report")))
        try:
            evaluations: Evaluations = await first_failure(self._run_nodes(), watch, lines, self._broken)
            self.records.end_lines()
            await first_failure(lines, watch, self._broken)
            if self._broken.done():  # while the last work ended
                self._broken.result()
            if mistake := self.records.accounting.describe_unbooked():
                raise FlowrlError(mistake)
        except Stalled as error:
            raise Stalled("\n".join(filter(None, [self.records.accounting.describe_unbooked(), str(error)]))) from None
        finally:
            watch.cancel()
            lines.cancel()
            await asyncio.gather(watch, lines, return_exceptions=True)  # a line in progress is written before the next
        return evaluations

    def fail(self, error: BaseException) -> None:
        """End the run with an exception that no caller receives (raised in the handler of a note, or in a timer)."""
        if not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # mark it as retrieved: the run may be ending already

    def unless_cancelled(self, task: asyncio.Task[Any]) -> None:
        """Done callback of a task that nobody awaits: its failure ends the run."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail_unretrieved(self, context: Mapping[str, Any]) -> None:
        """The event loop's exception handler."""
        error = context.get("exception")
        self.fail(error if isinstance(error, Exception) else FlowrlError(str(context["message"])))

    def interrupt(self) -> None:
        """End admission; the groups in flight are finished, then the run ends in order."""
        self.view.progress("driver", "interrupted: finishing what is in flight (interrupt again to stop at once)")
        self._end_admission()

    def _end_admission(self) -> None:
        self._state.interrupted = True
        self.tickets.close()
        if self.begun:
            self.records.accounting.end_admission()

    def stop_early(self, reason: str) -> None:
        """End the run as an interrupt does, with a checkpoint soon, unless the run is already ending."""
        if not self._state.interrupted:
            self.view.progress("driver", f"ending early: {reason}; finishing what is in flight")
            self.checkpoints.clock.make_due()
            self._end_admission()

    def end_in_time(self, reason: str) -> None:
        """As `stop_early`, without the end of an evaluation that goes on: the time for the whole run is over."""
        self.stop_early(reason)
        self._end_soon()

    def terminate(self) -> None:
        """As `interrupt`, with a checkpoint after the current batch, and without the end of an evaluation that goes on:
        the run may be killed before it has ended."""
        self.view.progress("driver", "terminated; a checkpoint follows the current batch; an interrupt stops at once")
        self.checkpoints.clock.make_due()
        self._end_admission()
        self._end_soon()

    def _end_soon(self) -> None:
        """Give up an evaluation that goes on, and everything else when --term-minutes are over."""
        self.phases.give_up_evaluation()
        if self._ends_by is None:
            limit_s = 60 * self.job.options.term_minutes
            self._ends_by = asyncio.get_running_loop().call_later(limit_s, self._end_overdue)

    def _end_overdue(self) -> None:
        """End the run as it is: a batch, an evaluation or a checkpoint does not end, or not in time."""
        self._overdue = True
        made = checkpoint.steps_of(self.job.run_dir / "checkpoints")
        goes_on = (
            f"--resume continues from {made[-1][1].name}"
            if made
            else "it has none yet, so --resume has nothing to continue from: start the run again"
        )
        self.fail(
            FlowrlError(
                f"--term-minutes {self.job.options.term_minutes:g} are over, and the run has not ended in order; it "
                f"ends without a new checkpoint: {goes_on}.\nWhen it was last looked at:\n"
                f"{self.lookout.describe_last()}"
            )
        )

    @property
    def begun(self) -> bool:
        """Whether the records are open: if so, a run that ends now has something to keep."""
        return self.records.is_open

    async def _start_processes(self) -> None:
        plan = self.job.plan
        num_ranks = sum(len(self.orders.replicas(name)) for name in plan.trainers if name not in plan.own_clock)
        batch_end = BatchEnd(num_ranks, self._is_due, self._do_what_is_due, passing=plan.own_clock)
        self.tickets.pause("start")
        for kind, handler in (
            ("warning", lambda host, body: self.view.warning(f"{body['node']}: {body['text']}")),
            ("statistics", self.records.add_statistics),
            ("episode", lambda host, body: self.records.episodes.add_attempt(**body)),
            ("samples", lambda host, body: self.records.samples.add_records(body)),
            ("judged", self.records.add_judged),
            ("give up", lambda host, body: self._notify_all("give up", body)),
            ("lock", self._locks.take_lock),
            ("unlock", self._locks.release_lock),
            ("step_done", batch_end.arrive),
            ("ended", lambda host, body: self.phases.has_ended(body["replica_id"])),
        ):
            self._endpoint.on(kind, handler)
        self.view.progress("driver", f"starting {len(self.job.slots)} processes")
        await self.processes.start(self.job.slots, self.job.specs)
        self._send_trace_level(trace.OFF if self.records.trace is None else self.records.trace.level)

    async def _run_nodes(self) -> Evaluations:
        with self.lookout.note_work("the set-up of the nodes"):
            await self.processes.ask_processes("setup")

            # All processes are set up: open the run's files, rewound to the checkpoint if the run resumes.
            messages, asked = await self.checkpoints.put_back()
            with convert_write_errors(self.job.run_dir):
                await asyncio.to_thread(self.job.rewind)
                self.records.open(self._endpoint, self.stop_early)
            self.lookout.accounting = accounting = self.records.accounting
            accounting.note_kept(*snapshots.samples_in(messages), snapshots.kept_requests([*messages, *asked]))
            if (source := self.job.resume_from) is not None:
                self.view.progress("driver", f"resumed from {source.name}: {len(messages)} messages in flight")
        await self.phases.hold_resumed()
        running = {process: asyncio.create_task(self.processes.ask_one(process, "run")) for process in self.processes}
        self._state.running = True
        try:
            evaluations: Evaluations = await first_failure(self.phases.run(running), *running.values())
            return evaluations
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    def _send_trace_level(self, level: int) -> None:
        self._notify_all("trace level", level)

    def _notify_all(self, kind: str, body: Any) -> None:
        for process in self.processes:
            self._endpoint.notify(process, kind, body)

    # The run continues without a process

    def may_lose_process(self, host: str) -> bool:
        """Whether the run continues if the process `host` ends now."""
        plan = self.job.plan
        one = next(one for one in plan.hosts if one.name == host)
        return self._state.running and may_end(
            one, ended=self.processes.lost, hosts=plan.hosts, stand_ins=plan.stand_ins
        )

    def drop_lost_process(self, host: str, reason: str) -> None:
        """The process `host` has ended, and the run continues: nothing waits for it any more, and the others know."""
        replica_ids = next(one.nodes for one in self.job.plan.hosts if one.name == host)
        self._locks.claimants_died({host, *replica_ids})
        for replica_id in replica_ids:
            self.records.accounting.consumer_died(replica_id)
            self.phases.has_ended(replica_id)
            self.records.statistics.note_lost(replica_id, GENERATORS_LOST, time.monotonic())
        self._notify_all("lost", {"host": host, "reason": reason, "replica_ids": list(replica_ids)})
        names = ", ".join(replica_ids)
        self.view.warning(f"{names}: out of service, its requests go to the other replicas: {reason}")

    # At the end of a batch

    def _is_due(self, version: int) -> bool:
        return self.checkpoints.clock.is_due(version) or self.phases.is_due(version)

    async def _do_what_is_due(self, version: int) -> None:
        """The trainers wait at the end of the batch that made `version`."""
        await self.records.accounting.bookings.wait_for_jobs()
        await self.phases.wait_for_readers(version)
        if self.checkpoints.clock.is_due(version):
            await self.checkpoints.at_batch_end(version)
        if self.phases.is_due(version):
            await self.phases.begin_evaluation(version)


async def first_failure(work: Awaitable[Any], *others: asyncio.Future[Any]) -> Any:
    """The result of `work`, unless one of `others` fails first: then that failure is raised."""
    main = asyncio.ensure_future(work)
    pending: set[asyncio.Future[Any]] = {main, *others}
    try:
        while not main.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return main.result()
    finally:
        main.cancel()
        await asyncio.gather(main, return_exceptions=True)


class RunSignals:
    """SIGINT and SIGTERM end the run in order, and a second one ends it at once. During the set-up, the first one ends
    it at once, because nothing is in flight yet and a model may take minutes to load. SIGUSR1 shows which node waits
    for what. SIGHUP says that the terminal is gone, and ends nothing. A run that is ending by itself (`stop_early`) has
    had no signal yet, so that the next one is its first.

    The sender of SIGTERM usually sends SIGKILL later, so the run writes a checkpoint as soon as possible. A run that
    only evaluates ends `at_once`: nothing is trained, and the same command continues with the answers that exist.
    """

    def __init__(self, driver: Driver, view: View, *, at_once: bool = False) -> None:
        self._driver = driver
        self._view = view
        self._at_once = at_once
        self._signalled = False
        self._describing: set[asyncio.Task[None]] = set()
        self._hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # as under nohup, also after the run

    def __enter__(self) -> Self:
        loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        loop.add_signal_handler(signal.SIGINT, self._stop_in_order, self._driver.interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._stop_in_order, self._driver.terminate)
        loop.add_signal_handler(signal.SIGUSR1, self._show_waits)
        if self._hangs_up:
            gone = "the terminal is gone (SIGHUP); the run goes on, and SIGTERM ends it in order"
            loop.add_signal_handler(signal.SIGHUP, self._view.warning, gone)
        return self

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *((signal.SIGHUP,) if self._hangs_up else ())):
            asyncio.get_running_loop().remove_signal_handler(number)

    def end_in_time(self, reason: str) -> None:
        """End the run as `Driver.end_in_time` does, or at once."""
        if self._at_once:
            self._view.warning(reason.partition(";")[0])
            self._stop_at_once()
        else:
            self._driver.end_in_time(reason)

    def _stop_in_order(self, begin: Callable[[], None]) -> None:
        if self._driver.begun and not (self._at_once or self._signalled):
            self._signalled = True
            begin()
        else:
            self._stop_at_once()

    def _stop_at_once(self) -> None:
        assert self._task is not None
        if not self._task.cancelling():
            again = "; the same command continues with the existing answers" if self._at_once else ""
            self._view.progress("driver", f"stopping at once{again}")
            self._task.cancel()

    def _show_waits(self) -> None:
        async def report() -> None:
            self._view.warning(await self._driver.lookout.describe_now())

        task = asyncio.get_running_loop().create_task(report())
        self._describing.add(task)
        task.add_done_callback(self._describing.discard)

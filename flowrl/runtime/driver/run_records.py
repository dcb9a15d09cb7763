"""The records of one run besides its checkpoints: ledger, metrics, kept samples and episodes, and the trace.

Ledger, metrics and samples are opened when all processes are set up, so that the run can begin. Trace and episodes are
opened before that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any

from flowrl.runtime.checkpoints.rundir import convert_write_errors
from flowrl.runtime.driver.job import Job, RunState
from flowrl.runtime.ledger.accounting import Accounting
from flowrl.runtime.ledger.sample_fates import Reuse
from flowrl.runtime.samples.kept_episodes import KeptEpisodes
from flowrl.runtime.samples.kept_samples import KeptSamples
from flowrl.runtime.telemetry import trace
from flowrl.runtime.telemetry.metrics import EarlyStop, Metrics, flatten_numbers, node_roles
from flowrl.runtime.telemetry.sinks import SampleTables, open_sinks
from flowrl.runtime.telemetry.statistics import Statistics
from flowrl.runtime.telemetry.view import View
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.tickets import Tickets


class RunRecords:
    """`config` is the graph's, for sinks that show it; `send_trace_level(level)` tells the processes what to trace."""

    accounting: Accounting
    metrics: Metrics
    samples: KeptSamples

    def __init__(
        self,
        job: Job,
        tickets: Tickets,
        state: RunState,
        view: View,
        config: Mapping[str, Any],
        send_trace_level: Callable[[int], None],
    ) -> None:
        self.statistics = Statistics()
        self.is_open = False
        self._job = job
        self._tickets = tickets
        self._state = state
        self._view = view
        self._config = config
        self.episodes = KeptEpisodes(job.run_dir, job.options.keep_episodes, view.warning)
        self._tables = SampleTables(job.options.tracking)
        self.trace: trace.TraceWriter | None = None
        """The trace of the run; None with --trace off."""
        if job.options.trace != "off":
            limit = trace.LIMIT_BYTES if job.options.trace == "sampled" else None
            self.trace = trace.TraceWriter(job.run_dir / "trace.json", limit_bytes=limit, on_level=send_trace_level)
        self._lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        """The records of steps whose lines are not written yet; None ends `write_lines`."""

    def open(self, endpoint: Endpoint, stop_early: Callable[[str], None]) -> None:
        """Open the records, empty for a fresh run or as the checkpoint left them, and answer the processes at
        `endpoint`.

        `stop_early(reason)` is called when the metrics say that the run should end.
        """
        job = self._job
        self.accounting = Accounting(
            job.run_dir,
            self._tickets,
            on_step=self.on_step,
            on_closed=lambda *sample: self.samples.note_closed(*sample),
            bound=job.plan.numbers.max_staleness,
            reuse=Reuse(job.plan.numbers.max_uses, job.plan.numbers.max_reused_age),
            own_clock=job.plan.own_clock,
            resume=job.resume_from is not None,
            restored_from=job.resume_from,
        )
        self.samples = KeptSamples(
            job.run_dir,
            is_open=self.accounting.is_open,
            was_admitted=self.accounting.was_admitted,
            in_flight=job.plan.numbers.samples_in_flight,
            warn=self._view.warning,
            shown=self._show_sample,
        )
        self.early_stop = EarlyStop(job.options.stop, stop_early)
        if job.resume_from is not None:
            self.early_stop.recall_records(job.run_dir)
        self.metrics = Metrics(
            job.run_dir,
            self.statistics,
            roles=node_roles(job.graph),
            sinks=open_sinks(job.options.track, job.run_dir, self._config, job.options.tracking),
            tables=self._tables,
            watch=self.early_stop.look_at_line,
            watch_evaluation=self.early_stop.look_at_evaluation,
            limits=job.options.alarms,
            record_line=self.accounting.book_line,
        )
        self.accounting.register_handlers(endpoint)
        self.is_open = True

    def close(self, *, orderly: bool) -> None:
        """Close every record, even if others fail to close. Raises the last failure."""
        with convert_write_errors(self._job.run_dir), ExitStack() as records:
            if self.trace is not None:
                records.callback(self.trace.close)
            records.callback(self.episodes.close)
            if not self.is_open:
                return
            records.callback(self.metrics.close)
            records.callback(self.samples.close)
            records.callback(self.accounting.close, orderly=orderly)

            def write_last_lines() -> None:
                while not self._lines.empty() and (record := self._lines.get_nowait()) is not None:
                    self._write_line(record)

            records.callback(write_last_lines)
            records.callback(self.accounting.bookings.commit_all)

    # Reports of processes

    def add_statistics(self, host: str, body: dict[str, Any]) -> None:
        """Take a process's statistics and trace."""
        self.statistics.add_report(body, time.monotonic())
        self._view.statistics(self.statistics, self._tickets.why_waiting)
        if self.trace is not None:  # else the process has recorded this before it was told the level
            with convert_write_errors(self._job.run_dir):
                self.trace.write_events(body["trace"])

    def add_judged(self, host: str, body: dict[str, Any]) -> None:
        """Take the figures on held-out rows that a trainer has measured after its last batch."""
        version, figures = body["version"], flatten_numbers(body["figures"])
        with convert_write_errors(self._job.run_dir):
            self.metrics.write_evaluation("end", version, figures)
        self._view.held_out({"step": version, **figures})

    def _show_sample(self, row: dict[str, Any]) -> None:
        self._tables.add_row(row)
        self._view.sample(row)

    # Lines of metrics

    def on_step(self, record: dict[str, Any]) -> None:
        """A batch is finished and booked: update the version, and queue the batch's line."""
        self._state.version = int(record["step"])
        self._lines.put_nowait(record | {"ledger_head": self.accounting.ledger.head})

    async def write_lines(self, ask_for_reports: Callable[[], Awaitable[Any]]) -> None:
        """Write one line per batch, in order, with what every process has counted until then. `end_lines` ends this."""
        while (record := await self._lines.get()) is not None:
            try:
                await ask_for_reports()
            finally:  # a booked step has a line, however the run ends
                line = self._write_line(record)
            self._lines.task_done()
            if self._job.advise is not None and (told := await asyncio.to_thread(self._job.advise, line)):
                self._view.warning(told)

    def end_lines(self) -> None:
        """End `write_lines` after the lines that are queued: no further step follows."""
        self._lines.put_nowait(None)

    async def wait_until_written(self) -> None:
        """Returns when the lines of all steps and the kept samples are written."""
        await self.accounting.bookings.wait_for_jobs()
        await self._lines.join()
        await self.samples.flush_rows()

    def write_evaluation(self, phase: str, version: int, figures: Mapping[str, float]) -> None:
        """Write the figures of an evaluation of `version`."""
        with convert_write_errors(self._job.run_dir):
            self.metrics.write_evaluation(
                phase, version, {f"evaluation/{key}": value for key, value in figures.items()}
            )

    def _write_line(self, record: dict[str, Any]) -> Mapping[str, Any]:
        with convert_write_errors(self._job.run_dir):
            line = self.metrics.write_line(record)
        self._view.step(line)
        return line

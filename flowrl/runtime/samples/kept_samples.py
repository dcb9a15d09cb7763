"""The driver's side of `rollouts/`: joins records with the states that the ledger books, and writes them in a thread.

Invariants
- A sample is kept once: when its state is known and its record has arrived. A second record of it, for example from a
  second trainer, is dropped.
- What waits in memory is bounded: states, records, and MOST_WAITING_BYTES of rows. A record finds the state of its
  sample if, since that sample was closed, at most twice as many samples as can be in flight were closed.
- A sample that is not kept although its record arrived is counted and reported.
- A failure to write is reported once; after it, nothing more is kept, and the run continues.

Waits: `flush` waits for the thread that writes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from flowrl.runtime.samples.rollout_files import FOLDER, bound_rollouts, rollout_files, write_rollouts
from flowrl.runtime.samples.sample_notes import TRAIN, SampleRecord, text_bytes

LATE = 16384
"""The least number of samples whose states are remembered for their records."""
MOST_OPEN = 65536
"""The least number of records that may wait for the states of their samples."""
FULL_BYTES = 8 << 20
"""Rows of this many bytes are written without further waiting."""
MOST_WAITING_BYTES = 128 << 20
"""Rows beyond this are dropped while earlier ones are written to a slow disk."""
PART_OF_RUN, LEAST_S, MOST_S = 0.05, 2.0, 60.0
"""Rows wait for this part of the run's time so far, within these bounds, so that there are not too many files."""

V = TypeVar("V")


class KeptSamples:
    """Use only on the driver's event loop.

    `is_open` and `was_admitted` tell whether a sample is in flight, and whether it ever was; samples of evaluations
    never are. `shown` gets every row that is kept. `in_flight` is the number of samples that can be in flight.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        is_open: Callable[[str], bool],
        was_admitted: Callable[[str], bool],
        warn: Callable[[str], None],
        in_flight: int = 0,
        shown: Callable[[SampleRecord], None] = lambda row: None,
    ) -> None:
        self._run_dir = run_dir
        self._is_open, self._was_admitted = is_open, was_admitted
        self._warn, self._shown = warn, shown
        self._open: OrderedDict[str, SampleRecord] = OrderedDict()
        """Records of samples whose state is not known yet."""
        self._closed: OrderedDict[str, SampleRecord | None] = OrderedDict()
        """The columns state, reason, step and closed_s of the samples closed last; None once their record has come."""
        self._most_open, self._most_closed = max(MOST_OPEN, in_flight), max(LATE, 2 * in_flight)
        self._num_lost = 0
        self._rows: list[SampleRecord] = []
        self._bytes = 0
        self._number = max((file.number for file in rollout_files(run_dir)), default=0) + 1
        self._writing: asyncio.Task[None] | None = None
        self._stopped = self._told_bound = False
        self._began_s = self._written_s = time.monotonic()

    def add_records(self, records: Iterable[SampleRecord]) -> None:
        """Take records from a replica."""
        for record in records:
            sample_id = record["sample_id"]
            if record["phase"] != TRAIN:
                self._keep_row(record | {"state": "held_out", "closed_s": time.time()})
            elif sample_id in self._closed:
                if (state := self._closed[sample_id]) is not None:
                    self._closed[sample_id] = None
                    self._keep_row(record | state)
            elif not self._is_open(sample_id):
                if self._was_admitted(sample_id):
                    self._note_lost("records come so late that the states of their samples are forgotten")
            elif _add_bounded(self._open, sample_id, record, self._most_open):
                self._note_lost(f"more than {self._most_open} records wait for the states of their samples")

    def note_closed(self, sample_id: str, state: str, reason: str | None, step: int) -> None:
        """The state of a sample is known; `step` is the batch that trained it, or else the one being made."""
        found = {"state": state, "reason": reason, "step": step, "closed_s": time.time()}
        record = self._open.pop(sample_id, None)
        _add_bounded(self._closed, sample_id, found if record is None else None, self._most_closed)
        if record is not None:
            self._keep_row(record | found)

    def _note_lost(self, why: str) -> None:
        """Count a sample that is not kept; the first one is reported at once."""
        self._num_lost += 1
        if self._num_lost == 1:
            self._warn(f"not all samples are kept in {self._run_dir / FOLDER}: {why}")

    async def flush_rows(self) -> None:
        """Returns when everything kept so far is in the files, or keeping has stopped."""
        while self._writing is not None or self._rows:
            if self._writing is None:
                self._begin_write()
            assert self._writing is not None
            await asyncio.shield(self._writing)

    def close(self) -> None:
        """Write what is left, and report how many samples could not be kept."""
        if self._num_lost and not self._stopped:
            self._warn(f"{self._num_lost} samples are not in {self._run_dir / FOLDER}")
        if self._rows and not self._stopped:
            self._note_written(_try_to_write(self._run_dir, self._take_rows(), self._number))

    def _keep_row(self, row: SampleRecord) -> None:
        if self._stopped:
            return
        self._shown(row)
        if self._bytes > MOST_WAITING_BYTES:
            self._note_lost("they arrive faster than they can be written")
            return
        self._rows.append(row)
        self._bytes += text_bytes(row)
        if self._writing is None and (self._bytes >= FULL_BYTES or self._is_due()):
            self._begin_write()

    def _is_due(self) -> bool:
        now = time.monotonic()
        return now - self._written_s >= min(MOST_S, max(LEAST_S, PART_OF_RUN * (now - self._began_s)))

    def _begin_write(self) -> None:
        self._writing = asyncio.get_running_loop().create_task(self._write_in_thread(self._take_rows()))

    def _take_rows(self) -> list[SampleRecord]:
        rows, self._rows, self._bytes = self._rows, [], 0
        self._written_s = time.monotonic()
        return rows

    async def _write_in_thread(self, rows: list[SampleRecord]) -> None:
        number, self._number = self._number, self._number + 2  # `close` may write while the thread still does
        try:
            self._note_written(await asyncio.to_thread(_try_to_write, self._run_dir, rows, number))
        finally:
            self._writing = None

    def _note_written(self, result: bool | str) -> None:
        """Handle the `result` of a write: whether old files were removed, or why nothing could be written."""
        if isinstance(result, str):
            self._stopped = True
            self._rows, self._bytes = [], 0
            self._warn(
                f"{self._run_dir / FOLDER} cannot be written ({result}); the run continues without keeping samples"
            )
        elif result and not self._told_bound:
            self._told_bound = True
            self._warn(f"{self._run_dir / FOLDER} has reached its largest size; the oldest samples are removed")


def _try_to_write(run_dir: Path, rows: list[SampleRecord], number: int) -> bool | str:
    """Write rows. Returns whether old files were removed for them, or the problem as text."""
    try:
        write_rollouts(run_dir, rows, number)
        return bound_rollouts(run_dir)
    except (OSError, ValueError, TypeError, ImportError, MemoryError) as problem:  # including what pyarrow raises
        return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else 'no reason given'}"


def _add_bounded(entries: OrderedDict[str, V], key: str, value: V, most: int) -> bool:
    """Add an entry. Returns whether the oldest one was removed to make room."""
    entries[key] = value
    full = len(entries) > most
    if full:
        entries.popitem(last=False)
    return full

"""The driver's side of `rollouts/`: joins records with the states that the ledger books, and writes them in a thread.

Invariants
- A sample is kept once: when its state is known and its record is here. A record of a sample whose state has been
  known for long, as from a second trainer, is dropped.
- What waits in memory is bounded: LATE states, MOST_OPEN records and MOST_WAITING_BYTES of rows.
- A failure to write is told once; nothing more is kept then, and the run goes on.

Waits: `flush` waits for the thread that writes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from flowrl.runtime.samples.rollout_files import FOLDER, bound_rollouts, rollout_files, write_rollouts
from flowrl.runtime.samples.sample_record import TRAIN, SampleRecord, text_bytes

LATE = 16384
"""States of samples whose record has not come."""
MOST_OPEN = 65536
FULL_BYTES = 8 << 20
"""So many bytes of rows are written without waiting for longer."""
MOST_WAITING_BYTES = 128 << 20
"""Rows beyond this are dropped, while a slow disk is written."""
PART_OF_RUN, LEAST_S, MOST_S = 0.05, 2.0, 60.0
"""Rows wait for a part of the time that the run has lasted, within these bounds, so that files are not too many."""

V = TypeVar("V")


class KeptSamples:
    """Use on the driver's event loop only. `shown` gets every row that is kept; `is_open` asks for a sample's state."""

    def __init__(
        self,
        run_dir: Path,
        *,
        is_open: Callable[[str], bool],
        warn: Callable[[str], None],
        shown: Callable[[SampleRecord], None] = lambda row: None,
    ) -> None:
        self._run_dir = run_dir
        self._is_open, self._warn, self._shown = is_open, warn, shown
        self._open: OrderedDict[str, SampleRecord] = OrderedDict()
        """Records of samples whose state is not known yet."""
        self._late: OrderedDict[str, SampleRecord] = OrderedDict()
        """States of samples whose record has not come yet."""
        self._rows: list[SampleRecord] = []
        self._bytes = 0
        self._number = max((file.number for file in rollout_files(run_dir)), default=0) + 1
        self._writing: asyncio.Task[None] | None = None
        self._stopped = self._told_bound = self._told_slow = False
        self._began_s = self._written_s = time.monotonic()

    def add(self, records: Iterable[SampleRecord]) -> None:
        """Take records from a replica."""
        for record in records:
            sample_id = record["sample_id"]
            if record["phase"] != TRAIN:
                self._keep(record | {"state": "held_out", "closed_s": time.time()})
            elif (state := self._late.pop(sample_id, None)) is not None:
                self._keep(record | state)
            elif self._is_open(sample_id):
                _bounded(self._open, sample_id, record, MOST_OPEN)

    def closed(self, sample_id: str, state: str, reason: str | None, step: int) -> None:
        """The state of a sample is known; `step` is the batch that trained it, or else the one being made."""
        found = {"state": state, "reason": reason, "step": step, "closed_s": time.time()}
        if (record := self._open.pop(sample_id, None)) is not None:
            self._keep(record | found)
        else:
            _bounded(self._late, sample_id, found, LATE)

    async def flush(self) -> None:
        """Everything kept so far is in the files, or keeping has stopped."""
        while self._writing is not None or self._rows:
            if self._writing is None:
                self._begin_write()
            assert self._writing is not None
            await asyncio.shield(self._writing)

    def close(self) -> None:
        """Write what is left."""
        if self._rows and not self._stopped:
            self._wrote(_attempt(self._run_dir, self._take(), self._number))

    def _keep(self, row: SampleRecord) -> None:
        if self._stopped:
            return
        self._shown(row)
        if self._bytes > MOST_WAITING_BYTES:
            if not self._told_slow:
                self._warn(f"{self._run_dir / FOLDER} is written more slowly than samples come; some are not kept")
            self._told_slow = True
            return
        self._rows.append(row)
        self._bytes += text_bytes(row)
        if self._writing is None and (self._bytes >= FULL_BYTES or self._is_due()):
            self._begin_write()

    def _is_due(self) -> bool:
        now = time.monotonic()
        return now - self._written_s >= min(MOST_S, max(LEAST_S, PART_OF_RUN * (now - self._began_s)))

    def _begin_write(self) -> None:
        self._writing = asyncio.get_running_loop().create_task(self._write(self._take()))

    def _take(self) -> list[SampleRecord]:
        rows, self._rows, self._bytes = self._rows, [], 0
        self._written_s = time.monotonic()
        return rows

    async def _write(self, rows: list[SampleRecord]) -> None:
        number, self._number = self._number, self._number + 2  # `close` may write while the thread still does
        try:
            self._wrote(await asyncio.to_thread(_attempt, self._run_dir, rows, number))
        finally:
            self._writing = None

    def _wrote(self, result: bool | str) -> None:
        """Whether old files were removed, or why nothing could be written."""
        if isinstance(result, str):
            self._stopped = True
            self._rows, self._bytes = [], 0
            self._warn(
                f"{self._run_dir / FOLDER} cannot be written ({result}); the run goes on and keeps no more samples"
            )
        elif result and not self._told_bound:
            self._told_bound = True
            self._warn(f"{self._run_dir / FOLDER} has reached its largest size; the oldest samples are removed")


def _attempt(run_dir: Path, rows: list[SampleRecord], number: int) -> bool | str:
    """Write rows; whether old files were removed for them, or the problem as text."""
    try:
        write_rollouts(run_dir, rows, number)
        return bound_rollouts(run_dir)
    except (OSError, ValueError, TypeError, ImportError, MemoryError) as problem:  # what pyarrow raises, too
        return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else 'no reason given'}"


def _bounded(entries: OrderedDict[str, V], key: str, value: Any, most: int) -> None:
    """Add an entry; the oldest one makes room."""
    entries[key] = value
    if len(entries) > most:
        entries.popitem(last=False)

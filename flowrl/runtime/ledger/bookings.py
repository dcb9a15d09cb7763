"""Bookings: the work of the accounting, in order, and in pieces that are short enough for the driver's loop.

A step of ten thousand samples takes seconds to book and to commit. Meanwhile hosts report, ask and wait.

Invariants
- Jobs are done one after the other, in the order given: an event waits for the step before it. So a transaction never
  contains only a part of a step.
- A job yields where the loop may do other things. If no other job is pending, its first piece is done at once; a job
  that does not yield is then over.
- An admission that waits for `this_tick` is answered when the transaction with its rows is committed.

Waits: `done` waits for jobs, which wait for nothing but the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from flowrl.errors import FlowrlError
from flowrl.runtime.ledger.ledger import Ledger

COMMIT_WITHIN_S = 0.5


class Bookings:
    """Does the jobs of one ledger on the driver's event loop. A job's exception is raised where its piece runs.

    That is in the caller of `do`, `finish` or `commit`, or in the loop, which calls its exception handler. In both
    cases the driver ends the run.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._jobs: deque[Iterator[None]] = deque()
        self._next_piece: asyncio.Handle | None = None
        self._admissions: asyncio.Future[None] | None = None
        """The future for which admissions wait whose rows are not in a transaction yet."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is not over."""
        return bool(self._jobs)

    def add_job(self, job: Iterator[None]) -> None:
        """Do this job when all earlier jobs are over."""
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._do_piece()

    def finish_jobs(self) -> None:
        """Do all jobs now. Raises what a job raises; the jobs after it are then not done."""
        try:
            while self._jobs:
                self._advance_job()
        finally:
            if self._next_piece is not None and not self._jobs:
                self._next_piece.cancel()

    async def wait_for_jobs(self) -> None:
        """Returns when the jobs that are pending now are over."""
        if self._jobs:
            over = asyncio.Event()

            def set_over() -> Iterator[None]:
                over.set()
                yield from ()

            self.add_job(set_over())
            await over.wait()

    def _do_piece(self) -> None:
        """Do the next piece, and have the loop do the rest."""
        self._next_piece = None
        try:
            if self._jobs:
                self._advance_job()
        finally:
            if self._jobs:
                self._next_piece = asyncio.get_running_loop().call_soon(self._do_piece)

    def _advance_job(self) -> None:
        """Do a piece of the first job, which is over if it ends or raises."""
        over = True
        try:
            over = next(self._jobs[0], self) is self
        finally:
            if over:
                self._jobs.popleft()

    # Transactions

    def commit_all(self) -> None:
        """Do everything, and commit all buffered rows, now."""
        self.finish_jobs()
        for _ in self.commit_in_pieces():
            pass

    def commit_in_pieces(self) -> Iterator[None]:
        """A job, or the last part of one: commit all rows that are buffered when it starts.

        Raises FlowrlError if the ledger cannot be written; the waiting admissions raise it too.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._admissions = self._admissions, None
        try:
            if self._ledger.dirty:
                yield from self._ledger.write_in_pieces()
        except FlowrlError as error:
            if waiting is not None:
                waiting.set_exception(error)
            raise
        else:
            if waiting is not None:
                waiting.set_result(None)

    def commit_soon(self) -> None:
        """Commit after the jobs that are pending now."""
        self.add_job(self.commit_in_pieces())

    def this_tick(self) -> asyncio.Future[None]:
        """The next commit, which all admissions share until it starts.

        It starts after this tick of the loop, or when the jobs that are pending then are over.
        """
        if self._admissions is None:
            loop = asyncio.get_running_loop()
            self._admissions = loop.create_future()
            loop.call_soon(self.commit_soon)
        return asyncio.shield(self._admissions)

    def commit_later(self) -> None:
        """Commit what is buffered at the latest COMMIT_WITHIN_S from now."""
        if self._timer is None and self._ledger.dirty:
            self._timer = asyncio.get_running_loop().call_later(COMMIT_WITHIN_S, self.commit_soon)

"""Bookings in pieces: in order, atomic for readers, and the same books as those that are made at once."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import FlowrlError
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.ledger import accounting, bookings, chain, ledger, ledger_file
from flowrl.runtime.ledger.bookings import Bookings
from tests.rigs.ticks import ticks, ticks_until
from tests.runtime.ledger.small_run import POLICY, SmallRun, prompts, sample, two_trainers, whole_run
from tests.runtime.runs.test_runtime_episodes import play


@pytest.fixture
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is one use, or one row."""
    monkeypatch.setattr(accounting, "USES_AT_ONCE", 1)
    monkeypatch.setattr(ledger, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(chain, "ROWS_AT_ONCE", 1)


def job(told: list[str], name: str, pieces: int = 1, error: Exception | None = None) -> Iterator[None]:
    for piece in range(1, pieces):
        told.append(f"{name}{piece}")
        yield
    if error is not None:
        raise error
    told.append(f"{name}{pieces}")


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Bookings]:
    book = ledger.Ledger(tmp_path / ledger_file.LEDGER)
    yield Bookings(book)
    book.close()


def test_jobs_are_done_in_order_and_the_loop_goes_on_between_their_pieces(books: Bookings) -> None:
    told: list[str] = []

    async def body() -> None:
        books.add_job(job(told, "a"))
        assert told == ["a1"] and not books.busy, "what is short is done at once"
        books.add_job(job(told, "b", 3))
        books.add_job(job(told, "c"))
        assert told == ["a1", "b1"] and books.busy
        asyncio.get_running_loop().call_soon(told.append, "loop")
        await books.wait_for_jobs()
        assert told == ["a1", "b1", "b2", "loop", "b3", "c1"] and not books.busy
        await books.wait_for_jobs()

    asyncio.run(body())


def test_everything_can_be_finished_at_once(books: Bookings) -> None:
    told: list[str] = []

    async def body() -> None:
        books.add_job(job(told, "a", 3))
        books.add_job(job(told, "b", 2))
        waiting = asyncio.ensure_future(books.wait_for_jobs())
        await ticks()
        books.finish_jobs()
        assert told == ["a1", "a2", "a3", "b1", "b2"] and not books.busy
        await waiting
        books.add_job(job(told, "c", 2))
        await ticks(5)
        assert told[5:] == ["c1", "c2"]

    asyncio.run(body())


def test_what_a_job_raises_is_told_and_the_next_jobs_are_done(books: Bookings) -> None:
    told: list[str] = []
    unretrieved: list[Any] = []

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context["exception"]))
        with pytest.raises(FlowrlError, match="at once"):
            books.add_job(job(told, "a", error=FlowrlError("at once")))
        books.add_job(job(told, "b", 2, error=FlowrlError("later")))
        books.add_job(job(told, "c"))
        await books.wait_for_jobs()

    asyncio.run(body())
    assert told == ["b1", "c1"] and [str(error) for error in unretrieved] == ["later"]


def content(directory: Path) -> dict[str, list[Any]]:
    """All rows of the ledger without the columns of times, and without the chain over them."""
    with closing(sqlite3.connect(directory / ledger_file.LEDGER)) as db:
        db.row_factory = sqlite3.Row
        found = {}
        for table in ledger_file.TABLES:
            rows = [dict(row) for row in db.execute(f"SELECT * FROM {table} ORDER BY rowid")]
            timed = ("line", "first_commit")
            found[table] = [{k: v for k, v in row.items() if not k.endswith("_s") and k not in timed} for row in rows]
        return found


@pytest.mark.parametrize("run", [whole_run, two_trainers])
def test_the_books_are_those_that_are_made_at_once(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("at once", "in pieces"):
        (tmp_path / name).mkdir()
    asyncio.run(run(tmp_path / "at once"))
    booking = accounting.Accounting._book_events

    def finished(self: accounting.Accounting, events: Any) -> Iterator[None]:
        yield  # even the shortest job takes two pieces
        yield from booking(self, events)

    def record(self: accounting.Accounting, events: Any) -> None:
        self.bookings.add_job(self._book_events(events))
        self.bookings.finish_jobs()  # the loop of these runs does not wait for what it reports

    monkeypatch.setattr(accounting.Accounting, "_book_events", finished)
    monkeypatch.setattr(accounting.Accounting, "record_events", record)
    for module, constant in ((accounting, "USES_AT_ONCE"), (ledger, "ROWS_AT_ONCE"), (chain, "ROWS_AT_ONCE")):
        monkeypatch.setattr(module, constant, 1)
    asyncio.run(run(tmp_path / "in pieces"))
    assert content(tmp_path / "at once") == content(tmp_path / "in pieces")
    assert audit(tmp_path / "in pieces").ok, str(audit(tmp_path / "in pieces"))


@pytest.mark.usefixtures("in_small_pieces")
def test_a_reader_sees_a_step_whole_or_not_and_an_admission_waits_for_its_commit(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path, ahead=2)
        for group in (0, 1):
            await small.admit(group)
        made = [sample(prompt, [0] * 3) for group in (0, 1) for prompt in prompts(group)]
        for one in made:
            small.client.generated(one)
        small.client.flush()
        await small.accounting.bookings.wait_for_jobs()
        seen: list[tuple[int, int, int, int]] = []
        counts = "SELECT (SELECT COUNT(*) FROM steps), (SELECT COUNT(*) FROM uses), (SELECT COUNT(*) FROM samples),"
        counts += " (SELECT COUNT(*) FROM samples WHERE state = 'trained')"
        with closing(sqlite3.connect(tmp_path / ledger_file.LEDGER)) as db:
            small.step(made)
            assert small.accounting.bookings.busy
            await ticks(2)
            admitted = asyncio.ensure_future(small.admit(2))
            while small.accounting.bookings.busy or not admitted.done():
                seen.append(db.execute(counts).fetchone())
                assert not admitted.done() or seen[-1][2] == 9, "no ticket before its rows are committed"
                await ticks()
            seen.append(db.execute(counts).fetchone())
        assert admitted.result() == 2
        assert {one[:2] + one[3:] for one in seen} == {(0, 0, 0), (1, 6, 6)} and len(seen) > 30
        assert small.accounting.tickets.versions == {POLICY: 1}
        small.close()
        assert audit(tmp_path).ok, str(audit(tmp_path))

    asyncio.run(body())


@pytest.mark.usefixtures("in_small_pieces")
def test_a_full_disk_in_the_middle_loses_no_row(tmp_path: Path) -> None:
    async def body() -> None:
        unretrieved: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context["exception"]))
        small = SmallRun(tmp_path)
        await small.admit(0)
        small.accounting.ledger._db.execute("PRAGMA max_page_count = 1")
        refused = asyncio.ensure_future(small.client.admit("prompts/0", prompts(1, 300)))
        await ticks_until(lambda: small.accounting.bookings.busy)
        await ticks(20)
        small.accounting.ledger.add_row("scored", 0.5, 1.0, "g0/0")
        with pytest.raises(FlowrlError, match="database or disk is full"):
            await refused
        small.accounting.ledger._db.execute("PRAGMA max_page_count = 10000")
        small.accounting.bookings.commit_all()
        with closing(sqlite3.connect(tmp_path / ledger_file.LEDGER)) as db:
            assert db.execute("SELECT COUNT(*), SUM(reward) FROM samples").fetchone() == (303, 0.5)
        assert len(unretrieved) == 1

    asyncio.run(body())


@pytest.mark.usefixtures("in_small_pieces")
def test_runs_with_evaluations_checkpoints_and_a_resume_go_on_while_steps_are_booked(tmp_path: Path) -> None:
    ran = play(tmp_path / "run", evaluate=4).raise_for_error()
    assert ran.audit().ok, str(ran.audit())
    assert ran.rows("SELECT phase, COUNT(*) FROM evaluations GROUP BY 1 ORDER BY 1") == [("after", 4), ("before", 4)]
    again = play(tmp_path / "run", steps=8, resume=True, evaluate=4).raise_for_error()
    assert again.steps[-1] == 8 and again.audit().ok, str(again.audit())


def test_a_step_of_thousands_of_samples_is_booked_in_short_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None takes more than so many uses or rows; one piece of each kind takes some 10 or 20 ms."""
    num_pieces, advance = [0], Bookings._advance_job

    def counted(self: Bookings) -> None:
        num_pieces[0] += 1
        advance(self)

    monkeypatch.setattr(bookings.Bookings, "_advance_job", counted)

    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.client.admit("prompts/0", prompts(0, 2000))
        await small.client.admit("prompts/0", prompts(1, 2000))
        num_pieces[0] = 0
        uses = [(f"g{group}/{member}", 1, 0, 0, 0, [(5, 1, "x")]) for group in (0, 1) for member in range(2000)]
        small.accounting.record_events([("step", POLICY, {"step": 1}, uses, "trainer/0")])
        assert num_pieces == [1]
        await small.accounting.bookings.wait_for_jobs()
        changed = 3 * 4000 + 3  # samples, uses and spans, the tickets and the step
        written = changed + 4000  # for each use the tokens of a report that may come later
        assert num_pieces[0] >= 4000 // 250 + written // 1000 + changed // 1000
        assert small.accounting.tickets.versions == {POLICY: 1}

    asyncio.run(body())

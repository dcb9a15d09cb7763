"""Accounting: admission, what becomes of samples, and what a run leaves behind."""

from __future__ import annotations

import asyncio
import itertools
import re
import sqlite3
import time
from collections.abc import Coroutine, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgpack
import numpy as np
import pytest

from flowrl.errors import FlowrlError, NodeFailed
from flowrl.messages import Tombstone
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.driver.run_checkpoints import Snapshotter
from flowrl.runtime.driver.run_processes import Orders
from flowrl.runtime.ledger import bookings, ledger, ledger_client, ledger_file
from flowrl.runtime.ledger.accounting import Accounting, LedgerClient, Use
from flowrl.runtime.ledger.ledger import Fate
from flowrl.runtime.telemetry.metrics import read_lines
from flowrl.wire.tickets import Tickets
from tests.rigs.ticks import ticks
from tests.runtime.ledger.small_run import POLICY, SmallRun, Wire, lost, prompts, sample, whole_run


def rows(directory: Path, query: str) -> list[tuple[Any, ...]]:
    """As any other process sees the ledger: committed rows only."""
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        return db.execute(query).fetchall()


def states(directory: Path) -> dict[str, tuple[str, str | None]]:
    return {
        sample_id: (state, reason)
        for sample_id, state, reason in rows(directory, "SELECT sample_id, state, reason FROM samples")
    }


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


# Admission


def test_a_group_is_committed_before_its_source_gets_the_ticket(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        assert await small.admit(0) == 0
        assert rows(
            tmp_path, "SELECT sample_id, group_id, prompt_id, member, state, prompt_tokens, born_version FROM samples"
        ) == [(f"g0/{m}", "g0", "p0", m, "in_flight", 5, 0) for m in range(3)]
        assert rows(tmp_path, "SELECT * FROM tickets") == [(0, "g0", "open", None, '{"trainer": 0}', 0, None)]

    run(body())


def test_groups_admitted_in_one_turn_share_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        commit = Mock(wraps=small.accounting.ledger.write_in_pieces)
        monkeypatch.setattr(small.accounting.ledger, "write_in_pieces", commit)
        assert await asyncio.gather(*(small.admit(group) for group in range(4))) == [0, 1, 2, 3]
        assert commit.call_count == 1

    run(body())


def test_admission_waits_for_a_ticket_in_order_of_asking(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path, ahead=0)
        await asyncio.gather(small.admit(0), small.admit(1))
        later = [asyncio.create_task(small.admit(group)) for group in (2, 3)]
        await ticks()
        assert not any(task.done() for task in later)
        small.step([sample(p, [0, 0]) for group in (0, 1) for p in prompts(group)])
        assert await asyncio.gather(*later) == [2, 3]
        assert rows(tmp_path, "SELECT DISTINCT born_version FROM samples WHERE group_id IN ('g2', 'g3')") == [(1,)]

    run(body())


def test_a_cancelled_admission_takes_no_ticket(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path, ahead=0)
        await asyncio.gather(small.admit(0), small.admit(1))
        waiting = asyncio.create_task(small.admit(2))
        await ticks()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        small.step([sample(p, [0]) for group in (0, 1) for p in prompts(group)])
        assert small.accounting.tickets.num_open == 0
        assert await small.admit(3) == 2

    run(body())


def test_nothing_is_admitted_during_a_pause(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        small.accounting.tickets.pause("checkpoint")
        waiting = asyncio.create_task(small.admit(0))
        await ticks()
        assert not waiting.done()
        small.accounting.resume_admission("checkpoint")
        assert await waiting == 0

    run(body())


def test_the_end_of_admission_answers_those_that_wait(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path, steps=1)
        await asyncio.gather(small.admit(0), small.admit(1))
        waiting = asyncio.create_task(small.admit(2))
        await ticks()
        small.step([sample(p, [0]) for group in (0, 1) for p in prompts(group)])
        assert await waiting is None
        assert await small.admit(3) is None

    run(body())


def test_nobody_waits_for_a_dead_consumer(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path, ahead=0, generators=("generator/0", "generator/1"))
        await asyncio.gather(small.admit(0), small.admit(1))
        waiting = asyncio.create_task(small.admit(2))
        held = asyncio.create_task(small.accounting.until_held(1))
        small.step([sample(p, [0]) for group in (0, 1) for p in prompts(group)])
        await ticks()
        assert small.accounting.tickets.num_open == 2 and not held.done()
        small.accounting.consumer_died("generator/1")
        assert await waiting == 2
        await held

    run(body())


def test_a_consumer_that_returns_is_waited_for_again(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path, ahead=0, generators=("generator/0", "generator/1"))
        small.accounting.consumer_died("generator/1")
        small.accounting.consumer_returned("generator/1", {POLICY: 0})
        await asyncio.gather(small.admit(0), small.admit(1))
        waiting = asyncio.create_task(small.admit(2))
        small.step([sample(p, [0]) for group in (0, 1) for p in prompts(group)])
        assert small.accounting.tickets.num_open == 2
        small.client.holds("generator/1", POLICY, 1)
        assert await waiting == 2

    run(body())


def test_after_a_resume_a_group_in_flight_gets_the_ticket_it_has_once(tmp_path: Path) -> None:
    async def before() -> None:
        small = SmallRun(tmp_path)
        assert [await small.admit(0), await small.admit(1)] == [0, 1]
        small.close(orderly=False)

    async def after() -> None:
        small = SmallRun(tmp_path, resume=True)
        with pytest.raises(FlowrlError, match=r"group 'g1' again after --resume, with samples .* \(g1/3\)"):
            await small.client.admit("prompts/0", prompts(1, 4))
        small.client.lost(Tombstone("g0", -1, "dropped", "cancelled", "x"))
        assert [await small.admit(1), await small.admit(0), await small.admit(2)] == [1, 0, 2]
        with pytest.raises(FlowrlError, match="group 'g1' a second time"):
            await small.admit(1)

    run(before())
    run(after())


def test_a_group_is_admitted_once_in_flight_or_done(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        for _ in range(2):
            with pytest.raises(FlowrlError, match=r"node 'prompts/0' admitted group 'g0' a second time"):
                await small.admit(0)
            with pytest.raises(FlowrlError, match=r"node 'prompts/0' admitted group 'g0' a second time"):
                await small.client.admit("prompts/0", [replace(p, sample_id=f"x{p.member}") for p in prompts(0)])
            small.client.lost(Tombstone("g0", -1, "dropped", "cancelled", "x"))
        assert await small.admit(1) == 1

    run(body())


@pytest.mark.parametrize("done", [False, True])
def test_every_sample_of_a_group_is_looked_up(tmp_path: Path, done: bool) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        if done:
            small.client.lost(Tombstone("g0", -1, "dropped", "cancelled", "x"))
            small.accounting.bookings.commit_all()
        first, second, third = prompts(1)
        with pytest.raises(FlowrlError, match=r"'prompts/0' admitted sample 'g0/2' .* in group 'g1' after group 'g0'"):
            await small.client.admit("prompts/0", [first, second, replace(third, sample_id="g0/2")])
        with pytest.raises(FlowrlError, match="group 'g1' with 2 samples of the same id, 'g1/1'"):
            await small.client.admit("prompts/0", [first, second, replace(third, sample_id="g1/1")])
        assert await small.admit(1) == 1
        assert rows(tmp_path, "SELECT COUNT(*) FROM samples") == [(6,)]

    run(body())


def test_of_two_admissions_at_once_the_later_one_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        small.accounting.tickets.pause("start")
        first = asyncio.create_task(small.admit(0))
        await ticks()
        with pytest.raises(FlowrlError, match="group 'g0' a second time"):
            await small.admit(0)
        with pytest.raises(FlowrlError, match="sample 'g0/1' a second time, in group 'g1' after group 'g0'"):
            await small.client.admit("prompts/1", [replace(p, sample_id=f"g0/{p.member + 1}") for p in prompts(1, 1)])
        small.accounting.resume_admission("start")
        assert await first == 0
        assert await small.admit(1) == 1
        small.close()
        assert audit(tmp_path).ok

    run(body())


def test_what_a_cancelled_admission_asked_for_may_be_asked_for_again(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        small.accounting.tickets.pause("start")
        waiting = asyncio.create_task(small.admit(0))
        await ticks()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        small.accounting.resume_admission("start")
        assert await small.admit(0) == 0

    run(body())


# What becomes of samples


def test_a_trained_sample_tells_its_whole_life(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [sample(p, [0, 0, 0], reward=0.25) for p in prompts(0)]
        for one in made:
            small.client.generated(one)
            small.client.scored(one)
        small.step(made)
        assert rows(
            tmp_path,
            "SELECT state, reason, response_tokens, trained_tokens, stale_tokens, redone_tokens, reward,"
            " oldest_version, newest_version, oldest_trained_version, trained_version, step, generator"
            " FROM samples WHERE member = 1",
        ) == [("trained", None, 3, 3, 0, 0, 0.25, 0, 0, 0, 0, 1, "generator/0")]
        times = rows(tmp_path, "SELECT admitted_s, generated_s, scored_s, trained_s FROM samples WHERE member = 1")[0]
        assert list(times) == sorted(times)
        assert rows(tmp_path, "SELECT * FROM uses WHERE sample_id = 'g0/1'") == [("g0/1", POLICY, 0, 1, 3, 0, 0, 0)]
        assert rows(tmp_path, "SELECT state, step FROM tickets") == [("trained", 1)]

    run(body())


def test_a_group_that_is_lost_member_by_member_gives_its_ticket_back(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path, ahead=0)
        await asyncio.gather(small.admit(0), small.admit(1))
        waiting = asyncio.create_task(small.admit(2))
        first, *others = prompts(0)
        small.client.lost(lost(first, "failed", "timeout"))
        for prompt in others:
            small.client.lost(lost(prompt, "filtered", "no_spread"))
        assert await waiting == 2
        assert states(tmp_path)["g0/0"] == ("failed", "timeout")
        assert states(tmp_path)["g0/2"] == ("filtered", "no_spread")
        assert rows(tmp_path, "SELECT state FROM tickets WHERE ticket = 0") == [("dropped",)]

    run(body())


def test_a_marker_that_names_no_samples_stands_for_the_whole_group(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        small.client.lost(Tombstone("g0", -1, "dropped", "cancelled", "advantage/0"))
        small.accounting.bookings.commit_all()
        assert set(states(tmp_path).values()) == {("dropped", "cancelled")}
        assert small.accounting.tickets.num_open == 0

    run(body())


def test_late_news_changes_no_state(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [sample(p, [0]) for p in prompts(0)]
        small.step(made[:2])
        small.client.lost(lost(made[0], "dropped", "late"))
        small.client.lost(lost(made[2], "failed", "timeout", tokens=4))
        small.client.lost(lost(made[2], "dropped", "again"))
        small.client.generated(made[2])
        small.client.flush()
        small.accounting.bookings.commit_all()
        assert states(tmp_path) == {"g0/0": ("trained", None), "g0/1": ("trained", None), "g0/2": ("failed", "timeout")}
        assert rows(tmp_path, "SELECT response_tokens, redone_tokens FROM samples WHERE member = 2") == [(1, 0)]

    run(body())


def test_news_of_a_generator_may_come_after_the_step(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        trainer = LedgerClient(small.wire, "trainer/0")
        small.wire.held = []
        made = small.generate(0)
        small.client.flush()
        late, small.wire.held = small.wire.held, None
        trainer.step({"step": 1}, [Use.of(one) for one in made], policy=POLICY)
        for kind, packed in late:
            small.wire.handlers[kind]("generator/0", msgpack.unpackb(packed))
        small.close()
        report = audit(tmp_path)
        assert report.ok, str(report)
        assert report.figures["  trained"] == sum(one.response_tokens for one in made) > 0

    run(body())


def test_the_tokens_of_an_unfinished_rollout_are_those_of_its_marker(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        small.client.lost(lost(prompts(0)[0], "dropped", "cancelled", tokens=17))
        small.accounting.bookings.commit_all()
        assert rows(tmp_path, "SELECT response_tokens FROM samples WHERE member = 0") == [(17,)]

    run(body())


def test_tokens_generated_again_are_counted_apart(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        prompt = prompts(0)[0]
        small.client.generated(sample(prompt, [0] * 5))
        small.client.generated(sample(prompt, [0] * 8, generator="generator/1"))
        small.client.flush()
        small.accounting.bookings.commit_all()
        query = "SELECT response_tokens, redone_tokens, generator FROM samples WHERE member = 0"
        assert rows(tmp_path, query) == [(8, 5, "generator/1")]

    run(body())


def test_a_copy_of_what_a_checkpoint_kept_changes_no_row(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        first, second = prompts(0)[:2]
        for prompt in (first, second):
            small.client.generated(sample(prompt, [0] * 5))
        small.client.scored(sample(first, [0] * 5, reward=1.0))
        small.client.flush()
        small.accounting.note_kept({first.sample_id}, {first.sample_id})
        small.client.generated(sample(first, [3] * 6))
        small.client.scored(sample(first, [3] * 6, reward=7.0))
        small.client.flush()
        small.accounting.bookings.commit_all()
        query = "SELECT response_tokens, redone_tokens, newest_version, reward FROM samples ORDER BY member LIMIT 2"
        assert rows(tmp_path, query) == [(5, 6, 0, 1.0), (5, 0, 0, None)]

    run(body())


def test_stale_tokens_leave_the_sample_trained_or_drop_it(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [sample(p, [0, 0, 1]) for p in prompts(0)]
        for one in made:
            small.client.generated(one)
        fresh = made[0].versions >= 1
        small.step([])
        small.step(made, [None, fresh, np.zeros_like(fresh)])
        query = "SELECT member, state, reason, trained_tokens, stale_tokens, oldest_trained_version, step FROM samples"
        assert rows(tmp_path, query) == [
            (0, "trained", None, 3, 0, 0, 2),
            (1, "trained", None, 1, 2, 1, 2),
            (2, "dropped", "stale", 0, 3, None, None),
        ]
        assert rows(tmp_path, "SELECT sample_id, tokens FROM uses ORDER BY 1") == [("g0/0", 3), ("g0/1", 1)]

    run(body())


def test_a_second_trainer_stands_in_uses_and_in_the_first_ones_record(tmp_path: Path) -> None:
    async def body() -> None:
        consumers = [("generator/0", "actor"), ("critic/0", "value")]
        records: list[dict[str, Any]] = []
        small = SmallRun(tmp_path)
        accounting = Accounting(tmp_path, Tickets(1, 1, consumers=consumers), on_step=records.append)
        accounting.register_handlers(small.wire)
        client = LedgerClient(small.wire, "generator/0")
        await client.admit("prompts/0", prompts(0))
        uses = [Use.of(sample(p, [0, 0])) for p in prompts(0)]
        client.step({"step": 1, "loss": 0.5}, uses, policy="value")
        assert records == []
        client.step({"step": 1, "loss": 0.1}, uses, policy="actor")
        assert records == [{"step": 1, "loss": 0.1, "value": {"step": 1, "loss": 0.5}}]
        assert rows(tmp_path, "SELECT trainer, COUNT(*), SUM(tokens) FROM uses GROUP BY trainer ORDER BY 1") == [
            ("actor", 3, 6),
            ("value", 3, 6),
        ]
        client.holds("generator/0", "actor", 1)
        assert accounting.tickets.num_open == 1
        client.holds("critic/0", "value", 1)
        assert accounting.tickets.num_open == 0

    run(body())


def test_a_sample_is_used_once(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [sample(p, [0]) for p in prompts(0)]
        small.step(made)
        with pytest.raises(
            FlowrlError, match="used sample 'g0/0' at step 2, but the state of this sample is already final"
        ):
            small.step(made[:1])

    run(body())


def test_tokens_beyond_the_bound_end_the_run(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        small.accounting._bound = 1
        await small.admit(0)
        small.step([])
        small.step([])
        with pytest.raises(FlowrlError, match=r"updates version 2 with tokens of 'g0/0'.* a staleness of 2, but"):
            small.step([sample(p, [0]) for p in prompts(0)])

    run(body())


def test_a_step_of_a_node_that_the_graph_does_not_know_as_a_trainer_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        with pytest.raises(FlowrlError, match=r"node 'other' booked a step.*declare trains=True"):
            small.client.step({"step": 1}, [], policy="other")

    run(body())


@pytest.mark.parametrize("step", [0, 1, 3])
def test_steps_are_booked_once_and_in_order(tmp_path: Path, step: int) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        small.client.step({"step": 1}, [], policy=POLICY)
        with pytest.raises(
            FlowrlError, match=rf"trainer 'trainer' booked step {step} after step 1; it has to book each"
        ):
            small.client.step({"step": step}, [], policy=POLICY)

    run(body())


def test_a_step_without_a_weights_edge_is_recorded(tmp_path: Path) -> None:
    async def body() -> None:
        records: list[dict[str, Any]] = []
        (tmp_path / "graph.json").write_text('{"tickets": null, "max_staleness": null}')
        accounting = Accounting(tmp_path, Tickets(1, None, consumers=(), trainers=["sft"]), on_step=records.append)
        wire = Wire()
        accounting.register_handlers(wire)
        client = LedgerClient(wire, "sft/0")
        await client.admit("rows/0", prompts(0, 1))
        row = sample(prompts(0, 1)[0], [-1, -1, -1])
        client.generated(row)
        client.step({"step": 1, "loss": np.float64(2.0)}, [Use.of(row)], policy="sft")
        assert records == [{"step": 1, "loss": 2.0}]
        query = "SELECT state, trained_tokens, oldest_version, oldest_trained_version, step FROM samples"
        assert rows(tmp_path, query) == [("trained", 3, None, None, 1)]
        assert audit(tmp_path).ok

    run(body())


# When things are written


def test_events_are_collected_and_sent_together(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        sent: list[list[str]] = []
        small.wire.on("ledger", lambda host, body: sent.append([event[0] for event in body["events"]]))
        made = sample(prompts(0)[0], [0])
        small.client.generated(made)
        small.client.scored(made)
        assert sent == []
        small.client.holds("generator/0", POLICY, 0)
        assert sent == [["generated", "scored", "holds"]]
        small.client.flush()
        assert len(sent) == 1

    run(body())


def test_events_are_sent_and_committed_without_a_further_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_client, "SEND_WITHIN_S", 0.0)
    monkeypatch.setattr(bookings, "COMMIT_WITHIN_S", 0.0)

    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        committed = asyncio.Event()
        writing = small.accounting.ledger.write_in_pieces

        def write_and_tell() -> Iterator[None]:
            yield from writing()
            committed.set()

        monkeypatch.setattr(small.accounting.ledger, "write_in_pieces", write_and_tell)
        small.client.generated(sample(prompts(0)[0], [0] * 6))
        await committed.wait()
        assert rows(tmp_path, "SELECT response_tokens FROM samples WHERE member = 0") == [(6,)]

    run(body())


def test_a_full_disk_fails_the_admission_and_loses_no_row(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        small.accounting.ledger._db.execute("PRAGMA max_page_count = 1")
        with pytest.raises(FlowrlError, match=r"ledger\.sqlite cannot be written \(database or disk is full\)"):
            await small.client.admit("prompts/0", prompts(1, 500))
        small.accounting.ledger._db.execute("PRAGMA max_page_count = 10000")
        small.accounting.bookings.commit_all()
        assert rows(tmp_path, "SELECT COUNT(*) FROM samples") == [(503,)]

    run(body())


@pytest.mark.parametrize(
    ("prompt_id", "cause"),
    [(None, "NOT NULL constraint failed: samples.prompt_id"), ([], "binding"), (2**63, "too large")],
)
def test_a_row_that_cannot_be_stored_is_reported_with_its_cause(tmp_path: Path, prompt_id: object, cause: str) -> None:
    async def body() -> None:
        reported: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        small = SmallRun(tmp_path)
        await small.admit(0)
        with pytest.raises(FlowrlError, match=rf"ledger\.sqlite cannot be written \(.*{cause}.*fix that") as refused:
            await small.accounting.admit_group("prompts/0", "g1", [("g1/0", prompt_id, 0, 0, 5)])
        assert "room" not in str(refused.value)
        assert reported == [refused.value]
        with pytest.raises(FlowrlError, match=cause):
            small.accounting.close(orderly=True)
        assert rows(tmp_path, "SELECT COUNT(*) FROM samples") == [(3,)]

    run(body())


def test_a_full_disk_asks_for_room(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        small.accounting.ledger._db.execute("PRAGMA max_page_count = 1")
        with pytest.raises(FlowrlError, match="make room there and continue with --resume"):
            await small.client.admit("prompts/0", prompts(1, 500))

    run(body())


TWICE_WRITTEN: tuple[tuple[Any, ...], ...] = (
    ("partial", 3, "g0/0"),
    ("generated", "generator/0", 5, 1, 2, 9.0, "g0/0"),
    ("redone", 4, "g0/0"),
)


def test_a_resumed_run_keeps_tickets_for_what_its_samples_may_still_ask_for(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path, ahead=3)
        accounting = small.accounting
        rows_of = [[(f"{g}/{m}", "p", 0, m, 5) for m in range(2)] for g in "abc"]
        assert await accounting.admit_group("prompts/0", "a", rows_of[0], asks=1) == 0
        with pytest.raises(FlowrlError, match="no sample of this name"):
            await accounting.admit_group("prompts/0", "b", rows_of[1], asked_by="x/0")
        assert await accounting.admit_group("prompts/0", "b", rows_of[1], asked_by="a/0") == 1
        with pytest.raises(FlowrlError, match="needs 1 of the tickets kept for that sample, and 0 are left"):
            await accounting.admit_group("prompts/0", "c", rows_of[2], asked_by="a/0")
        small.close(orderly=False)
        again = SmallRun(tmp_path, ahead=3, resume=True).accounting
        assert [again.tickets.num_kept_for(name) for name in ("a/0", "a/1", "b/0")] == [0, 1, None]
        again._settle_sample("a/1", POLICY, Fate(state="filtered", reason="test"))
        assert again.tickets.num_kept_for("a/1") is None
        assert await again.admit_group("prompts/0", "c", rows_of[2], asked_by="a/1") == 2
        again.close(orderly=False)
        assert rows(tmp_path, "SELECT asks, asked_by FROM tickets ORDER BY ticket") == [
            (1, None),
            (0, "a/0"),
            (0, None),
        ]

    run(body())


@pytest.mark.parametrize("order", list(itertools.permutations(TWICE_WRITTEN)))
def test_where_two_statements_write_one_column_any_order_ends_alike(
    tmp_path: Path, order: tuple[tuple[Any, ...], ...]
) -> None:
    """In one transaction or in several, wherever the commits fall."""
    for commits in itertools.product([False, True], repeat=3):
        directory = tmp_path / "".join(str(int(commit)) for commit in commits)
        directory.mkdir()
        book = ledger.Ledger(directory / "ledger.sqlite")
        book.add_row("ticket", 0, "g0", "{}")
        book.add_row("admitted", "g0/0", "g0", "p0", 0, 0, 5, 0, 1.0)
        for event, commit in zip(order, commits, strict=True):
            book.add_row(*event)
            if commit:
                book.commit_rows()
        book.close()
        query = "SELECT response_tokens, redone_tokens, generator, oldest_version, newest_version FROM samples"
        assert rows(directory, query) == [(5, 4, "generator/0", 1, 2)]


def test_no_other_two_statements_write_one_column() -> None:
    written: dict[str, set[str]] = {}
    for name, statement in ledger.STATEMENTS.items():
        if statement.startswith("UPDATE samples SET"):
            assignments = statement.partition(" SET ")[2].partition(" WHERE ")[0]
            for column in re.findall(r"(\w+) = ", assignments):
                written.setdefault(column, set()).add(name)
    assert {column: names for column, names in written.items() if len(names) > 1} == {
        "response_tokens": {"partial", "generated"},
        "redone_tokens": {"generated", "redone"},
        "state": {"trained", "unused"},
        "stale_tokens": {"trained", "unused"},
        "masked_tokens": {"trained", "unused"},
    }


def test_an_orderly_end_drops_what_is_in_flight(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        small.close(orderly=True)
        assert set(states(tmp_path).values()) == {("dropped", "run_end")}
        assert not (tmp_path / "ledger.sqlite-wal").exists()

    run(body())


def test_a_failure_leaves_it_in_flight(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        small.close(orderly=False)
        assert set(states(tmp_path).values()) == {("in_flight", None)}

    run(body())


def test_a_checkpoint_that_a_death_cut_off_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Its read transaction did, for 5 s: to fold the WAL into the file SQLite waits for all readers."""

    class Dying(Orders):
        async def ask_all(self, kind: str, body: Any = None) -> list[Any]:
            if kind == "resume":
                raise NodeFailed("generator", 0, "it died")
            return []

    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        orders = Dying(cast(Any, None), cast(Any, SimpleNamespace(hosts=())), [], cast(Any, None))
        with pytest.raises(NodeFailed) as failed:
            await Snapshotter(orders, {}, tmp_path, keep=0).take({}, tmp_path, small.accounting)
        start_s = time.monotonic()
        small.close(orderly=False)
        assert time.monotonic() - start_s < ledger.FOLDED_WITHIN_MS / 1000
        assert not (tmp_path / "ledger.sqlite-wal").exists()
        assert failed.traceback, "the frames of the failure are there until now"

    run(body())


def test_somebody_who_reads_the_ledger_does_not_hold_up_the_end_for_long(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        with closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT COUNT(*) FROM samples").fetchone()
            start_s = time.monotonic()
            small.close(orderly=False)
            assert time.monotonic() - start_s < 4
        assert set(states(tmp_path).values()) == {("in_flight", None)}

    run(body())


def test_a_resumed_run_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    async def before() -> None:
        small = SmallRun(tmp_path)
        await asyncio.gather(*(small.admit(group) for group in range(4)))
        done = small.generate(0) + small.generate(1)
        small.step(done)
        (tmp_path / "checkpoint").mkdir()
        small.accounting.as_of_now().write(tmp_path / "checkpoint")
        await small.admit(4)
        small.step(small.generate(2) + small.generate(3))
        small.close(orderly=False)

    async def after() -> None:
        ledger_file.restore_ledger(tmp_path / "checkpoint", tmp_path / "ledger.sqlite")
        small = SmallRun(tmp_path, resume=True, start_version=1)
        assert small.accounting.in_flight() == {"g2": 2, "g3": 3}
        assert small.accounting.tickets.untrained() == [2, 3]
        assert await small.admit("4 anew") == 4
        small.step(small.generate(2) + small.generate(3))
        small.close()
        assert rows(tmp_path, "SELECT group_id, step FROM tickets ORDER BY ticket") == [
            ("g0", 1),
            ("g1", 1),
            ("g2", 2),
            ("g3", 2),
            ("g4 anew", None),
        ]

    run(before())
    run(after())


@pytest.mark.parametrize("seed", range(20))
def test_whole_runs_close_their_books(tmp_path: Path, seed: int) -> None:
    run(whole_run(tmp_path, seed))
    report = audit(tmp_path)
    assert report.ok, str(report)
    assert report.figures["steps"] == 6
    assert report.figures["  in flight"] == 0
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]

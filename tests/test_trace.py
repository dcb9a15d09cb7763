"""The trace: slices, rows, arrows, and a file that always loads."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from flowrl.channel.envelope import Envelope, message_id, source_id
from flowrl.messages import Prompt
from flowrl.runtime import trace
from flowrl.runtime.trace import BACKGROUND_ROW, TraceBuffer, TraceWriter

NO_TOKENS = np.zeros(0, np.int32)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reading of the time is one microsecond later."""
    ticks = itertools.count(1_000_000, 1_000)
    monkeypatch.setattr(time, "time_ns", lambda: next(ticks))


def envelope(ticket: int, member: int = 0) -> Envelope:
    prompt = Prompt(f"g{ticket}/{member}", f"g{ticket}", "p", 0, member, 4, 1, "", NO_TOKENS)
    return Envelope(source_id("prompts", prompt.sample_id), ticket, prompt.group_id, member, prompt)


def written(path: Path, *drained: list[Any]) -> list[dict[str, Any]]:
    """What a trace file holds after these events, which travel as the wire has them."""
    writer = TraceWriter(path)
    for events in drained:
        writer.write(msgpack.unpackb(msgpack.packb(events)))
    writer.close()
    return list(json.loads(path.read_text()))


def slices(events: list[dict[str, Any]]) -> list[tuple[str, str, int, int, int]]:
    return [(e["name"], e["cat"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]


def test_an_item_is_a_slice_and_its_work_nests_in_it(tmp_path: Path) -> None:
    buffer = TraceBuffer()
    buffer.item("generator/0", envelope(7), begins=True)
    buffer.slice("generator/0", "generate", 1_002_000, 1_004_000)
    buffer.item("generator/0", envelope(7), begins=False)
    events = written(tmp_path / "trace.json", buffer.drain())
    (work, item) = slices(events)
    assert work == ("generate", "work", 0, 1002, 1004)
    assert item == ("Prompt 7", "item", 0, 1000, 1001)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"generator/0"}
    assert buffer.drain() == []


def test_items_side_by_side_take_rows_of_their_own(tmp_path: Path) -> None:
    async def work(buffer: TraceBuffer, ticket: int, turns: int) -> None:
        buffer.item("generator/0", envelope(ticket), begins=True)
        for _ in range(turns):
            start = time.time_ns()
            await asyncio.sleep(0)
            buffer.slice("generator/0", f"part of {ticket}", start, time.time_ns())
        buffer.item("generator/0", envelope(ticket), begins=False)

    async def body(buffer: TraceBuffer) -> None:
        await asyncio.gather(*(work(buffer, ticket, 1 + ticket % 3) for ticket in range(6)))
        await asyncio.gather(*(work(buffer, ticket, 2) for ticket in range(6, 9)))

    buffer = TraceBuffer()
    asyncio.run(body(buffer))
    found = slices(written(tmp_path / "trace.json", buffer.drain()))
    assert {row for _, _, row, _, _ in found} == set(range(6))
    items = {name: (row, start, end) for name, cat, row, start, end in found if cat == "item"}
    parts = [(name, row, start, end) for name, cat, row, start, end in found if cat == "work"]
    assert len(parts) == 18
    for name, row, start, end in parts:
        item_row, item_start, item_end = items[f"Prompt {name.split()[-1]}"]
        assert row == item_row
        assert item_start <= start <= end <= item_end
    by_row = defaultdict(list)
    for row, start, end in items.values():
        by_row[row].append((start, end))
    for spans in by_row.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
            assert end <= start


def test_what_belongs_to_no_item_has_background_rows(tmp_path: Path) -> None:
    buffer = TraceBuffer()
    for start, end in ((1, 5), (2, 3), (5, 6)):
        buffer.slice("generator/0", f"update {start}", start * 1_000, end * 1_000)
    buffer.slice("generator/0", "credit", 1_000, 2_000, kind="wait")
    found = slices(written(tmp_path / "trace.json", buffer.drain()))
    assert [(name, cat, row - BACKGROUND_ROW) for name, cat, row, _, _ in found] == [
        ("update 1", "work", 0),
        ("update 2", "work", 1),
        ("update 5", "work", 0),
        ("credit", "wait", 2),
    ]


def test_an_arrow_leads_from_the_sender_to_the_receiver(tmp_path: Path) -> None:
    sender, receiver = TraceBuffer(), TraceBuffer()
    prompt = envelope(3)
    made = Envelope(message_id([prompt.id], "generator.rollouts", 0), 3, "g3", 0, prompt.body)
    sender.item("generator/0", prompt, begins=True)
    sender.sent("generator/0", made)
    sender.item("generator/0", prompt, begins=False)
    receiver.item("reward/0", made, begins=True)
    receiver.item("reward/0", made, begins=False)
    events = written(tmp_path / "trace.json", sender.drain(), receiver.drain())
    (start,) = [e for e in events if e["ph"] == "s"]
    end = next(e for e in events if e["ph"] == "f" and e["id"] == start["id"])
    outer = {e["pid"]: e for e in events if e["ph"] == "X"}
    for arrow in (start, end):
        around = outer[arrow["pid"]]
        assert around["ts"] <= arrow["ts"] <= around["ts"] + around["dur"]
        assert around["tid"] == arrow["tid"]
    assert start["pid"] != end["pid"]


def test_a_source_sends_from_a_slice_of_its_own(tmp_path: Path) -> None:
    buffer = TraceBuffer()
    buffer.sent("prompts/0", envelope(0))
    events = written(tmp_path / "trace.json", buffer.drain())
    assert [name for name, *_ in slices(events)] == ["send Prompt"]
    assert [e["ph"] for e in events if e["ph"] != "M"] == ["X", "s"]


def test_a_long_run_keeps_every_second_ticket_then_every_fourth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "SLICES_PER_STRIDE", 100)
    buffer = TraceBuffer()
    kept = []
    for ticket in range(3000):
        buffer.item("reward/0", envelope(ticket), begins=True)
        buffer.slice("reward/0", "score", 1, 2)
        buffer.item("reward/0", envelope(ticket), begins=False)
        kept += [ticket] if buffer.drain() else []
    assert kept[:100] == list(range(100))
    assert kept[100:200] == list(range(100, 300, 2))
    assert kept[200:300] == list(range(300, 700, 4))
    assert len(kept) < 500
    assert set(range(0, 3000, 64)) <= set(kept)


def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    first, second = TraceBuffer(), TraceBuffer()
    first.slice("trainer/0", "step", 1_000, 2_000)
    second.slice("generator/0", "update", 3_000, 4_000)
    second.slice("trainer/0", "step", 5_000, 6_000)
    before = written(path, first.drain())
    after = written(path, second.drain())
    assert after[: len(before)] == before
    pids = {e["args"]["name"]: e["pid"] for e in after if e["name"] == "process_name"}
    assert {e["pid"] for e in after if e["name"] == "step"} == {pids["trainer/0"]}


@pytest.mark.parametrize("lost_bytes", [0, 1, 30, 80])
def test_a_killed_run_leaves_a_file_that_can_be_continued(tmp_path: Path, lost_bytes: int) -> None:
    path = tmp_path / "trace.json"
    buffer = TraceBuffer()
    for start in range(4):
        buffer.slice("trainer/0", f"step {start}", start * 1_000, start * 1_000 + 500)
    writer = TraceWriter(path)
    writer.write(buffer.drain())
    writer._file.close()
    text = path.read_bytes()
    path.write_bytes(text[: len(text) - lost_bytes])
    names = [name for name, *_ in slices(written(path))]
    assert names == [f"step {start}" for start in range(len(names))]
    assert len(names) >= 2

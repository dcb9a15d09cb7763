"""The trace: slices, rows, arrows, and a file that always loads."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from flowrl.messages import Message, Prompt
from flowrl.runtime.telemetry.trace import BACKGROUND_ROW, OFF, TraceBuffer, TraceWriter, depth_of
from flowrl.wire.encoding.schema import Envelope, message_id, source_id
from tests.rigs.ticks import ticks

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
        writer.write_events(msgpack.unpackb(msgpack.packb(events)))
    writer.close()
    return list(json.loads(path.read_text()))


def slices(events: list[dict[str, Any]]) -> list[tuple[str, str, int, int, int]]:
    return [(e["name"], e["cat"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]


def test_an_item_is_a_slice_and_its_work_nests_in_it(tmp_path: Path) -> None:
    buffer = TraceBuffer()
    buffer.record_item("generator/0", envelope(7), begins=True)
    buffer.record_slice("generator/0", "generate", 1_002_000, 1_004_000)
    buffer.record_item("generator/0", envelope(7), begins=False)
    events = written(tmp_path / "trace.json", buffer.drain_events())
    (work, item) = slices(events)
    assert work == ("generate", "work", 0, 1002, 1004)
    assert item == ("Prompt 7", "item", 0, 1000, 1001)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"generator/0"}
    assert buffer.drain_events() == []


def test_items_side_by_side_take_rows_of_their_own(tmp_path: Path) -> None:
    async def work(buffer: TraceBuffer, ticket: int, turns: int) -> None:
        buffer.record_item("generator/0", envelope(ticket), begins=True)
        for _ in range(turns):
            start = time.time_ns()
            await ticks()
            buffer.record_slice("generator/0", f"part of {ticket}", start, time.time_ns())
        buffer.record_item("generator/0", envelope(ticket), begins=False)

    async def body(buffer: TraceBuffer) -> None:
        await asyncio.gather(*(work(buffer, ticket, 1 + ticket % 3) for ticket in range(6)))
        await asyncio.gather(*(work(buffer, ticket, 2) for ticket in range(6, 9)))

    buffer = TraceBuffer()
    asyncio.run(body(buffer))
    found = slices(written(tmp_path / "trace.json", buffer.drain_events()))
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
        buffer.record_slice("generator/0", f"update {start}", start * 1_000, end * 1_000)
    buffer.record_slice("generator/0", "credit", 1_000, 2_000, kind="wait")
    found = slices(written(tmp_path / "trace.json", buffer.drain_events()))
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
    sender.record_item("generator/0", prompt, begins=True)
    sender.record_sent("generator/0", made)
    sender.record_item("generator/0", prompt, begins=False)
    receiver.record_item("reward/0", made, begins=True)
    receiver.record_item("reward/0", made, begins=False)
    events = written(tmp_path / "trace.json", sender.drain_events(), receiver.drain_events())
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
    buffer.record_sent("prompts/0", envelope(0))
    events = written(tmp_path / "trace.json", buffer.drain_events())
    assert [name for name, *_ in slices(events)] == ["send Prompt"]
    assert [e["ph"] for e in events if e["ph"] != "M"] == ["X", "s"]


def way(ticket: int, hosts: dict[str, TraceBuffer]) -> None:
    """A group's way: prompts -> generator -> reward, each in a host of its own."""
    message = envelope(ticket)
    hosts["prompts"].record_sent("prompts/0", message)
    for node in ("generator", "reward"):
        hosts[node].record_item(f"{node}/0", message, begins=True)
        hosts[node].record_slice(f"{node}/0", f"{node} {ticket}", time.time_ns(), time.time_ns())
        made = Envelope(message_id([message.id], node, 0), ticket, message.group_id, 0, message.body)
        hosts[node].record_sent(f"{node}/0", made)
        hosts[node].record_item(f"{node}/0", message, begins=False)
        message = made
    hosts["batcher"].record_item("batcher/0", message, begins=True)
    hosts["batcher"].record_item("batcher/0", message, begins=False)


def test_a_long_run_stays_below_the_limit_with_whole_ways(tmp_path: Path) -> None:
    """However the reports of the hosts are mixed, and however late they hear of a level."""
    path, limit = tmp_path / "trace.json", 200_000
    hosts = {name: TraceBuffer() for name in ("prompts", "generator", "reward", "batcher")}
    told: list[int] = []
    writer = TraceWriter(path, limit_bytes=limit, on_level=told.append)
    for ticket in range(4000):
        way(ticket, hosts)
        if ticket % 20 == 0:
            for host in hosts.values():
                writer.write_events(msgpack.unpackb(msgpack.packb(host.drain_events())))
            assert path.stat().st_size <= limit
            json.loads(path.read_bytes())
        if ticket % 170 == 0 and told:
            for number, host in enumerate(hosts.values()):
                host.level = told[-1] if number % 2 else max(told[-1] - 1, 0)
    for host in hosts.values():
        writer.write_events(host.drain_events())
    writer.close()
    events = json.loads(path.read_bytes())
    assert told == list(range(1, writer.level + 1)) and writer.level >= 3

    deep = {f"g{ticket}" for ticket in range(4000) if depth_of(envelope(ticket)) >= writer.level}
    assert 4000 / 2**writer.level / 2 < len(deep) < 4000 / 2**writer.level * 2
    for node in ("generator", "reward"):
        assert {f"g{name.split()[1]}" for name, cat, *_ in slices(events) if cat == "work" and node in name} == deep
    arrows = {ph: sorted(e["id"] for e in events if e["ph"] == ph) for ph in "sf"}
    assert len(arrows["s"]) == len(deep) * 3
    assert len(arrows["s"]) == len(set(arrows["s"])) and set(arrows["f"]) <= set(arrows["s"])
    assert len(arrows["f"]) == len(deep) * 3


def test_a_batch_is_there_as_long_as_one_of_its_groups() -> None:
    tickets = [ticket for ticket in range(64) if depth_of(envelope(ticket)) == 0][:3]
    (deep,) = [ticket for ticket in range(64) if depth_of(envelope(ticket)) == 4][:1]

    @dataclass(frozen=True)
    class Together(Message):
        samples: tuple[Prompt, ...]

    def batch(tickets: list[int]) -> Envelope:
        samples: Any = [envelope(ticket).body for ticket in tickets]
        return Envelope(message_id([], "batches", 0), body=Together(tuple(samples)))

    assert depth_of(batch(tickets)) == 0
    assert depth_of(batch([*tickets, deep])) == 4


def test_what_belongs_to_no_group_thins_out_by_halves(tmp_path: Path) -> None:
    buffer = TraceBuffer()
    buffer.level = 3
    for start in range(64):
        buffer.record_slice("trainer/0", f"wait {start}", start * 1000, start * 1000 + 1, kind="wait")
    assert [name for name, *_ in slices(written(tmp_path / "trace.json", buffer.drain_events()))] == [
        f"wait {start}" for start in range(0, 64, 8)
    ]


def test_off_records_nothing() -> None:
    buffer = TraceBuffer()
    buffer.level = OFF
    for ticket in range(100):
        way(ticket, dict.fromkeys(("prompts", "generator", "reward", "batcher"), buffer))
    buffer.record_slice("trainer/0", "step", 1, 2)
    assert buffer.drain_events() == []


def test_a_limit_smaller_than_one_report_is_kept(tmp_path: Path) -> None:
    hosts = dict.fromkeys(("prompts", "generator", "reward", "batcher"), TraceBuffer())
    for ticket in range(500):
        way(ticket, hosts)
    path = tmp_path / "trace.json"
    writer = TraceWriter(path, limit_bytes=20_000)
    writer.write_events(hosts["prompts"].drain_events())
    assert path.stat().st_size <= 20_000
    assert len(slices(json.loads(path.read_bytes()))) > 10
    writer.close()


def test_a_resumed_run_goes_on_at_its_level(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for _ in range(2):
        writer = TraceWriter(path, limit_bytes=30_000)
        hosts = dict.fromkeys(("prompts", "generator", "reward", "batcher"), TraceBuffer())
        level = writer.level
        for ticket in range(300):
            way(ticket, hosts)
        writer.write_events(hosts["prompts"].drain_events())
        writer.close()
    assert 0 < level <= writer.level
    depths = [e["args"]["depth"] for e in json.loads(path.read_bytes()) if e["ph"] != "M"]
    assert min(depths) >= writer.level


def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    first, second = TraceBuffer(), TraceBuffer()
    first.record_slice("trainer/0", "step", 1_000, 2_000)
    second.record_slice("generator/0", "update", 3_000, 4_000)
    second.record_slice("trainer/0", "step", 5_000, 6_000)
    before = written(path, first.drain_events())
    after = written(path, second.drain_events())
    assert after[: len(before)] == before
    pids = {e["args"]["name"]: e["pid"] for e in after if e["name"] == "process_name"}
    assert {e["pid"] for e in after if e["name"] == "step"} == {pids["trainer/0"]}


@pytest.mark.parametrize("lost_bytes", [0, 1, 3, 30, 80])
def test_a_killed_run_leaves_a_file_that_can_be_continued(tmp_path: Path, lost_bytes: int) -> None:
    path = tmp_path / "trace.json"
    buffer = TraceBuffer()
    for start in range(4):
        buffer.record_slice("trainer/0", f"step {start}", start * 1_000, start * 1_000 + 500)
    writer = TraceWriter(path)
    writer.write_events(buffer.drain_events())
    text = path.read_bytes()
    assert len(slices(json.loads(text))) == 4, "whole before it is closed"
    writer.close()
    path.write_bytes(text[: len(text) - lost_bytes])
    names = [name for name, *_ in slices(written(path))]
    assert names == [f"step {start}" for start in range(len(names))]
    assert len(names) >= 2


def test_a_run_killed_while_it_thins_keeps_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    buffer = TraceBuffer()
    buffer.record_slice("trainer/0", "step", 1_000, 2_000)
    written(path, buffer.drain_events())
    (tmp_path / ".trace.json.tmp").write_bytes(b"[\n half of")
    assert [name for name, *_ in slices(written(path))] == ["step"]
    assert not (tmp_path / ".trace.json.tmp").exists()

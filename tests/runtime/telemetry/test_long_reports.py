"""Reports to the driver that are longer than what may be decoded at once: each is sent in parts, and none is refused.

The limit is that of `flowrl.wire.encoding.cost`: a node that sends ten thousand messages a second, an evaluation of
a whole benchmark and a batch of many thousand samples all exceed it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.runtime.ledger.ledger_client import EvaluationRow, LedgerClient, Use
from flowrl.runtime.process.context import Meters, NodeContext
from flowrl.runtime.samples.kept_episodes import KeptEpisodes
from flowrl.runtime.samples.sample_notes import MOST_TEXT, SampleNotes, SampleRecord, SampleShare
from flowrl.runtime.telemetry.statistics import Statistics
from flowrl.testing import run_graph
from flowrl.wire.encoding.cost import MOST_VALUES, chunked, values_in, weigh
from flowrl.wire.encoding.multiparts import NOTIFY, MessageDecoder, MessageEncoder
from tests.commands.test_samples import sample as trainable
from tests.runtime.ledger.small_run import POLICY, SmallRun, prompts, sample

STAGES = Path(__file__).parents[3] / "benchmarks" / "runs" / "stages.py"
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**60), st.floats(), st.text(max_size=8))
VALUES = st.recursive(
    PLAIN, lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=3), inner, max_size=4))
)


def sent(*bodies: Any) -> list[Any]:
    """The bodies as the driver gets them in one multipart or several. Raises WireError if one is refused."""
    encoder = MessageEncoder("A", 0)
    encoder.add([(NOTIFY, 0, 0, 0, ("kind", body)) for body in bodies])
    decoder = MessageDecoder()
    frames = [frame for parts in encoder.multiparts() for frame in decoder.decode([bytes(part) for part in parts])]
    assert all(frame[4][0] == "kind" for frame in frames), frames  # type: ignore[index]
    return [frame[4][1] for frame in frames]  # type: ignore[index]


@given(st.lists(VALUES, max_size=30), st.integers(1, 40))
def test_parts_hold_all_in_order_and_at_most_so_many_values(items: list[Any], most: int) -> None:
    parts = [*chunked(items, most)]
    assert [*itertools.chain(*parts)] == items or any(item != item for item in items)
    assert all(len(part) == 1 or sum(map(values_in, part)) <= most for part in parts) and [] not in parts
    joined = [[*first, second[0]] for first, second in itertools.pairwise(parts)]
    assert all(sum(map(values_in, part)) > most for part in joined), "no part is smaller than it has to be"


@given(VALUES)
def test_values_are_counted_as_a_receiver_counts_them(value: Any) -> None:
    assert values_in(value) == weigh(msgpack.packb(value)).num_values


class Checked(LedgerClient):
    """A client whose notifications pass the wire, each in a multipart of its own."""

    def __init__(self, small: SmallRun, replica: str) -> None:
        self.numbers: list[int] = []
        self._small = small
        super().__init__(self, replica)

    async def request(self, host: str, kind: str, body: dict[str, Any]) -> Any:
        return await self._small.wire.request(host, kind, body)

    def notify(self, host: str, kind: str, body: dict[str, Any]) -> None:
        self.numbers.append(values_in(body))
        for found in sent(body):
            self._small.wire.notify(host, kind, found)


def counted(run_dir: Path, table: str) -> int:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        return int(db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])


@pytest.mark.timeout(120)
def test_a_batch_of_many_samples_is_one_step(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        client = Checked(small, "trainer/0")
        members = prompts(0, 12_000)
        await small.client.admit("prompts/0", members)
        made = [sample(member, [0]) for member in members]
        for one in made:
            client.generated(one)
            client.scored(one)
        client.step(
            {"step": 1, "tokens_trained": len(made), "staleness_max": 0}, list(map(Use.of, made)), policy=POLICY
        )
        client.step({"step": 2, "tokens_trained": 0, "staleness_max": None}, [], policy=POLICY)
        small.close()
        assert sum(client.numbers) > 2 * MOST_VALUES and max(client.numbers) < MOST_VALUES / 2
        assert counted(tmp_path, "uses") == 12_000 and counted(tmp_path, "steps WHERE step = 2") == 1

    asyncio.run(body())


def test_an_evaluation_of_a_whole_benchmark_is_booked_at_once(tmp_path: Path) -> None:
    rows = [EvaluationRow("before", 0, f"p{n}", 0, 0.5, False, 9, 0, 0, "task") for n in range(40_000)]

    async def body() -> None:
        small = SmallRun(tmp_path)
        client, other = Checked(small, "held_out/0"), Checked(small, "held_out/1")
        client.pause(True)
        client.evaluation(rows)
        other.evaluation(rows[:3])
        small.accounting.bookings.commit_all()
        assert counted(tmp_path, "evaluations") == 3, "nothing of an evaluation without its last rows"
        client.pause(False)
        small.accounting.bookings.commit_all()
        assert counted(tmp_path, "evaluations") == 40_003
        assert len(client.numbers) > 10 and max(client.numbers) < MOST_VALUES / 2
        small.close()

    asyncio.run(body())


def test_what_a_fast_node_leaves_in_the_trace_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl.runtime.telemetry.trace import TraceBuffer
    from flowrl.wire.endpoint import Endpoint

    bodies: list[Mapping[str, Any]] = []
    notify, drain = Endpoint.notify, TraceBuffer.drain_events
    many = [("item", "prompts/0", 0, f"send {n}", 1_000 + n, 1, 0) for n in range(60_000)]

    def listen(endpoint: Endpoint, host: str, kind: str, body: Any) -> None:
        if kind == "statistics":
            bodies.extend(sent(body))
        notify(endpoint, host, kind, body)

    monkeypatch.setattr(Endpoint, "notify", listen)
    monkeypatch.setattr(TraceBuffer, "drain_events", lambda buffer: [*drain(buffer), *(many if not bodies else [])])
    run_graph(STAGES, tmp_path / "run", {"generate_s": 0.0, "train_s": 0.0}, steps=2, trace="full")
    assert sum(event[1] == "prompts/0" and event[3].startswith("send 5") for one in bodies for event in one["trace"])
    assert (tmp_path / "run" / "trace.json").read_text().count('"send 5') >= 11_111


def test_observations_are_summed_up_where_they_are_made() -> None:
    meters, statistics = Meters(), Statistics()
    for value in range(200_000):
        meters.add_observation("open_turns", value)
    for found in sent({"nodes": {"generator/0": meters.read_totals()}}):
        statistics.add_report(found, 1.0)
    line = statistics.since_line()
    assert (line["open_turns"], line["open_turns_max"]) == (99_999.5, 199_999)
    assert meters.read_totals()["observed"] == {}
    for number in (np.uint8(200), np.float16(300.0)):
        for _ in range(300):
            meters.add_observation("small", number)
    assert meters.read_totals()["observed"] == {"small": (600, 150_000.0, 300.0)}


def test_an_unwritable_record_leaves_no_rows_behind(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        client = Checked(small, "trainer/0")
        members = prompts(0, 8_000)
        await small.client.admit("prompts/0", members)
        uses = [Use.of(sample(member, [0])) for member in members]
        with pytest.raises(ZeroDivisionError):
            client.step({"step": 1, "loss": Unwritable()}, uses, policy=POLICY)
        client.step({"step": 1, "tokens_trained": 0, "staleness_max": None}, [], policy=POLICY)
        small.accounting.bookings.commit_all()
        assert counted(tmp_path, "uses") == 0
        small.close()

    asyncio.run(body())


class Unwritable:
    def item(self) -> float:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("number", "text"), [(8_000, "42"), (3, "\U0001f600" * (MOST_TEXT + 9)), (40, "計算" * 100_000)]
)
def test_kept_samples_are_sent_however_many_and_long(number: int, text: str) -> None:
    found: list[SampleRecord] = []
    notes = SampleNotes(lambda records: found.extend(*sent(records)), SampleShare.parse("all"), token_ids=True)
    notes.send_decided([trainable(n, text=text) for n in range(number)])
    assert len(found) == number and {one["response"] for one in found} == {text[:MOST_TEXT]}


class Driver:
    """Takes a context's notifications as they come out of the wire."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def notify(self, host: str, kind: str, body: Any) -> None:
        self.bodies += sent(body)


def test_an_episode_may_be_longer_than_text_may_be(tmp_path: Path) -> None:
    driver, told = Driver(), list[str]()
    context = NodeContext.__new__(NodeContext)
    context.endpoint = driver  # type: ignore[assignment]
    line = json.dumps({"a": "x" * (12 << 20)})
    context.episode("g:0", line, failed=False)
    kept = KeptEpisodes(tmp_path, 4, told.append)
    kept.add_attempt(**driver.bodies[0])
    kept.close()
    assert not told and (tmp_path / "episodes" / "recent.jsonl").read_text() == line + "\n"


def test_arrays_are_one_value() -> None:
    assert values_in({"a": np.zeros(9)}) == 3

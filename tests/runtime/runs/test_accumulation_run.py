"""Runs whose batches come in pieces, with sleeping stages on a virtual clock: books, bound, checkpoints, a crash."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runs import stages
from flowrl.messages import Batch, Group
from flowrl.nodes import TokenBatch
from flowrl.testing import GraphRun, VirtualClock, run_graph

STAGES = Path(stages.__file__)
SPREAD = {"generate_s": 4.0, "train_s": 4.0, "groups_per_step": 4, "group_size": 2, "uneven": 0.75}
STEPS = 6


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """What the batcher has made."""
    made: list[Batch] = []
    piece = TokenBatch.make_batch

    def recorded(self: TokenBatch, groups: Sequence[Group], *, last: bool = True, again: Sequence[Group] = ()) -> Batch:
        made.append(piece(self, groups, last=last, again=again))
        return made[-1]

    monkeypatch.setattr(TokenBatch, "make_batch", recorded)
    return made


def go(directory: Path, staleness: int, **options: Any) -> GraphRun:
    return run_graph(STAGES, directory, {**SPREAD, "staleness": staleness}, clock=VirtualClock(), **options)


def trained_once(directory: Path) -> list[tuple[int, int]]:
    """(step, number of samples) of each step. Fails if a sample was used twice."""
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as books:
        ((twice,),) = books.execute("SELECT COUNT(*) - COUNT(DISTINCT sample_id) FROM uses")
        assert twice == 0
        return books.execute("SELECT step, COUNT(*) FROM uses GROUP BY step ORDER BY step").fetchall()


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_sample_is_trained_once_in_the_step_of_its_batch(
    staleness: int, sent: list[Batch], tmp_path: Path
) -> None:
    ran = go(tmp_path / "run", staleness, steps=STEPS, save_every=2)
    assert ran.audit().ok
    assert trained_once(tmp_path / "run") == [(step, 8) for step in range(1, STEPS + 1)]
    assert sum(one.last for one in sent) == STEPS
    assert len(sent) >= (2 * STEPS if staleness == 0 else STEPS + 1), "no batch came in pieces"


def test_pieces_make_a_synchronous_step_shorter(sent: list[Batch], tmp_path: Path) -> None:
    lengths = {}
    for choice in ("off", "auto"):
        config = {**SPREAD, "staleness": 0, "accumulate": choice}
        clock = VirtualClock()
        run_graph(STAGES, tmp_path / choice, config, steps=STEPS, clock=clock)
        lengths[choice] = clock.now_s / STEPS
    assert lengths["off"] == pytest.approx(8.0, abs=0.1)
    assert lengths["auto"] == pytest.approx(6.5, abs=0.1), "groups come at 1.75, 2.5, 3.25 and 4 s; two go at 2.5 s"


def test_a_crash_between_pieces_loses_nothing_and_trains_nothing_twice(
    sent: list[Batch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = TokenBatch._send_groups

    async def crashing(self: TokenBatch, groups: Sequence[Group], *, last: bool) -> None:
        await send(self, groups, last=last)
        if sum(one.last for one in sent) == 4 and self._begun.num_pieces == 2:
            raise RuntimeError("between two pieces of the fifth batch")

    monkeypatch.setattr(TokenBatch, "_send_groups", crashing)
    ran = go(tmp_path / "run", 0, steps=STEPS, save_every=3, must_succeed=False)
    assert "between two pieces of the fifth batch" in str(ran.error)
    monkeypatch.setattr(TokenBatch, "_send_groups", send)
    resumed = go(tmp_path / "run", 0, steps=STEPS, save_every=3, resume=True)
    assert resumed.audit().ok
    assert trained_once(tmp_path / "run") == [(step, 8) for step in range(1, STEPS + 1)]

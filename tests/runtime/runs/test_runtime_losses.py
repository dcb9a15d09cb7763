"""A generator's process dies, at whatever moment: the others do what it did, and nothing is lost. In virtual time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import FlowrlError, NodeFailed
from flowrl.runtime.ledger.ledger_client import LedgerClient
from flowrl.runtime.ledger.request_ledger import RequestLedger
from flowrl.testing import GraphRun
from tests.runtime.checkpoints.test_runtime_half_done import STEPS, killed, play
from tests.runtime.runs.lost_hosts import CLUSTERS, Death, let_die

EDGE = "trainer.weights -> generator.weights"
FIRST, SECOND = "generator/0", "generator/1"
SMALL: dict[str, Any] = {"apart": True, "kind": "Paced", "step_s": 0.05, "groups_per_step": 3, "turns": 2}


def require_whole(ran: GraphRun, *, lost: int = 1, redone: int = 0) -> None:
    """`play` has looked at the audit and the fates; here at what was told."""
    told = [line for line in ran.view.warnings if "out of service, its requests go to the other replicas" in line]
    assert len(told) == lost and all("died" in line for line in told)
    assert sum(line.get("generators_lost", 0) for line in ran.metrics()) == lost
    twice = ran.rows("SELECT request_id FROM requests WHERE abandoned IS NULL GROUP BY 1 HAVING COUNT(*) > 1")
    assert twice == [], "a request has two replies that count"
    assert ran.rows("SELECT SUM(redone_tokens) FROM samples") == [(redone,)]


@pytest.fixture
def booked_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that their askers have reported, and nobody else."""
    found: list[str] = []
    again, request = RequestLedger.book_again, RequestLedger.book_request

    def spied(self: RequestLedger, request_id: str, *rest: Any) -> None:
        def booked(self: RequestLedger, request_id: str, *rest: Any) -> None:
            found.append(request_id)
            request(self, request_id, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RequestLedger, "book_request", booked)
            again(self, request_id, *rest)

    monkeypatch.setattr(RequestLedger, "book_again", spied)
    return found


def test_a_process_that_dies_costs_requests_and_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, booked_again: list[str]
) -> None:
    for seed in range(12):
        draws = random.Random(seed)
        death = Death(at_s=draws.uniform(0.05, 1.2), known_after_s=draws.choice([0.0, 0.0, 0.3]))
        let_die(monkeypatch, {draws.choice([FIRST, SECOND]): death})
        require_whole(play(tmp_path / str(seed), **SMALL))
    assert booked_again, "no generator died between an answer and its report"


def withhold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second generator reports requests with its part of a checkpoint, and not before."""
    flush, pause = LedgerClient.flush, LedgerClient.pause

    def flush_others(self: LedgerClient) -> None:
        if self.replica != SECOND:
            flush(self)
            return
        requests = [event for event in self._events if event[0] == "request"]
        self._events = [event for event in self._events if event[0] != "request"]
        flush(self)
        self._events += requests

    def pause_with_all(self: LedgerClient, paused: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LedgerClient, "flush", flush)
            pause(self, paused)

    monkeypatch.setattr(LedgerClient, "flush", flush_others)
    monkeypatch.setattr(LedgerClient, "pause", pause_with_all)


MOMENTS = ("node", "pause", "quiesce", "ping", "snapshot", "kept", "resume", "report")


@pytest.mark.parametrize(
    ("kind", "answered"),
    [
        pytest.param(kind, answered, marks=[] if (number % 2 == 0) == answered else pytest.mark.matrix)
        for number, kind in enumerate(MOMENTS)
        for answered in (False, True)
    ],
)
def test_at_each_moment_of_a_checkpoint(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, answered: bool
) -> None:
    withhold(monkeypatch)
    let_die(monkeypatch, {SECOND: Death(kind=kind, nth=2, answered=answered, known_after_s=0.1)})
    config = SMALL | {"groups_per_step": 10, "turns": 4, "step_s": 0.02}
    require_whole(play(tmp_path / "run", **config))
    killed(tmp_path / "run", after=2)
    let_die(monkeypatch, {})
    ran = play(tmp_path / "run", resume=True, **config)
    assert ran.steps[-1] == STEPS
    again = {generator for (generator,) in ran.rows("SELECT DISTINCT generator FROM requests WHERE incarnation > 0")}
    assert again == {FIRST, SECOND}, "a resumed run has all of its generators"


def test_two_of_three_may_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_die(monkeypatch, {FIRST: Death(at_s=0.3), SECOND: Death(at_s=0.5)})
    ran = play(tmp_path / "run", **SMALL, generators=3)
    require_whole(ran, lost=2)
    assert CLUSTERS[-1].killed[:2] == [FIRST, SECOND], "one that Ray cannot reach is ended too"
    assert all(line["edges"][EDGE]["depth"] == 0 for line in ran.metrics()[1:]), "nobody takes those of the lost ones"


def test_the_last_one_ends_the_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_die(monkeypatch, {FIRST: Death(at_s=0.3), SECOND: Death(kind="report", nth=2)})
    with pytest.raises(NodeFailed, match=r"node 'generator', replica 1, failed: the process of host 'generator/1'"):
        play(tmp_path / "run", **SMALL)
    let_die(monkeypatch, {})
    play(tmp_path / "run", resume=True, **SMALL)


def test_the_last_one_in_service_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of the second one has died before the process of the first."""
    let_die(monkeypatch, {FIRST: Death(at_s=0.6)})
    with pytest.raises(FlowrlError, match="has no replica left to ask"):
        play(tmp_path / "run", **SMALL, dies_s=0.3)


def test_a_process_whose_engine_died_before_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_die(monkeypatch, {SECOND: Death(at_s=1.3)})
    ran = play(tmp_path / "run", **SMALL, dies_s=0.3)
    ((redone,),) = ran.rows("SELECT SUM(tokens) FROM requests WHERE abandoned = 'generator_died'")
    require_whole(ran, redone=redone)


def test_another_process_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_die(monkeypatch, {"core": Death(at_s=0.3)})
    with pytest.raises(NodeFailed, match="process of host 'core'"):
        play(tmp_path / "run", **SMALL)

"""Reuse: what is trained again is bounded, counted once each time, unchanged, and proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import FlowrlError
from flowrl.nodes.groups.replay import Replay
from flowrl.runtime.ledger import accounting
from flowrl.runtime.ledger.sample_fates import Reuse
from flowrl.testing import run_graph

REPLAYED = Path(__file__).parent / "graphs_proof" / "replayed.py"
TIMES = "SELECT s.group_id, COUNT(DISTINCT r.step), MAX(r.step - u.step) FROM reuses r JOIN uses u USING (sample_id)"
TIMES += " JOIN samples s USING (sample_id) GROUP BY s.group_id ORDER BY 1"


def test_groups_are_trained_again_within_cap_and_age(tmp_path: Path) -> None:
    ran = run_graph(REPLAYED, tmp_path / "run", steps=10)
    report = ran.audit()
    assert report.ok, str(report)
    found = ran.rows(TIMES)
    assert max(times for _, times, _ in found) == 2
    assert max(age for *_, age in found) <= 3
    # 3 fresh groups of 2 samples in each of 10 steps, and 2 older ones in all steps but the first
    assert ran.rows("SELECT COUNT(*), SUM(tokens) FROM reuses") == [(36, 36 * 8)]
    assert ran.rows("SELECT COUNT(*) FROM uses") == [(60,)]
    assert report.figures["tokens reused"] == 36 * 8
    assert report.figures["  trained"] == 60 * 8
    assert (report.figures["max staleness"] or 0) <= 1
    assert (report.figures["max age of a reuse"] or 0) <= 4
    assert [line["reused_tokens"] for line in ran.metrics()] == [0] + [32] * 9
    assert [line.get("reused_groups") for line in ran.metrics()] == [None] + [2.0] * 9


@pytest.mark.parametrize("config", [{}, {"look_ahead": 3, "staleness": 2}, {"replay": Replay(2)}])
def test_a_resumed_run_reuses_what_one_that_was_not_stopped_would_have(tmp_path: Path, config: dict[str, Any]) -> None:
    query = "SELECT s.group_id, r.step, r.number FROM reuses r JOIN samples s USING (sample_id) ORDER BY 2, 1"
    whole = run_graph(REPLAYED, tmp_path / "whole", {**config, "staleness": 0, "look_ahead": 1}, steps=9)
    run_graph(REPLAYED, tmp_path / "run", config, steps=4, save_every=2)
    again = run_graph(REPLAYED, tmp_path / "run", config, steps=9, resume=True, save_every=2)
    assert again.audit().ok, str(again.audit())
    if not config:
        assert [step for _, step, _ in again.rows(query)] == [step for _, step, _ in whole.rows(query)]
    assert again.rows("SELECT COUNT(*) FROM reuses") == [(32,)]
    assert again.rows("SELECT MAX(number) FROM (SELECT COUNT(*) AS number FROM reuses GROUP BY sample_id, step)") == [
        (1,)
    ]


@pytest.mark.parametrize(
    ("prefer", "wanted"),
    [("fresh", {"group3", "group4"}), ("spread", {"group0", "group1"}), ("function", {"group0", "group1"})],
)
def test_groups_are_chosen_by_freshness_spread_or_a_function(tmp_path: Path, prefer: str, wanted: set[str]) -> None:
    config: dict[str, Any] = {"staleness": 0}
    if prefer == "function":
        config["by_number"] = True
    else:
        config["replay"] = Replay(2, 8, 3, 3, prefer)  # type: ignore[arg-type]
    ran = run_graph(REPLAYED, tmp_path / "run", config, steps=3)
    query = "SELECT DISTINCT s.group_id FROM reuses r JOIN samples s USING (sample_id) WHERE r.step = 3"
    assert {name for (name,) in ran.rows(query)} == wanted


WRONG = {
    "too often": r"as use 4, but the graph allows 3 \(replay.max_uses\)",
    "too old": r"a staleness of \d, but the graph allows 4",
    "too early": "has not finished its group in an earlier step",
    "miscounted": "as use 8, but the ledger has 1 earlier uses of it",
    "undeclared": "the graph declares no reuse: its tokens would be trained more than once",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_reuse_that_is_not_allowed_ends_the_run(tmp_path: Path, wrong: str) -> None:
    config: dict[str, Any] = {"wrong": wrong, "by_number": wrong in ("too often", "too old")}
    if wrong == "too old":
        config["replay"] = Replay(groups=2, keep=100, max_uses=100, max_age=3)
    ran = run_graph(REPLAYED, tmp_path / "run", config, steps=12, must_succeed=False)
    assert isinstance(ran.error, FlowrlError)
    with pytest.raises(FlowrlError, match=WRONG[wrong]):
        raise ran.error


AUDITED = {
    "too often": ["reuses: trainer used sample group", "times by step", "but the run allows 3"],
    "too old": ["again (age ", "but a reuse is bound by 4"],
    "too early": ["again at step 1, but never before"],
    "miscounted": ["after 7 uses by its own count, but after 1 by the ledger's"],
    "undeclared": ["but the run allows 1"],
    "changed": ["no request sampled exactly these tokens in this context"],
}


@pytest.mark.parametrize("wrong", AUDITED)
def test_the_audit_finds_what_the_accounting_would_let_pass(
    tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reuse, "require_allowed", lambda *args, **kwargs: None)
    monkeypatch.setattr(accounting, "require_fresh", lambda *args: None)
    config: dict[str, Any] = {"wrong": wrong, "by_number": wrong in ("too often", "too old")}
    if wrong == "too old":
        config["replay"] = Replay(groups=2, keep=100, max_uses=100, max_age=3)
    ran = run_graph(REPLAYED, tmp_path / "run", config, steps=12)
    text = str(ran.audit())
    for part in AUDITED[wrong]:
        assert part in text, text


def test_resuming_with_less_reuse_than_is_in_flight_is_refused(tmp_path: Path) -> None:
    run_graph(REPLAYED, tmp_path / "run", steps=4, save_every=2)
    config = {"replay": Replay(groups=2, keep=8, max_uses=2, max_age=3)}
    with pytest.raises(FlowrlError, match="max_uses is 2 and was 3"):
        run_graph(REPLAYED, tmp_path / "run", config, steps=8, resume=True)

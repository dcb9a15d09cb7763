"""Runs of games with two seats in one process, in virtual time: what trains, what is proven, what is resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flowrl.runtime.samples.kept_episodes import read_kept
from flowrl.testing import GraphRun, VirtualClock, run_graph

SEATS = Path(__file__).parent / "graphs_episodes" / "seats.py"
STEPS, SAMPLES = 5, 5 * 16


def play(run_dir: Path, *, steps: int = STEPS, resume: bool = False, **config: Any) -> GraphRun:
    options: dict[str, Any] = {"steps": steps, "resume": resume, "save_every": 2, "keep": 0}
    ran = run_graph(SEATS, run_dir, config, clock=VirtualClock(), timeout_s=3600, **options)
    report = ran.audit()
    assert report.ok or config.get("meddle"), str(report)
    return ran


def test_both_seats_of_the_policy_train_each_token_once(tmp_path: Path) -> None:
    ran = play(tmp_path / "run")
    assert ran.states() == {"trained": SAMPLES}
    report, turns = ran.audit(), ran.rows("SELECT SUM(turns) FROM episodes")[0][0]
    assert report.figures["requests"] == report.figures["policy spans proven"] == turns > 3 * SAMPLES
    sampled = ran.rows("SELECT SUM(tokens) FROM requests")[0][0]
    assert ran.rows("SELECT SUM(trained_tokens) FROM samples") == [(sampled,)]
    assert {reward for (reward,) in ran.rows("SELECT DISTINCT reward FROM samples")} == {0.5}, "one seat wins"
    assert max(line["staleness_max"] for line in ran.metrics()) <= 2


def test_the_kept_episodes_name_the_seats(tmp_path: Path) -> None:
    play(tmp_path / "run")
    records = read_kept(tmp_path / "run")
    assert len(records) == SAMPLES
    for record in records:
        rewards = dict(record["seat_rewards"])
        assert sorted(rewards.values()) == [0.0, 1.0] and list(rewards) == [0, 1]
        assert {f"seat_{seat}_reward": reward for seat, reward in rewards.items()}.items() <= record["metrics"].items()
        assert [one["seat"] for one in record["sequences"]] in ([0, 1], [0])
    assert any(len(record["sequences"]) == 2 for record in records)


@pytest.mark.parametrize("every", [0, 1, 3])
def test_an_opponent_is_part_of_the_environment(tmp_path: Path, every: int) -> None:
    ran = play(tmp_path / "run", opponent_every=every)
    states = ran.states()
    assert states["trained"] + states.get("dropped: no_turn", 0) + states.get("dropped: run_end", 0) >= SAMPLES
    assert {name for (name,) in ran.rows("SELECT DISTINCT generator FROM requests")} == {"generator/0"}
    counted = ran.rows("SELECT SUM(response_tokens) FROM samples")[0][0]
    assert ran.rows("SELECT SUM(tokens) FROM requests") == [(counted,)]
    seats = {record["sequences"][0]["seat"] for record in read_kept(tmp_path / "run") if record["turns"]}
    assert seats == {0, 1}, "the policy plays either seat"
    assert {reward for (reward,) in ran.rows("SELECT DISTINCT reward FROM samples WHERE state = 'trained'")} == {0, 1}
    assert max(line["staleness_max"] for line in ran.metrics()) <= 2


def test_a_group_plays_one_seat(tmp_path: Path) -> None:
    play(tmp_path / "run", opponent_every=0)
    groups: dict[str, set[int]] = {}
    for record in read_kept(tmp_path / "run"):
        groups.setdefault(record["sample_id"].rpartition(":")[0], set()).add(record["sequences"][0]["seat"])
    assert len(groups) > 8 and {len(seats) for seats in groups.values()} == {1}


def test_a_game_that_is_over_before_the_policys_turn_is_dropped(tmp_path: Path) -> None:
    ran = play(tmp_path / "run", opponent_every=0)
    ended = [record for record in read_kept(tmp_path / "run") if not record["turns"]]
    assert ended and ran.states()["dropped: no_turn"] == len(ended)
    for record in ended:
        assert record["reward"] == 1.0 and record["metrics"]["not_allowed"] == 1.0
        assert [size for size, _ in record["sequences"][0]["spans"]] == [len(record["sequences"][0]["pieces"])]


def test_held_out_games_are_played_against_version_0(tmp_path: Path) -> None:
    ran = play(tmp_path / "run", evaluate=64)
    rows = ran.rows("SELECT phase, COUNT(*), AVG(score) FROM evaluations GROUP BY 1 ORDER BY 1")
    assert [(phase, number) for phase, number, _ in rows] == [("after", 64), ("before", 64)]
    assert all(0.3 < score < 0.7 for *_, score in rows), "both play at random"
    versions = ran.rows("SELECT DISTINCT phase, newest_version FROM evaluations WHERE newest_version IS NOT NULL")
    assert set(versions) == {("before", 0), ("after", STEPS)}, "of the policy's own tokens"


def test_one_id_of_the_last_seat_changed_fails_the_audit(tmp_path: Path) -> None:
    report = play(tmp_path / "run", meddle=True).audit()
    assert not report.ok and 0 < report.figures["policy spans proven"] < report.figures["policy spans"]


@pytest.mark.parametrize("config", [{}, {"saves": True}, {"opponent_every": 3}, {"opponent_every": 0, "saves": True}])
def test_half_done_games_go_on_after_a_resume(tmp_path: Path, config: dict[str, Any]) -> None:
    play(tmp_path / "run", **config)
    for later in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    again = play(tmp_path / "run", resume=True, **config)
    assert again.rows("SELECT COUNT(*) FROM requests WHERE abandoned IS NOT NULL") == [(0,)]
    assert again.rows("SELECT SUM(redone_tokens) FROM samples") == [(0,)]
    assert again.states()["trained"] >= SAMPLES - 16


def test_what_is_kept_is_json_that_show_prints(tmp_path: Path) -> None:
    play(tmp_path / "run", steps=2)
    assert all(json.dumps(record) for record in read_kept(tmp_path / "run"))

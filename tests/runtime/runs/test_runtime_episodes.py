"""Runs of episodes in one process, in virtual time: failures, retries, limits, resumes, the proof of the tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import FlowrlError
from flowrl.runtime.samples.kept_episodes import read_kept
from flowrl.testing import GraphRun, VirtualClock, run_graph

PLAYED = Path(__file__).parent / "graphs_episodes" / "played.py"
STEPS = 6


def play(
    run_dir: Path,
    *,
    steps: int = STEPS,
    resume: bool = False,
    keep_episodes: int = 200,
    keep_samples: str = "auto",
    keep_token_ids: bool = False,
    **config: Any,
) -> GraphRun:
    options: dict[str, Any] = {
        "steps": steps,
        "resume": resume,
        "save_every": 2,
        "keep": 0,
        "keep_episodes": keep_episodes,
        "keep_samples": keep_samples,
        "keep_token_ids": keep_token_ids,
    }
    return run_graph(PLAYED, run_dir, config, clock=VirtualClock(), timeout_s=3600, must_succeed=False, **options)


def test_every_trained_token_was_sampled_for_its_episode(tmp_path: Path) -> None:
    ran = play(tmp_path / "run", evaluate=16).raise_for_error()
    report = ran.audit()
    assert report.ok, str(report)
    assert ran.states() == {"trained": STEPS * 6}
    turns = ran.rows("SELECT SUM(turns) FROM episodes")[0][0]
    assert report.figures["requests"] == report.figures["policy spans proven"] == turns > STEPS * 6
    assert ran.rows("SELECT COUNT(*) FROM samples WHERE prompt_tokens = 0") == [(0,)]
    assert ran.rows("SELECT phase, COUNT(*) FROM evaluations GROUP BY 1 ORDER BY 1") == [("after", 16), ("before", 16)]


def test_one_id_changed_between_generator_and_trainer_fails_the_audit(tmp_path: Path) -> None:
    report = play(tmp_path / "run", meddle=True).raise_for_error().audit()
    assert not report.ok and report.figures["policy spans proven"] < report.figures["policy spans"]
    assert "prompts:0:" in str(report), "the sample is named"


@pytest.mark.parametrize("retries", [0, 2])
def test_what_the_environment_does_wrong_is_redone_or_fails_by_its_cause(tmp_path: Path, retries: int) -> None:
    ran = play(tmp_path / "run", fails=0.4, retries=retries).raise_for_error()
    assert ran.audit().ok, str(ran.audit())
    states = ran.states()
    causes = {"failed: env_raised", "failed: env_timed_out", "failed: env_malformed"}
    assert states.keys() <= causes | {"trained", "filtered: group_too_small", "dropped: run_end"}
    assert bool(states.keys() & causes) or retries
    voided = ran.rows("SELECT DISTINCT abandoned FROM requests WHERE abandoned IS NOT NULL")
    assert {cause for (cause,) in voided} <= {"env_raised", "env_timed_out", "env_malformed"} and voided
    redone = ran.rows("SELECT SUM(redone_tokens) FROM samples")[0][0]
    assert redone == ran.rows("SELECT SUM(tokens) FROM requests WHERE abandoned IS NOT NULL")[0][0] > 0
    assert ran.rows("SELECT MAX(attempts) FROM episodes")[0][0] == retries + 1


def test_a_failed_sample_has_no_reward(tmp_path: Path) -> None:
    ran = play(tmp_path / "run", fails=0.5, retries=0).raise_for_error()
    assert ran.rows("SELECT COUNT(*) FROM samples WHERE state = 'failed' AND reward IS NOT NULL") == [(0,)]
    assert ran.rows("SELECT COUNT(*) FROM samples WHERE state = 'failed'")[0][0] > 0


@pytest.mark.parametrize("wanted", ["train", "mask", "drop"])
def test_episodes_that_a_limit_cut_off(tmp_path: Path, wanted: str) -> None:
    ran = play(tmp_path / "run", most_turns=2, on_truncated=wanted).raise_for_error()
    assert ran.audit().ok, str(ran.audit())
    cut = ran.rows("SELECT COUNT(*) FROM episodes WHERE truncated = 'turns'")[0][0]
    assert cut > 0
    state = {"train": "trained", "mask": "filtered: masked", "drop": "dropped: truncated"}[wanted]
    assert ran.states()[state] > 0
    if wanted == "drop":
        assert ran.states()[state] == cut


def test_a_longer_run_goes_on_from_the_end_of_the_first(tmp_path: Path) -> None:
    first = play(tmp_path / "run", steps=4, step_s=0.5).raise_for_error()
    assert first.audit().ok
    second = play(tmp_path / "run", steps=8, step_s=0.5, resume=True).raise_for_error()
    assert second.audit().ok, str(second.audit())
    assert second.states()["trained"] == 8 * 6


def play_twice(run_dir: Path, **config: Any) -> tuple[GraphRun, GraphRun]:
    """Play, and again from the last but one checkpoint, which has episodes between two turns."""
    broken = play(run_dir, step_s=0.9, **config).raise_for_error()
    for later in sorted((run_dir / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    return broken, play(run_dir, step_s=0.9, resume=True, **config).raise_for_error()


def test_attempts_count_on_after_a_resume(tmp_path: Path) -> None:
    broken, again = play_twice(tmp_path / "run", fails=0.4, retries=3)
    assert broken.audit().ok and again.audit().ok, str(again.audit())
    assert again.rows("SELECT COUNT(*) FROM requests WHERE abandoned = 'resumed'") == [(0,)]
    assert again.rows("SELECT MAX(attempts) FROM episodes")[0][0] > 1


def test_a_run_that_breaks_off_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    broken, again = play_twice(tmp_path / "run")
    assert broken.audit().ok and again.audit().ok, str(again.audit())
    assert again.rows("SELECT COUNT(*) FROM requests WHERE abandoned IS NOT NULL") == [(0,)]
    assert again.states() == {"trained": STEPS * 6}


def test_two_generators_share_the_turns(tmp_path: Path) -> None:
    ran = play(tmp_path / "run", generators=2).raise_for_error()
    assert ran.audit().ok
    shares = dict(ran.rows("SELECT generator, COUNT(*) FROM requests GROUP BY 1"))
    assert len(shares) == 2 and min(shares.values()) > 0


def test_a_run_in_which_everything_fails_ends_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.nodes.episodes.attempt_outcomes.PATIENCE_S", 0.1)
    ran = play(tmp_path / "run", fails=1.0)
    assert isinstance(ran.error, FlowrlError) and "mostly by env_" in str(ran.error)


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_rewritten_contexts_are_branches_whose_tokens_are_proven(tmp_path: Path, credit: str) -> None:
    """Up to 8 turns; three replies in four are rewritten in the next context."""
    ran = play(tmp_path / "run", history="template", most=8, credit=credit, evaluate=8).raise_for_error()
    report = ran.audit()
    assert report.ok, str(report)
    assert ran.states() == {"trained": STEPS * 6}
    # Which rows are played depends on the path of the environment's file.
    assert 4 < ran.rows("SELECT MAX(turns) FROM episodes")[0][0] <= 8
    turns = ran.rows("SELECT SUM(turns) FROM episodes")[0][0]
    assert (
        report.figures["requests"] == report.figures["policy spans proven"] == report.figures["policy spans"] == turns
    )
    assert ran.rows("SELECT COUNT(*) FROM uses") == ran.rows("SELECT COUNT(*) FROM samples") == [(STEPS * 6,)]
    used = ran.rows("SELECT SUM(tokens) FROM uses")[0][0]
    assert (
        used
        == ran.rows("SELECT SUM(tokens) FROM requests")[0][0]
        == ran.rows("SELECT SUM(response_tokens) FROM samples")[0][0]
    )
    sequences = {one["sample_id"]: len(one["sequences"]) for one in read_kept(tmp_path / "run")}
    assert len(sequences) == STEPS * 6 and sum(number > 1 for number in sequences.values()) > STEPS
    assert max(sequences.values()) > 2


def test_one_id_changed_in_a_branch_fails_the_audit(tmp_path: Path) -> None:
    report = play(tmp_path / "run", history="template", most=8, meddle=True).raise_for_error().audit()
    assert not report.ok and report.figures["policy spans"] - report.figures["policy spans proven"] == STEPS * 6

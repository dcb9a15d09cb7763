"""Evaluations between batches: no version is made while one goes on, and the best checkpoint stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.commands.model_directories import model_dir
from flowrl.errors import ConfigError
from flowrl.runtime.checkpoints.checkpoint import prune_checkpoints
from flowrl.runtime.checkpoints.rundir import Best, read_best
from tests.rigs.run_process import GRAPHS, Run, audit

STEPS = 9


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_trainers_stand_during_an_evaluation_and_the_best_checkpoint_stays(tmp_path: Path) -> None:
    run = Run(GRAPHS / "evaluated.py", tmp_path / "run", "--steps", str(STEPS), "--keep-best", "--keep", "1")
    assert run.wait() == 0, run.stdout + run.stderr
    evaluations = [word.split() for word in run.words("evaluation-0")]
    assert [(phase, int(step)) for phase, step, *_ in evaluations] == [
        ("before", 0),
        *(("during", step) for step in (2, 4, 6, 8)),
        ("after", STEPS),
    ]
    made = {int(version): float(at) for version, at in map(str.split, run.words("trainer-0")[2:])}
    for _, step, began, ended in evaluations:
        assert not [version for version, at in made.items() if float(began) < at < float(ended)], step
    assert json.loads((run.run_dir / "best.json").read_text()) == {
        "step": 2,
        "score": 0.6,
        "checkpoint": "checkpoints/step_000002",
    }
    assert [path.name for path in sorted((run.run_dir / "checkpoints").glob("step_*"))] == [
        "step_000002",
        "step_000009",
    ]
    assert "audit: ok" in audit(run.run_dir)


def test_a_better_score_replaces_the_best_and_an_equal_one_does_not(tmp_path: Path) -> None:
    first = Best.of(3, {"score": 0.5, "exact_match": 0.9})
    assert first == Best(3, 0.5, "checkpoints/step_000003")
    assert first.beats(None)
    assert Best.of(4, {"score": 0.51}).beats(first)
    assert not Best.of(4, {"score": 0.5}).beats(first)


@pytest.mark.parametrize("content", ["{", "[]", '{"step": 3}', '{"step": "3", "score": 0.5, "checkpoint": "c"}'])
def test_a_damaged_record_of_the_best_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text(content)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"/best.json is damaged \(.+\); restore it from a copy, or remove it"):
        read_best(tmp_path, newest_step=5)
    with pytest.raises(ConfigError, match=r"/best.json is damaged"):
        model_dir(tmp_path)


def test_what_is_named_has_to_be_there_and_not_of_the_future(tmp_path: Path) -> None:
    best = Best(3, 0.5, "checkpoints/step_000003")
    best.write(tmp_path)
    assert read_best(tmp_path, newest_step=5) is None, "its checkpoint is gone"
    (tmp_path / best.checkpoint).mkdir(parents=True)
    assert read_best(tmp_path, newest_step=5) == best
    assert read_best(tmp_path, newest_step=2) is None, "the run was taken back to before it"
    assert read_best(tmp_path / "nowhere", newest_step=5) is None


def test_the_spared_checkpoint_counts_besides_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        (tmp_path / f"step_{step:06d}").mkdir()
    prune_checkpoints(tmp_path, 1, spared={2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000004"]

"""graphs/ppo.py on the real stack: critic warm-up, two trainers in the books, checkpoint and resume.

One run and its resumption serve all tests here.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowrl.models import Policy, resolve
from flowrl.runtime.audit.audit import audit
from flowrl.tasks import Task
from flowrl.training.engine.requirements import SHARDS
from tests.stack.test_stack_run import flowrl

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(500)]
WARM_UP, STEPS, RESUMED_STEPS = 2, 4, 5
SETTINGS = ("--group-size", "2", "--groups-per-step", "4", "--critic-warmup", str(WARM_UP), "--kl-target", "0.05")
CHECKPOINTED = STEPS // 2


def ppo(run_dir: Path, ray: dict[str, str], *args: str) -> str:
    command = ("run", "graphs/ppo.py", "--run-dir", str(run_dir), "--plain", *SETTINGS, *args)
    done = flowrl(*command, timeout_s=400, env=ray)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, ray: dict[str, str]) -> tuple[Path, str]:
    """A finished run of STEPS steps: its directory and what it printed."""
    run_dir = tmp_path_factory.mktemp("ppo") / "run"
    saved = ("--save-every", str(CHECKPOINTED), "--keep", "0")
    return run_dir, ppo(run_dir, ray, "--steps", str(STEPS), "--evaluate", "4", *saved)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def num_shards(run_dir: Path, step: int) -> int:
    """Files of the checkpoint of that step in which a rank has saved its part of a trainer's state."""
    return len([*(run_dir / "checkpoints" / f"step_{step:06d}").rglob(SHARDS.format(rank="*"))])


def weights(path: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return dict(load_file(path / "model.safetensors"))


def test_both_trainers_stand_in_books_that_close(first: tuple[Path, str]) -> None:
    run_dir, printed = first
    assert "audit: ok" in printed
    assert audit(run_dir).figures["samples"] == STEPS * 8
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        uses = db.execute("SELECT trainer, step, COUNT(*), SUM(tokens) FROM uses GROUP BY trainer, step").fetchall()
    by_trainer = {trainer: [row[1:] for row in uses if row[0] == trainer] for trainer in ("actor", "critic_trainer")}
    assert by_trainer["actor"] == by_trainer["critic_trainer"], "the same samples and tokens at the same steps"
    assert [row[:2] for row in by_trainer["actor"]] == [(step, 8) for step in range(1, STEPS + 1)]


def test_the_policy_stands_still_while_the_critic_warms_up(first: tuple[Path, str]) -> None:
    records = lines(first[0])
    assert [record["unchanged"] for record in records] == [step <= WARM_UP for step in range(1, STEPS + 1)]
    assert [record["optimizer_steps"] for record in records] == [0 if step <= WARM_UP else 2 for step in range(1, 5)]
    start = weights(Path(resolve(Policy("tiny", task=Task("arithmetic")))))
    held = weights(first[0] / "checkpoints" / f"step_{CHECKPOINTED:06d}")
    moved = weights(first[0] / "checkpoints" / f"step_{STEPS:06d}")
    assert all((held[name] == start[name]).all() for name in held)
    assert any((moved[name] != start[name]).any() for name in moved)


def test_values_are_of_one_version_within_the_bound(first: tuple[Path, str]) -> None:
    for record in lines(first[0]):
        assert record["step"] - 2 <= record["values_version"] <= record["step"] - 1, "at most one version behind"
        assert isinstance(record["values_mean"], float) and record["kl_coef"] > 0


def test_the_critic_holds_what_its_trainer_published(first: tuple[Path, str]) -> None:
    found = [record["value_mismatch"] for record in lines(first[0]) if record.get("value_mismatch") is not None]
    assert found and max(found) < 1e-5


def test_a_checkpoint_holds_both_models(first: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    path = first[0] / "checkpoints" / f"step_{STEPS:06d}"
    assert AutoModelForCausalLM.from_pretrained(path).config.vocab_size
    assert AutoModelForSequenceClassification.from_pretrained(path / "critic").config.num_labels == 1


def test_a_run_goes_on_from_its_newest_checkpoint(first: tuple[Path, str], ray: dict[str, str]) -> None:
    run_dir = first[0]
    before = weights(run_dir / "checkpoints" / f"step_{STEPS:06d}" / "critic")
    assert num_shards(run_dir, STEPS) == 2
    more = ("--trainer.replicas", "2")  # of the critic's trainer, too
    printed = ppo(run_dir, ray, "--steps", str(RESUMED_STEPS), "--evaluate", "4", "--resume", *more)
    assert f"resumed from step_{STEPS:06d}" in printed and "audit: ok" in printed
    records = lines(run_dir)
    assert [record["step"] for record in records] == list(range(1, RESUMED_STEPS + 1))
    assert records[-1]["values_version"] == STEPS
    after = weights(run_dir / "checkpoints" / f"step_{RESUMED_STEPS:06d}" / "critic")
    changes = {name: float(abs(after[name] - before[name]).max()) for name in after}
    assert 0 < max(changes.values()) < 0.01, "the critic went on from where it was, not from a new head"
    assert num_shards(run_dir, RESUMED_STEPS) == 4, "two ranks go on with the state of one, of each trainer"

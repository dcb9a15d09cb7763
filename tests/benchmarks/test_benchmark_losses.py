"""The command that compares losses: its commands, equal tokens, and what it says of finished runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import losses
from benchmarks.training.losses import LOSSES, SEEDS, STALENESS, Outcome, command_of, read_outcomes, table
from flowrl.commands.prepare import prepare_graph
from flowrl.commands.run_graph import RunFileOptions
from flowrl.runtime.driver.job import RunOptions


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_run_is_a_command_that_flowrl_takes(loss: str, staleness: int) -> None:
    name, *arguments = command_of(loss, staleness, 2)
    prepared = prepare_graph(name, (RunOptions, RunFileOptions), arguments)
    assert prepared.own[0].seed == 2
    assert (prepared.cfg.loss.objective.kind, prepared.cfg.steps.staleness) == (loss, staleness)
    assert (prepared.cfg.loss.objective.old, prepared.cfg.loss.objective.correction) == ("behavior", None)


def outcome(loss: str, staleness: int, seed: int, *curve: tuple[int, float]) -> Outcome:
    return Outcome(loss, staleness, seed, curve, 0.25, 0.5, staleness / 2, staleness, 0.125)


def test_rewards_are_compared_at_equal_tokens() -> None:
    one = outcome("ppo", 0, 0, (60, 0.0), (30, 0.5), (20, 1.0), (90, 9.0))
    assert one.tokens == 200
    assert one.reward_within(100) == pytest.approx((10 * 0.5 + 10 * 1.0) / 20)
    assert one.reward_within(50) == 0.0


def test_the_table_has_every_seed_at_the_least_tokens() -> None:
    found = [
        outcome("ppo", 0, 0, (100, 0.5)),
        outcome("ppo", 0, 1, (50, 0.25), (50, 1.0)),
        outcome("sapo", 4, 0, (80, 1.0)),
    ]
    lines = table(found).splitlines()
    assert lines[2] == "| ppo | 0 | 0.00 | 0.750 | 0.500, 1.000 | 0.500, 0.500 | 0.1250 |"
    assert lines[3].startswith("| sapo | 4 | 2.00 | 1.000 | 1.000 |")
    assert lines[-1].startswith("3 of 54 runs, 2 seeds; N is 80 trained tokens. Before training 0.250")


def test_a_run_with_a_result_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[Any, ...]] = []

    def run_loss(loss: str, staleness: int, seed: int, home: Path) -> Outcome:
        started.append((loss, staleness, seed))
        if loss == "gspo":
            raise losses.CaseFailed("gspo-0-0 ended with status 2")
        return outcome(loss, staleness, seed, (100, 0.5))

    monkeypatch.setattr(losses, "run_loss", run_loss)
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(asdict(outcome("ppo", 0, 0, (100, 0.5)))) + '\n{"loss": "cut o')
    results.write_text(results.read_text() + "\n")
    assert losses.main(["--home", str(tmp_path), "--most", "2"]) == 1
    assert started == [("gspo", 0, 0), ("cispo", 0, 0)]
    assert "gspo-0-0 ended with status 2" in capsys.readouterr().err
    assert sorted(read_outcomes(results)) == [("cispo", 0, 0), ("ppo", 0, 0)]
    started.clear()
    assert losses.main(["--home", str(tmp_path), "--table"]) == 0
    assert not started and len(SEEDS) == 3

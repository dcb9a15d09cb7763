"""Evaluations of a run that is resumed: none is lost, none is repeated, and weights are saved before they are used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError, NodeFailed
from flowrl.graph.load import load_file
from flowrl.runtime.checkpoints.rundir import RunDir
from flowrl.runtime.driver.driver import Driver
from flowrl.runtime.driver.job import RunOptions
from flowrl.runtime.driver.launch import Launch
from flowrl.runtime.ledger.ledger_segments import phases_evaluated
from flowrl.runtime.telemetry.metrics import read_lines
from flowrl.testing import GraphRun, run_graph
from tests.rigs.in_process import seeing_the_driver

MEASURED = Path(__file__).parents[1] / "checkpoints" / "graphs_resumed" / "measured.py"


def run(directory: Path, *, steps: int = 6, must_succeed: bool = True, **config: Any) -> GraphRun:
    going_on = (directory / "config.json").exists()
    more: dict[str, Any] = {name: config.pop(name) for name in ("save_every", "keep_best") if name in config}
    return run_graph(MEASURED, directory, config, steps=steps, resume=going_on, must_succeed=must_succeed, **more)


def lost_at(directory: Path, place: str, **options: Any) -> None:
    """A run that ends by an error in this evaluation."""
    ran = run(directory, must_succeed=False, fails_at=place, **options)
    assert isinstance(ran.error, NodeFailed) and "the evaluation is lost" in str(ran.error)


def evaluated(directory: Path) -> list[tuple[str, int]]:
    """The lines of evaluations.jsonl, which are those of the ledger."""
    return [(record["phase"], record["step"]) for record in read_lines(directory / "evaluations.jsonl")]


def events(directory: Path, kind: str = "") -> list[str]:
    """The events of all lives of a run; of one kind, and without its name, if a kind is given."""
    found = (directory / "events").read_text().split("\n")[:-1]
    return [event.removeprefix(f"{kind} ") for event in found if event.startswith(f"{kind} ")] if kind else found


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_what_is_trained_is_saved_before_the_evaluation_after_it(tmp_path: Path) -> None:
    lost_at(tmp_path, "after 6")
    assert checkpoints(tmp_path) == ["step_000006"]
    assert evaluated(tmp_path) == [("before", 0)]
    ran = run(tmp_path)
    assert ran.steps == [], "no batch is trained again"
    assert events(tmp_path, "asks") == ["before 0", "after 6", "after 6"]
    assert evaluated(tmp_path) == ran.rows("SELECT phase, step FROM evaluations") == [("before", 0), ("after", 6)]
    assert (report := ran.audit()).ok, str(report)


def test_weights_are_written_once_and_the_last_checkpoint_has_the_evaluation(tmp_path: Path) -> None:
    ran = run(tmp_path, keep_best=True)
    assert events(tmp_path, "writes") == [".step_000006.tmp"], "the second checkpoint takes the first one's weights"
    version, newest = RunDir(tmp_path).newest_checkpoint()
    assert version == 6 and (newest / "part" / "weights").read_text() == ".step_000006.tmp"
    assert phases_evaluated(newest, 6) == {"after"}
    assert '"step": 6' in (tmp_path / "best.json").read_text()
    assert ran.audit().ok


def test_weights_are_written_again_where_files_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    run(tmp_path)
    assert events(tmp_path, "writes") == [".step_000006.tmp"] * 2
    assert RunDir(tmp_path).newest_checkpoint()[0] == 6


def test_only_the_evaluation_after_the_last_step_is_left_to_do(tmp_path: Path) -> None:
    def require(steps: int) -> None:
        launch = Launch(MEASURED, graph, cfg, RunOptions(steps=steps, run_dir=tmp_path, resume=True))
        launch._check_steps(steps, tmp_path / "checkpoints" / f"step_{steps:06d}")

    loaded = load_file(MEASURED)
    graph = loaded.build(cfg := loaded.config_type())
    lost_at(tmp_path, "after 6", save_every=3)
    require(6)
    with pytest.raises(ConfigError, match="step 3 and --steps is 3, so nothing is left to do"):
        require(3)  # there are groups in flight
    run(tmp_path)
    with pytest.raises(ConfigError, match="step 6 and --steps is 6, so nothing is left to do"):
        require(6)


def test_what_a_trainer_measures_at_the_end_is_a_line_once(tmp_path: Path) -> None:
    lost_at(tmp_path, "after 6", judges=True)
    ran = run(tmp_path, judges=True)
    assert evaluated(tmp_path) == [("before", 0), ("end", 6), ("after", 6)]
    line = read_lines(tmp_path / "evaluations.jsonl")[1]
    assert line.keys() == {"step", "phase", "time_s", "held_out/loss"} and line["held_out/loss"] == 0.5
    assert "held-out rows at 6" in ran.view.lines
    assert (report := ran.audit()).ok, str(report)


# Evaluations that were due at the checkpoint


def test_an_evaluation_that_was_due_at_the_checkpoint_is_made_up_for(tmp_path: Path) -> None:
    """No trainer takes a batch before it has ended, and the best checkpoint is kept as usual."""
    lost_at(tmp_path, "during 3", every=3, save_every=3, keep_best=True)
    before = len(events(tmp_path))
    lost_at(tmp_path, "after 6", every=3, save_every=3, keep_best=True)
    assert events(tmp_path)[before:][:5] == [
        "version 3",
        "asks during 3",
        "answers during 3",
        "writes .step_000003.tmp",
        "version 4",
    ]
    assert '"step": 3' in (tmp_path / "best.json").read_text()
    assert evaluated(tmp_path) == [("before", 0), ("during", 3)]
    ran = run(tmp_path, every=3, save_every=3, keep_best=True)
    assert evaluated(tmp_path) == ran.rows("SELECT phase, step FROM evaluations")
    assert (report := ran.audit()).ok, str(report)


def test_an_evaluation_that_ended_after_its_checkpoint_was_written_is_repeated(tmp_path: Path) -> None:
    lost_at(tmp_path, "during 4", every=1, save_every=3)
    assert evaluated(tmp_path)[-1] == ("during", 3)
    ran = run(tmp_path, every=1, save_every=3)
    lines = [("before", 0), *(("during", step) for step in (1, 2, 3, 4, 5)), ("after", 6)]
    assert evaluated(tmp_path) == ran.rows("SELECT phase, step FROM evaluations") == lines
    assert events(tmp_path, "asks").count("during 3") == 2
    assert (report := ran.audit()).ok, str(report)


def test_an_evaluation_that_is_in_the_checkpoint_is_not_repeated(tmp_path: Path) -> None:
    """--keep-best writes the checkpoint after the evaluation."""
    lost_at(tmp_path, "during 4", every=1, keep_best=True)
    assert checkpoints(tmp_path)[-1] == "step_000003"
    ran = run(tmp_path, every=1, keep_best=True)
    assert evaluated(tmp_path) == ran.rows("SELECT phase, step FROM evaluations")
    assert events(tmp_path, "asks").count("during 3") == 1
    assert (report := ran.audit()).ok, str(report)


def test_a_finished_run_that_gets_more_steps_is_not_evaluated_again_at_its_last_step(tmp_path: Path) -> None:
    run(tmp_path, every=3)
    ran = run(tmp_path, every=3, steps=9)
    assert events(tmp_path, "asks") == ["before 0", "during 3", "after 6", "after 9"]
    assert (report := ran.audit()).ok, str(report)


def test_a_finished_run_that_has_nothing_left_to_do_repeats_no_evaluation(tmp_path: Path) -> None:
    run(tmp_path)
    ran = run(tmp_path)
    assert events(tmp_path, "asks") == ["before 0", "after 6"]
    assert evaluated(tmp_path) == ran.rows("SELECT phase, step FROM evaluations")
    assert (report := ran.audit()).ok, str(report)


# Runs that are ended while they are evaluated


def at(place: str, call: Callable[[Driver], Callable[[], None]], *, after_s: float) -> Callable[[Driver], None]:
    """Have the driver do something after the evaluation with this text was announced."""

    def see(driver: Driver) -> None:
        progress = driver.view.progress

        def announced(name: str, text: str) -> None:
            progress(name, text)
            if text == place:
                asyncio.get_running_loop().call_later(after_s, call(driver))

        driver.view.progress = announced  # type: ignore[method-assign]

    return see


@pytest.mark.parametrize("by", ["SIGTERM", "--max-hours"])
@pytest.mark.parametrize("place", ["before 0", "during 2", "after 6"])
def test_a_run_whose_time_is_over_does_not_wait_for_an_evaluation(tmp_path: Path, place: str, by: str) -> None:
    phase, step = place.split()
    text = f"evaluation {phase} training, at version {step}"

    def ended(driver: Driver) -> Callable[[], None]:
        return driver.terminate if by == "SIGTERM" else lambda: driver.end_in_time("--max-hours 1 are over")

    with seeing_the_driver(at(text, ended, after_s=0.1)):  # it has been asked by then
        ran = run(tmp_path, every=2, stays_at=place)
    assert ran.outcome is not None and ran.outcome.interrupted
    assert f"driver: the evaluation {phase} training is given up" in ran.view.lines
    assert events(tmp_path, "asks")[-1] == place
    assert (report := ran.audit()).ok, str(report)
    ran = run(tmp_path, every=2)
    assert evaluated(tmp_path)[-1] == ("after", 6)
    assert evaluated(tmp_path) == ran.rows("SELECT phase, step FROM evaluations")
    assert (report := ran.audit()).ok, str(report)


def test_a_run_that_is_interrupted_before_its_first_step_keeps_the_evaluation_before(tmp_path: Path) -> None:
    text = "evaluation before training, at version 0"
    with seeing_the_driver(at(text, lambda driver: driver.interrupt, after_s=0)):
        run(tmp_path)
    assert checkpoints(tmp_path) == ["step_000000"]
    ran = run(tmp_path)
    assert evaluated(tmp_path) == ran.rows("SELECT phase, step FROM evaluations") == [("before", 0), ("after", 6)]
    assert events(tmp_path, "asks") == ["before 0", "after 6"]
    assert (report := ran.audit()).ok, str(report)

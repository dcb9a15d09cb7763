"""Evaluations of a run that is resumed: none is lost, none is repeated, and weights are saved before they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError, NodeFailed
from flowrl.graph.load import load_file
from flowrl.runtime.checkpoints.rundir import RunDir
from flowrl.runtime.driver.launch import Launch
from flowrl.runtime.driver.options import RunOptions
from flowrl.runtime.ledger.ledger_file import phases_evaluated
from flowrl.runtime.telemetry.metrics import read
from flowrl.testing import GraphRun, run_graph

MEASURED = Path(__file__).parent / "graphs_resumed" / "measured.py"


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
    return [(record["phase"], record["step"]) for record in read(directory / "evaluations.jsonl")]


def words(directory: Path, name: str) -> list[str]:
    return (directory / name).read_text().split("\n")[:-1]


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_what_is_trained_is_saved_before_the_evaluation_after_it(tmp_path: Path) -> None:
    lost_at(tmp_path, "after 6")
    assert checkpoints(tmp_path) == ["step_000006"]
    assert evaluated(tmp_path) == [("before", 0)]
    ran = run(tmp_path)
    assert ran.steps == [], "no batch is trained again"
    assert words(tmp_path, "asked") == ["before 0", "after 6", "after 6"]
    assert evaluated(tmp_path) == ran.rows("SELECT phase, step FROM evaluations") == [("before", 0), ("after", 6)]
    assert (report := ran.audit()).ok, str(report)


def test_weights_are_written_once_and_the_last_checkpoint_has_the_evaluation(tmp_path: Path) -> None:
    ran = run(tmp_path, keep_best=True)
    assert words(tmp_path, "writes") == [".step_000006.tmp"], "the second checkpoint takes the first one's weights"
    version, newest = RunDir(tmp_path).newest_checkpoint()
    assert version == 6 and (newest / "part" / "weights").read_text() == ".step_000006.tmp"
    assert phases_evaluated(newest / "ledger.sqlite", 6) == {"after"}
    assert '"step": 6' in (tmp_path / "best.json").read_text()
    assert ran.audit().ok


def test_weights_are_written_again_where_files_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    run(tmp_path)
    assert words(tmp_path, "writes") == [".step_000006.tmp"] * 2
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

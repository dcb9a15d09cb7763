"""Runs that end before their last step: by a figure, or by the clock; and responses that were cut off."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.load import load_file
from flowrl.messages import Group
from flowrl.nodes import TokenBatch
from flowrl.runtime.driver.driver import Driver
from flowrl.runtime.driver.job import RunOptions
from flowrl.runtime.driver.launch import Launch
from flowrl.runtime.telemetry.metrics import EarlyStop, StopRule, read_lines
from flowrl.testing import VirtualClock, run_graph
from tests.nodes.test_nodes_batch import batches, group
from tests.rigs.in_process import seeing_the_driver
from tests.runtime.runs.test_runtime_episodes import PLAYED

RULES = [
    (StopRule("r", above=0.5), [0.1, 0.5, 0.6, 0.7], "r is 0.6, above 0.5"),
    (StopRule("r", below=0.5, for_values=2), [0.1, 0.7, 0.2, 0.3], "r is 0.3, below 0.5"),
    (StopRule("r", patience=2), [0.1, 0.3, 0.2, 0.3], "r has not improved for 2 values"),
    (StopRule("r", patience=2, best="lowest"), [3.0, 2.0, 2.0, 2.5], "r has not improved for 2 values"),
    (StopRule("r", patience=2), [0.1, 0.2, 0.1, 0.3, 0.2], ""),
    (StopRule("r", above=0.5), [float("nan"), 0.1], ""),
]


@pytest.mark.parametrize(("rule", "values", "reason"), RULES)
def test_a_rule_ends_a_run_once(rule: StopRule, values: list[float], reason: str) -> None:
    told: list[str] = []
    stop = EarlyStop(rule, told.append)
    for value in [*values, values[-1]] if reason else values:
        stop.look_at_line({"r": value, "other": 9.0})
        stop.look_at_line({"other": 9.0})
    assert told == ([reason] if reason else [])


def test_a_value_before_training_ends_nothing_and_is_the_one_to_beat() -> None:
    told: list[str] = []
    above, patience = (
        EarlyStop(StopRule("evaluation/score", **rule), told.append)  # type: ignore[arg-type]
        for rule in ({"above": 0.5}, {"patience": 2})
    )
    for stop in (above, patience):
        stop.look_at_evaluation("before", {"evaluation/score": 0.6})
        assert told == [] and stop.unseen == ""
    patience.look_at_evaluation("during", {"evaluation/score": 0.5})
    assert told == []
    patience.look_at_evaluation("during", {"evaluation/score": 0.6})
    assert told == ["evaluation/score has not improved for 2 values"]
    above.look_at_evaluation("after", {"evaluation/score": 0.7})
    assert len(told) == 1, "after training there is nothing to end"
    above.look_at_evaluation("during", {"evaluation/score": 0.7})
    assert told[1:] == ["evaluation/score is 0.7, above 0.5"]


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    lines = [{"step": 1, "r": 0.5}, {"step": 2, "r": 0.4}, {"step": 3, "r": None}]
    held_out = [("before", 0.9), ("during", 0.5), ("after", 0.1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluations = [{"step": 4, "phase": phase, "evaluation/score": score} for phase, score in held_out]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    for metric in ("r", "evaluation/score"):
        told: list[str] = []
        stop = EarlyStop(StopRule(metric, patience=2), told.append)
        stop.recall_records(tmp_path)
        assert told == [] and stop.unseen == ""
        stop.look_at_line({metric: 0.3})
        assert told == [f"{metric} has not improved for 2 values"]


def test_the_values_of_a_resumed_run_are_all_counted(tmp_path: Path) -> None:
    lines = [{"step": step, "r": value} for step, value in enumerate((0.5, 0.4, 0.3), start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "evaluations.jsonl").write_text('{"step": 1}\n')  # somebody has edited it
    told: list[str] = []
    stop = EarlyStop(StopRule("r", patience=2), told.append)
    stop.recall_records(tmp_path)
    stop.look_at_line({"r": 0.45})
    assert told == ["r has not improved for 3 values"]


EVALUATED = Path(__file__).parents[1] / "runs" / "graphs_alive" / "evaluated.py"


@pytest.mark.parametrize("above", [-0.5, 0.3])
def test_a_run_ends_by_an_evaluation_during_training(tmp_path: Path, above: float) -> None:
    rule = StopRule("evaluation/score", above=above)
    config = {"every": (2,)}
    ran = run_graph(EVALUATED, tmp_path / "run", config, clock=VirtualClock(), timeout_s=3600, steps=30, stop=rule)
    assert ran.outcome is not None and ran.outcome.interrupted
    ends = 2 if above < 0 else 4
    assert ends <= len(ran.steps) <= ends + 2
    rows = [
        (row["phase"], row["step"], row["evaluation/score"]) for row in read_lines(tmp_path / "run/evaluations.jsonl")
    ]
    assert rows == [("before", 0, 0.0), *(("during", step, step / 10) for step in range(2, ends + 1, 2))]


def test_a_resumed_run_has_no_evaluation_of_what_it_goes_back_before(tmp_path: Path) -> None:
    run, config = tmp_path / "run", {"every": (2,)}
    first = run_graph(EVALUATED, run, config, clock=VirtualClock(), timeout_s=3600, steps=5, save_every=3, keep=0)
    assert first.outcome is not None
    shutil.rmtree(run / "checkpoints" / "step_000005")
    run_graph(EVALUATED, run, config, clock=VirtualClock(), timeout_s=3600, steps=7, resume=True)
    rows = [(row["phase"], row["step"]) for row in read_lines(run / "evaluations.jsonl")]
    assert rows == [("before", 0), *(("during", step) for step in (2, 4, 6)), ("after", 7)]


def test_a_run_whose_time_was_over_before_its_training_is_evaluated_by_the_next(tmp_path: Path) -> None:
    """Its time was over during that evaluation, which it gave up, so its only checkpoint is that of version 0."""
    run, config = tmp_path / "run", {"every": (2,), "seconds": 60.0}
    run_graph(EVALUATED, run, config, clock=VirtualClock(), timeout_s=36000, steps=4, max_hours=0.001)
    assert not (run / "evaluations.jsonl").exists() or not read_lines(run / "evaluations.jsonl")
    run_graph(EVALUATED, run, {"every": (2,)}, clock=VirtualClock(), timeout_s=36000, steps=4, resume=True)
    rows = [(row["phase"], row["step"]) for row in read_lines(run / "evaluations.jsonl")]
    assert rows == [("before", 0), ("during", 2), ("after", 4)]


@pytest.mark.parametrize("wrong", [{"metric": "r"}, {"above": 1.0}, {"metric": "r", "patience": -1}])
def test_half_a_rule_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"--stop\."):
        StopRule(**wrong)  # type: ignore[arg-type]


def test_hours_have_to_pass() -> None:
    with pytest.raises(ConfigError, match="--max-hours is 0"):
        RunOptions(max_hours=0)


def test_a_run_ends_by_its_clock_with_a_checkpoint_and_goes_on(tmp_path: Path) -> None:
    whole = run_graph(PLAYED, tmp_path / "whole", {}, clock=(clock := VirtualClock()), timeout_s=3600, steps=6)
    took_s = clock.now_s
    assert whole.steps == [1, 2, 3, 4, 5, 6] and took_s > 0
    hours = took_s / 2 / 3600
    ran = run_graph(PLAYED, tmp_path / "run", {}, clock=VirtualClock(), timeout_s=3600, steps=400, max_hours=hours)
    assert ran.outcome is not None and ran.outcome.interrupted and 0 < len(ran.steps) < 400
    assert any("--max-hours" in line and "are over" in line for line in ran.view.lines)
    assert ran.audit().ok and (tmp_path / "run" / "checkpoints" / f"step_{ran.steps[-1]:06}").is_dir()


MEASURED = Path(__file__).parents[1] / "checkpoints" / "graphs_resumed" / "measured.py"


@pytest.mark.parametrize("by", ["SIGTERM", "--max-hours"])
@pytest.mark.parametrize(
    ("hangs_at", "newest"), [("batch 3", 2), ("checkpoint", 2), ("finish", None), ("batch 1", None)]
)
def test_a_run_that_is_to_end_ends_without_a_checkpoint_if_something_in_it_does_not(
    tmp_path: Path, hangs_at: str, newest: int | None, by: str
) -> None:
    """An evaluation that hangs is given up at once; that its process hangs, too, is seen in its `finish`."""
    clock, ended_s = VirtualClock(), list[float]()

    def end(driver: Driver) -> None:
        ended_s.append(clock.now_s)
        driver.terminate() if by == "SIGTERM" else driver.end_in_time("--max-hours 1 are over")

    def at_100_s(driver: Driver) -> None:
        asyncio.get_running_loop().call_later(100, end, driver)

    config = {"hangs_at": hangs_at, "stays_at": "before 0" if hangs_at == "finish" else ""}
    with seeing_the_driver(at_100_s):
        ran = run_graph(
            MEASURED,
            tmp_path,
            config,
            clock=clock,
            timeout_s=36000,
            steps=400,
            save_every=2,
            term_minutes=0.4,
            must_succeed=False,
        )
    assert isinstance(ran.error, FlowrlError) and str(ran.error).startswith("--term-minutes 0.4 are over"), ran.error
    assert 24 <= clock.now_s - ended_s[0] < 24 + 3
    what = f"--resume continues from step_{newest:06}." if newest else "start the run again."
    assert what in str(ran.error).split("\n")[0]
    assert "every node:" in str(ran.error) and "works: " in str(ran.error)
    made = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert made == ([f"step_{newest:06}"] if newest else [])
    if newest:
        again = run_graph(MEASURED, tmp_path, {}, clock=VirtualClock(), timeout_s=3600, steps=4, resume=True)
        assert again.steps[-1] == 4 and again.audit().ok


def test_a_run_that_ends_in_order_within_its_limit_is_not_cut_off(tmp_path: Path) -> None:
    def at_once(driver: Driver) -> None:
        asyncio.get_running_loop().call_later(0.03, driver.terminate)

    with seeing_the_driver(at_once):
        ran = run_graph(MEASURED, tmp_path, {}, clock=VirtualClock(), timeout_s=36000, steps=100_000, term_minutes=0.4)
    assert ran.outcome is not None and ran.outcome.interrupted and ran.audit().ok


def test_the_limit_of_an_orderly_end_has_to_be_above_0() -> None:
    with pytest.raises(ConfigError, match="--term-minutes is 0; it has to be above 0"):
        RunOptions(term_minutes=0)


def launched(tmp_path: Path, *, hours: float, ago_s: float) -> Launch:
    """A run of at most `hours`, whose command was given `ago_s` before now."""
    loaded = load_file(PLAYED)
    cfg = loaded.config_type()
    options = RunOptions(steps=1, run_dir=tmp_path / "run", max_hours=hours)
    return Launch(loaded.path, loaded.build(cfg), cfg, options, started_s=time.monotonic() - ago_s)


def test_the_set_up_counts_among_the_hours(tmp_path: Path) -> None:
    launch, clock, told = launched(tmp_path, hours=1.0, ago_s=3000.0), VirtualClock(), list[float]()

    async def run() -> None:
        with launch.limit_hours(lambda reason: told.append(clock.now_s)):
            await asyncio.sleep(1200)  # under test: what comes in this time of the clock

    clock.run(run())
    assert told == [pytest.approx(600, abs=5)]


def test_a_run_whose_hours_are_over_after_the_set_up_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-hours 1 were over before the set-up ended"):
        launched(tmp_path, hours=1.0, ago_s=3601.0).run()
    assert not (tmp_path / "run" / "ledger.sqlite").exists()


def test_a_run_ends_by_a_figure(tmp_path: Path) -> None:
    rule = StopRule("tokens_trained", above=0.0, for_values=3)
    ran = run_graph(PLAYED, tmp_path / "run", {}, clock=VirtualClock(), timeout_s=3600, steps=50, stop=rule)
    assert ran.outcome is not None and ran.outcome.interrupted and 3 <= len(ran.steps) < 50
    assert any("ending early: tokens_trained is" in line for line in ran.view.lines) and ran.audit().ok


def test_responses_that_were_cut_off_are_kept_out_of_the_loss() -> None:
    whole = group("g0")
    cut = dataclasses.replace(whole.samples[0], truncated=True)
    arrivals = [(0, Group("g0", (cut, whole.samples[1]), 2))]
    for filtered, trained in ((True, 2), (False, 4)):
        (batch,) = batches(TokenBatch(1, mask_truncated=filtered), arrivals)
        assert batch.num_tokens == trained
    (batch,) = batches(TokenBatch(1, mask_truncated=True), arrivals)
    assert batch.metrics["overlong_share"] == 0.5
    masks = [sample.loss_mask for sample in batch.samples]
    assert masks[0] is not None and not masks[0].any() and masks[1] is None
    assert np.array_equal(batch.samples[0].advantages, cut.advantages), "it still counts in its group's baseline"


@pytest.mark.parametrize(("metric", "warned"), [("reward_maen", True), ("tokens_trained", False)])
def test_a_figure_that_never_came_is_told(tmp_path: Path, metric: str, warned: bool) -> None:
    rule = StopRule(metric, above=1e9)
    ran = run_graph(PLAYED, tmp_path / "run", {}, clock=VirtualClock(), timeout_s=3600, steps=3, stop=rule)
    assert ran.outcome is not None and not ran.outcome.interrupted
    assert any(f"--stop.metric {metric} had no value" in line for line in ran.view.lines) == warned

"""Alarms: each rings from the line that crosses its limit to the one that comes back; view and metrics tell."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowrl.errors import ConfigError
from flowrl.runtime.telemetry.metrics import ALARMS, FIGURES, Alarms, AlarmThresholds, Metrics, read_lines
from flowrl.runtime.telemetry.statistics import Statistics
from flowrl.runtime.telemetry.view import Board, PlainView, draw_board
from tests.runtime.telemetry.test_metrics import Recorder

SHORT = AlarmThresholds(window=2)
BAD = {
    "kl": 0.9,
    "all_equal_groups_share": 1.0,
    "logprob_mismatch": 0.2,
    "truncated_share": 0.8,
    "failing_by_length": 6.0,
}
GOOD = {
    "kl": 0.01,
    "all_equal_groups_share": 0.2,
    "logprob_mismatch": 0.001,
    "truncated_share": 0.0,
    "failing_by_length": 1.0,
}


def ringing(limits: AlarmThresholds, *records: dict[str, Any]) -> list[set[str]]:
    alarms = Alarms(limits)
    return [set(alarms.look_at_line(record)) for record in records]


@pytest.mark.parametrize("name", FIGURES)
def test_an_alarm_rings_while_the_mean_of_its_window_is_above_the_limit(name: str) -> None:
    figure, _ = FIGURES[name]
    good, bad = {figure: GOOD[figure]}, {figure: BAD[figure]}
    assert ringing(SHORT, bad, bad, bad, good, good) == [set(), {name}, {name}, ringing(SHORT, bad, good)[1], set()]


def test_entropy_is_compared_with_that_of_the_beginning() -> None:
    entropies = (1.0, 3.0, 0.5, 0.15, 0.15, 0.15, 2.0)
    rings = ringing(SHORT, *({"entropy": value} for value in entropies))
    assert [bool(names) for names in rings] == [False, False, False, False, True, True, False]
    assert rings[4] == {"entropy_collapse"}


def test_lines_without_a_figure_neither_ring_nor_end_an_alarm() -> None:
    assert ringing(SHORT, {"kl": 0.9}, {"kl": None}, {}, {"kl": 0.9}, {"kl": None}) == [
        set(),
        set(),
        set(),
        {"kl_drift"},
        {"kl_drift"},
    ]


def test_a_limit_of_zero_is_silence() -> None:
    silent = AlarmThresholds(0, 0, 0, 0, 0, 0, window=1)
    assert ringing(silent, BAD | {"entropy": 1.0}, BAD | {"entropy": 0.0}) == [set(), set()]


def test_a_resumed_run_remembers_what_it_began_with() -> None:
    before = [{"entropy": 1.0}, {"entropy": 1.0}, {"entropy": 0.05}]
    assert set(Alarms(SHORT, before).look_at_line({"entropy": 0.05})) == {"entropy_collapse"}
    assert not Alarms(SHORT, before[2:]).look_at_line({"entropy": 0.05})


@pytest.mark.parametrize("limits", [{"kl": -1}, {"entropy": float("nan")}, {"window": 0}])
def test_limits_are_numbers_from_zero_up(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--alarms\."):
        AlarmThresholds(**limits)


def test_lines_and_sinks_tell_of_alarms(tmp_path: Path) -> None:
    sink = Recorder()
    metrics = Metrics(tmp_path, Statistics(), roles={}, sinks=[sink], limits=AlarmThresholds(window=1))
    metrics.write_line({"step": 1, **GOOD})
    metrics.write_line({"step": 2, **BAD})
    metrics.close()
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert first["alarms"] == {}
    assert set(second["alarms"]) == set(FIGURES)
    assert second["alarms"]["kl_drift"] == "kl is 0.9, above 0.5"
    scalars = [{name: values[f"alarm/{name}"] for name in ALARMS} for _, values in sink.written]
    assert scalars == [dict.fromkeys(ALARMS, 0.0), {name: float(name in FIGURES) for name in ALARMS}]


def test_the_live_view_shows_what_rings() -> None:
    line = {"step": 3, "time_s": 1.0, "reward_mean": 0.5, "alarms": {"kl_drift": "kl is 0.9, above 0.5"}}
    console = Console(width=100, file=io.StringIO(), record=True)
    board = Board("grpo")
    board.add_line(line)
    console.print(draw_board(board))
    assert "kl_drift: kl is 0.9, above 0.5" in console.export_text()


def test_lines_tell_of_the_beginning_and_the_end() -> None:
    out = io.StringIO()
    view = PlainView(Board("grpo"), Console(file=out, width=200))
    for step, alarms in enumerate(({}, {"kl_drift": "kl is 0.9, above 0.5"}, {"kl_drift": "kl is 1, above 0.5"}, {})):
        view.step({"step": step, "alarms": alarms})
    told = [line.partition("] ")[2].strip() for line in out.getvalue().splitlines() if "kl_drift" in line]
    assert told == ["alarm: kl_drift: kl is 0.9, above 0.5", "alarm over: kl_drift"]

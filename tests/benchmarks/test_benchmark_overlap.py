"""The arithmetic of benchmarks/runs/sync_vs_async.py, against figures computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.runs.overlap import Gain, Spread, pace, rewards
from benchmarks.runs.sync_vs_async import Case, Done, make_cases, records, reward_table
from flowrl.errors import ConfigError, GraphError
from flowrl.graph.load import load_file

ROOT = Path(__file__).parents[2]
STAGES = ROOT / "benchmarks" / "runs" / "stages.py"


def line(time_s: float, *, busy: tuple[float, float] = (2.0, 1.0), reward: float | None = None) -> dict[str, Any]:
    return {
        "time_s": time_s,
        "generator_busy_s": busy[0],
        "trainer_busy_s": busy[1],
        "num_samples": 32,
        "tokens_trained": 320,
        "reward_mean": reward,
    }


def test_pace_leaves_out_the_first_steps_and_the_tail() -> None:
    lines = [line(20.0, busy=(9.0, 9.0)), line(30.0, busy=(9.0, 9.0)), line(34.0), line(38.0), line(39.0)]
    found = pace(lines, skip=2, tail=1)
    assert found.step_s == 4.0
    assert (found.generator_s, found.trainer_s) == (2.0, 1.0)
    assert (found.samples_per_s, found.tokens_per_s) == (8.0, 80.0)
    assert pace(lines, skip=2).step_s == 3.0


def test_busy_seconds_are_those_of_one_replica() -> None:
    lines = [line(0.0), line(1.0, busy=(6.0, 4.0))]
    found = pace(lines, skip=1, generators=3, ranks=2)
    assert (found.generator_s, found.trainer_s) == (2.0, 2.0)
    assert found.bound == 2.0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="5 steps leave none to measure: 3 are skipped, the last 2 too"):
        pace([line(float(second)) for second in range(5)], skip=3, tail=2)


def test_gain_is_the_part_of_the_bound_that_was_reached() -> None:
    sync = pace([line(0.0), line(3.3)], skip=1)
    other = pace([line(0.0), line(2.2)], skip=1)
    gain = Gain.of(sync, other)
    assert sync.bound == 1.5
    assert gain.speedup == pytest.approx(1.5)
    assert gain.overlap == pytest.approx(1.0)
    assert gain.of_ideal == pytest.approx(2.0 / 2.2)


def test_rewards_are_means_of_the_last_tenth_at_each_moment() -> None:
    lines = [line(100.0 + second, reward=float(second)) for second in range(20)]
    assert rewards(lines, [0.0, 10.0, 19.0, 20.0]) == [0.0, 9.5, 18.5, None]
    assert rewards([line(0.0), line(1.0)], [1.0]) == [None]


def test_spread_is_median_and_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert str(Spread.of([0.5, 123.4, 45.67])) == "45.7\n0.500-123"


def test_cases_follow_the_fields_of_the_graph() -> None:
    cases = make_cases(load_file(STAGES), [0, 2, 1], ["--train-s", "0.1"])
    assert [(case.name, case.staleness) for case in cases] == [
        ("sync", 0),
        ("sync, time share", 0),
        ("async 1", 1),
        ("async 2", 2),
    ]
    assert cases[1].args == ("--staleness", "0", "--time-share", "generator", "trainer", "--train-s", "0.1")


def test_wrong_options_are_refused_before_anything_runs() -> None:
    file = load_file(STAGES)
    with pytest.raises(ConfigError, match="no-such"):
        make_cases(file, [0], ["--no-such", "1"])
    with pytest.raises(GraphError, match="staleness"):
        make_cases(file, [-1], [])
    with pytest.raises(ConfigError, match="no field staleness"):
        make_cases(load_file(ROOT / "graphs" / "sft.py"), [0], [])


def test_records_name_benchmark_case_system_and_repetition() -> None:
    case = Case("async 1", 1, ())
    lines = [line(0.0, reward=0.25), line(2.0, reward=0.75)]
    here = pace(lines, skip=1)
    done = [Done(case, 4, lines, here, Gain.of(here, here))]
    found = {record["case"]: record for record in records(done, STAGES)}
    assert found["step"] == {
        "benchmark": "sync_vs_async",
        "case": "step",
        "system": "async 1",
        "value": 2.0,
        "unit": "s",
        "repetition": 4,
        "graph": str(STAGES),
    }
    assert found["overlap"]["value"] == pytest.approx(1 / 1.5, abs=1e-6)
    assert list(reward_table([case], done).columns[-1].cells) == ["0.750"]

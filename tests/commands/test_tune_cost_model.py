"""The cost model of `flowrl tune` against a simulation of the same stages, and by hand."""

from __future__ import annotations

import pytest

from flowrl.commands.tune.cost_model import (
    StageWork,
    StepRest,
    lines_of,
    lost_to_spread,
    mean_of_larger,
    predict_step,
    side_by_side,
)
from flowrl.commands.tune.stage_times import StageSize, StageTimes, amdahl_seconds
from tests.commands.step_simulation import Pipeline, normal

CORES = frozenset({(0, 0)}), frozenset({(0, 1)})
BOTH = frozenset({(0, 0), (0, 1)})


def pair(
    generate_s: float, train_s: float, *, spread: float = 0.0, slow: float = 1.0, line: str = ""
) -> list[StageWork]:
    return [
        StageWork("generate", generate_s, generate_s * spread, line, CORES[0], generates=True, contention=slow),
        StageWork("train", train_s, train_s * spread, line, CORES[1], contention=slow),
    ]


TIMES = [(3.0, 1.0), (1.0, 1.0), (1.0, 4.0), (0.1, 5.0)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("publish_s", [0.0, 0.3])
def test_bounded_staleness(times: tuple[float, float], ahead: int, publish_s: float) -> None:
    simulated = Pipeline(lambda: times[0], lambda: times[1], ahead, publish_s=publish_s).step_s(200)
    predicted = predict_step(pair(*times), ahead=ahead, rest=StepRest(sync_s=publish_s))
    assert predicted.step_s == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("slow", [1.3, 2.0])
def test_stages_that_slow_each_other(times: tuple[float, float], ahead: int, slow: float) -> None:
    pipeline = Pipeline(lambda: times[0], lambda: times[1], ahead, slow={"generate": slow, "train": slow})
    predicted = predict_step(pair(*times, slow=slow), ahead=ahead, rest=StepRest())
    assert predicted.step_s == pytest.approx(pipeline.step_s(200), rel=0.02)


@pytest.mark.parametrize("times", TIMES)
def test_a_shared_core_gives_each_half_of_it(times: tuple[float, float]) -> None:
    generates, trains = pair(*times)
    stages = [generates, StageWork("train", times[1], cores=BOTH)]
    pipeline = Pipeline(lambda: times[0], lambda: times[1], 1, slow={"generate": 2.0, "train": 2.0})
    predicted = predict_step(stages, ahead=1, rest=StepRest())
    assert predicted.step_s == pytest.approx(pipeline.step_s(200), rel=0.02)
    assert predicted.step_s == pytest.approx(sum(times))
    assert predict_step([generates, trains], ahead=1, rest=StepRest()).step_s == pytest.approx(max(times))


@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize("times", [(1.0, 1.0), (1.2, 1.0), (1.0, 1.1), (1.0, 3.0)])
def test_the_spread_of_stages(times: tuple[float, float], ahead: int) -> None:
    generate_s, train_s = (normal(mean, 0.25 * mean, seed) for seed, mean in enumerate(times))
    simulated = Pipeline(generate_s, train_s, ahead).step_s(2000)
    predicted = predict_step(pair(*times, spread=0.25), ahead=ahead, rest=StepRest())
    assert predicted.step_s == pytest.approx(simulated, rel=0.02)


def test_in_turns_staleness_buys_nothing() -> None:
    for ahead in (0, 1):
        simulated = Pipeline(lambda: 1.0, lambda: 2.0, ahead, time_shared=True).step_s(100)
        predicted = predict_step(pair(1.0, 2.0, line="both"), ahead=ahead, rest=StepRest(time_shared_s=0.2))
        assert predicted.step_s == pytest.approx(simulated + 0.2, rel=0.02)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("ahead", [0, 1])
def test_replicas_between_measured_ones(replicas: int, ahead: int) -> None:
    """A fixed part of 0.5 s, and 4 s that are divided: measured with 1 and 4 replicas."""
    times = StageTimes([(StageSize(count), 0.5 + 4 / count) for count in (1, 4)])
    seconds = times.stage_seconds(StageSize(replicas))
    simulated = Pipeline(lambda: replicas * 0.5 + 4, lambda: 1.5, ahead, replicas=replicas).step_s(100)
    assert predict_step(pair(seconds, 1.5), ahead=ahead, rest=StepRest()).step_s == pytest.approx(simulated, rel=0.02)


def test_cores_and_replicas_multiply() -> None:
    times = StageTimes([(StageSize(1, 1), 8.0), (StageSize(1, 4), 2.0), (StageSize(2, 4), 1.5)])
    assert times.stage_seconds(StageSize(1, 2)) == pytest.approx(4.0)
    assert times.stage_seconds(StageSize(2, 1)) == pytest.approx(8.0 * 0.75)
    once = StageTimes([(StageSize(1, 2), 1.0), (StageSize(2, 1), 1.0)])
    assert (
        once.covers_size(StageSize(2, 1))
        and once.covers_size(StageSize(2, 2))
        and not once.covers_size(StageSize(1, 1))
    )
    assert (
        times.covers_size(StageSize(2, 3))
        and not times.covers_size(StageSize(1, 8))
        and not times.covers_size(StageSize(3, 1))
    )


def test_amdahls_law_between_and_beyond() -> None:
    assert amdahl_seconds({1: 5.0, 4: 2.0}, 2) == pytest.approx(3.0)  # 1 + 4 / cores
    assert amdahl_seconds({1: 5.0, 4: 2.0}, 8) == pytest.approx(1.5)
    assert amdahl_seconds({2: 3.0}, 8) == 3.0
    assert amdahl_seconds({1: 2.0, 2: 3.0}, 4) == 3.0, "what got slower with cores is not predicted to get faster"
    assert amdahl_seconds({1: 4.0, 2: 3.0, 4: 1.0}, 3) == pytest.approx(3.0 - 8 * (1 / 2 - 1 / 3))


def test_three_lines_of_which_one_takes_turns() -> None:
    stages = [StageWork("g", 3.0), StageWork("r", 1.0, line="a"), StageWork("t", 1.0, line="a"), StageWork("c", 0.5)]
    length_s, busy_s = side_by_side(lines_of(stages))
    assert length_s == pytest.approx(3.0) and busy_s == {"g": 3.0, "r": 1.0, "t": 1.0, "c": 0.5}
    predicted = predict_step(stages, ahead=1, rest=StepRest(sync_s=1.5))
    assert predicted.step_s == pytest.approx((3.0 + 2.0 + 0.5 + 1.5) / 2)
    assert predicted.bottleneck == "g"


def test_contention_lasts_while_others_work() -> None:
    length_s, busy_s = side_by_side(lines_of(pair(1.0, 4.0, slow=2.0)))
    assert busy_s == {"generate": pytest.approx(2.0), "train": pytest.approx(5.0)} and length_s == pytest.approx(5.0)


def test_a_window_does_not_wait_for_the_slowest_group() -> None:
    stages = pair(1.0, 1.0, spread=0.4)
    waits, not_waits = (predict_step(stages, ahead=1, rest=StepRest(), window=some).step_s for some in (False, True))
    assert waits == pytest.approx(1 + 0.4 * 2**0.5 / (2 * 3.141592653589793) ** 0.5)
    assert not_waits == pytest.approx(1 + 0.4 / (2 * 3.141592653589793) ** 0.5)


def test_clarks_mean_of_the_larger() -> None:
    assert lost_to_spread(2.0, 1.0, 0.0, ahead=1) == 0.0
    assert mean_of_larger(1.0, 1.0, 1.0) == pytest.approx(1.3989422804)
    assert mean_of_larger(5.0, 1.0, 0.1) == pytest.approx(5.0)
    assert lost_to_spread(1.0, 1.0, 1.0, ahead=2) == pytest.approx(
        lost_to_spread(1.0, 1 - 1e-4, 1.0, ahead=2), rel=1e-3
    )
    assert lost_to_spread(2.0, 2.0, 0.5, ahead=3) == pytest.approx(0.25 / (5 * 2))
    assert lost_to_spread(1.0, 0.1, 1e-6, ahead=4) == 0.0


def test_shares_of_the_step() -> None:
    predicted = predict_step(pair(1.0, 3.0), ahead=1, rest=StepRest(async_s=1.0))
    assert predicted.step_s == 4.0 and predicted.busy == {"generate": 0.25, "train": 0.75}

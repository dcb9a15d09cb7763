"""What a run's records say of overlap: the pace of its steps, and the bound that its stages set.

A synchronous step takes at least Tg + Tt: the generator's and the trainer's busy seconds a step. Side
by side they take max(Tg, Tt) at best, so (Tg + Tt) / max(Tg, Tt) bounds the speed-up, and overlap is
the part of the bound that was reached. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

Lines = Sequence[Mapping[str, Any]]
"""Lines of `metrics.jsonl`, in order."""


@dataclass(frozen=True)
class Pace:
    """A run in its steady state, means over its steps there."""

    step_s: float
    generator_s: float
    """Busy seconds a step of one generator replica."""
    trainer_s: float
    """The same of one rank."""
    samples_per_s: float
    tokens_per_s: float
    """Trained tokens."""

    @property
    def bound(self) -> float:
        """Largest speed-up that overlapping the two stages can give: 1 to 2."""
        return (self.generator_s + self.trainer_s) / max(self.generator_s, self.trainer_s)


@dataclass(frozen=True)
class Gain:
    """An asynchronous run against the synchronous one of the same repetition."""

    speedup: float
    bound: float
    of_ideal: float
    """max(Tg, Tt) over the step's time: overlap, had the synchronous run no overhead of its own."""

    @property
    def overlap(self) -> float:
        """The speed-up as a part of its bound."""
        return self.speedup / self.bound

    @staticmethod
    def of(sync: Pace, other: Pace) -> Gain:
        ideal_s = max(sync.generator_s, sync.trainer_s)
        return Gain(sync.step_s / other.step_s, sync.bound, ideal_s / other.step_s)


def pace(lines: Lines, *, skip: int, tail: int = 0, generators: int = 1, ranks: int = 1) -> Pace:
    """The pace between the ends of step `skip` and of the last but `tail`.

    The first steps fill the pipeline; the last `staleness` ones no longer share the machine with
    generation. Raises ValueError if no step is left.
    """
    steps = lines[skip : len(lines) - tail]
    if skip < 1 or not steps:
        raise ValueError(f"{len(lines)} steps leave none to measure: {skip} are skipped, the last {tail} too")
    seconds = steps[-1]["time_s"] - lines[skip - 1]["time_s"]
    return Pace(
        step_s=seconds / len(steps),
        generator_s=fmean(line["generator_busy_s"] for line in steps) / generators,
        trainer_s=fmean(line["trainer_busy_s"] for line in steps) / ranks,
        samples_per_s=sum(line["num_samples"] for line in steps) / seconds,
        tokens_per_s=sum(line["tokens_trained"] for line in steps) / seconds,
    )


def rewards(lines: Lines, at_s: Sequence[float]) -> list[float | None]:
    """Mean reward of the last few batches at each moment, counted from the end of the first batch.

    None where the run had ended before, or measures no reward.
    """
    return [_reward(lines, lines[0]["time_s"] + moment_s) for moment_s in at_s]


def _reward(lines: Lines, moment_s: float) -> float | None:
    done = [line["reward_mean"] for line in lines if line["time_s"] <= moment_s]
    if not done or lines[-1]["time_s"] < moment_s or done[-1] is None:
        return None
    return fmean(done[-max(1, len(lines) // 10) :])


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the repetitions; as text on two lines."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{_short(self.middle)}\n{_short(self.low)}-{_short(self.high)}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.3f}"

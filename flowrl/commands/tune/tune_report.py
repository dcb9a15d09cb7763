"""What `flowrl tune` prints: placements with their predicted and measured steps, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.commands.tune.cost_model import StepPrediction
from flowrl.commands.tune.measured_step import MeasuredStep
from flowrl.commands.tune.tuned_placement import TunedPlacement

TIE = 0.02
"""Measured steps that differ by less count as equal: repeated runs of one placement differ by as much."""


@dataclass(frozen=True)
class TunedRow:
    """One placement."""

    placement: TunedPlacement
    predicted: StepPrediction | None
    """None: what the prediction needs was not measured."""
    verified: MeasuredStep | None = None
    """A separate run, which is not one of those that the prediction is based on."""

    @property
    def prediction_error(self) -> float | None:
        """Relative error of the prediction: 0.1 if the predicted step is 10% too long."""
        if self.predicted is None or self.verified is None:
            return None
        return self.predicted.step_s / self.verified.step_s - 1

    @property
    def sort_key(self) -> tuple[bool, float]:
        """Sort key: by predicted time; rows without a prediction come last."""
        return (True, 0.0) if self.predicted is None else (False, self.predicted.step_s)


def in_order(rows: Sequence[TunedRow]) -> list[TunedRow]:
    """The rows by predicted step; among equal ones, by smaller staleness, then by fewer options."""
    return sorted(rows, key=lambda row: (*row.sort_key, row.placement.staleness or 0, len(row.placement.options)))


def choose_row(rows: Sequence[TunedRow]) -> TunedRow | None:
    """The fastest of the verified rows; if none was verified, the row that is predicted to be the fastest.

    Among equally fast ones, the row with the smallest staleness and the fewest options.
    """
    measured = {index: row.verified.step_s for index, row in enumerate(rows) if row.verified is not None}
    if measured:
        limit_s = (1 + TIE) * min(measured.values())
        near = [rows[index] for index, step_s in measured.items() if step_s <= limit_s]
        return min(near, key=lambda row: (row.placement.staleness or 0, len(row.placement.options)))
    return next((row for row in in_order(rows) if row.predicted is not None), None)


def row_table(rows: Sequence[TunedRow], best: TunedRow | None) -> str:
    """The rows by predicted step; * marks the chosen one, and "now" what runs without further options."""
    heads = ("", "step s", "measured", "error", "busy", "placement")
    cells = [heads, *(_cells(row, row is best) for row in in_order(rows))]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    right = {1, 2, 3}
    return "\n".join(
        "  ".join(
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _cells(row: TunedRow, is_best: bool) -> tuple[str, ...]:
    mark = ("*" if is_best else "") + (" now" if row.placement.is_default else "")
    if row.predicted is None:
        return (mark.strip(), "-", _seconds_text(row.verified), "", "", row.placement.in_words)
    busy = " ".join(f"{name} {part:.0%}" for name, part in row.predicted.busy.items())
    error = "" if row.prediction_error is None else f"{row.prediction_error:+.1%}"
    return (
        mark.strip(),
        f"{row.predicted.step_s:.3g}",
        _seconds_text(row.verified),
        error,
        busy,
        row.placement.in_words,
    )


def _seconds_text(step: MeasuredStep | None) -> str:
    return "" if step is None else f"{step.step_s:.3g}"


def row_records(rows: Sequence[TunedRow], best: TunedRow | None) -> Iterator[dict[str, Any]]:
    """The rows as plain data."""
    for row in in_order(rows):
        yield {
            "placement": row.placement.in_words,
            "options": {name: _plain_data(value) for name, value in row.placement.options.items()},
            "default": row.placement.is_default,
            "chosen": row is best,
            "predicted_s": None if row.predicted is None else row.predicted.step_s,
            "busy": {} if row.predicted is None else dict(row.predicted.busy),
            "measured_s": None if row.verified is None else row.verified.step_s,
            "measured_steps": None if row.verified is None else row.verified.num_steps,
            "load": None if row.verified is None else row.verified.load,
            "error": row.prediction_error,
        }


def _plain_data(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value

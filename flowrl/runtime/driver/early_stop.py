"""Ends a run because of its metrics: a figure has passed a bound, or has not improved for a number of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrl.errors import ConfigError
from flowrl.runtime.telemetry.metrics import EVALUATIONS, METRICS, flat, read


@dataclass(frozen=True)
class StopRule:
    """When a run ends before its last step: as by an interrupt, it finishes groups in flight and saves a checkpoint."""

    metric: str = ""
    """Name of a number in metrics.jsonl, or of one from evaluations during training, such as evaluation/score; empty:
    the run does not end early."""
    above: float | None = None
    """End the run when the metric is above this."""
    below: float | None = None
    """End the run when the metric is below this."""
    patience: int = 0
    """End the run after this many values without an improvement, starting from the value before training. 0: never."""
    best: Literal["highest", "lowest"] = "highest"
    """Whether a higher or a lower value is an improvement."""
    for_values: int = 1
    """Number of values in a row that must be above, or below."""

    def __post_init__(self) -> None:
        rules = self.above is not None or self.below is not None or self.patience > 0
        if bool(self.metric) != rules:
            raise ConfigError(
                "--stop.metric and a rule go together: --stop.above, --stop.below or --stop.patience; give both, or "
                "neither"
            )
        if self.patience < 0 or self.for_values < 1:
            raise ConfigError("--stop.patience has to be 0 or more, and --stop.for-values 1 or more")
        if self.for_values > 1 and self.above is None and self.below is None:
            raise ConfigError("--stop.for-values is for --stop.above and --stop.below; give one of them too")
        if self.best != "highest" and not self.patience:
            raise ConfigError("--stop.best is for --stop.patience; give that too, or leave it out")


class EarlyStop:
    """Looks at every line of metrics and every evaluation; calls `stop` once, with the reason.

    An evaluation before training sets the value to beat and does not end the run. One after training is ignored.
    """

    def __init__(self, rule: StopRule, stop: Callable[[str], None]) -> None:
        self._rule = rule
        self._stop = stop
        self._beyond = 0
        """Number of values in a row, up to the newest, that are above, or below."""
        self._best = -math.inf
        self._since_best = 0
        self._stopped = self._seen = False

    @property
    def unseen(self) -> str:
        """The metric of the rule if it has had no value yet, otherwise ""."""
        return "" if self._seen else self._rule.metric

    def look(self, values: Mapping[str, object]) -> None:
        """Take the value of the metric, if it is among `values`."""
        value = self._value(values)
        if value is not None and (reason := self._reason(value)) and not self._stopped:
            self._stopped = True
            self._stop(reason)

    def evaluated(self, phase: str, values: Mapping[str, object]) -> None:
        """Take the value of the metric of an evaluation before, during or after training."""
        if phase == "during":
            self.look(values)
        elif phase == "before" and (value := self._value(values)) is not None:
            self._best = self._signed(value)

    def recall(self, run_dir: Path) -> None:
        """Take the values in the records of a resumed run, without ending it: the counts continue from there."""
        if not self._rule.metric:
            return
        stopped, self._stopped = self._stopped, True
        for line in read(run_dir / METRICS):
            self.look(flat(line))
        for line in read(run_dir / EVALUATIONS):
            self.evaluated(line.get("phase", ""), line)
        self._stopped = stopped

    def _value(self, values: Mapping[str, object]) -> float | None:
        """The value of the metric, if `values` has one that is a finite number."""
        value = values.get(self._rule.metric)
        self._seen |= value is not None
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def _signed(self, value: float) -> float:
        """The value with the sign for which a higher value is better."""
        return value if self._rule.best == "highest" else -value

    def _reason(self, value: float) -> str:
        """Why the run ends with this value; "" if it continues."""
        rule = self._rule
        beyond = (rule.above is not None and value > rule.above) or (rule.below is not None and value < rule.below)
        self._beyond = self._beyond + 1 if beyond else 0
        if self._beyond >= rule.for_values:
            side = f"above {rule.above:g}" if rule.above is not None and value > rule.above else f"below {rule.below:g}"
            return f"{rule.metric} is {value:.4g}, {side}"
        signed = self._signed(value)
        self._since_best = 0 if signed > self._best else self._since_best + 1
        self._best = max(self._best, signed)
        if rule.patience and self._since_best >= rule.patience:
            times = "value" if self._since_best == 1 else "values"  # more than the patience in a resumed run
            return f"{rule.metric} has not improved for {self._since_best} {times}"
        return ""

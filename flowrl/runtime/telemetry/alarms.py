"""Alarms: common RL failures, detected early in the metrics lines.

Pure. An alarm checks the mean over the last `window` lines that have its figure. It rings from the line at which this
mean crosses the limit until a line at which it is within the limit again. An alarm changes nothing in the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.errors import ConfigError


@dataclass(frozen=True)
class AlarmThresholds:
    """The limits at which alarms start to ring; 0 disables an alarm."""

    entropy: float = 0.1
    """entropy_collapse: below this fraction of the entropy at the start of the run."""
    kl: float = 0.5
    """kl_drift: above this KL to the reference per token."""
    equal: float = 0.9
    """all_equal_groups: above this share of groups whose rewards are all equal and so give no training signal."""
    mismatch: float = 0.05
    """logprob_mismatch: above this mean difference between the trainer's and the generator's logprobs."""
    truncated: float = 0.5
    """truncation: above this share of responses cut off at the maximum length."""
    failing: float = 4.0
    """failing_by_length: above this dependence of failing on an episode's length, in standard deviations: the episodes
    that are left are then biased."""
    window: int = 5
    """Number of lines in a mean."""

    def __post_init__(self) -> None:
        for name in ("entropy", "kl", "equal", "mismatch", "truncated", "failing"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--alarms.{name} is {getattr(self, name)}; it has to be 0 (silent) or more")
        if self.window < 1:
            raise ConfigError(f"--alarms.window is {self.window}; it needs at least 1 line")


FIGURES = {
    "kl_drift": ("kl", "kl"),
    "all_equal_groups": ("all_equal_groups_share", "equal"),
    "logprob_mismatch": ("logprob_mismatch", "mismatch"),
    "truncation": ("truncated_share", "truncated"),
    "failing_by_length": ("failing_by_length", "failing"),
}
"""Alarm -> (figure of a metrics line, limit), for the alarms that ring above a limit."""
NAMES = ("entropy_collapse", *FIGURES)


class Alarms:
    """Checks every metrics line; `before` are the existing lines of a resumed run."""

    def __init__(self, limits: AlarmThresholds, before: Iterable[Mapping[str, Any]] = ()) -> None:
        self._limits = limits
        self._recent: dict[str, deque[float]] = {}
        self._first: list[float] = []
        """The entropies of the run's first lines that have one, at most `window`."""
        for record in before:
            self.look(record)

    def look(self, record: Mapping[str, Any]) -> dict[str, str]:
        """The alarms that ring at this line, with their messages."""
        ringing = {name: text for name in FIGURES if (text := self._above(name, record))}
        if text := self._collapse(record):
            ringing["entropy_collapse"] = text
        return ringing

    def _above(self, name: str, record: Mapping[str, Any]) -> str:
        figure, limit_name = FIGURES[name]
        limit, mean = getattr(self._limits, limit_name), self._mean(figure, record)
        if not limit or mean is None or mean <= limit:
            return ""
        return f"{figure} is {mean:.3g}, above {limit:g}"

    def _collapse(self, record: Mapping[str, Any]) -> str:
        mean, part = self._mean("entropy", record), self._limits.entropy
        if record.get("entropy") is not None and len(self._first) < self._limits.window:
            self._first.append(record["entropy"])
        if mean is None or len(self._first) < self._limits.window:
            return ""
        began = sum(self._first) / len(self._first)
        return f"entropy is {mean:.3g}, below {part:g} of the {began:.3g} at the start" if mean < part * began else ""

    def _mean(self, figure: str, record: Mapping[str, Any]) -> float | None:
        """The mean over the last lines that have the figure; None while there are fewer than `window`."""
        recent = self._recent.setdefault(figure, deque(maxlen=self._limits.window))
        if record.get(figure) is not None:
            recent.append(float(record[figure]))
        return sum(recent) / len(recent) if len(recent) == self._limits.window else None

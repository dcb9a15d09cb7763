"""The learning rate as a function of the version being made, so a checkpoint stores no state of a scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from flowrl.errors import ConfigError

Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then constant or a decay to `floor` times the peak at the run's last step."""

    decay: Decay = "constant"
    """How the rate falls from its peak to `floor` at the run's last step; linear and cosine need --steps."""
    warmup_steps: int = 0
    """Number of batches over which the rate rises; the first batch trains with peak / warmup_steps."""
    floor: float = 0.0
    """The final rate as a share of the peak, from 0 to 1."""

    def __post_init__(self) -> None:
        if self.decay not in get_args(Decay):
            raise ConfigError(f"decay is {self.decay!r}; choose one of {', '.join(get_args(Decay))}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; it has to be 0 or more")
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"floor is {self.floor}; it is a share of the learning rate, from 0 to 1")

    def factor(self, step: int, num_steps: int | None) -> float:
        """The factor by which the peak rate is multiplied in batch `step` of `num_steps`, counted from 1."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        if num_steps is None:
            raise ConfigError(
                f"a {self.decay} decay ends at the run's last step, so it needs their number; set --steps"
            )
        progress = min(1.0, (step - self.warmup_steps - 1) / max(1, num_steps - self.warmup_steps - 1))
        shape = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * shape

"""Running statistics over batches: reward normalisation and the adaptive KL controller.

Both advance by one step per batch in the batcher, so neither depends on ranks or timing. The batcher
recomputes a batch's advantages with the statistics and the coefficient of that batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.messages import Group
from flowrl.training.advantages import Estimate, Scale, require_one_seat, whole_reward

SMALLEST_VARIANCE = 1e-8


@dataclass(frozen=True)
class AdaptiveKL:
    """The controller of arXiv 1909.08593: β ← β·(1 + gain·clip(KL/target − 1, −limit, limit)) after every batch.

    KL is the mean over responses of the sum over their tokens, in nats.
    """

    target: float
    gain: float = 0.1
    limit: float = 0.2

    def problems(self) -> list[str]:
        """Problems of these settings, as complete sentences."""
        values = (("target", self.target), ("gain", self.gain), ("limit", self.limit))
        return [f"adaptive_kl.{name} is {value}; it has to be above 0" for name, value in values if not value > 0]

    def next(self, coef: float, kl: float) -> float:
        """The coefficient of the next batch, after a batch with `coef` whose KL was `kl`."""
        error = min(max(kl / self.target - 1.0, -self.limit), self.limit)
        return coef * (1.0 + self.gain * error)


@dataclass
class Moments:
    """Mean and population variance of all values seen; merged batch by batch (Chan et al.)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def add(self, values: Sequence[float]) -> None:
        new = np.asarray(values, np.float64)
        if not new.size:
            return
        difference, total = float(new.mean()) - self.mean, self.count + new.size
        self.squares += float(((new - new.mean()) ** 2).sum()) + difference**2 * self.count * new.size / total
        self.mean += difference * new.size / total
        self.count = total

    @property
    def scale(self) -> Scale:
        variance = self.squares / self.count if self.count else 1.0
        return Scale(self.mean, float(np.sqrt(max(variance, SMALLEST_VARIANCE))))


class RunningEstimate:
    """Computes the advantages of successive batches with running statistics of the batches so far."""

    def __init__(self, estimate: Estimate, *, normalise_rewards: bool, adaptive_kl: AdaptiveKL | None) -> None:
        self._estimate = estimate
        self._adaptive_kl = adaptive_kl
        self._moments = Moments() if normalise_rewards else None
        self._kl_coef = estimate.kl_coef
        self._metrics: dict[str, float] = {}

    def batch(self, groups: Sequence[Group]) -> list[Group]:
        """`groups` with the advantages of this batch; advances statistics and coefficient by one batch."""
        scale = None
        if self._moments is not None:
            for group in groups:
                require_one_seat(group.samples, "a running mean of rewards")
            self._moments.add([whole_reward(sample) for group in groups for sample in group.samples])
            scale = self._moments.scale
            self._metrics |= {"reward_running_mean": scale.mean, "reward_running_std": scale.std}
        made = [self._estimate.trainable(group.samples, kl_coef=self._kl_coef, scale=scale) for group in groups]
        if self._adaptive_kl is not None:
            kl = self._mean_kl(groups)
            self._metrics |= {"kl_coef": self._kl_coef, "reward_kl": kl}
            self._kl_coef = self._adaptive_kl.next(self._kl_coef, kl)
        return [dataclasses.replace(group, samples=samples) for group, samples in zip(groups, made, strict=True)]

    def _mean_kl(self, groups: Sequence[Group]) -> float:
        sums = []
        for group in groups:
            for sample, kl_T in zip(group.samples, self._estimate.kl(group.samples), strict=True):
                sums.append(float(kl_T[: sample.num_tokens][sample.whole_mask].sum()))
        return float(np.mean(sums))

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last batch, by their names in metrics.jsonl."""
        return self._metrics

    def state(self) -> Mapping[str, Any]:
        moments = {} if self._moments is None else dataclasses.asdict(self._moments)
        return {"kl_coef": self._kl_coef, "moments": moments}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._kl_coef = float(state["kl_coef"])
        if self._moments is not None and state["moments"]:
            self._moments = Moments(**state["moments"])

"""The result of training on one batch: sums over micro-batches and ranks, and the figures made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from flowrl.training.batch.micro_batch import MicroBatch
from flowrl.training.loss.objective import MeanOver, Totals


@dataclass
class Sums:
    """Values that are summed over micro-batches and ranks."""

    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gap_by_age: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    tokens_by_age: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, stats: Mapping[str, Tensor], share: float = 1.0) -> None:
        for name, value in stats.items():
            self.values[name] += float(value) * share

    def merge(self, other: Sums) -> None:
        for name, value in other.values.items():
            self.values[name] += value
        for age, gap in other.gap_by_age.items():
            self.gap_by_age[age] += gap
            self.tokens_by_age[age] += other.tokens_by_age[age]

    def add_gaps(self, micro_batch: MicroBatch, proximal_BT: Tensor) -> None:
        """Add |log π_p − log π_b| of the trained tokens that the policy has sampled, by their age."""
        trained = micro_batch.mask_BT
        gaps = (proximal_BT - micro_batch.behavior_BT).abs()[trained].double().cpu().numpy()
        ages = micro_batch.ages_BT[trained].cpu().numpy()
        gaps, ages = gaps[ages >= 0], ages[ages >= 0]
        for age in np.unique(ages):
            self.gap_by_age[int(age)] += float(gaps[ages == age].sum())
            self.tokens_by_age[int(age)] += int((ages == age).sum())


@dataclass
class Accumulated:
    """Sums over the pieces of a batch that came so far: of this rank, except `totals`, which are of all ranks."""

    totals: Totals = field(default_factory=lambda: Totals(0, 0))
    sums: Sums = field(default_factory=Sums)
    """Only the gaps; the loss and stats are in `by_number` until the numbers are known."""
    by_number: dict[MeanOver, Sums] = field(default_factory=lambda: defaultdict(Sums))
    """Kind of number -> the sums to be divided by the number of that kind."""
    computed: int = 0

    def add(
        self, over: MeanOver, loss_and_stats: Mapping[str, Tensor], others: Mapping[MeanOver, Mapping[str, Tensor]]
    ) -> None:
        """Add a micro-batch's sums: loss and stats are to be divided by the number of `over`, `others` by their own."""
        for number, values in {over: loss_and_stats, **others}.items():
            self.by_number[number].add(values)

    def means(self) -> Sums:
        """The gaps, and this rank's share of each mean."""
        for over, sums in self.by_number.items():
            for name, value in sums.values.items():
                self.sums.values[name] += value / max(1, self.totals.number(over))
        return self.sums


@dataclass(frozen=True)
class Update:
    """The result of training on one batch, over all ranks."""

    changed: bool
    """False: no optimizer step was applied, so the weights are the same as before."""
    optimizer_steps: int
    """Number of steps that were applied."""
    skipped_steps: int
    """Number of steps whose gradient was not finite."""
    token_passes: int
    """Tokens that entered a loss, counted once in each epoch."""
    tokens_computed: int
    """Tokens that one pass over the batch computes, prompts and padding included, shared prefixes once."""
    grad_norm: float | None
    """Mean over the applied steps, before clipping."""
    stats: Mapping[str, float | None]
    """loss and the objective's stats, means over the batch's optimizer steps; None without a value."""
    behavior_gap: float | None
    """Mean |log π_p − log π_b| over the trained tokens whose log π_p is computed: all tokens, or those up to the first
    applied step if the objective needs no pass for π_p."""
    behavior_gap_by_staleness: Mapping[int, float]

    @classmethod
    def of(cls, sums: Sums, names: Sequence[str], norms: Sequence[float], skipped: int, token_passes: int) -> Update:
        """The update with these sums over all ranks, and the gradient norms of the applied steps."""
        tokens = sum(sums.tokens_by_age.values())
        return cls(
            changed=bool(norms),
            optimizer_steps=len(norms),
            skipped_steps=skipped,
            token_passes=token_passes,
            tokens_computed=0,
            grad_norm=sum(norms) / len(norms) if norms else None,
            stats={name: sums.values.get(name) for name in names},
            behavior_gap=sum(sums.gap_by_age.values()) / tokens if tokens else None,
            behavior_gap_by_staleness={
                age: sums.gap_by_age[age] / number for age, number in sorted(sums.tokens_by_age.items())
            },
        )

    @property
    def without_a_step(self) -> bool:
        """Whether no step was tried: the batch has fewer samples or tokens than the objective needs."""
        return not self.optimizer_steps and not self.skipped_steps

    @property
    def metrics(self) -> dict[str, Any]:
        """The values under their names in a metrics line."""
        return {
            **self.stats,
            "optimizer_steps": self.optimizer_steps,
            "skipped_steps": self.skipped_steps,
            "unchanged": not self.changed,
            "token_passes": self.token_passes,
            "tokens_computed": self.tokens_computed,
            "grad_norm": self.grad_norm,
            "behavior_gap": self.behavior_gap,
            "behavior_gap_by_staleness": {str(age): gap for age, gap in self.behavior_gap_by_staleness.items()},
        }

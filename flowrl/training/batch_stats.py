"""Statistics of a batch's samples: sums over a rank's part that can be added over ranks. Needs numpy only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import TypeVar

import numpy as np

from flowrl.messages import Bool, Trainable
from flowrl.training.loss.objective import trained_mask

N = TypeVar("N", int, float)

SHORT = 16
"""The end of the first range of lengths, in policy tokens."""


@dataclass
class BatchStats:
    """Sums and maxima; `make_metrics` turns them into the names of a metrics line."""

    num_samples: int = 0
    raw_reward: float = 0.0
    raw_reward_squares: float = 0.0
    shaped_reward: float = 0.0
    reward_parts: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Name -> (sum, number of samples that have this part)."""
    response_tokens: int = 0
    trained_tokens: int = 0
    stale_tokens: int = 0
    truncated: int = 0
    aged_tokens: int = 0
    """Trained tokens that a version of the policy has sampled; samples that are data have no such tokens."""
    age: int = 0
    """Sum of the ages of these tokens."""
    oldest_age: int = 0
    turn_ages: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Range of turns, by its name in a metrics line -> (sum of ages over trained tokens, number of these tokens)."""
    reused_tokens: int = 0
    """Tokens in the loss that an earlier batch has trained too. Nothing else here counts samples that are replayed."""
    reused_age: int = 0
    """Sum of the ages of these tokens."""
    oldest_reused: int = 0
    lengths: Counter[str] = field(default_factory=Counter)
    """Name of a range of lengths -> number of samples with a trained token whose number of policy tokens is in it."""

    @classmethod
    def collect_stats(cls, samples: Sequence[Trainable], masks: Sequence[Bool], version: int) -> BatchStats:
        """The statistics of `samples`; `masks` mark each sample's tokens that enter the loss in `version`'s update."""
        stats = cls(num_samples=sum(not sample.times_trained for sample in samples))
        for sample, mask in zip(samples, masks, strict=True):
            if sample.times_trained:
                ages = version - sample.whole_versions[mask]
                stats.reused_tokens += ages.size
                stats.reused_age += int(ages.sum())
                stats.oldest_reused = max(stats.oldest_reused, int(ages.max(initial=0)))
                continue
            stats.raw_reward += sample.raw_reward
            stats.raw_reward_squares += sample.raw_reward**2
            stats.shaped_reward += sample.reward
            add_pairs(stats.reward_parts, {name: (value, 1) for name, value in sample.reward_parts.items()})
            stats.response_tokens += sample.response_tokens
            stats.stale_tokens += int((trained_mask(sample) & sample.whole_mask & ~mask).sum())
            stats.truncated += sample.truncated
            stats.trained_tokens += int(mask.sum())
            ages = version - sample.whole_versions[mask & (sample.whole_versions >= 0)]
            if ages.size:
                stats.aged_tokens += ages.size
                stats.age += int(ages.sum())
                stats.oldest_age = max(stats.oldest_age, int(ages.max()))
                add_pairs(stats.turn_ages, ages_by_turn(sample, mask, version))
                stats.lengths[length_name(sample.response_tokens)] += 1
        return stats

    @classmethod
    def add_up(cls, stats: Iterable[BatchStats]) -> BatchStats:
        """The statistics of all parts together."""
        whole = cls()
        for part in stats:
            whole.num_samples += part.num_samples
            whole.raw_reward += part.raw_reward
            whole.raw_reward_squares += part.raw_reward_squares
            whole.shaped_reward += part.shaped_reward
            add_pairs(whole.reward_parts, part.reward_parts)
            whole.response_tokens += part.response_tokens
            whole.trained_tokens += part.trained_tokens
            whole.aged_tokens += part.aged_tokens
            whole.stale_tokens += part.stale_tokens
            whole.truncated += part.truncated
            whole.age += part.age
            whole.oldest_age = max(whole.oldest_age, part.oldest_age)
            whole.reused_tokens += part.reused_tokens
            whole.reused_age += part.reused_age
            whole.oldest_reused = max(whole.oldest_reused, part.oldest_reused)
            add_pairs(whole.turn_ages, part.turn_ages)
            whole.lengths += part.lengths
        return whole

    def make_metrics(self, *, offline: bool = False) -> dict[str, float | None]:
        """Means over samples or trained tokens; of a part of the reward, over the samples that have it. Staleness is
        None if nothing was trained.

        `offline` leaves out what only rollouts have: rewards and ages. Without a second turn in any sample there are no
        ages by turn and no lengths.
        """
        n = max(1, self.num_samples)
        mean = self.raw_reward / n
        trained = self.trained_tokens
        of_any: dict[str, float | None] = {
            "num_samples": self.num_samples,
            "response_tokens_mean": self.response_tokens / n,
            "tokens_trained": trained,
        }
        if offline:
            return of_any
        reused: dict[str, float] = {}
        if self.reused_tokens:
            reused = {
                "reused_tokens": self.reused_tokens,
                "reused_age_mean": self.reused_age / self.reused_tokens,
                "reused_age_max": self.oldest_reused,
            }
        by_turn: dict[str, float] = {}
        if len(self.turn_ages) > 1:
            by_turn = {f"staleness/{name}": age / tokens for name, (age, tokens) in sorted(self.turn_ages.items())}
            by_turn |= {f"lengths_trained/{name}": number for name, number in sorted(self.lengths.items())}
        return of_any | {
            "reward_mean": mean,
            "reward_std": sqrt(max(0.0, self.raw_reward_squares / n - mean**2)),
            "reward_shaped_mean": self.shaped_reward / n,
            "truncated_fraction": self.truncated / n,
            "tokens_stale": self.stale_tokens,
            "staleness_mean": self.age / self.aged_tokens if self.aged_tokens else None,
            "staleness_max": self.oldest_age if self.aged_tokens else None,
            **{f"reward/{name}": value / samples for name, (value, samples) in self.reward_parts.items()},
            **by_turn,
            **reused,
        }


def add_pairs(sums: dict[str, tuple[N, int]], more: Mapping[str, tuple[N, int]]) -> None:
    """Add the pairs of `more`, (sum, number), to those of the same names in `sums`."""
    for name, (value, number) in more.items():
        known = sums.get(name)
        sums[name] = (value, number) if known is None else (known[0] + value, known[1] + number)


def ages_by_turn(sample: Trainable, mask: Bool, version: int) -> dict[str, tuple[int, int]]:
    """(sum of ages, number) of the tokens in `mask`, by turns: 1, 2, 3 to 4, 5 to 8 and so on.

    A turn is a run of policy tokens; runs count through all sequences, one after the other.
    """
    mask = mask & (sample.whole_versions >= 0)
    turns = np.cumsum(np.diff(sample.whole_mask.astype(np.int8), prepend=0) == 1)[mask]
    ages = version - sample.whole_versions[mask]
    doublings = np.ceil(np.log2(turns)).astype(int)
    found = {}
    for doubling in np.unique(doublings).tolist():
        these = ages[doublings == doubling]
        name = f"turn_{2**doubling}" if doubling < 2 else f"turns_{2 ** (doubling - 1) + 1}_{2**doubling}"
        found[name] = (int(these.sum()), int(these.size))
    return found


def length_name(tokens: int) -> str:
    """The name of the range with this number of policy tokens; each range ends at twice the end of the one before."""
    most = SHORT
    while most < tokens:
        most *= 2
    return f"tokens_{1 if most == SHORT else most // 2 + 1}_{most}"

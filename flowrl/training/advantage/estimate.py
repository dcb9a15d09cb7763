"""Computes an advantage at each policy token from the rewards of one group's members.

The steps run in this order, and a graph selects some of them: normalisation of rewards, KL before the baseline, the
group's baseline, KL token by token, return-to-go (or GAE if there are a critic's values). For episodes with seats, the
steps run once for each seat (`seat_credit`).

Axes: K members that were scored, T tokens of the longest of them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from flowrl.episode import Episode
from flowrl.errors import ConfigError
from flowrl.messages import Bool, Float32, Scored, Trainable
from flowrl.training.advantage.advantages import (
    DISCOUNTED_ESTIMATORS,
    ESTIMATORS,
    GROUP_ESTIMATORS,
    Estimator,
    gae,
    group_rewards,
    returns_to_go,
    token_rewards,
)
from flowrl.training.advantage.seat_credit import of_seat, seats_of
from flowrl.training.advantage.turn_credit import Credit, at_tokens, rewards_of_turns, turn_advantages

KlEstimator = Literal["k1", "k2", "k3"]
LOG_RATIO_LIMIT = 20.0
KL_LIMIT = 10.0
"""The same as in `flowrl.training.loss.policy_losses`, which is not imported here because it needs torch."""
Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Scale:
    """Mean and std for the normalisation of rewards: (R − mean) / std."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """How advantages are computed. `gae` needs samples with `values`, a KL samples with `ref_logprobs`."""

    estimator: Estimator = "group_norm"
    gamma: float = 1.0
    """Discount from token to token; with `credit="turn"` from turn to turn."""
    lam: float = 1.0
    """λ of `gae`."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference inside the reward."""
    kl_estimator: KlEstimator = "k1"
    kl_before_baseline: bool = False
    """Subtract kl_coef·Σkl from a response's reward before the group's baseline, not token by token (2402.14740)."""
    shuffle_rewards: bool = False
    """For a control run that must not learn: the rewards of a group are shuffled among its members."""
    credit: Credit = "episode"
    """Only for episodes: whether a token gets the advantage of its episode or of its turn; see `turn_credit`."""

    def problems(self) -> list[str]:
        """Problems of these settings, as complete sentences."""
        found = []
        if self.estimator not in ESTIMATORS:
            found.append(f"estimator is {self.estimator!r}; it has to be one of {', '.join(ESTIMATORS)}")
        if self.credit not in get_args(Credit):
            found.append(f"credit is {self.credit!r}; it has to be one of {', '.join(get_args(Credit))}")
        if self.credit == "turn":
            found += self._turn_problems()
        elif self.gamma != 1.0 and self.estimator not in DISCOUNTED_ESTIMATORS:
            found.append(f"gamma is {self.gamma}; estimator {self.estimator!r} needs 1")
        if self.lam != 1.0 and self.estimator != "gae":
            found.append(f"lam is {self.lam}; it belongs to estimator 'gae', leave it at 1")
        found += [
            f"{name} is {value}; it has to be in [0, 1]"
            for name, value in (("gamma", self.gamma), ("lam", self.lam))
            if not 0 <= value <= 1
        ]
        if not 0 <= self.kl_coef < np.inf:
            found.append(f"kl_coef is {self.kl_coef}; it has to be 0 or more")
        if self.kl_estimator not in get_args(KlEstimator):
            found.append(f"kl_estimator is {self.kl_estimator!r}; it has to be one of k1, k2, k3")
        if self.kl_before_baseline and self.estimator not in GROUP_ESTIMATORS:
            found.append(f"kl_before_baseline needs an estimator with a baseline, and {self.estimator!r} has none")
        return found

    def _turn_problems(self) -> list[str]:
        """Settings that cannot be combined with `credit="turn"`, as complete sentences."""
        found = []
        if self.estimator not in GROUP_ESTIMATORS:
            compares = ", ".join(GROUP_ESTIMATORS)
            found.append(f"credit is 'turn', which compares a group; estimator has to be one of {compares}")
        if self.kl_coef:
            found.append("credit is 'turn', but kl_coef is above 0; set kl_coef=0 and use the objective's kl_coef")
        if self.shuffle_rewards:
            found.append("credit is 'turn', but shuffle_rewards shuffles rewards of episodes; set credit='episode'")
        return found

    def trainable(
        self, samples: Sequence[Scored], *, kl_coef: float | None = None, scale: Scale | None = None
    ) -> tuple[Trainable, ...]:
        """The scored members of one group with their advantages, and under `gae` with their returns.

        `kl_coef` replaces the estimate's own; `scale` normalises rewards first. Raises ConfigError if a
        sample lacks data that the estimate needs.
        """
        if len(seats := seats_of(samples)) > 1:
            return self._by_seat(samples, seats, kl_coef, scale)
        if self.credit == "turn":
            return self._by_turn(samples)
        scale = scale or Scale()
        mask_KT = stack([sample.whole_mask for sample in samples]).astype(bool)
        coef = self.kl_coef if kl_coef is None else kl_coef
        kl_KT = self.kl(samples) if coef else None
        rewards_KT = self._token_rewards(samples, mask_KT, kl_KT, coef, scale)
        if self.estimator == "gae":
            values_KT = stack([self._needed(sample, "values") for sample in samples])
            advantages_KT, returns_KT = gae(rewards_KT, values_KT, mask_KT, gamma=self.gamma, lam=self.lam)
            rows = zip(samples, advantages_KT, returns_KT, strict=True)
            return tuple(trainable(s, advantages_T, returns_T) for s, advantages_T, returns_T in rows)
        advantages_KT = returns_to_go(rewards_KT, mask_KT, gamma=self.gamma)
        return tuple(trainable(s, advantages_T) for s, advantages_T in zip(samples, advantages_KT, strict=True))

    def _by_seat(
        self, samples: Sequence[Scored], seats: Sequence[int], kl_coef: float | None, scale: Scale | None
    ) -> tuple[Trainable, ...]:
        """Each seat is compared with the same seat of the other members; a token gets the advantage of its seat."""
        advantages_K = [np.zeros(sample.num_tokens) for sample in samples]
        for seat in seats:
            mine = [k for k, sample in enumerate(samples) if seat in dict(sample.seat_rewards)]
            views = [of_seat(samples[k], seat) for k in mine]
            for k, made in zip(mine, self.trainable(views, kl_coef=kl_coef, scale=scale), strict=True):
                advantages_K[k] += made.advantages
        return tuple(trainable(s, advantages_T) for s, advantages_T in zip(samples, advantages_K, strict=True))

    def _by_turn(self, samples: Sequence[Scored]) -> tuple[Trainable, ...]:
        rewards_K = [rewards_of_turns(sample) for sample in samples]
        advantages_K = turn_advantages(rewards_K, self.estimator, gamma=self.gamma)
        pairs = zip(samples, advantages_K, strict=True)
        return tuple(trainable(s, at_tokens(s, advantages_U)) for s, advantages_U in pairs if isinstance(s, Episode))

    def _token_rewards(
        self, samples: Sequence[Scored], mask_KT: Mask, kl_KT: Array | None, coef: float, scale: Scale
    ) -> Array:
        compared = self.estimator in GROUP_ESTIMATORS
        rewards_K = (np.array(self._rewards(samples, turns=compared)) - scale.mean) / scale.std
        turns_KT = None if compared else turn_rewards(samples, mask_KT.shape) / scale.std
        if kl_KT is not None and self.kl_before_baseline:
            rewards_K -= coef * np.where(mask_KT, kl_KT, 0.0).sum(axis=1)
            kl_KT = None
        return token_rewards(group_rewards(rewards_K, self.estimator), mask_KT, kl_KT, coef, turns_KT)

    def _rewards(self, samples: Sequence[Scored], *, turns: bool) -> list[float]:
        """The samples' rewards: with `turns` including the rewards of turns, to compare a group; else without them."""
        rewards = [whole_reward(sample) if turns else sample.reward for sample in samples]
        if self.shuffle_rewards:
            random.Random(samples[0].group_id).shuffle(rewards)
        return rewards

    def kl(self, samples: Sequence[Scored]) -> Array:
        """kl_t to the reference at every policy token, estimated from the behavior policy's logprobs."""
        behavior_KT = stack([whole_logprobs(sample) for sample in samples])
        reference_KT = stack([self._needed(sample, "ref_logprobs") for sample in samples])
        return kl_per_token(behavior_KT - reference_KT, self.kl_estimator)

    def _needed(self, sample: Scored, name: str) -> Float32:
        found: Float32 | None = getattr(sample, name)
        if found is not None:
            return found
        if name == "values":
            raise ConfigError(
                f"estimator 'gae' needs a critic's values, and sample {sample.sample_id} has none; connect the "
                "batcher's port values to a Critic with g.call, or choose another estimator"
            )
        raise ConfigError(
            f"kl_coef is {self.kl_coef}, but sample {sample.sample_id} has no reference logprobs; put a "
            "Reference node between generator and reward, or set kl_coef=0"
        )


def unvalued(samples: Sequence[Scored]) -> tuple[Trainable, ...]:
    """`samples` with unset advantages (empty arrays), until a critic has computed values for them."""
    return tuple(trainable(sample, np.zeros(0)) for sample in samples)


def whole_logprobs(sample: Scored) -> Float32:
    """`behavior_logprobs` of all sequences, one after the other."""
    return np.concatenate([one.behavior_logprobs for one in sample.sequences])


def whole_reward(sample: Scored) -> float:
    """The sum of the response's reward and those of its turns."""
    return sample.reward + sum(reward for _, reward in sample.turn_rewards)


def kl_per_token(log_ratio: Array, estimator: KlEstimator) -> Array:
    """k1 = d, k2 = d²/2, k3 = e^−d − 1 + d of d = log π − log π_ref, each clamped to ±10 (Schulman 2020)."""
    d = np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    estimates = {"k1": d, "k2": d * d / 2, "k3": np.expm1(-d) + d}
    return np.clip(estimates[estimator], -KL_LIMIT, KL_LIMIT)


def turn_rewards(samples: Sequence[Scored], shape: tuple[int, ...]) -> Array:
    """[K, T]: each turn's reward at the turn's last policy token, 0 elsewhere. Several at one token are summed."""
    rewards_KT = np.zeros(shape)
    for row, sample in zip(rewards_KT, samples, strict=True):
        for place, reward in sample.turn_rewards:
            row[place] += reward
    return rewards_KT


def stack(arrays: Sequence[npt.NDArray[Any]]) -> Array:
    """Rows of unequal length as one array, with zeros after the shorter ones."""
    result = np.zeros((len(arrays), max(len(array) for array in arrays)))
    for row, array in zip(result, arrays, strict=True):
        row[: len(array)] = array
    return result


def trainable(sample: Scored, advantages_T: Array, returns_T: Array | None = None) -> Trainable:
    """`sample` with its advantages and returns, cut to its own length, which is that of all its sequences together."""
    made = {field.name: getattr(sample, field.name) for field in dataclasses.fields(Scored)}
    length = sample.num_tokens
    returns = None if returns_T is None else returns_T[:length].astype(np.float32)
    advantages = advantages_T[:length].astype(np.float32)
    return Trainable(**made, advantages=advantages, returns=returns, loss_mask=_loss_mask(sample))


def _loss_mask(sample: Scored) -> Bool | None:
    """The mask that the sample already has, if any; all False for an episode that stays out of the loss."""
    if isinstance(sample, Episode) and sample.masked:
        return np.zeros(sample.num_tokens, np.bool_)
    return sample.loss_mask if isinstance(sample, Trainable) else None

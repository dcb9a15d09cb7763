"""From rewards to advantages: the members of one group compared with each other.

Axes: K members that were scored, T tokens of the longest of them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Members, Out
from flowrl.messages import Group, Scored, Trainable
from flowrl.training.advantages import (
    DISCOUNTED_ESTIMATORS,
    ESTIMATORS,
    GROUP_ESTIMATORS,
    Estimator,
    group_rewards,
    returns_to_go,
    token_rewards,
)

KlEstimator = Literal["k1", "k2", "k3"]
LOG_RATIO_LIMIT = 20.0
KL_LIMIT = 10.0
"""As in `flowrl.training.objectives`, which needs torch."""
Array = npt.NDArray[np.float64]


class GroupAdvantage(Node):
    """Collects the `size` members of a group and gives each of their policy tokens its advantage.

    `kl_coef` takes the KL to the reference (samples then need `ref_logprobs`) out of the reward, token
    by token. With `filter_equal` a group whose raw rewards are all equal is filtered, since it teaches
    nothing. `shuffle_rewards` deals the rewards of a group out at random: a control that must not learn.
    """

    keyed_state = True

    scored: In[Scored]
    groups: Out[Group]

    def __init__(
        self,
        estimator: Estimator = "group_norm",
        *,
        size: int,
        gamma: float = 1.0,
        kl_coef: float = 0.0,
        kl_estimator: KlEstimator = "k1",
        filter_equal: bool = False,
        shuffle_rewards: bool = False,
    ) -> None:
        self.estimator: Estimator = estimator
        self.size = size
        self.gamma = gamma
        self.kl_coef = kl_coef
        self.kl_estimator = kl_estimator
        self.filter_equal = filter_equal
        self.shuffle_rewards = shuffle_rewards

    def facts(self) -> Facts:
        return Facts(group_size=self.size, drops=True, keeps_lineage=False)

    def check(self, facts: Any) -> list[str]:
        problems = []
        if self.estimator not in ESTIMATORS or self.estimator == "gae":
            known = ", ".join(name for name in ESTIMATORS if name != "gae")
            problems.append(f"estimator is {self.estimator!r}; without a critic it has to be one of {known}")
        if self.size < 1:
            problems.append(f"the group size is {self.size}; it needs at least 1")
        elif self.size < 2 and self.estimator in GROUP_ESTIMATORS:
            problems.append(f"estimator {self.estimator!r} compares the members of a group, but the group size is 1")
        if self.gamma != 1.0 and self.estimator not in DISCOUNTED_ESTIMATORS:
            problems.append(f"gamma is {self.gamma}; estimator {self.estimator!r} needs 1")
        if self.kl_estimator not in get_args(KlEstimator):
            problems.append(f"kl_estimator is {self.kl_estimator!r}; it has to be one of k1, k2, k3")
        return problems

    async def run(self) -> None:
        async for members in self.scored.groups(self.size):
            reason = self._why_filtered(members)
            if reason:
                for sample in members.items:
                    self.scored.drop(sample, reason, state="filtered")
            else:
                await self.groups.send(self.group(members), made_from=members.items)

    def group(self, members: Members[Scored]) -> Group:
        """The group of `members` with its advantages."""
        samples = members.items
        rewards = [sample.reward for sample in samples]
        if self.estimator in GROUP_ESTIMATORS:
            rewards = [sample.reward + sum(reward for _, reward in sample.turn_rewards) for sample in samples]
        if self.shuffle_rewards:
            random.Random(members.group_id).shuffle(rewards)
        advantages_KT = self._advantages(samples, rewards)
        return Group(
            group_id=members.group_id,
            samples=tuple(
                trainable(sample, advantages_T) for sample, advantages_T in zip(samples, advantages_KT, strict=True)
            ),
            group_size=members.size,
        )

    def _advantages(self, samples: Sequence[Scored], rewards: Sequence[float]) -> Array:
        mask_KT = stack([sample.policy_mask for sample in samples]).astype(bool)
        kl_KT = self._kl(samples) if self.kl_coef else None
        turns_KT = None if self.estimator in GROUP_ESTIMATORS else turn_rewards(samples, mask_KT.shape)
        rewards_KT = token_rewards(group_rewards(rewards, self.estimator), mask_KT, kl_KT, self.kl_coef, turns_KT)
        return returns_to_go(rewards_KT, mask_KT, gamma=self.gamma)

    def _kl(self, samples: Sequence[Scored]) -> Array:
        missing = next((sample.sample_id for sample in samples if sample.ref_logprobs is None), None)
        if missing is not None:
            raise ConfigError(
                f"{self.name}: kl_coef is {self.kl_coef}, but sample {missing} carries no reference logprobs; put a "
                "Reference node between generator and reward, or set kl_coef=0"
            )
        behavior_KT = stack([sample.behavior_logprobs for sample in samples])
        reference_KT = stack([sample.ref_logprobs for sample in samples if sample.ref_logprobs is not None])
        return kl_per_token(behavior_KT - reference_KT, self.kl_estimator)

    def _why_filtered(self, members: Members[Scored]) -> str:
        """The reason for which the group is not trained, "" if it is."""
        if len(members.items) < 2 and self.estimator in GROUP_ESTIMATORS:
            return "group_too_small"
        raw = [sample.raw_reward for sample in members.items]
        return "all_equal" if self.filter_equal and max(raw) <= min(raw) else ""


def kl_per_token(log_ratio: Array, estimator: KlEstimator) -> Array:
    """k1 = d, k2 = d²/2, k3 = e^−d − 1 + d of d = log π − log π_ref, each clamped to ±10 (Schulman 2020)."""
    d = np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    estimates = {"k1": d, "k2": d * d / 2, "k3": np.expm1(-d) + d}
    return np.clip(estimates[estimator], -KL_LIMIT, KL_LIMIT)


def turn_rewards(samples: Sequence[Scored], shape: tuple[int, ...]) -> Array:
    """The rewards of single turns at their places, [K, T]."""
    rewards_KT = np.zeros(shape)
    for row, sample in zip(rewards_KT, samples, strict=True):
        for place, reward in sample.turn_rewards:
            row[place] += reward
    return rewards_KT


def stack(arrays: Sequence[npt.NDArray[Any]]) -> Array:
    """Rows of unequal length as one array, zeros behind the shorter ones."""
    result = np.zeros((len(arrays), max(len(array) for array in arrays)))
    for row, array in zip(result, arrays, strict=True):
        row[: len(array)] = array
    return result


def trainable(sample: Scored, advantages_T: Array) -> Trainable:
    """`sample` with its advantages, cut to its own length."""
    fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(Scored)}
    return Trainable(**fields, advantages=advantages_T[: len(sample.token_ids)].astype(np.float32))

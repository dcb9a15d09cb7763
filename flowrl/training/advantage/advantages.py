"""Advantages: from one reward per sample to one number per policy token.

Axes: B samples, T policy tokens (of the longest sample), K members of one group.

In the running graph the advantage node calls `group_rewards`, then `returns_to_go` or `gae` on its
result, and the batcher calls `whiten`; `advantages` runs all these steps in one call. Papers: GAE
1506.02438, GRPO 2402.03300, REINFORCE++ 2501.03262, Dr.GRPO 2503.20783, RLOO 2402.14740.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from flowrl.messages import Bool, Float32

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Estimator = Literal["reinforce", "reinforce_baseline", "dr_grpo", "rloo", "group_norm", "gae"]

ESTIMATORS: tuple[str, ...] = get_args(Estimator)
GROUP_ESTIMATORS = ("reinforce_baseline", "dr_grpo", "rloo", "group_norm")
"""Estimators that compare a sample with the other members of its group; they need at least two members."""
WHITENED_ESTIMATORS = ("gae", "reinforce", "reinforce_baseline")
DISCOUNTED_ESTIMATORS = ("gae", "reinforce")

EQUAL_REWARDS = 1e-6
"""Rewards of a group that differ by no more than this, relative to the largest |reward|, are equal: R′ is exactly 0."""
LEAST_SPREAD = 1e-12
"""Rewards of a group that differ by no more than this are equal, however small they are."""


def group_rewards(rewards_K: npt.ArrayLike, estimator: Estimator) -> Array:
    """R′ of the scored members of one group. Raises ValueError if the group is too small to compare."""
    rewards = np.asarray(rewards_K, np.float64)
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}; choose one of {', '.join(ESTIMATORS)}")
    if estimator not in GROUP_ESTIMATORS:
        return rewards.copy()
    n = rewards.size
    if n < 2:
        raise ValueError(f"estimator {estimator!r} compares the members of a group and needs two, got {n}")
    if all_equal(rewards):
        return np.zeros_like(rewards)
    if estimator == "rloo":
        baseline: Array = (rewards.sum() - rewards) / (n - 1)
        return rewards - baseline
    centred: Array = rewards - rewards.mean()
    return centred / (float(rewards.std(ddof=1)) + 1e-9) if estimator == "group_norm" else centred


def all_equal(rewards_K: npt.ArrayLike) -> bool:
    """Whether rewards of a group differ at most by rounding. Every use of "equal" in a group is this one, so that a
    group which is kept or counted as different trains something."""
    rewards = np.asarray(rewards_K, np.float64)
    return bool(rewards.max() - rewards.min() <= max(EQUAL_REWARDS * float(np.abs(rewards).max()), LEAST_SPREAD))


def token_rewards(
    shaped_B: npt.ArrayLike, mask_BT: Mask, kl_BT: Array | None, kl_coef: float, turns_BT: Array | None = None
) -> Array:
    """r_t = −kl_coef · kl_t on every policy token, plus R′ on the last one.

    `turns_BT` holds rewards of single turns, each at its turn's last policy token.
    """
    shaped = np.asarray(shaped_B, np.float64)
    rewards_BT = np.zeros(mask_BT.shape) if turns_BT is None else np.where(mask_BT, turns_BT, 0.0)
    if kl_BT is not None and kl_coef:
        rewards_BT -= np.where(mask_BT, kl_coef * kl_BT, 0.0)
    for b in np.flatnonzero(mask_BT.any(axis=1)):
        rewards_BT[b, np.flatnonzero(mask_BT[b])[-1]] += shaped[b]
    return rewards_BT


def returns_to_go(rewards_BT: Array, mask_BT: Mask, *, gamma: float = 1.0) -> Array:
    """A_t = Σ_{k≥t} γ^{k−t} r_k over the policy's own tokens; other tokens are not time steps."""
    result = np.zeros_like(rewards_BT)
    for b, mask_T in enumerate(mask_BT):
        running = 0.0
        for t in np.flatnonzero(mask_T)[::-1]:
            running = rewards_BT[b, t] + gamma * running
            result[b, t] = running
    return result


def gae(rewards_BT: Array, values_BT: Array, mask_BT: Mask, *, gamma: float, lam: float) -> tuple[Array, Array]:
    """(advantages, returns) by δ_t = r_t + γV_{t+1} − V_t; V after a sequence's end is 0.

    `values_BT` holds, at each policy token, the value of the state before it.
    """
    advantages_BT = np.zeros_like(rewards_BT)
    for b, mask_T in enumerate(mask_BT):
        running = next_value = 0.0
        for t in np.flatnonzero(mask_T)[::-1]:
            delta = rewards_BT[b, t] + gamma * next_value - values_BT[b, t]
            running = delta + gamma * lam * running
            advantages_BT[b, t] = running
            next_value = values_BT[b, t]
    return advantages_BT, np.where(mask_BT, advantages_BT + values_BT, 0.0)


def whiten(advantages_BT: Array, mask_BT: Mask, *, mean_only: bool = False) -> Array:
    """(A − m)/√max(v, 1e-8) over the masked tokens of the whole batch, population variance; 0 elsewhere."""
    trained = advantages_BT[mask_BT]
    if not trained.size:
        return np.zeros_like(advantages_BT)
    scale = 1.0 if mean_only else np.sqrt(max(float(trained.var()), 1e-8))
    return np.where(mask_BT, (advantages_BT - trained.mean()) / scale, 0.0)


def distillation_advantages(teacher_logprobs_T: Float32, behavior_logprobs_T: Float32, policy_mask_T: Bool) -> Array:
    """A_t = log π_teacher − log π_b at each policy token, 0 elsewhere.

    Each token is treated separately, without a return-to-go: the expected policy gradient is that of the
    reverse KL of each next token, KL(π‖π_teacher), at the prefixes that the student visits (2306.13649).
    """
    gap_T = teacher_logprobs_T.astype(np.float64) - behavior_logprobs_T
    return np.where(policy_mask_T, gap_T, 0.0)


def advantages(
    rewards_B: Any,
    group_ids_B: Sequence[Hashable],
    mask_BT: Any,
    *,
    estimator: Estimator,
    values_BT: Any = None,
    kl_BT: Any = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
    mean_only: bool = False,
    kl_before_baseline: bool = False,
    turns_BT: Any = None,
) -> tuple[Any, Any]:
    """(advantages_BT, returns_BT) of whole groups; numpy in, float64 numpy out, or torch in, torch out.

    `mask_BT` marks policy tokens. `whiten` applies to `gae`, `reinforce` and `reinforce_baseline`
    only; returns are never whitened. `kl_before_baseline` subtracts kl_coef·Σkl from the reward
    before the group's baseline instead of token by token. `turns_BT` holds the rewards of single turns
    at their last policy tokens; estimators that compare a group's members sum them.
    """
    if gamma != 1.0 and estimator not in DISCOUNTED_ESTIMATORS:
        raise ValueError(f"gamma = {gamma} needs estimator gae or reinforce, not {estimator!r}; set gamma=1")
    rewards, mask = _array(rewards_B), np.asarray(mask_BT).astype(bool)
    kl = None if kl_BT is None else _array(kl_BT)
    if kl is not None and kl_before_baseline:
        rewards, kl = rewards - kl_coef * np.where(mask, kl, 0.0).sum(axis=1), None
    turns = None if turns_BT is None else _array(turns_BT)
    if turns is not None and estimator in GROUP_ESTIMATORS:
        rewards, turns = rewards + np.where(mask, turns, 0.0).sum(axis=1), None
    rewards_BT = token_rewards(_by_group(rewards, group_ids_B, estimator), mask, kl, kl_coef, turns)
    if estimator == "gae":
        if values_BT is None:
            raise ValueError("estimator 'gae' needs values_BT, the critic's value before every policy token")
        advantages_BT, returns_BT = gae(rewards_BT, _array(values_BT), mask, gamma=gamma, lam=lam)
    else:
        advantages_BT = returns_BT = returns_to_go(rewards_BT, mask, gamma=gamma)
    if whiten and estimator in WHITENED_ESTIMATORS:
        advantages_BT = _whiten(advantages_BT, mask, mean_only=mean_only)
    return _like(mask_BT, rewards_B, advantages_BT), _like(mask_BT, rewards_B, returns_BT)


_whiten = whiten


def _by_group(rewards_B: Array, group_ids_B: Sequence[Hashable], estimator: Estimator) -> Array:
    members: dict[Hashable, list[int]] = {}
    for b, group_id in enumerate(_hashable(group_ids_B)):
        members.setdefault(group_id, []).append(b)
    shaped_B = np.empty_like(rewards_B)
    for indices in members.values():
        shaped_B[indices] = group_rewards(rewards_B[indices], estimator)
    return shaped_B


def _hashable(ids: Any) -> Sequence[Hashable]:
    return ids.tolist() if hasattr(ids, "tolist") else ids  # type: ignore[no-any-return]


def _array(values: Any) -> Array:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, np.float64)


def _like(mask: Any, rewards: Any, values_BT: Array) -> Any:
    """`values_BT` as a tensor if the mask is a tensor, with the rewards' dtype if that is a float type."""
    if not hasattr(mask, "detach"):
        return values_BT
    import torch

    dtype = rewards.dtype if isinstance(rewards, torch.Tensor) and rewards.is_floating_point() else torch.float64
    return torch.as_tensor(values_BT, dtype=dtype, device=mask.device)

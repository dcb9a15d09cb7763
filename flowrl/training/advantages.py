"""Advantages: from one reward per sample to one number per policy token.

Axes: B samples, T policy tokens (of the longest sample), K members of one group that were scored, U turns of the
longest episode.

`Estimate` is what a graph selects. Its steps run in this order: normalisation of rewards, KL before the baseline, the
group's baseline (`group_rewards`), KL token by token, return-to-go (`returns_to_go`, or `compute_gae` if there are a
critic's values). The batcher calls `whiten_advantages`; `compute_advantages` runs all these steps in one call. Papers:
GAE 1506.02438, GRPO 2402.03300, REINFORCE++ 2501.03262, Dr.GRPO 2503.20783, RLOO 2402.14740, MaxRL 2602.02710,
pass@k 2508.10751, GDPO 2601.05242.

Credit by turn: each turn of an episode is compared with the same turn of the other members of its group.

G_t = Σ_{u≥t} γ^{u−t} r_u is what an episode still gets from turn t on, 0 for a turn that it does not have. The baseline
of turn t is the mean of G_t over all scored members, including those that have ended. A mean over only the episodes
that continue would depend on which ones continue, and so on what the policy did. The spread is that of whole returns,
G_0, one number for the group. Normalising rewards turn by turn and then adding them up would be biased in the same way.

Credit by seat: each seat of an episode is compared with the same seat in the other episodes of the group; for episodes
with seats, the steps run once for each seat. A seat's tokens get the advantage that follows from the seat's own reward.
The baseline of a seat is taken over all scored members in which the policy has played that seat, including those that
ended before the seat's first turn.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import comb, sqrt
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError
from flowrl.messages import Bool, Float32, Scored, Trainable
from flowrl.messages.episode import Episode

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Estimator = Literal[
    "reinforce", "reinforce_baseline", "dr_grpo", "rloo", "group_norm", "max_rl", "pass_at_k", "gdpo", "gae"
]

SUM_BLOCK = 16
"""Terms that are summed by one product: the fastest of 16 to 256, for 2,048 to 32,768 terms."""
ESTIMATORS: tuple[str, ...] = get_args(Estimator)
BASELINE_ESTIMATORS = ("reinforce_baseline", "dr_grpo", "rloo", "group_norm")
"""Estimators that compare rewards of any scale, of whole samples or of turns, with those of the group."""
SCALED_ESTIMATORS = ("max_rl", "pass_at_k", "gdpo")
"""Estimators that read more in rewards than their differences: their size, whether they pass, or their parts."""
GROUP_ESTIMATORS = (*BASELINE_ESTIMATORS, *SCALED_ESTIMATORS)
"""Estimators that compare a sample with the other members of its group; they need at least two members."""
WHITENED_ESTIMATORS = ("gae", "reinforce", "reinforce_baseline", "gdpo")
DISCOUNTED_ESTIMATORS = ("gae", "reinforce")

EQUAL_REWARDS = 1e-6
"""Rewards of a group that differ by no more than this, relative to the largest |reward|, are equal: R′ is exactly 0."""
LEAST_SPREAD = 1e-12
"""Rewards of a group that differ by no more than this are equal, however small they are."""


def group_rewards(
    rewards_K: npt.ArrayLike, estimator: Estimator, *, pass_k: int | None = None, pass_at: float = 1.0
) -> Array:
    """R′ of the scored members of one group; `pass_k` and `pass_at` are those of `pass_at_k`.

    Raises ValueError if the group is too small to compare, and ConfigError for a reward below 0 under `max_rl`. `gdpo`
    compares parts, see `normalise_parts`.
    """
    rewards = np.asarray(rewards_K, np.float64)
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}; choose one of {', '.join(ESTIMATORS)}")
    if estimator not in GROUP_ESTIMATORS:
        return rewards.copy()
    n = rewards.size
    if n < 2:
        raise ValueError(f"estimator {estimator!r} compares the members of a group and needs two, got {n}")
    if estimator == "gdpo":
        raise ValueError("estimator 'gdpo' compares the parts of rewards, which normalise_parts takes")
    if estimator == "pass_at_k":
        if pass_k is None or not 1 <= pass_k <= n:
            raise ValueError(f"estimator 'pass_at_k' needs a pass_k from 1 to the {n} members of the group: {pass_k}")
        return pass_rewards(rewards >= pass_at, pass_k)
    if estimator == "max_rl" and rewards.min() < 0:
        raise ConfigError(
            f"estimator 'max_rl' divides by the mean reward of a group, and a reward is {rewards.min():g}; give it "
            "rewards of 0 and more"
        )
    if all_equal(rewards):
        return np.zeros_like(rewards)
    if estimator == "max_rl":
        relative: Array = rewards / rewards.mean() - 1.0
        return relative
    if estimator == "rloo":
        baseline: Array = (rewards.sum() - rewards) / (n - 1)
        return rewards - baseline
    centred: Array = rewards - rewards.mean()
    return centred / (float(rewards.std(ddof=1)) + 1e-9) if estimator == "group_norm" else centred


def pass_rewards(passes_K: Mask, k: int) -> Array:
    """R′ of each member as the best of k members is rewarded: 1 if one of the k passes, the mean over all choices of
    k members that include it, against all choices (2508.10751, with their σ + 1e-6)."""
    n, failing = passes_K.size, int((~passes_K).sum())
    none_passes = comb(failing, k) / comb(n, k)
    spread = sqrt(none_passes * (1 - none_passes)) + 1e-6
    none_passes_beside = comb(failing - 1, k - 1) / comb(n - 1, k - 1) if failing else 0.0
    return np.where(passes_K, none_passes, none_passes - none_passes_beside) / spread


def normalise_parts(parts_KP: npt.ArrayLike, weights_P: npt.ArrayLike) -> Array:
    """R′ of each member: the weighted sum of the parts of its reward, each normalised over the group (2601.05242).

    A part that is equal in all members adds 0. The sum is then whitened over the batch (axis P: the parts).
    """
    parts = np.asarray(parts_KP, np.float64)
    normalised_KP = np.stack([group_rewards(part_K, "group_norm") for part_K in parts.T], axis=1)
    found: Array = normalised_KP @ np.asarray(weights_P, np.float64)
    return found


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
    for rewards_T, mask_T, sums_T in zip(rewards_BT, mask_BT, result, strict=True):
        sums_T[mask_T] = discounted_sums(rewards_T[mask_T], gamma)
    return result


def compute_gae(rewards_BT: Array, values_BT: Array, mask_BT: Mask, *, gamma: float, lam: float) -> tuple[Array, Array]:
    """(advantages, returns) by δ_t = r_t + γV_{t+1} − V_t; V after a sequence's end is 0.

    `values_BT` holds, at each policy token, the value of the state before it.
    """
    advantages_BT = np.zeros_like(rewards_BT)
    for b, mask_T in enumerate(mask_BT):
        values_P = values_BT[b, mask_T]  # P: the policy's own tokens, which are the time steps
        deltas_P = rewards_BT[b, mask_T] + gamma * np.append(values_P[1:], 0.0) - values_P
        advantages_BT[b, mask_T] = discounted_sums(deltas_P, gamma * lam)
    return advantages_BT, np.where(mask_BT, advantages_BT + values_BT, 0.0)


def discounted_sums(terms_T: Array, discount: float) -> Array:
    """x_t = Σ_{k≥t} discount^{k−t} terms_k.

    Summed within blocks by one matrix product; then each block gets what follows it, block by block in the same way.
    Division by powers of the discount, which needs no blocks, would overflow.
    """
    if discount == 1.0 or not len(terms_T):
        return np.cumsum(terms_T[::-1])[::-1]
    num_blocks = -(-len(terms_T) // SUM_BLOCK)
    blocks_NS = np.zeros((num_blocks, SUM_BLOCK))
    blocks_NS.ravel()[: len(terms_T)] = terms_T
    steps_S = np.arange(SUM_BLOCK)
    distance_SS = steps_S[:, None] - steps_S  # from column to row
    sums_NS: Array = blocks_NS @ np.where(distance_SS >= 0, discount ** np.maximum(distance_SS, 0), 0.0)
    if num_blocks > 1:
        firsts_N = discounted_sums(sums_NS[:, 0], discount**SUM_BLOCK)
        sums_NS[:-1] += firsts_N[1:, None] * discount ** (SUM_BLOCK - steps_S)
    return sums_NS.ravel()[: len(terms_T)]


def whiten_advantages(advantages_BT: Array, mask_BT: Mask, *, mean_only: bool = False) -> Array:
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


def compute_advantages(
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
    pass_k: int | None = None,
    pass_at: float = 1.0,
) -> tuple[Any, Any]:
    """(advantages_BT, returns_BT) of whole groups; numpy in, float64 numpy out, or torch in, torch out.

    `gdpo` has no such call: it compares parts of rewards, see `Estimate`.

    `mask_BT` marks policy tokens. `whiten` applies to `gae`, `reinforce` and `reinforce_baseline`
    only; returns are never whitened. `kl_before_baseline` subtracts kl_coef·Σkl from the reward
    before the group's baseline instead of token by token. `turns_BT` holds the rewards of single turns
    at their last policy tokens; estimators that compare a group's members sum them.
    """
    if gamma != 1.0 and estimator not in DISCOUNTED_ESTIMATORS:
        raise ValueError(f"gamma = {gamma} needs estimator gae or reinforce, not {estimator!r}; set gamma=1")
    rewards, mask = convert_like_float64(rewards_B), np.asarray(mask_BT).astype(bool)
    kl = None if kl_BT is None else convert_like_float64(kl_BT)
    if kl is not None and kl_before_baseline:
        rewards, kl = rewards - kl_coef * np.where(mask, kl, 0.0).sum(axis=1), None
    turns = None if turns_BT is None else convert_like_float64(turns_BT)
    if turns is not None and estimator in GROUP_ESTIMATORS:
        rewards, turns = rewards + np.where(mask, turns, 0.0).sum(axis=1), None
    members: dict[Hashable, list[int]] = {}
    for b, group_id in enumerate(group_ids_B.tolist() if hasattr(group_ids_B, "tolist") else group_ids_B):
        members.setdefault(group_id, []).append(b)
    shaped_B = np.empty_like(rewards)
    for indices in members.values():
        shaped_B[indices] = group_rewards(rewards[indices], estimator, pass_k=pass_k, pass_at=pass_at)
    rewards_BT = token_rewards(shaped_B, mask, kl, kl_coef, turns)
    if estimator == "gae":
        if values_BT is None:
            raise ValueError("estimator 'gae' needs values_BT, the critic's value before every policy token")
        advantages_BT, returns_BT = compute_gae(rewards_BT, convert_like_float64(values_BT), mask, gamma=gamma, lam=lam)
    else:
        advantages_BT = returns_BT = returns_to_go(rewards_BT, mask, gamma=gamma)
    if whiten and estimator in WHITENED_ESTIMATORS:
        advantages_BT = whiten_advantages(advantages_BT, mask, mean_only=mean_only)
    return return_like(mask_BT, rewards_B, advantages_BT), return_like(mask_BT, rewards_B, returns_BT)


def convert_like_float64(values: Any) -> Array:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, np.float64)


def return_like(mask: Any, rewards: Any, values_BT: Array) -> Any:
    """`values_BT` as a tensor if the mask is a tensor, with the rewards' dtype if that is a float type."""
    if not hasattr(mask, "detach"):
        return values_BT
    import torch

    dtype = rewards.dtype if isinstance(rewards, torch.Tensor) and rewards.is_floating_point() else torch.float64
    return torch.as_tensor(values_BT, dtype=dtype, device=mask.device)


Credit = Literal["episode", "turn"]
"""episode: every policy token gets the advantage of the whole episode. turn: it gets that of its turn."""


def turn_advantages(rewards_K: Sequence[Sequence[float]], estimator: Estimator, *, gamma: float = 1.0) -> list[Array]:
    """The advantage of every turn of each member; `rewards_K` are the rewards of its turns.

    `group_norm` divides by the spread of whole returns (std with n−1); `rloo` leaves a member out of its own baseline;
    `dr_grpo` and `reinforce_baseline` do neither. A turn whose returns are equal in all members has an advantage of
    exactly 0; so has every turn under `group_norm` if the whole returns are equal. Raises ValueError if there are fewer
    than two members.
    """
    num_members, num_turns = len(rewards_K), max(map(len, rewards_K), default=0)
    if num_members < 2:
        raise ValueError(f"credit by turn compares the members of a group and needs two, got {num_members}")
    rewards_KU = np.array([[*rewards, *[0.0] * (num_turns - len(rewards))] for rewards in rewards_K], np.float64)
    returns_KU = returns_to_go(rewards_KU, np.ones(rewards_KU.shape, np.bool_), gamma=gamma)
    baseline_U = returns_KU.mean(axis=0)
    advantages_KU = returns_KU - baseline_U
    advantages_KU[:, [all_equal(returns_K) for returns_K in returns_KU.T]] = 0.0
    if estimator == "rloo":
        advantages_KU *= num_members / (num_members - 1)
    if estimator == "group_norm":
        whole_K = returns_KU[:, 0]
        spread = whole_K.std(ddof=1)
        advantages_KU = np.zeros_like(returns_KU) if all_equal(whole_K) else advantages_KU / (spread + 1e-9)
    return [advantages_U[: len(rewards)] for advantages_U, rewards in zip(advantages_KU, rewards_K, strict=True)]


def require_one_seat(samples: Sequence[Scored], user: str) -> None:
    """Raise ConfigError if the policy has played several seats of an episode, which `user` ("a critic") cannot use."""
    for sample in samples:
        if len(sample.seat_rewards) > 1:
            raise ConfigError(
                f"the policy has played {len(sample.seat_rewards)} seats of sample {sample.sample_id!r}, which have a "
                f"reward each, but {user} takes samples with one; leave it out, or connect the port opponent of the "
                "Environment, so that the policy plays one seat"
            )


def reduce_to_seat(sample: Scored, seat: int) -> Scored:
    """The sample reduced to this seat: its reward, its turns, and a policy mask of its tokens.

    The sequences and all indices stay as they are. For a seat without a turn, its reward becomes that of a single turn.
    """
    masks = [one.policy_mask & (number == seat) for one, number in zip(sample.sequences, sample.seats, strict=True)]
    branches = [replace(branch, policy_mask=mask) for branch, mask in zip(sample.branches, masks[1:], strict=True)]
    reward = dict(sample.seat_rewards)[seat]
    mine = replace(sample, policy_mask=masks[0], branches=tuple(branches), reward=reward, seats=(), seat_rewards=())
    if not isinstance(mine, Episode):
        return mine
    ends = np.cumsum([one.token_ids.size for one in sample.sequences])
    sequences = np.searchsorted(ends, [place for place, _ in mine.rewards_by_turn], "right").tolist()
    pairs = zip(mine.rewards_by_turn, sequences, strict=True)
    turns = tuple(turn for turn, number in pairs if sample.seats[number] == seat)
    return replace(mine, rewards_by_turn=turns or ((0, reward),))


KlEstimator = Literal["k1", "k2", "k3"]
LOG_RATIO_LIMIT = 20.0
KL_LIMIT = 10.0
"""The same as in `flowrl.training.loss.loss_formulas`, which is not imported here because it needs torch."""


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
    pass_k: int | None = None
    """k of `pass_at_k`: of so many samples one has to pass."""
    pass_at: float = 1.0
    """The reward from which a sample passes, for `pass_at_k`."""
    part_weights: tuple[tuple[str, float], ...] = ()
    """(name in a sample's `reward_parts`, weight) of the parts that `gdpo` normalises one by one."""
    credit: Credit = "episode"
    """Only for episodes: whether a token gets the advantage of its episode or of its turn; see `turn_advantages`."""

    def list_problems(self) -> list[str]:
        """Problems of these settings, as complete sentences."""
        found = []
        if self.estimator not in ESTIMATORS:
            found.append(f"estimator is {self.estimator!r}; it has to be one of {', '.join(ESTIMATORS)}")
        if self.credit not in get_args(Credit):
            found.append(f"credit is {self.credit!r}; it has to be one of {', '.join(get_args(Credit))}")
        found += self._list_scale_problems()
        if self.credit == "turn":
            if self.estimator not in BASELINE_ESTIMATORS:
                compares = ", ".join(BASELINE_ESTIMATORS)
                found.append(f"credit is 'turn', which compares a group; estimator has to be one of {compares}")
            if self.kl_coef:
                found.append("credit is 'turn', but kl_coef is above 0; set kl_coef=0 and use the objective's kl_coef")
            if self.shuffle_rewards:
                found.append("credit is 'turn', but shuffle_rewards shuffles rewards of episodes; set credit='episode'")
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

    def _list_scale_problems(self) -> list[str]:
        """Problems of what only `SCALED_ESTIMATORS` have, and cannot have."""
        found = []
        if self.estimator == "pass_at_k" and (self.pass_k is None or self.pass_k < 1):
            found.append(
                f"pass_k is {self.pass_k}; estimator 'pass_at_k' needs it, as the number of samples of which one has "
                "to pass"
            )
        if self.estimator != "pass_at_k" and (self.pass_k is not None or self.pass_at != Estimate.pass_at):
            found.append(f"pass_k and pass_at are for estimator 'pass_at_k', not {self.estimator!r}; leave them out")
        if self.estimator == "gdpo" and len(self.part_weights) < 2:
            found.append(
                "estimator 'gdpo' normalises each part of a reward by itself, and this reward has no two; give it a "
                "sum, as with --task.reward 'verifier + 0.5*FILE.py:short'"
            )
        if self.estimator == "gdpo" and self.shuffle_rewards:
            found.append("shuffle_rewards shuffles whole rewards, and estimator 'gdpo' reads parts; choose another")
        if self.estimator in SCALED_ESTIMATORS and self.kl_before_baseline:
            found.append(
                f"kl_before_baseline changes the reward that estimator {self.estimator!r} reads; leave it out, so "
                "that the KL is subtracted token by token"
            )
        return found

    @property
    def least_members(self) -> int:
        """The number of scored members that a group needs."""
        if self.estimator not in GROUP_ESTIMATORS:
            return 1
        return max(2, self.pass_k or 0)

    def make_trainables(
        self, samples: Sequence[Scored], *, kl_coef: float | None = None, scale: Scale | None = None
    ) -> tuple[Trainable, ...]:
        """The scored members of one group with their advantages, and under `gae` with their returns.

        `kl_coef` replaces the estimate's own; `scale` normalises rewards first. Raises ConfigError if a
        sample lacks data that the estimate needs.
        """
        seats = sorted({seat for sample in samples for seat, _ in sample.seat_rewards})
        if len(seats) > 1:
            return self._estimate_by_seat(samples, seats, kl_coef, scale)
        if self.credit == "turn":
            return self._estimate_by_turn(samples)
        scale = scale or Scale()
        mask_KT = stack_rows([sample.whole_mask for sample in samples]).astype(bool)
        coef = self.kl_coef if kl_coef is None else kl_coef
        kl_KT = self.compute_kl(samples) if coef else None
        compared = self.estimator in GROUP_ESTIMATORS
        rewards = [whole_reward(sample) if compared else sample.reward for sample in samples]
        if self.shuffle_rewards:
            random.Random(samples[0].group_id).shuffle(rewards)
        rewards_K = (np.array(rewards) - scale.mean) / scale.std
        turns_KT: Array | None = None
        if not compared:  # each turn's reward at the turn's last policy token; several at one token are summed
            turns_KT = np.zeros(mask_KT.shape)
            for row, sample in zip(turns_KT, samples, strict=True):
                for place, reward in sample.turn_rewards:
                    row[place] += reward
            turns_KT /= scale.std
        if kl_KT is not None and self.kl_before_baseline:
            rewards_K -= coef * np.where(mask_KT, kl_KT, 0.0).sum(axis=1)
            kl_KT = None
        shaped_K = (
            self._compare_parts(samples)
            if self.estimator == "gdpo"
            else group_rewards(rewards_K, self.estimator, pass_k=self.pass_k, pass_at=self.pass_at)
        )
        rewards_KT = token_rewards(shaped_K, mask_KT, kl_KT, coef, turns_KT)
        if self.estimator == "gae":
            values_KT = stack_rows([self._require_array(sample, "values") for sample in samples])
            advantages_KT, returns_KT = compute_gae(rewards_KT, values_KT, mask_KT, gamma=self.gamma, lam=self.lam)
            rows = zip(samples, advantages_KT, returns_KT, strict=True)
            return tuple(Trainable.of(s, advantages_T, returns=returns_T) for s, advantages_T, returns_T in rows)
        advantages_KT = returns_to_go(rewards_KT, mask_KT, gamma=self.gamma)
        return tuple(Trainable.of(s, advantages_T) for s, advantages_T in zip(samples, advantages_KT, strict=True))

    def _compare_parts(self, samples: Sequence[Scored]) -> Array:
        names, weights = zip(*self.part_weights, strict=True)
        require_one_seat(samples, "the estimator 'gdpo'")
        for sample in samples:
            if sample.turn_rewards:
                raise ConfigError(
                    f"sample {sample.sample_id} has rewards of turns, which are in no part of its reward, but "
                    "estimator 'gdpo' compares parts; choose another estimator"
                )
            if lacking := [name for name in names if name not in sample.reward_parts]:
                raise ConfigError(
                    f"estimator 'gdpo' compares the part {lacking[0]!r} of rewards, and that of sample "
                    f"{sample.sample_id} has {', '.join(sample.reward_parts) or 'no parts'}; name the parts that "
                    "rewards have, or choose another estimator"
                )
        return normalise_parts([[sample.reward_parts[name] for name in names] for sample in samples], weights)

    def _estimate_by_seat(
        self, samples: Sequence[Scored], seats: Sequence[int], kl_coef: float | None, scale: Scale | None
    ) -> tuple[Trainable, ...]:
        """Each seat is compared with the same seat of the other members; a token gets the advantage of its seat."""
        advantages_K = [np.zeros(sample.num_tokens) for sample in samples]
        for seat in seats:
            mine = [k for k, sample in enumerate(samples) if seat in dict(sample.seat_rewards)]
            views = [reduce_to_seat(samples[k], seat) for k in mine]
            for k, made in zip(mine, self.make_trainables(views, kl_coef=kl_coef, scale=scale), strict=True):
                advantages_K[k] += made.advantages
        return tuple(Trainable.of(s, advantages_T) for s, advantages_T in zip(samples, advantages_K, strict=True))

    def _estimate_by_turn(self, samples: Sequence[Scored]) -> tuple[Trainable, ...]:
        """Each turn is compared with the same turn of the other members; its policy tokens, through all sequences of
        the episode, get its advantage."""
        episodes: list[Episode] = []
        for sample in samples:
            if not isinstance(sample, Episode) or not sample.rewards_by_turn:
                raise ConfigError(
                    f"credit is 'turn', but sample {sample.sample_id} has no rewards by turn; connect the advantage "
                    "node to an Environment, or set credit='episode'"
                )
            episodes.append(sample)
        rewards_K = [[reward for _, reward in episode.rewards_by_turn] for episode in episodes]
        advantages_K = turn_advantages(rewards_K, self.estimator, gamma=self.gamma)
        made: list[Trainable] = []
        for episode, advantages_U in zip(episodes, advantages_K, strict=True):
            tokens = np.flatnonzero(episode.whole_mask)
            turns = np.searchsorted([place for place, _ in episode.rewards_by_turn], tokens)
            if turns.size and turns[-1] == advantages_U.size:
                raise ConfigError(
                    f"sample {episode.sample_id} has policy tokens after its last turn; `rewards_by_turn` of an "
                    "episode has to name the last policy token of every turn"
                )
            advantages_T = np.zeros(episode.num_tokens)
            advantages_T[tokens] = advantages_U[turns]
            made.append(Trainable.of(episode, advantages_T))
        return tuple(made)

    def compute_kl(self, samples: Sequence[Scored]) -> Array:
        """kl_t to the reference at every policy token, estimated from the behavior policy's logprobs."""
        behavior_KT = stack_rows([self._require_array(sample, "behavior_logprobs") for sample in samples])
        reference_KT = stack_rows([self._require_array(sample, "ref_logprobs") for sample in samples])
        return kl_per_token(behavior_KT - reference_KT, self.kl_estimator)

    def _require_array(self, sample: Scored, name: str) -> Float32:
        found: Float32 | None = sample.column(name)
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


def leave_unvalued(samples: Sequence[Scored]) -> tuple[Trainable, ...]:
    """`samples` with unset advantages (empty arrays), until a critic has computed values for them."""
    return tuple(Trainable.of(sample) for sample in samples)


def whole_reward(sample: Scored) -> float:
    """The sum of the response's reward and those of its turns."""
    return sample.reward + sum(reward for _, reward in sample.turn_rewards)


def kl_per_token(log_ratio: Array, estimator: KlEstimator) -> Array:
    """k1 = d, k2 = d²/2, k3 = e^−d − 1 + d of d = log π − log π_ref, each clamped to ±10 (Schulman 2020)."""
    d = np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    estimates = {"k1": d, "k2": d * d / 2, "k3": np.expm1(-d) + d}
    return np.clip(estimates[estimator], -KL_LIMIT, KL_LIMIT)


def stack_rows(arrays: Sequence[npt.NDArray[Any]]) -> Array:
    """Rows of unequal length as one array, with zeros after the shorter ones."""
    result = np.zeros((len(arrays), max(len(array) for array in arrays)))
    for row, array in zip(result, arrays, strict=True):
        row[: len(array)] = array
    return result

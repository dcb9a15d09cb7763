"""Credit by turn: each turn of an episode is compared with the same turn of the other members of its group.

G_t = Σ_{u≥t} γ^{u−t} r_u is what an episode still gets from turn t on, 0 for a turn that it does not have. The baseline
of turn t is the mean of G_t over all scored members, including those that have ended. A mean over only the episodes
that continue would depend on which ones continue, and so on what the policy did. The spread is that of whole returns,
G_0, one number for the group. Normalising rewards turn by turn and then adding them up would be biased in the same way.

Axes: K members that were scored, U turns of the longest episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from flowrl.episode import Episode
from flowrl.errors import ConfigError
from flowrl.messages import Scored
from flowrl.training.advantage.advantages import Array, Estimator, all_equal, returns_to_go

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


def rewards_of_turns(sample: Scored) -> list[float]:
    """The reward of each turn. Raises ConfigError if the sample is no episode."""
    if not isinstance(sample, Episode) or not sample.rewards_by_turn:
        raise ConfigError(
            f"credit is 'turn', but sample {sample.sample_id} has no rewards by turn; connect the advantage node to an "
            "Environment, or set credit='episode'"
        )
    return [reward for _, reward in sample.rewards_by_turn]


def at_tokens(sample: Episode, advantages_U: Array) -> Array:
    """The advantage of each turn at all its policy tokens, 0 elsewhere, through all sequences of the episode."""
    tokens = np.flatnonzero(sample.whole_mask)
    turns = np.searchsorted([place for place, _ in sample.rewards_by_turn], tokens)
    if turns.size and turns[-1] == advantages_U.size:
        raise ConfigError(
            f"sample {sample.sample_id} has policy tokens after its last turn; `rewards_by_turn` of an episode has to "
            "name the last policy token of every turn"
        )
    found = np.zeros(sample.num_tokens)
    found[tokens] = advantages_U[turns]
    return found

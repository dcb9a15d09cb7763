"""Credit by seat: each seat of an episode is compared with the same seat in the other episodes of the group.

A seat's tokens get the advantage that follows from the seat's own reward. The baseline of a seat is taken over all
scored members in which the policy has played that seat, including those that ended before the seat's first turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flowrl.episode import Episode
from flowrl.errors import ConfigError
from flowrl.messages import Scored


def seats_of(samples: Sequence[Scored]) -> list[int]:
    """The seats that the policy has played in some of these samples; [] if none of them has seats."""
    return sorted({seat for sample in samples for seat, _ in sample.seat_rewards})


def require_one_seat(samples: Sequence[Scored], user: str) -> None:
    """Raise ConfigError if the policy has played several seats of an episode, which `user` ("a critic") cannot use."""
    for sample in samples:
        if len(sample.seat_rewards) > 1:
            raise ConfigError(
                f"the policy has played {len(sample.seat_rewards)} seats of sample {sample.sample_id!r}, which have a "
                f"reward each, but {user} takes samples with one; leave it out, or connect the port opponent of the "
                "Environment, so that the policy plays one seat"
            )


def of_seat(sample: Scored, seat: int) -> Scored:
    """The sample reduced to this seat: its reward, its turns, and a policy mask of its tokens.

    The sequences and all indices stay as they are. For a seat without a turn, its reward becomes that of a single turn.
    """
    masks = [one.policy_mask & (number == seat) for one, number in zip(sample.sequences, sample.seats, strict=True)]
    branches = [replace(branch, policy_mask=mask) for branch, mask in zip(sample.branches, masks[1:], strict=True)]
    reward = dict(sample.seat_rewards)[seat]
    mine = replace(sample, policy_mask=masks[0], branches=tuple(branches), reward=reward, seats=(), seat_rewards=())
    if not isinstance(mine, Episode):
        return mine
    return replace(mine, rewards_by_turn=_turns_of(sample, mine.rewards_by_turn, seat) or ((0, reward),))


def _turns_of(sample: Scored, turns: Sequence[tuple[int, float]], seat: int) -> tuple[tuple[int, float], ...]:
    ends = np.cumsum([one.token_ids.size for one in sample.sequences])
    sequences = np.searchsorted(ends, [place for place, _ in turns], "right").tolist()
    return tuple(turn for turn, number in zip(turns, sequences, strict=True) if sample.seats[number] == seat)

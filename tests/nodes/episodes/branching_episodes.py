"""Episodes of several sequences, as an environment with history="template" sends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.messages import Branch
from flowrl.messages.episode import Episode

Arrays = dict[str, Any]


def episode(
    member: int,
    sequences: Sequence[Sequence[int]],
    rewards: Sequence[float],
    *,
    group: str = "g",
    version: int = 0,
    vocabulary: int = 40,
    draw: np.random.Generator | None = None,
    **more: Any,
) -> Episode:
    """An episode with a turn for each number in `sequences`: the number of tokens of the turn's reply.

    Each inner list is a sequence; a later one begins with a part of the one before it.
    """
    draw = draw or np.random.default_rng(member)
    made: list[Arrays] = []
    places: list[int] = []
    for replies in sequences:
        before = made[-1]["token_ids"] if made else draw.integers(0, vocabulary, 3)
        ids, mask = list(before[: max(2, len(before) // 2)]), [False] * max(2, len(before) // 2)
        for reply in replies:
            ids += draw.integers(0, vocabulary, 2 + reply).tolist()
            mask += [False] * 2 + [True] * reply
            places.append(sum(len(one["token_ids"]) for one in made) + len(ids) - 1)
        made.append(_arrays(ids, mask, draw, version))
    first, *further = made
    return Episode(
        sample_id=f"{group}:{member}",
        group_id=group,
        prompt_id="p",
        epoch=0,
        member=member,
        group_size=4,
        prompt_text="",
        response_text="",
        prompt_tokens=int(np.argmax(first["policy_mask"])),
        truncated=False,
        generator="generator/0",
        **first,
        branches=tuple(Branch(**one) for one in further),
        reward=float(sum(rewards)),
        raw_reward=float(sum(rewards)),
        rewards_by_turn=tuple(zip(places, map(float, rewards), strict=True)),
        turns=len(places),
        **more,
    )


def _arrays(ids: Sequence[int], mask: Sequence[bool], draw: np.random.Generator, version: int) -> Arrays:
    sampled = np.array(mask)
    ages = np.sort(draw.integers(0, 3, len(ids)))[::-1]
    return {
        "token_ids": np.array(ids, np.int32),
        "policy_mask": sampled,
        "behavior_logprobs": np.where(sampled, draw.normal(-3.5, 0.6, len(ids)), 0).astype(np.float32),
        "versions": np.where(sampled, version - ages, -1).astype(np.int32),
    }

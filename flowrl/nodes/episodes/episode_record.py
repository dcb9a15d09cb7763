"""An attempt at an episode as `flowrl show` prints it: texts of tokens, who said them, rewards, how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.agents import TokenSequence
from flowrl.agents.token_pieces import TokenPieces
from flowrl.messages import Prompt
from flowrl.nodes.episodes.played import Played

MOST_TEXT = 8192
"""Most characters that are kept of a failure's text: those at its end."""


class EpisodeRecords:
    """Makes the records of one node, as lines of JSON. `name_of` gives the name of what plays a prompt."""

    def __init__(self, tokenizer: Any, name_of: Callable[[Prompt], str]) -> None:
        self._name_of = name_of
        self._pieces = TokenPieces(tokenizer)

    def line(
        self,
        prompt: Prompt,
        attempt: int,
        played: Played | None,
        *,
        reward: float | None = None,
        cause: str = "",
        text: str = "",
    ) -> str:
        """The record of an attempt, counted from 0. `played` is None if it failed before its first observation."""
        played = played or Played()
        record = {
            "sample_id": prompt.sample_id,
            "attempt": attempt,
            "ended_s": time.time(),
            "seconds": round(played.seconds, 3),
            "environment": self._name_of(prompt),
            "turns": played.turns,
            "reward": reward,
            "cut": played.cut,
            "cause": cause,
            "text": text[-MOST_TEXT:],
            "metrics": played.metrics,
            "seat_rewards": played.seat_rewards,
            "rewards": played.rewards,
            "sequences": [self._sequence(played, number) for number in range(len(played.sequences))],
        }
        return json.dumps(record)

    def _sequence(self, played: Played, number: int) -> dict[str, Any]:
        sequence = played.sequences[number]
        return {
            "pieces": self._pieces.of(sequence.token_ids.tolist()),
            "spans": spans_of(sequence),
            "roles": fed_roles(played.messages[number]) if played.messages else [],
            "seat": played.seats[number] if played.seats else None,
        }


def spans_of(sequence: TokenSequence) -> list[tuple[int, int]]:
    """(number of tokens, version) of each run of tokens of one origin; version -1 for what was fed."""
    versions = np.where(sequence.policy_mask, sequence.versions, -1)
    starts = np.flatnonzero(np.diff(versions, prepend=-2))
    sizes = np.diff(starts, append=versions.size)
    return [(int(size), int(versions[start])) for start, size in zip(starts, sizes, strict=True)]


def fed_roles(messages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The roles of the messages before each reply."""
    blocks: list[list[str]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            blocks.append([])
        else:
            blocks[-1].append(str(message["role"]))
    return blocks[: sum(message["role"] == "assistant" for message in messages)]

"""Conversations of more tokens than a limit: their beginning is cut off, or they are an error before training."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Bool, Int32


def shortened(token_ids: Int32, mask: Bool, most: int) -> tuple[Int32, Bool]:
    """The last `most` tokens; unchanged if the last turn that is trained would lose its beginning or its prompt."""
    excess = len(token_ids) - most
    return (token_ids[excess:], mask[excess:]) if 0 < excess < answer_start(mask) else (token_ids, mask)


def answer_start(mask: Bool) -> int:
    """Where the last trained turn begins."""
    places = np.flatnonzero(~mask[: int(np.flatnonzero(mask)[-1])])
    return int(places[-1]) + 1 if places.size else 0


def refuse_long(lengths: Iterable[int], most: int, *, option: str, task: str) -> None:
    """Raise ConfigError if a conversation has more than `most` tokens."""
    lengths = list(lengths)
    if long := [length for length in lengths if length > most]:
        raise ConfigError(
            f"{len(long)} of {len(lengths)} conversations of {task!r} are longer than {option} = {most}, the longest "
            f"has {max(long)}; raise it, or set too_long to drop or truncate"
        )

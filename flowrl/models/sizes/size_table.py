"""Defaults of graphs' options by the size of the trained model; those for `tiny` are declared by the graphs themselves.

    lr         by what the graph learns from; ten times that for an adapter
    dtype      bfloat16, with fp32 master weights, but float32 at ZeRO stage 0
    response   tokens of a response, and prompt, of a prompt: together at most three quarters of the context
    groups     prompts of a step; 8 samples of each

docs/models.md has the same table, and a test compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Learning = Literal["samples", "rows", "preferences", "rewards"]
"""What a trainer learns from: the policy's own samples, demonstrations, preferences, or pairs for a new head."""
ADAPTER_FACTOR = 10.0
CRITIC_FACTOR = 10.0
"""Learning rate of a critic, as a multiple of the policy's."""


@dataclass(frozen=True)
class SizeRow:
    """The defaults for models up to `parameters`."""

    parameters: float
    samples: float
    rows: float
    preferences: float
    rewards: float
    """Learning rates for training all weights, by what the graph learns from."""
    response: int
    prompt: int
    groups: int

    def lr(self, learning: Learning) -> float:
        """The learning rate for all weights."""
        rate: float = getattr(self, learning)
        return rate


TABLE = (
    SizeRow(0.5e9, samples=5e-6, rows=5e-5, preferences=2e-6, rewards=2e-5, response=512, prompt=1024, groups=32),
    SizeRow(3e9, samples=2e-6, rows=2e-5, preferences=1e-6, rewards=1e-5, response=1024, prompt=1024, groups=32),
    SizeRow(15e9, samples=1e-6, rows=1e-5, preferences=5e-7, rewards=1e-5, response=2048, prompt=2048, groups=64),
    SizeRow(math.inf, samples=1e-6, rows=5e-6, preferences=3e-7, rewards=5e-6, response=2048, prompt=2048, groups=64),
)
UNKNOWN = 7e9
"""Number of parameters that is assumed if it is unknown."""
GROUP_SIZE = 8
EVALUATED = 256
"""Number of held-out prompts, for graphs that evaluate by default."""
MICRO_BATCH = 8192
"""Tokens of a micro-batch, unless a prompt and its response have more."""


def row_for(parameters: float | None) -> SizeRow:
    """The row for a model of that size."""
    return next(row for row in TABLE if (UNKNOWN if parameters is None else parameters) <= row.parameters)

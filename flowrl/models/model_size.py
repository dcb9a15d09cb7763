"""How many parameters a model has, and the defaults of graphs' options by that number.

The number is read from the headers of the model's files, or from its name if the model is not here yet. The defaults
for `tiny` are declared by the graphs themselves; for others they are

    lr         by what the graph learns from; ten times that for an adapter
    dtype      bfloat16, with fp32 master weights, but float32 at ZeRO stage 0
    response   tokens of a response, and prompt, of a prompt: together at most three quarters of the context
    groups     prompts of a step; 8 samples of each

docs/models.md has the same table, and a test compares the two.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrl.errors import ConfigError
from flowrl.models.model_files import context_length, known_config_file, known_directory, weight_files
from flowrl.models.model_layout import known_shape
from flowrl.models.policy import SMOLLM2_CONTEXT, Policy

NAMED = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z])")
SMOLLM2_PARAMETERS = 134_515_008
BYTES_OF_PICKLED = 2
"""Bytes assumed for each parameter in weight files without a header, which mostly have 16 bits."""


@dataclass(frozen=True)
class ModelSize:
    """Number of parameters, and how it is known."""

    parameters: int | None
    """None: unknown."""
    by: str = ""
    """How the number was estimated; empty: it was counted."""

    def __str__(self) -> str:
        if self.parameters is None:
            return "a model of unknown size"
        billions = self.parameters / 1e9
        small = f"{self.parameters / 1e6:.3g} million" if self.parameters >= 1e6 else str(self.parameters)
        shown = f"{billions:.3g} billion" if billions >= 1 else small
        return f"{shown} parameters{f' ({self.by})' if self.by else ''}"


def model_size(policy: Policy) -> ModelSize:
    """The size of a model that is not of the `tiny` family. Reads headers but no weights, and uses no network."""
    if policy.model == "smollm2":
        return ModelSize(SMOLLM2_PARAMETERS)
    directory = known_directory(policy)
    if directory is not None:
        try:
            if found := sum(count_parameters(file) for file in weight_files(directory)):
                return ModelSize(found)
        except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
            pass  # the check of the model reports what is wrong with it
    if (shape := known_shape(policy)) is not None:
        return ModelSize(shape.num_parameters, "by its config.json")
    named = NAMED.findall(policy.model.rpartition("/")[2])
    if not named:
        return ModelSize(None)
    number, unit = named[0]
    return ModelSize(int(float(number) * (1e9 if unit in "Bb" else 1e6)), "by its name")


def model_context(policy: Policy) -> int | None:
    """The most tokens that fit into the model's context; None if that is not known."""
    if policy.model == "smollm2":
        return SMOLLM2_CONTEXT
    file = known_config_file(policy)
    try:
        return None if file is None else context_length(file)
    except (ConfigError, OSError):
        return None


def count_parameters(file: Path) -> int:
    if file.suffix != ".safetensors":
        return file.stat().st_size // BYTES_OF_PICKLED
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(min(length, file.stat().st_size)))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


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

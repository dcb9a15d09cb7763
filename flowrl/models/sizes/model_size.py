"""How many parameters a model has, from the headers of its files, or from its name if the model is not here yet."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.models.directory import context_length, weight_files
from flowrl.models.find_model import known_directory
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
            if found := sum(_parameters(file) for file in weight_files(directory)):
                return ModelSize(found)
        except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
            pass  # the check of the model reports what is wrong with it
    return _by_name(policy.model)


def model_context(policy: Policy) -> int | None:
    """The most tokens that fit into the model's context; None if that is not known."""
    if policy.model == "smollm2":
        return SMOLLM2_CONTEXT
    directory = known_directory(policy)
    try:
        return None if directory is None else context_length(directory)
    except (ConfigError, OSError):
        return None


def _parameters(file: Path) -> int:
    if file.suffix != ".safetensors":
        return file.stat().st_size // BYTES_OF_PICKLED
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(min(length, file.stat().st_size)))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _by_name(name: str) -> ModelSize:
    found = NAMED.findall(name.rpartition("/")[2])
    if not found:
        return ModelSize(None)
    number, unit = found[0]
    return ModelSize(int(float(number) * (1e9 if unit in "Bb" else 1e6)), "by its name")

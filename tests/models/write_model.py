"""Models of tests as directories, written as exports are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from flowrl.training.engine.zero import ModelWriter
from flowrl.training.model.policy_model import Wrapped, read_companions


def write_model(model: Wrapped, source: Path, path: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write the model, or the weights `state`, with the files that `source` has beside its own."""
    writer = ModelWriter(model, read_companions(source), path)
    weights = model.network.state_dict() if state is None else state
    writer.add_tensors(list(weights), list(weights.values()))
    writer.close()

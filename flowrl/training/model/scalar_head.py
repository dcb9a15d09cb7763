"""Which layer of a saved model is its scalar head: transformers' `score`, or another name that OpenRLHF gave it.

A reward model of transformers, TRL or flowrl is a …ForSequenceClassification with `score.weight`. OpenRLHF saves a
class of its own: the head is named by `value_head_prefix` (in its config.json, else `score` or `value_head`), and mean
and standard deviation of the scores are `mean` and `std` there.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError

USUAL = ("score", "value_head")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def has_scalar_head(path: str | Path) -> bool:
    """Whether the model directory holds a model with a scalar head."""
    return scalar_head(path) is not None


def require_scalar_head(path: str | Path) -> None:
    """Raise ConfigError unless `has_scalar_head`."""
    if not has_scalar_head(path):
        found = ", ".join(_config(path).get("architectures") or ("no architecture",))
        raise ConfigError(
            f"{path} is not a reward model: its config.json names {found}, not a …ForSequenceClassification, and it "
            "has no layer score or value_head; train one with graphs/reward_model.py, or start from the policy"
        )


def renamed_head(path: str | Path) -> dict[str, str] | None:
    """transformers' `key_mapping` for a head of another name than `score`; None if there is nothing to rename."""
    head = scalar_head(path)
    return None if head in (None, "score") else {f"^{re.escape(str(head))}\\.": "score."}


def scalar_head(path: str | Path) -> str | None:
    """The name of the head's layer; None if the model has none."""
    config = _config(path)
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        return "score"
    tensors = set(_tensor_names(Path(path)))
    prefixes = (config.get("value_head_prefix"), *USUAL)
    return next((str(prefix) for prefix in prefixes if prefix and f"{prefix}.weight" in tensors), None)


def _config(path: str | Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    return content


def _tensor_names(path: Path) -> Iterator[str]:
    """The names of all tensors, from an index or the headers of safetensors; a single pickled file is opened."""
    for index in INDEXES:
        if (path / index).is_file():
            yield from json.loads((path / index).read_text(encoding="utf-8"))["weight_map"]
            return
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            yield from json.loads(stream.read(length))
    if not files:
        import torch

        for file in sorted(path.glob("pytorch_model*.bin")):
            yield from torch.load(file, map_location="meta", weights_only=True, mmap=True)

"""Which layer of a saved model is its scalar head, and what the head's outputs are called.

A reward model of transformers, TRL or flowrl is a …ForSequenceClassification with `score.weight`. OpenRLHF saves a
class of its own: the head is named by `value_head_prefix` (in its config.json, else `score` or `value_head`), and mean
and standard deviation of the scores are `mean` and `std` there. ArmoRM's head is `regression_layer`; its gate, which
weighs the outputs for each prompt, is not read.

Each row of the head's weight is one label. A reward model has one label, a regression of several attributes has one
label for each.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError

USUAL = ("score", "value_head", "regression_layer")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def has_scalar_head(path: str | Path) -> bool:
    """Whether the model directory holds a model with a scalar head."""
    return scalar_head(path) is not None


def require_scalar_head(path: str | Path) -> None:
    """Raise ConfigError unless `has_scalar_head`."""
    if not has_scalar_head(path):
        found = ", ".join(read_config_json(path).get("architectures") or ("no architecture",))
        raise ConfigError(
            f"{path} is not a reward model: its config.json names {found}, not a …ForSequenceClassification, and it "
            "has no layer score, value_head or regression_layer; train one with graphs/reward_model.py, or start from "
            "the policy"
        )


def require_one_label(path: str | Path) -> None:
    """Raise ConfigError if the model directory has a head with several labels: a value to be trained is one number."""
    labels = head_labels(path) if has_scalar_head(path) else ()
    if len(labels) > 1:
        raise ConfigError(
            f"{path} scores {len(labels)} labels ({', '.join(labels)}), but a critic or a reward model in training has "
            "one output; start from the policy, or from a model with one label"
        )


def head_labels(path: str | Path) -> tuple[str, ...]:
    """The names of the head's outputs, in order: `id2label` of the config if it names as many, else LABEL_0 and so on.

    A single output has a name too. Raises ConfigError if the directory has no scalar head.
    """
    require_scalar_head(path)
    places, name = list_tensor_files(Path(path)), f"{scalar_head(path)}.weight"
    if name not in places:
        raise ConfigError(f"{path} has no tensor {name}, though its config.json says so; copy the whole directory")
    number = read_tensor_shapes(places[name])[name][0]
    named = {int(index): str(name) for index, name in (read_config_json(path).get("id2label") or {}).items()}
    if set(named) == set(range(number)) and len(set(named.values())) == number:
        return tuple(named[index] for index in range(number))
    return tuple(f"LABEL_{index}" for index in range(number))


def renamed_head(path: str | Path) -> dict[str, str] | None:
    """transformers' `key_mapping` for a head that is not named `score`; None if there is nothing to rename."""
    head = scalar_head(path)
    return None if head in (None, "score") else {f"^{re.escape(str(head))}\\.": "score."}


def scalar_head(path: str | Path) -> str | None:
    """The name of the head's layer; None if the model has none."""
    config = read_config_json(path)
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        return "score"
    tensors = set(list_tensor_files(Path(path)))
    prefixes = (config.get("value_head_prefix"), *USUAL)
    return next((str(prefix) for prefix in prefixes if prefix and f"{prefix}.weight" in tensors), None)


def read_config_json(path: str | Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    return content


def list_tensor_files(path: Path) -> Mapping[str, Path]:
    """Tensor -> its file, from an index or the files' own lists."""
    for index in INDEXES:
        if (path / index).is_file():
            weight_map = json.loads((path / index).read_text(encoding="utf-8"))["weight_map"]
            return {name: path / file for name, file in weight_map.items()}
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    return {name: file for file in files for name in read_tensor_shapes(file)}


def read_tensor_shapes(file: Path) -> Mapping[str, Sequence[int]]:
    """Tensor -> its shape, from the header of safetensors; a pickled file is opened."""
    if file.suffix != ".safetensors":
        import torch

        state = torch.load(file, map_location="meta", weights_only=True, mmap=True)
        return {name: tuple(tensor.shape) for name, tensor in state.items()}
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return {name: about["shape"] for name, about in header.items() if name != "__metadata__"}

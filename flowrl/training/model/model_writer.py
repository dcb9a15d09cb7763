"""Writing a Hugging Face directory shard by shard: only the weights of one file are in host memory at a time.

Every shard goes through transformers' own `save_pretrained`, which knows the names and formats of the files; then the
shard is moved to its place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.training.model.policy_model import Wrapped, bare
from flowrl.training.model.tensors import adapted_layers
from flowrl.training.model.value_model import ScalarModel

SHARD_BYTES = 2 << 30
"""Most bytes of a file; a larger tensor has a file of its own."""
WEIGHTS = "model.safetensors"
SHARD = ".shard"
"""Folder in which a shard is written, and prefix of its file's name until the number of shards is known."""


class ModelWriter:
    """Takes the weights of `model` in any order, each once, and writes them to the directory `path`.

    `beside` are further files (`companions`); those that transformers has not written are added. A model of at most
    `shard_bytes` becomes one file, as `save_pretrained` would write it.
    """

    def __init__(
        self, model: Wrapped, beside: Mapping[str, bytes], path: str | Path, *, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._model, self._beside, self._target = model, beside, Path(path)
        self._written = bare(model.network) if adapted_layers(model.network) else model.network
        self._most = None if _at_once(self._written) else shard_bytes
        self._state: dict[str, Tensor] = {}
        self._bytes = 0
        self._shards: list[dict[str, int]] = []
        """One mapping for each shard: name of a tensor -> bytes."""

    def add(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Copy these tensors, which may change afterwards."""
        for name, tensor in zip(names, tensors, strict=True):
            if self._most is not None and self._state and self._bytes + tensor.nbytes > self._most:
                self._flush()
            self._state[name] = tensor.to("cpu", copy=True)
            self._bytes += tensor.nbytes

    def close(self) -> None:
        """Write the last shard, an index if there are several shards, and the files of `beside`."""
        if isinstance(self._model, ScalarModel) and self._model.tokenizer is not None:
            self._target.mkdir(parents=True, exist_ok=True)
            self._model.tokenizer.save_pretrained(self._target)
        self._flush()
        num = len(self._shards)
        files = [WEIGHTS] if num == 1 else [f"model-{n:05d}-of-{num:05d}.safetensors" for n in range(1, num + 1)]
        for number, file in enumerate(files):
            (self._target / f"{SHARD}-{number}").replace(self._target / file)
        if num > 1:
            index = {
                "metadata": {"total_size": sum(sum(shard.values()) for shard in self._shards)},
                "weight_map": {name: file for shard, file in zip(self._shards, files, strict=True) for name in shard},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._target / f"{WEIGHTS}.index.json").write_text(text, encoding="utf-8")
        for name, content in self._beside.items():
            if not (self._target / name).exists():
                (self._target / name).write_bytes(content)

    def _flush(self) -> None:
        folder = self._target / SHARD
        shutil.rmtree(folder, ignore_errors=True)
        state, self._state, self._bytes = self._state, {}, 0
        self._written.save_pretrained(folder, state_dict=state, max_shard_size=1 << 60)
        del state
        shard = folder / WEIGHTS
        self._shards.append(_sizes(shard))
        shard.replace(self._target / f"{SHARD}-{len(self._shards) - 1}")
        if len(self._shards) == 1:
            shutil.copytree(folder, self._target, dirs_exist_ok=True)  # the config, and the model's own code
        shutil.rmtree(folder)


def _sizes(file: Path) -> dict[str, int]:
    """Name -> bytes of a safetensors file."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    places = {name: about["data_offsets"] for name, about in header.items() if name != "__metadata__"}
    return {name: end - start for name, (start, end) in places.items()}


def _at_once(network: Any) -> bool:
    """Whether a tensor in the files is made from several tensors of the model, which are then needed together."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    found = getattr(network, "_weight_conversions", None)
    if found is None:
        found = get_model_conversion_mapping(network, add_legacy=False)
    return any(isinstance(one, WeightConverter) and len(one.target_patterns) > 1 for one in found or ())

"""How one generator is spread over its GPUs: vLLM's tensor, pipeline and data parallel sizes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.nodes.vllm_engine.engine import Engine

OPTIONS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True)
class Parallel:
    """The sizes that a generator asks for. Their product is the number of GPUs of each of its replicas."""

    tensor: int | None = None
    """None: the number of GPUs divided by the other two sizes."""
    pipeline: int = 1
    data: int = 1

    @classmethod
    def of(cls, engine: Engine) -> Parallel:
        """The sizes among the options of a generator's engine."""
        return cls(engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size)

    def arguments(self, num_gpus: int) -> dict[str, Any]:
        """Engine arguments for a replica with this number of GPUs, for which there are no `problems`.

        Within Ray, vLLM would choose its Ray executor for several workers, and refuse our placement group.
        """
        sizes = dict(zip(OPTIONS, self.sizes(num_gpus), strict=True))
        return sizes | ({"distributed_executor_backend": "mp"} if num_gpus > 1 else {})

    def sizes(self, num_gpus: int) -> tuple[int, int, int]:
        """(tensor, pipeline, data) of a replica with this number of GPUs."""
        return self._tensor(num_gpus), self.pipeline, self.data

    def _tensor(self, num_gpus: int) -> int:
        return self.tensor or max(1, num_gpus) // (self.pipeline * self.data)

    def problems(self, gpus: float) -> list[str]:
        """What is wrong with these sizes on `gpus` GPUs for each replica, as complete sentences."""
        asked = f"tensor {self.tensor or 'any'} × pipeline {self.pipeline} × data {self.data} parallel parts"
        least = (self.tensor or 1) * self.pipeline * self.data
        if gpus <= 1:
            return [] if least == 1 else [f"the engine asks for {asked}, but gpus is {gpus:g}; set gpus={least}"]
        if gpus != int(gpus):
            return [f"gpus is {gpus:g}; above 1 it has to be a whole number"]
        if least != gpus if self.tensor else gpus % least:
            return [
                f"the engine asks for {asked}, but gpus is {gpus:g}; the product of the sizes has to be equal to it"
            ]
        return []

    def problems_with(self, model_dir: Path, gpus: float) -> list[str]:
        """The problem if tensor parallelism cannot split the attention heads of the model in `model_dir`."""
        heads, tensor = _attention_heads(model_dir), self._tensor(int(gpus))
        if heads is None or heads % tensor == 0:
            return []
        return [
            f"the engine splits {model_dir} into {tensor} tensor-parallel parts, but the model has {heads} attention "
            f"heads; use a number of GPUs that divides them, or more replicas with fewer GPUs"
        ]


def read_config(model_dir: Path) -> dict[str, Any]:
    """The model's config.json; empty if it cannot be read, which `check_model` reports."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _attention_heads(model_dir: Path) -> int | None:
    """The number of attention heads in the model's config.json; None if it has none."""
    config = read_config(model_dir)
    found = {**config, **config.get("text_config", {})}.get("num_attention_heads")
    return int(found) if found is not None else None

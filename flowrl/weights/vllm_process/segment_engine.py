"""vLLM's weight transfer engine over shared memory: loads a published version into the model, within a worker process.

Three properties of vLLM 0.32 determine the design:

- On CPU, linear layers keep a repacked copy of their weight. The layerwise reload rebuilds it, except
  for an `lm_head` tied to the embedding: its weight tensor is updated through the embedding, but its copy is
  not, and the head would still use the old weights.
- The base class synchronizes an accelerator, which raises an error on machines without one.
- An fp8 engine quantizes a layer as soon as all of it has been loaded, and so does the layerwise reload. Published
  weights are in 16 bits or more; fp8 scales are made in this process, so no publisher has them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.platforms import current_platform

from flowrl.tensor_table import TensorRow
from flowrl.weights.manifest import views
from flowrl.weights.shm import DATA_OFFSET, Segment


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: the engine needs no init info."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One version: its segment, which the caller keeps read-locked until the update is finished, and its table."""

    segment: str
    tensors: Sequence[TensorRow]


class SharedMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """vLLM weight transfer engine over flowrl's shared-memory segments."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mappings: dict[str, mmap.mmap] = {}
        self._parameters = checkpoint_parameters(self.model)
        """Names of the parameters that a publisher sends."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        tensors = views(self._mapping(update_info.segment), update_info.tensors, start=DATA_OFFSET)
        missing = self._parameters - set(self.model.load_weights(tensors))
        if missing:
            raise ValueError(
                f"the published version lacks {len(missing)} of the model's parameters, among them "
                f"{sorted(missing)[:3]}: trainer and generator were given different models"
            )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            refresh_tied_heads(self.model)

    def shutdown(self) -> None:
        self._mappings.clear()

    def _mapping(self, name: str) -> mmap.mmap:
        """The segment's mapping. It is kept: a publisher reuses its few segments, and mapping costs page faults."""
        if name not in self._mappings:
            segment = Segment(name)
            self._mappings[name] = segment.map()
            segment.close()
        return self._mappings[name]


def checkpoint_parameters(model: torch.nn.Module) -> set[str]:
    """Names of the loaded parameters, tied ones once, without those that layers make from them (fp8 scales)."""
    made = set()
    for prefix, layer in model.named_modules():
        loaded, _ = get_layerwise_info(layer).restore_metadata
        if loaded:
            made |= {f"{prefix}.{name}" for name in layer._parameters.keys() - loaded.keys() - SKIP_TENSORS}
    return {name for name, _ in model.named_parameters()} - made


def refresh_tied_heads(model: torch.nn.Module) -> int:
    """Rebuild the packed copy of every head that shares its weight with an embedding; returns how many."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    owners = {id(m.weight) for m in embeddings if not isinstance(m, ParallelLMHead)}
    tied = [m for m in embeddings if isinstance(m, ParallelLMHead) and id(m.weight) in owners]
    for head in tied:
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    return len(tied)

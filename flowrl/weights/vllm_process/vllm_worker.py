"""Runs inside vLLM's worker process: registers the engine that loads versions from shared memory.

vLLM imports this module in its engine process because `worker_extension_cls` names it. Between start and finish of an
update the model is on the meta device: `apply_weights` does start, loading and finish in one call, so that no engine
step can run in between.
"""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from flowrl.weights.receive import SEGMENT_ENGINE
from flowrl.weights.vllm_process.engine_process import adopt_process, release_freed_memory
from flowrl.weights.vllm_process.segment_engine import (
    SharedMemoryEngine,
    all_loaded,
    keep_heads_plain,
    pack_experts_again,
    register_adapter,
    spare_discarded,
)

# This logger warns at every update about each layer without weights of its own: rotary embeddings and tied heads.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class WorkerExtension:
    """A mixin for vLLM's worker class; its methods are called with `collective_rpc`."""

    def apply_weights(self, update_info: dict[str, Any]) -> float:
        """Start, load and finish one update; returns the seconds taken. A failure leaves the engine unusable."""
        began = time.perf_counter()
        first = not getattr(self, "has_weights", False)
        with all_loaded(self.weight_transfer_engine.model):  # type: ignore[attr-defined]
            self.start_weight_update()  # type: ignore[attr-defined]
            self.update_weights(update_info)  # type: ignore[attr-defined]
        self.finish_weight_update()  # type: ignore[attr-defined]
        if first:  # later updates use the same memory again, which then costs no page faults
            self.has_weights = True
            release_freed_memory()
        return time.perf_counter() - began

    def load_adapter(self, update_info: dict[str, Any], adapter: dict[str, Any], adapter_id: int) -> float:
        """Register a LoRA adapter under `adapter_id`, so that requests can name it; returns the seconds taken."""
        began = time.perf_counter()
        register_adapter(self.model_runner.lora_manager, update_info, adapter, adapter_id)  # type: ignore[attr-defined]
        return time.perf_counter() - began


if SEGMENT_ENGINE.name not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(SEGMENT_ENGINE.name, SharedMemoryEngine)
if current_platform.is_cpu():
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    pack_experts_again(UnquantizedFusedMoEMethod)
    spare_discarded(GPUModelRunner)
    keep_heads_plain(PunicaWrapperCPU)
adopt_process()
gc.freeze()  # vLLM collects three times before its first request; these now skip the objects of imported modules

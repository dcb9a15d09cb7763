"""Runs inside vLLM's worker: loads a LoRA adapter from shared memory, without files.

vLLM loads an adapter from a directory when a request first names it, unless the adapter is already registered.
So this module registers it beforehand, and builds it from the segment's tensors as vLLM would build it from
those of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from flowrl.weights.manifest import views
from flowrl.weights.shm import DATA_OFFSET, Segment


def register_adapter(manager: Any, update_info: Mapping[str, Any], adapter: Mapping[str, Any], adapter_id: int) -> None:
    """Add the adapter in the segment to `manager`, vLLM's WorkerLoRAManager, as `adapter_id`."""
    config = PEFTHelper.from_dict({**adapter, "target_modules": list(adapter["target_modules"])})
    config.validate_legal(manager.lora_config)
    held = manager._adapter_manager
    renames = getattr(held.model, "hf_to_vllm_mapper", None)
    held.add_adapter(
        LoRAModel.from_lora_tensors(
            adapter_id,
            _tensors(update_info),
            config,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=renames.get_rename_mapper() if renames is not None else None,
            skip_prefixes=getattr(held.model, "lora_skip_prefixes", None),
        )
    )


def _tensors(update_info: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the segment's tensors: the publisher later overwrites the segment with another version."""
    segment = Segment(update_info["segment"])
    try:
        rows = views(segment.map(), update_info["tensors"], start=DATA_OFFSET)
        return {name: tensor.clone() for name, tensor in rows}
    finally:
        segment.close()

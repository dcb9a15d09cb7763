"""vLLM's weight transfer engine over shared memory, and what else runs inside vLLM's worker process.

Importing this module changes nothing in vLLM; importing `vllm_worker` does. Four properties of vLLM 0.32 determine
`SharedMemoryEngine`:

- On CPU, linear layers keep a repacked copy of their weight. The layerwise reload rebuilds it, except
  for an `lm_head` tied to the embedding: its weight tensor is updated through the embedding, but its copy is
  not, and the head would still use the old weights.
- The base class synchronizes an accelerator, which raises an error on machines without one.
- An fp8 engine quantizes a layer as soon as all of it has been loaded, and so does the layerwise reload. Published
  weights are in 16 bits or more; fp8 scales are made in this process, so no publisher has them.

- On CPU, experts compute with packed weights too. vLLM packs them at the first load alone; at an update it
  puts the plain weights in their place. `pack_experts_again` mends that.

Two crashes of vLLM on CPU are prevented by `spare_discarded` and `keep_heads_plain`.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
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

from flowrl.messages import TensorRow
from flowrl.weights.shm import DATA_OFFSET, Segment, map_segment, view_tensors


def register_adapter(manager: Any, update_info: Mapping[str, Any], adapter: Mapping[str, Any], adapter_id: int) -> None:
    """Add the adapter in the segment to `manager`, vLLM's WorkerLoRAManager, as `adapter_id`, without files.

    vLLM loads an adapter from a directory when a request first names it, unless the adapter is already registered.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    config = PEFTHelper.from_dict({**adapter, "target_modules": list(adapter["target_modules"])})
    config.validate_legal(manager.lora_config)
    held = manager._adapter_manager
    renames = getattr(held.model, "hf_to_vllm_mapper", None)
    segment = Segment(update_info["segment"])
    try:  # copies, for the publisher later overwrites the segment with another version
        rows = view_tensors(segment.map_file(), update_info["tensors"], start=DATA_OFFSET)
        tensors = {name: tensor.clone() for name, tensor in rows}
    finally:
        segment.close()
    held.add_adapter(
        LoRAModel.from_lora_tensors(
            adapter_id,
            tensors,
            config,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=renames.get_rename_mapper() if renames is not None else None,
            skip_prefixes=getattr(held.model, "lora_skip_prefixes", None),
        )
    )


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

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        mapping = map_segment(update_info.segment, self._mappings)
        self.model.load_weights(view_tensors(mapping, update_info.tensors, start=DATA_OFFSET))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            refresh_tied_heads(self.model)

    def shutdown(self) -> None:
        self._mappings.clear()


@contextmanager
def all_loaded(model: Any) -> Iterator[None]:
    """Within this context every parameter of the model has to be loaded, whichever transfer engine loads it.

    Raises ValueError at the end if some were not.
    """
    missing = checkpoint_parameters(model)
    load_weights = model.load_weights

    def load(weights: Any) -> Any:
        loaded = load_weights(weights)
        missing.difference_update(loaded)
        return loaded

    model.load_weights = load  # of this object alone: vLLM's engines call it once, or for every buffer that arrives
    try:
        yield
    finally:
        del model.load_weights
    if missing:
        raise ValueError(
            f"the published version lacks {len(missing)} of the model's parameters, among them "
            f"{sorted(missing)[:3]}: trainer and generator were given different models"
        )


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


def pack_experts_again(method_class: Any) -> None:
    """Make experts of this class of vLLM's pack their weights at every load; does nothing the second time."""
    set_up_kernel = method_class._setup_kernel
    if getattr(set_up_kernel, "packs_again", False):
        return

    @functools.wraps(set_up_kernel)
    def set_up(method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        loaded_before = method.moe_kernel is not None
        set_up_kernel(method, layer, *args, **kwargs)
        if loaded_before:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    set_up.packs_again = True  # type: ignore[attr-defined]
    method_class._setup_kernel = set_up


def keep_heads_plain(wrapper: Any) -> None:
    """Prevent a crash when adapters are served and logprobs of a prompt's tokens are requested.

    `wrapper` is vLLM's class that computes adapters. vLLM adds the adapter of the output layer to all logits, with one
    row of its table for each token that is sampled. The logits of a prompt's tokens have more rows than that, which
    raises an error that ends the engine. flowrl's adapters leave the output layer as it is, so nothing has to be added.
    """
    wrapper.add_lora_logits = lambda *args, **kwargs: None


class SpareGenerator(torch.Generator):
    """Its draws are discarded, so it is never moved back."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def spare_discarded(runner_class: Any) -> None:
    """Make all runners of this class draw a sample that will be discarded from a spare generator; does nothing the
    second time.

    This prevents a crash when a prompt is computed in several steps and its request has a seed. vLLM samples after each
    of these steps, and discards all but the last result. It then moves the request's random generator back by what the
    discarded draw has used. A GPU's generator can do that; on CPU it raises an error that ends the engine. A prompt is
    split when the prompts of one step exceed `max_num_batched_tokens`, for example when many requests arrive at once.
    Here discarded draws come from a separate generator, so the request's generator does not have to be moved back.
    """
    sample_tokens = runner_class.sample_tokens
    if getattr(sample_tokens, "spares", False):
        return

    @functools.wraps(sample_tokens)
    def spare(runner: Any, *args: Any, **kwargs: Any) -> Any:
        generators, count = runner.input_batch.generators, runner.input_batch.num_reqs
        discarded = np.flatnonzero(runner.discard_request_mask.np[:count]).tolist()
        own = {index: generators[index] for index in discarded if index in generators}
        generators.update({index: SpareGenerator() for index in own})
        try:
            return sample_tokens(runner, *args, **kwargs)
        finally:
            generators.update(own)

    spare.spares = True  # type: ignore[attr-defined]
    runner_class.sample_tokens = spare

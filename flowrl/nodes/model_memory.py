"""The memory of nodes that have a model: their footprints, and how a trainer's state leaves a GPU that is shared.

Footprints have sizes from config.json and formulas from docs/memory.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from flowrl.graph.node import Footprint, MemoryTerm, Node, Share, Stay
from flowrl.graph.routes import WeightTransport, readers_dtype
from flowrl.models import Policy
from flowrl.models.model_layout import known_shape
from flowrl.nodes.engine_options import Engine, largest_kv_cache
from flowrl.training.memory import BYTES, ModelShape, TrainerModel, scoring_bytes, scoring_gathered
from flowrl.training.settings import Dtype, LoRA, SequenceKind, ZeroSettings

GIB = 1 << 30
RUNTIME_BYTES = 600 << 20
"""CUDA context, kernels and cuBLAS workspace of a process on a GPU. An assumption, not measured."""
NCCL_BYTES = 256 << 20
"""Buffers of NCCL's communicators of a process. An assumption, as above."""
PACKED_BYTES = 2 * (256 << 20)
"""The two buffers into which vLLM packs weights for a broadcast, at either end."""
GRAPHS_BYTES = 1 << 30
"""CUDA graphs of vLLM. An assumption, as above."""
EXPORT_BYTES = 2 << 30
"""Largest file of an exported model in bytes (`SHARD_BYTES` of model_writer.py, which imports torch)."""
UTILIZATION = 0.92
"""vLLM's default of gpu_memory_utilization."""
BATCHED_TOKENS = 8192
"""Tokens of a step for which vLLM reserves memory."""
PROMPT_TOKENS = 512
"""As in `kv_cache_room` of vllm_start.py."""


def trainer_footprint(
    policy: Policy,
    share: Share,
    zero: ZeroSettings,
    lora: LoRA,
    *,
    scalar: bool,
    sequence: int = 1,
    kind: SequenceKind = "ulysses",
    tensor: int = 1,
) -> Footprint | None:
    """The footprint of one rank of a trainer; `share.first` is rank 0, which publishes and exports.

    `sequence` ranks divide positions, with attention of that `kind`, or `tensor` ranks divide matrices.
    """
    shape = known_shape(policy)
    if shape is None:
        return None
    divided = {"sliced": sequence, "tensor": max(1, tensor)}
    model = TrainerModel(shape, zero, lora, share.replicas, scalar, share.device_bytes, kind=kind, **divided)
    return Footprint(tuple(_trainer_terms(model, share)))


def _trainer_terms(model: TrainerModel, share: Share) -> Iterator[MemoryTerm]:
    offload = model.zero.offload if not model.zero.nvme_path else "disk"
    tokens = share.token_budget or share.longest_sample or 0
    leaves = bool(share.time_shared and share.gpus)
    stay: Stay = "lease" if leaves else "always"
    if offload == "none":
        yield MemoryTerm("weights", model.weight_bytes, "device", stay)
        yield MemoryTerm("gradients", model.gradient_bytes, "device", stay)
        yield MemoryTerm("optimizer", model.optimizer_bytes, "device", stay)
        kept = model.weight_bytes + model.gradient_bytes + model.optimizer_bytes
    else:
        kept = model.weight_bytes if offload == "optimizer" else 0
        yield MemoryTerm("weights", model.weight_bytes, "device" if kept else "host", stay if kept else "always")
        yield MemoryTerm("gradients", model.gradient_bytes + model.offload_bytes, "host")
        if offload != "disk":
            yield MemoryTerm("optimizer", model.optimizer_bytes, "host")
    yield MemoryTerm("activations", model.activation_bytes(tokens) + model.gathered_bytes, "device", "lease")
    broadcast = PACKED_BYTES if WeightTransport.NCCL in share.sends else 0
    yield MemoryTerm("buffers", model.bucket_bytes + broadcast, "device", stay)
    if leaves:
        yield MemoryTerm("away", kept + model.bucket_bytes, "host", "away")
    if share.gpus:
        yield MemoryTerm("runtime", RUNTIME_BYTES + (NCCL_BYTES if share.replicas > 1 else 0))
    whole, largest = model.num_parameters * model.element_bytes, model.shape.largest_tensor * model.element_bytes
    yield MemoryTerm("loading", 2 * largest if model.zero_stage == 3 else whole, "host", "loading")
    if share.first:
        yield MemoryTerm("export", min(whole, max(EXPORT_BYTES, largest)), "host", "export")
        readers = [way for way in share.sends if way.in_host_memory]
        read = readers_dtype(share.readers, auto=model.shape.dtype)
        element = min(model.element_bytes, BYTES.get(read or "", model.element_bytes))
        sent = (model.num_trained if model.lora.synced_rank else model.num_parameters) * element
        if readers:  # published versions: at most one for each reader, and the two newest
            yield MemoryTerm("published weights", (len(readers) + 2) * sent, "shm")


def scoring_footprint(policy: Policy, share: Share, dtype: Dtype, token_budget: int) -> Footprint | None:
    """The footprint of a model that only scores; device terms are for each of its GPUs."""
    shape = known_shape(policy)
    if shape is None:
        return None
    element = BYTES[dtype]
    weights = shape.num_parameters * element
    ranks = max(1, int(share.gpus))
    terms = [
        MemoryTerm("weights", -(-weights // ranks), "device", "lease"),
        MemoryTerm("loading", weights, "host", "loading"),
    ]
    if ranks > 1:
        terms.append(MemoryTerm("gathered", scoring_gathered(shape, element), "device", "lease"))
    most = scoring_bytes(shape, element, token_budget, share.device_bytes)
    terms.append(MemoryTerm("activations", most, "device", "lease"))
    if share.time_shared and share.gpus:
        terms.append(MemoryTerm("weights", weights, "host", "away"))
    if share.gpus:
        terms.append(MemoryTerm("runtime", RUNTIME_BYTES + (NCCL_BYTES if ranks > 1 else 0)))
    return Footprint(tuple(terms))


def generator_footprint(
    policy: Policy, share: Share, engine: Engine, *, slots: int, longest_response: int
) -> Footprint | None:
    """The footprint of one generator; device terms are for each of its GPUs."""
    shape = known_shape(policy)
    if shape is None:
        return None
    element = shape.element_bytes if engine.dtype == "auto" else BYTES[engine.dtype]
    if not share.gpus:
        longest = share.longest_asked
        prompt = PROMPT_TOKENS if longest is None else min(PROMPT_TOKENS, longest)
        per_token = shape.kv_bytes_per_token(element)
        room = min(largest_kv_cache(shape.num_parameters * element), slots * (prompt + longest_response) * per_token)
        weights = stored_bytes(shape, engine)
        terms = [MemoryTerm("weights", weights), MemoryTerm("KV cache", engine.kv_cache_bytes or room)]
        return Footprint(tuple(terms))
    tensor, pipeline = engine.tensor_size(max(1, int(share.gpus))), engine.pipeline_parallel_size
    if shape.heads % tensor:
        problem = (
            f"the engine splits {policy.model} into {tensor} tensor-parallel parts, but the model has {shape.heads} "
            "attention heads; use a number of GPUs that divides them, or more replicas with fewer GPUs"
        )
        return Footprint((), (problem,))
    offloaded = int(engine.cpu_offload_gb * GIB)
    weights = max(0, -(-stored_bytes(shape, engine) // (tensor * pipeline)) - offloaded)
    runtime = RUNTIME_BYTES + (0 if engine.enforce_eager else GRAPHS_BYTES) + (NCCL_BYTES if tensor > 1 else 0)
    runtime += PACKED_BYTES if WeightTransport.NCCL in share.receives else 0
    activations = scoring_bytes(shape, element, BATCHED_TOKENS) // tensor + 8 * shape.vocab * slots
    cache_element = 1 if engine.kv_cache_dtype.startswith("fp8") else element
    per_token = 2 * -(-shape.layers // pipeline) * max(1, shape.kv_heads // tensor) * shape.head_dim * cache_element
    taken = weights + activations + runtime
    budget = int((engine.gpu_memory_utilization or UTILIZATION) * share.device_bytes)
    cache = engine.kv_cache_bytes or max(0, budget - taken)
    known = share.longest_sample or 0 if share.longest_asked is None else share.longest_asked + longest_response
    longest = engine.max_model_len or known
    least = per_token * longest
    terms = [
        MemoryTerm("weights", weights, "device", "lease"),
        MemoryTerm("KV cache", cache if share.device_bytes or engine.kv_cache_bytes else least, "device", "lease"),
        MemoryTerm("activations", activations, "device", "lease"),
        MemoryTerm("runtime", runtime),
    ]
    if offloaded:
        terms.append(MemoryTerm("weights", offloaded * max(1, int(share.gpus)), "host"))
    if share.time_shared:
        terms.append(MemoryTerm("weights", weights * max(1, int(share.gpus)), "host", "away"))
    if not share.device_bytes or cache >= least:
        return Footprint(tuple(terms))
    part = engine.gpu_memory_utilization or UTILIZATION
    problem = (
        f"vLLM takes {part:g} of each GPU's {share.device_bytes / GIB:.1f} GiB; weights and computing need "
        f"{taken / GIB:.1f}, so {cache / GIB:.2f} are left for the KV cache, and one sequence of "
        f"{longest} tokens needs {least / GIB:.2f}; raise "
        "--engine.tensor-parallel-size or --engine.gpu-memory-utilization, or shorten prompts and responses"
    )
    return Footprint(tuple(terms), (problem,))


def stored_bytes(shape: ModelShape, engine: Engine) -> int:
    """Bytes of the whole model's weights. Only the layers' matrices are in fp8, with a scale of 4 bytes per output."""
    element = shape.element_bytes if engine.dtype == "auto" else BYTES[engine.dtype]
    if "fp8" not in engine.quantization:
        return shape.num_parameters * element
    matrices = shape.layers * sum(inputs * outputs for inputs, outputs in shape.linear_shapes)
    scales = shape.layers * sum(outputs for _, outputs in shape.linear_shapes)
    return matrices + 4 * scales + (shape.num_parameters - matrices) * element


class ResidentNode(Node):
    """A node that loads its state to its GPU in `setup`: weights, gradients, optimizer state. If it shares the GPU
    (`g.time_share`), the state is moved away while another node uses the GPU.

    Each rank of a gang moves its own state; nothing of the move is collective.
    """

    _residence: Any = None
    """A Residence. The annotation is Any because ports are found by evaluating annotations, and the module of Residence
    imports torch."""

    def find_resident(self) -> object:
        """The object that leads to all tensors on the GPU; made by `setup`."""
        raise NotImplementedError

    async def on_acquire(self) -> None:
        if self._residence is not None:
            began = time.perf_counter()
            await self.blocking(self._residence.come_back)
            self.context.gauge("device_return_s", time.perf_counter() - began)

    async def on_release(self) -> None:
        if self.context.gpus:
            began = time.perf_counter()
            moved = await self.blocking(self._move_away)
            self.context.gauge("device_leave_s", time.perf_counter() - began)
            self.context.gauge("device_leave_bytes", moved)

    def _move_away(self) -> int:
        if self._residence is None:
            import torch

            from flowrl.training.engine.residence import Residence

            self._residence = Residence(self.find_resident(), torch.device("cuda", 0))
        return int(self._residence.move_away())

    async def close(self) -> None:
        if self._residence is not None and not self._residence.is_away:
            self._residence.free_memory()

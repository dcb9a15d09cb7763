"""`Engine`: the options with which vLLM runs a generator. Plain data, the same options for every generator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from flowrl.errors import ConfigError
from flowrl.nodes.vllm_engine.offload import offload_beside, offload_fixes, offload_option
from flowrl.nodes.vllm_engine.quantization import (
    CACHE_FLAGS,
    FP8,
    LEAST_CAPABILITY,
    method_problems,
    vllm_method,
    why_fixed,
)
from flowrl.nodes.vllm_engine.vllm_options import parse_extra
from flowrl.training.memory import ModelShape

EngineDtype = Literal["auto", "float32", "bfloat16", "float16"]
CacheDtype = Literal["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
OURS = {
    "model": "the policy decides",
    "logprobs_mode": "training needs the logprobs of the distribution that was sampled from",
    "worker_extension_cls": "weight updates are built on it",
    "weight_transfer_config": "weight updates are built on it",
    "scheduling_policy": "evaluation runs below training by priority",
    "distributed_executor_backend": "vLLM's workers are children of the generator's process",
    "enable_lora": "the generator's `lora` decides",
    "max_loras": "the bound of staleness decides",
    "enable_sleep_mode": "whether the generator takes turns decides",
    "seed": "the run's seed decides",
    "trust_remote_code": "--trust-remote-code decides, for every library",
    "max_num_seqs": "twice the concurrency, for training and evaluation",
}
"""vLLM's options that a user cannot set, and why."""
RENAMED = {"kv_cache_memory_bytes": "kv_cache_bytes"}
"""vLLM's name of an option -> ours."""
FITTING = -1
"""A max_model_len that tells vLLM to take the longest sequence, up to the model's context, for which the KV cache has
room. Without it, an engine whose cache is smaller than the context does not start."""
LEAST_CACHE, LARGEST_CACHE = 256 << 20, 1 << 30
ON_GPUS_ONLY = ("gpu_memory_utilization", "cpu_offload_gb")


@dataclass(frozen=True)
class Engine:
    """Options of vLLM."""

    tensor_parallel_size: int | None = None
    """GPUs among which every layer is split; None: what pipeline and data parallelism leave of the GPUs."""
    pipeline_parallel_size: int = 1
    """Number of groups of layers, each on its own GPUs."""
    data_parallel_size: int = 1
    """Number of copies of the model within one generator."""
    gpu_memory_utilization: float | None = None
    """Share of each GPU's memory that vLLM takes, weights and KV cache together; None: vLLM's 0.92."""
    max_model_len: int | None = None
    """Most tokens of prompt and response together; None: as many as the longest prompt and response of the graph have.
    If a node sends prompts of any length, None means the model's context; on a GPU, as much of it as the KV cache has
    room for."""
    concurrency: int = 128
    """Prompts that one generator processes at a time; evaluation has the same number of further places, at lower
    priority."""
    dtype: EngineDtype = "auto"
    """Type of weights and computation; auto: the model's own. On a CPU the default is the trainer's, or float32 if the
    CPU is slow in bfloat16."""
    enforce_eager: bool | None = None
    """Neither compile nor record CUDA graphs; None: eager on a CPU."""
    quantization: str = ""
    """fp8: vLLM keeps the layers' matrices in 8 bits, and quantizes every version that it receives (fp8_per_channel; or
    fp8_per_tensor, fp8_per_block). vLLM's other methods are for generators that receive no weights."""
    kv_cache_dtype: CacheDtype = "auto"
    """Type of the KV cache; auto: the type of the computation."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache of each GPU; None: on a GPU the memory that vLLM finds free, on a CPU room for a prompt and
    a response in every place, at most as much as the weights have, between 256 MiB and 1 GiB."""
    cpu_offload_gb: float = 0.0
    """GiB of each GPU's weights that are kept in host memory and read through the bus at every step; for generators
    that receive no weights, or only adapters."""
    extra: tuple[str, ...] = ()
    """Further options of vLLM's engine by vLLM's names, such as max_num_batched_tokens=8192."""

    def __post_init__(self) -> None:
        for problem in self._range_problems():
            raise ConfigError(problem)

    def _range_problems(self) -> Iterator[str]:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{_option(name)} is {value}; it has to be 1 or more"
        if self.concurrency < 1:
            yield f"{_option('concurrency')} is {self.concurrency}; a generator needs at least 1 place"
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            yield f"{_option('gpu_memory_utilization')} is {share}; it is a share, above 0 and at most 1"
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            yield f"{_option('kv_cache_bytes')} is {self.kv_cache_bytes}; it has to be 1 or more"
        if not self.cpu_offload_gb >= 0:
            yield f"{_option('cpu_offload_gb')} is {self.cpu_offload_gb}; it has to be 0 or more"

    @property
    def model_parallel_gpus(self) -> int:
        """The smallest number of GPUs that fits the parallel sizes."""
        return (self.tensor_parallel_size or 1) * self.pipeline_parallel_size * self.data_parallel_size

    def fixed_weights(self, *, adapters: bool) -> str:
        """Why a generator with this engine takes no new weights, or no new `adapters`; "" if it takes them."""
        if self._offload and not adapters:
            return offload_fixes(self._offload)
        return why_fixed(self.quantization, self.extra)

    @property
    def _offload(self) -> str:
        return offload_option(self.cpu_offload_gb, self.extra)

    @property
    def in_fp8(self) -> bool:
        """Whether the layers' matrices are in fp8, quantized while they are loaded."""
        return self.quantization in FP8

    def needs(self, gpus: float) -> dict[str, Any]:
        """The facts of a generator with `gpus` GPUs about what its machine has to support."""
        cached_in_fp8 = not gpus and self.kv_cache_dtype.startswith("fp8")
        return {
            "quantization": self.quantization,
            "least_capability": LEAST_CAPABILITY if self.in_fp8 else 0.0,
            "cpu_flags": CACHE_FLAGS if cached_in_fp8 else frozenset(),
        }

    def problems(self, gpus: float, shape: ModelShape | None = None) -> list[str]:
        """What is wrong with these options of a generator with `gpus` GPUs, as complete sentences.

        `shape` is the shape of the generator's model; None if it is not known.
        """
        stored = shape.dtype if shape is not None else ""
        dtype, experts = stored if self.dtype == "auto" else self.dtype, shape.experts if shape is not None else 0
        found = [*self._extra_problems()]
        found += method_problems(self.quantization, dtype, on_gpu=gpus > 0, mixture=experts > 0)
        if self.in_fp8 and self._offload:
            found.append(offload_beside(self.quantization, self._offload))
        for name in () if gpus else ON_GPUS_ONLY:
            if getattr(self, name):
                found.append(f"{_option(name)} is {getattr(self, name)}, but the generator has no GPUs; leave it out")
        return found

    def _extra_problems(self) -> Iterator[str]:
        own = {field.name for field in fields(self)}
        seen: set[str] = set()
        for text in self.extra:
            try:
                name, _ = parse_extra(text)
            except ConfigError as problem:
                yield str(problem)
                continue
            if name in OURS:
                yield f"--engine.extra sets {name!r}, which flowrl sets itself: {OURS[name]}; remove it"
            elif (ours := RENAMED.get(name, name)) in own:
                yield f"--engine.extra sets {name!r}, which has an option of its own; write {_option(ours)}"
            elif name in seen:
                yield f"--engine.extra sets {name!r} twice; keep one"
            seen.add(name)

    def arguments(self, *, on_gpu: bool, longest: int | None = None) -> dict[str, Any]:
        """Arguments of vLLM's AsyncEngineArgs, without the parallel sizes and the dtype.

        `longest` is the number of tokens of the longest expected sequence, if that is less than the model's context.
        """
        eager = self.enforce_eager if self.enforce_eager is not None else not on_gpu
        found: dict[str, Any] = {
            "max_model_len": self.max_model_len or longest or (FITTING if on_gpu else None),
            "max_num_seqs": 2 * self.concurrency,
            "enforce_eager": eager,
            "kv_cache_dtype": self.kv_cache_dtype,
        }
        optional = {
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "quantization": vllm_method(self.quantization) or None,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "cpu_offload_gb": self.cpu_offload_gb or None,
        }
        found |= {name: value for name, value in optional.items() if value is not None}
        return found | dict(parse_extra(text) for text in self.extra)


def largest_kv_cache(weights_bytes: int | None) -> int:
    """Maximum size of the KV cache on a CPU, where vLLM writes all of it at the start; None: the size is unknown."""
    return LARGEST_CACHE if weights_bytes is None else min(LARGEST_CACHE, max(LEAST_CACHE, weights_bytes))


def _option(name: str) -> str:
    return f"--engine.{name.replace('_', '-')}"

"""`Engine`: the options with which vLLM runs a generator. Plain data, the same options for every generator.

What vLLM 0.32 combines with weight updates decides which options a generator that receives weights may have:

- fp8: vLLM quantizes 16-bit weights while it loads them, at the start and at each update. A trainer publishes 16-bit
  weights as for any engine; the scales are made where the weights are loaded, so every transport works.
- Weights in host memory (`cpu_offload_gb`, or vLLM's prefetched layers): an engine with these cannot take whole weights
  by its layerwise reload ("has not been implemented"). For prefetched layers it writes the buffers on the device, and
  the next pass fills these again from the old weights. Weights that vLLM quantizes while it loads them cannot be moved
  to the host at all: they are on no device until then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from flowrl.errors import ConfigError
from flowrl.nodes.vllm_options import given_name, parse_extra
from flowrl.training.memory import ModelShape

EngineDtype = Literal["auto", "float32", "bfloat16", "float16"]
CacheDtype = Literal["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
Runner = Literal["auto", "v1", "v2"]
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
    runner: Runner = "auto"
    """Which of vLLM's two model runners computes and samples; auto: vLLM's choice, which is v2 where Triton works,
    and v1 on a CPU. With triton installed, v2 runs on a CPU in Triton's interpreter, slowly: for tests."""
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
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag_of(name)} is {value}; it has to be 1 or more")
        if self.concurrency < 1:
            raise ConfigError(f"{flag_of('concurrency')} is {self.concurrency}; a generator needs at least 1 place")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"{flag_of('gpu_memory_utilization')} is {share}; it is a share, above 0 and at most 1")
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise ConfigError(f"{flag_of('kv_cache_bytes')} is {self.kv_cache_bytes}; it has to be 1 or more")
        if not self.cpu_offload_gb >= 0:
            raise ConfigError(f"{flag_of('cpu_offload_gb')} is {self.cpu_offload_gb}; it has to be 0 or more")

    @property
    def model_parallel_gpus(self) -> int:
        """The smallest number of GPUs that fits the parallel sizes."""
        return (self.tensor_parallel_size or 1) * self.pipeline_parallel_size * self.data_parallel_size

    def fixed_weights(self, *, adapters: bool) -> str:
        """Why a generator with this engine takes no new weights, or no new `adapters`; "" if it takes them."""
        if (offload := self._offload_option) and not adapters:
            return (
                f"{offload}, and vLLM cannot replace the weights that it keeps in host memory by an update; leave it "
                "out, or train adapters (--lora.rank 32), which leave those weights as they are"
            )
        if OVERRIDE in map(given_name, self.extra):
            return (
                f"--engine.extra sets {OVERRIDE!r}, by which layers may be quantized in ways that a weight update "
                "cannot repeat; write --engine.quantization fp8 instead"
            )
        if not self.quantization or self.quantization in FP8:
            return ""
        return (
            f"its engine is quantized ({self.quantization}), and of vLLM's methods only {', '.join(sorted(FP8))} "
            "quantize the weights of an update; write --engine.quantization fp8, or leave it out"
        )

    @property
    def _offload_option(self) -> str:
        """The option that keeps weights in host memory, as the beginning of a sentence; "" if there is none."""
        if self.cpu_offload_gb:
            return f"--engine.cpu-offload-gb is {self.cpu_offload_gb}"
        name = next((name for name in map(given_name, self.extra) if name.startswith(PREFETCH)), "")
        return f"--engine.extra sets {name!r}" if name else ""

    @property
    def in_fp8(self) -> bool:
        """Whether the layers' matrices are in fp8, quantized while they are loaded."""
        return self.quantization in FP8

    def find_problems(self, gpus: float, shape: ModelShape | None = None) -> list[str]:
        """What is wrong with these options of a generator with `gpus` GPUs, as complete sentences.

        `shape` is the shape of the generator's model; None if it is not known.
        """
        stored = shape.dtype if shape is not None else ""
        dtype, experts = stored if self.dtype == "auto" else self.dtype, shape.experts if shape is not None else 0
        found, method = [*self._extra_problems()], f"--engine.quantization is {self.quantization}"
        if self.in_fp8 and dtype == "float32":
            found.append(
                f"{method}, with which vLLM computes all else in 16 bits, but the engine's dtype is float32; add "
                "--engine.dtype bfloat16"
            )
        if self.in_fp8 and gpus <= 0 and experts:
            found.append(
                f"{method}, but vLLM computes experts in fp8 only on GPUs, and the generator has none; leave it out"
            )
        elif self.in_fp8 and gpus <= 0 and FP8[self.quantization] != CHANNEL:
            found.append(
                f"{method}, which vLLM computes on GPUs, but the generator has none; write fp8, which is {CHANNEL}"
            )
        if self.in_fp8 and (offload := self._offload_option):
            found.append(
                f"{method} and {offload}, but vLLM cannot keep weights in host "
                "memory that it quantizes while it loads them; leave one of the two out"
            )
        if self.runner == "v2" and gpus <= 0 and find_spec("triton") is None:
            found.append(
                "--engine.runner is v2, whose kernels are Triton's, but the generator has no GPUs; leave it out, or "
                "install triton, whose interpreter runs them on a CPU slowly, for tests"
            )
        for name in () if gpus else ON_GPUS_ONLY:
            if getattr(self, name):
                found.append(f"{flag_of(name)} is {getattr(self, name)}, but the generator has no GPUs; leave it out")
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
                yield f"--engine.extra sets {name!r}, which has an option of its own; write {flag_of(ours)}"
            elif name in seen:
                yield f"--engine.extra sets {name!r} twice; keep one"
            seen.add(name)

    def vllm_arguments(self, *, on_gpu: bool, longest: int | None = None) -> dict[str, Any]:
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
            "quantization": FP8.get(self.quantization, self.quantization) or None,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "cpu_offload_gb": self.cpu_offload_gb or None,
        }
        found |= {name: value for name, value in optional.items() if value is not None}
        return found | dict(parse_extra(text) for text in self.extra)

    # How a replica spreads over its GPUs: the product of the three sizes is their number.

    def tensor_size(self, num_gpus: int) -> int:
        """The tensor-parallel size of a replica with this number of GPUs."""
        return self.tensor_parallel_size or max(1, num_gpus) // (self.pipeline_parallel_size * self.data_parallel_size)

    def size_arguments(self, num_gpus: int) -> dict[str, Any]:
        """Engine arguments for a replica with this number of GPUs, for which there are no `parallel_problems`.

        Within Ray, vLLM would choose its Ray executor for several workers, and refuse our placement group.
        """
        sizes: dict[str, Any] = {
            "tensor_parallel_size": self.tensor_size(num_gpus),
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "data_parallel_size": self.data_parallel_size,
        }
        return sizes | ({"distributed_executor_backend": "mp"} if num_gpus > 1 else {})

    def parallel_problems(self, gpus: float) -> list[str]:
        """What is wrong with the sizes on `gpus` GPUs for each replica, as complete sentences."""
        tensor, pipeline, data = self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size
        asked = f"tensor {tensor or 'any'} × pipeline {pipeline} × data {data} parallel parts"
        least = self.model_parallel_gpus
        if gpus <= 1:
            return [] if least == 1 else [f"the engine asks for {asked}, but gpus is {gpus:g}; set gpus={least}"]
        if gpus != int(gpus):
            return [f"gpus is {gpus:g}; above 1 it has to be a whole number"]
        if least != gpus if tensor else gpus % least:
            return [
                f"the engine asks for {asked}, but gpus is {gpus:g}; the product of the sizes has to be equal to it"
            ]
        return []

    def head_problems(self, model_dir: Path, gpus: float) -> list[str]:
        """The problem if tensor parallelism cannot split the attention heads of the model in `model_dir`."""
        config = read_config(model_dir)
        heads = {**config, **config.get("text_config", {})}.get("num_attention_heads")
        tensor = self.tensor_size(int(gpus))
        if heads is None or int(heads) % tensor == 0:
            return []
        return [
            f"the engine splits {model_dir} into {tensor} tensor-parallel parts, but the model has {int(heads)} "
            "attention heads; use a number of GPUs that divides them, or more replicas with fewer GPUs"
        ]


def largest_kv_cache(weights_bytes: int | None) -> int:
    """Maximum size of the KV cache on a CPU, where vLLM writes all of it at the start; None: the size is unknown."""
    return LARGEST_CACHE if weights_bytes is None else min(LARGEST_CACHE, max(LEAST_CACHE, weights_bytes))


def flag_of(name: str) -> str:
    return f"--engine.{name.replace('_', '-')}"


def read_config(model_dir: Path) -> dict[str, Any]:
    """The model's config.json; empty if it cannot be read, which `check_model` reports."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


PREFETCH = "offload_"
"""Prefix of the names of vLLM's options for prefetched layers."""


CHANNEL = "fp8_per_channel"
FP8: Mapping[str, str] = {name: name for name in (CHANNEL, "fp8_per_tensor", "fp8_per_block")} | {"fp8": CHANNEL}
"""Methods of engines that receive weights -> vLLM's name. fp8 has a scale for each output channel of a weight and for
each token; it is the only one of the three methods that vLLM also computes on every CPU."""
LEAST_CAPABILITY = 8.9
"""Lowest compute capability of GPUs that multiply in fp8. Below it vLLM repacks fp8 weights for 16-bit kernels."""
CACHE_FLAGS = frozenset({"avx512f", "amx_tile"})
"""CPUs with one of these flags can keep vLLM's KV cache in fp8."""
OVERRIDE = "quantization_config"
"""vLLM's option that can choose a different method for each layer."""


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM supports; an adapter of another rank uses the next larger one."""
MOST_SLOTS = 8


@dataclass(frozen=True)
class AdapterSlots:
    """How many adapters vLLM serves at a time, and their rank."""

    rank: int
    count: int

    @classmethod
    def slots_for(cls, rank: int, max_staleness: int | None) -> AdapterSlots:
        """Slots for all versions that can be in use at once: from the oldest allowed one, plus the one being loaded."""
        return cls(rank, min(MOST_SLOTS, 2 + (1 if max_staleness is None else max_staleness)))

    @property
    def vllm_arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's AsyncEngineArgs."""
        rank = next(size for size in RANKS if size >= self.rank)
        return {
            "enable_lora": True,
            "max_lora_rank": rank,
            "max_loras": self.count,
            "max_cpu_loras": self.count,
        }

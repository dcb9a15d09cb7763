"""`Engine`: the options with which vLLM runs a generator. Plain data, the same options for every generator.

What vLLM 0.32 combines with weight updates decides which options a generator that receives weights may have:

- fp8: vLLM quantizes 16-bit weights while it loads them, at the start and at each update. A trainer publishes 16-bit
  weights as for any engine; the scales are made where the weights are loaded, so every transport works.
- Weights in host memory (`cpu_offload_gb`, or vLLM's prefetched layers): an engine with these cannot take whole weights
  by its layerwise reload ("has not been implemented"). For prefetched layers it writes the buffers on the device, and
  the next pass fills these again from the old weights. Weights that vLLM quantizes while it loads them cannot be moved
  to the host at all: they are on no device until then.

The types of vLLM's own options are read from vLLM's source: importing vllm takes seconds. If vLLM is not installed, its
options are not known: any name is accepted, and values that are JSON are read as JSON.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from flowrl.errors import ConfigError
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
                yield f"{flag_of(name)} is {value}; it has to be 1 or more"
        if self.concurrency < 1:
            yield f"{flag_of('concurrency')} is {self.concurrency}; a generator needs at least 1 place"
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            yield f"{flag_of('gpu_memory_utilization')} is {share}; it is a share, above 0 and at most 1"
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            yield f"{flag_of('kv_cache_bytes')} is {self.kv_cache_bytes}; it has to be 1 or more"
        if not self.cpu_offload_gb >= 0:
            yield f"{flag_of('cpu_offload_gb')} is {self.cpu_offload_gb}; it has to be 0 or more"

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
        return why_fixed(self.quantization, self.extra)

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

    def machine_needs(self, gpus: float) -> dict[str, Any]:
        """The facts of a generator with `gpus` GPUs about what its machine has to support."""
        cached_in_fp8 = not gpus and self.kv_cache_dtype.startswith("fp8")
        return {
            "quantization": self.quantization,
            "least_capability": LEAST_CAPABILITY if self.in_fp8 else 0.0,
            "cpu_flags": CACHE_FLAGS if cached_in_fp8 else frozenset(),
        }

    def find_problems(self, gpus: float, shape: ModelShape | None = None) -> list[str]:
        """What is wrong with these options of a generator with `gpus` GPUs, as complete sentences.

        `shape` is the shape of the generator's model; None if it is not known.
        """
        stored = shape.dtype if shape is not None else ""
        dtype, experts = stored if self.dtype == "auto" else self.dtype, shape.experts if shape is not None else 0
        found = [*self._extra_problems()]
        found += method_problems(self.quantization, dtype, on_gpu=gpus > 0, mixture=experts > 0)
        if self.in_fp8 and (offload := self._offload_option):
            found.append(
                f"--engine.quantization is {self.quantization} and {offload}, but vLLM cannot keep weights in host "
                "memory that it quantizes while it loads them; leave one of the two out"
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
            "quantization": vllm_method(self.quantization) or None,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "cpu_offload_gb": self.cpu_offload_gb or None,
        }
        found |= {name: value for name, value in optional.items() if value is not None}
        return found | dict(parse_extra(text) for text in self.extra)


def largest_kv_cache(weights_bytes: int | None) -> int:
    """Maximum size of the KV cache on a CPU, where vLLM writes all of it at the start; None: the size is unknown."""
    return LARGEST_CACHE if weights_bytes is None else min(LARGEST_CACHE, max(LEAST_CACHE, weights_bytes))


def flag_of(name: str) -> str:
    return f"--engine.{name.replace('_', '-')}"


OPTIONS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True)
class Parallel:
    """The sizes that a generator asks for. Their product is the number of GPUs of each of its replicas."""

    tensor: int | None = None
    """None: the number of GPUs divided by the other two sizes."""
    pipeline: int = 1
    data: int = 1

    @classmethod
    def of_engine(cls, engine: Engine) -> Parallel:
        """The sizes among the options of a generator's engine."""
        return cls(engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size)

    def size_arguments(self, num_gpus: int) -> dict[str, Any]:
        """Engine arguments for a replica with this number of GPUs, for which there are no `problems`.

        Within Ray, vLLM would choose its Ray executor for several workers, and refuse our placement group.
        """
        sizes = dict(zip(OPTIONS, self.sizes_on(num_gpus), strict=True))
        return sizes | ({"distributed_executor_backend": "mp"} if num_gpus > 1 else {})

    def sizes_on(self, num_gpus: int) -> tuple[int, int, int]:
        """(tensor, pipeline, data) of a replica with this number of GPUs."""
        return self.tensor_size(num_gpus), self.pipeline, self.data

    def tensor_size(self, num_gpus: int) -> int:
        return self.tensor or max(1, num_gpus) // (self.pipeline * self.data)

    def find_problems(self, gpus: float) -> list[str]:
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
        heads, tensor = _attention_heads(model_dir), self.tensor_size(int(gpus))
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


def vllm_method(quantization: str) -> str:
    """vLLM's name of a method."""
    return FP8.get(quantization, quantization)


def why_fixed(quantization: str, extra: tuple[str, ...]) -> str:
    """Why an engine with these options takes no new weights, "" if it takes them."""
    if OVERRIDE in map(given_name, extra):
        return (
            f"--engine.extra sets {OVERRIDE!r}, by which layers may be quantized in ways that a weight update cannot "
            "repeat; write --engine.quantization fp8 instead"
        )
    if not quantization or quantization in FP8:
        return ""
    return (
        f"its engine is quantized ({quantization}), and of vLLM's methods only {', '.join(sorted(FP8))} quantize the "
        "weights of an update; write --engine.quantization fp8, or leave it out"
    )


def method_problems(quantization: str, dtype: str, *, on_gpu: bool, mixture: bool) -> Iterator[str]:
    """What is wrong with a method for an engine whose other weights and computation have this dtype.

    `mixture` says whether the model is a mixture of experts.
    """
    if quantization not in FP8:
        return
    if dtype == "float32":
        yield (
            f"--engine.quantization is {quantization}, with which vLLM computes all else in 16 bits, but the engine's "
            "dtype is float32; add --engine.dtype bfloat16"
        )
    if mixture and not on_gpu:
        yield (
            f"--engine.quantization is {quantization}, but vLLM computes experts in fp8 only on GPUs, and the "
            "generator has none; leave it out"
        )
    elif not on_gpu and vllm_method(quantization) != CHANNEL:
        yield (
            f"--engine.quantization is {quantization}, which vLLM computes on GPUs, but the generator has none; write "
            f"fp8, which is {CHANNEL}"
        )


def method_note(quantization: str) -> str:
    """What `flowrl check` reports about a method."""
    return (
        f"--engine.quantization {quantization}: vLLM quantizes the layers' matrices of every version by "
        f"{vllm_method(quantization)}; embeddings, norms and the output layer stay in 16 bits"
    )


WORDS = {"int": "an integer", "float": "a number", "bool": "true or false"}


def given_name(text: str) -> str:
    """The name in `--engine.extra NAME=VALUE` in vLLM's spelling, whether or not vLLM has such an option."""
    return text.partition("=")[0].strip().replace("-", "_")


def parse_extra(text: str) -> tuple[str, Any]:
    """(name, value) of `--engine.extra NAME=VALUE`. Raises ConfigError for a name or value that vLLM does not take."""
    _, equals, value = text.partition("=")
    name = given_name(text)
    if not equals or not name:
        raise ConfigError(f"--engine.extra is {text!r}; write NAME=VALUE, such as max_num_batched_tokens=8192")
    known = known_options()
    if known is None:
        return name, json_or_text(value)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else "they are the fields of vLLM's AsyncEngineArgs"
        raise ConfigError(f"--engine.extra names {name!r}, which is not an option of vLLM's engine; {hint}")
    return name, typed_value(name, value, known[name])


@functools.cache
def known_options() -> Mapping[str, str] | None:
    """Option -> its type as vLLM's source writes it; None if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(next(iter(spec.submodule_search_locations))) / "engine" / "arg_utils.py"
    if not source.is_file():
        return None
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return {
        field.target.id: ast.unparse(field.annotation)
        for one in classes
        if one.name in ("EngineArgs", "AsyncEngineArgs")
        for field in one.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def typed_value(name: str, value: str, annotation: str) -> Any:
    """`value` as the first type of a union that accepts it. Types other than those in `WORDS` take JSON, or text."""
    kinds = [kind.strip() for kind in annotation.strip("'").split(" | ")]
    if "None" in kinds and value.lower() in ("none", "null"):
        return None
    for kind in kinds:
        try:
            if kind == "bool" and value.lower() in ("true", "false"):
                return value.lower() == "true"
            if kind in ("int", "float"):
                return {"int": int, "float": float}[kind](value)
        except ValueError:
            continue
    if set(kinds) - {"None", *WORDS}:
        return value if kinds == ["str"] else json_or_text(value)
    needed = ", or ".join(WORDS[kind] for kind in kinds if kind in WORDS)
    raise ConfigError(f"--engine.extra {name}={value}: vLLM's {name} needs {needed}")


def json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


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

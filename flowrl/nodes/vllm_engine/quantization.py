"""fp8 engines that receive weights. vLLM quantizes 16-bit weights while it loads them, at the start and at each update.

A trainer publishes 16-bit weights as for any engine. The scales are made where the weights are loaded, so every
transport works with an fp8 engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flowrl.nodes.vllm_engine.vllm_options import given_name

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

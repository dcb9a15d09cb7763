"""Weights that vLLM keeps in host memory: `Engine.cpu_offload_gb`, or vLLM's prefetched layers (by --engine.extra).

vLLM 0.32 combines neither with the layerwise reload by which an engine takes a version ("has not been implemented").
For prefetched layers it writes the buffers on the device, and the next pass fills these again from the old weights.
Weights that vLLM quantizes while it loads them cannot be moved to the host at all: they are on no device until then.
"""

from __future__ import annotations

from flowrl.nodes.vllm_engine.vllm_options import given_name

PREFETCH = "offload_"
"""Prefix of the names of vLLM's options for prefetched layers."""


def offload_option(cpu_offload_gb: float, extra: tuple[str, ...]) -> str:
    """The option that keeps weights in host memory, as the beginning of a sentence; "" if there is none."""
    if cpu_offload_gb:
        return f"--engine.cpu-offload-gb is {cpu_offload_gb}"
    name = next((name for name in map(given_name, extra) if name.startswith(PREFETCH)), "")
    return f"--engine.extra sets {name!r}" if name else ""


def offload_fixes(option: str) -> str:
    """Why an engine with this `offload_option` takes no whole weights."""
    return (
        f"{option}, and vLLM cannot replace the weights that it keeps in host memory by an update; leave it out, or "
        "train adapters (--lora.rank 32), which leave those weights as they are"
    )


def offload_beside(quantization: str, option: str) -> str:
    """Why no engine can combine this method, which quantizes while it loads, with this `offload_option`."""
    return (
        f"--engine.quantization is {quantization} and {option}, but vLLM cannot keep weights in host memory that it "
        "quantizes while it loads them; leave one of the two out"
    )

"""How glibc allocates memory in the processes that compute a model on a CPU.

By default each large tensor has its own mapping, or is part of a thread's heap that shrinks as soon as it can, so the
kernel clears the tensor's pages again in every pass. The settings here make one heap for all threads, which keeps its
memory, in huge pages if the kernel provides them. With them, an update of SmolLM2 takes 0.8 of its time (`python -m
benchmarks.training.kernels`, with and without --plain-malloc).
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
"""Read when a process starts. Other C libraries ignore it, and an older glibc ignores names that it does not know."""
TUNABLES = {
    "arena_max": 1,
    "mmap_threshold": 1 << 40,
    "trim_threshold": 1 << 40,
    "top_pad": 64 << 20,
    "hugetlb": 1,
}


def keeping(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that keeps its memory; none if `variables` choose an allocator or its settings."""
    if VARIABLE in variables or "malloc" in variables.get("LD_PRELOAD", ""):
        return {}
    return {VARIABLE: ":".join(f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items())}

"""What the CPU of this machine can do, as the kernel tells it, and whether that makes products in bfloat16 fast.

torch gives such products to oneDNN where the CPU has AVX512 with the extensions below or, on Arm, instructions for
bfloat16. Elsewhere it computes them in loops of its own: on an AMD EPYC with AVX2 alone 10 GFLOP/s on a core, where
float32 reaches 90, so that an update of SmolLM2-135M takes 69 s in place of 7 to 9.
"""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FAST_X86 = frozenset({"avx512bw", "avx512dq", "avx512vl"})
FAST_ARM = frozenset({"bf16"})


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The names of its features ("avx2", "bf16"); empty where the kernel does not tell."""
    return frozenset(_field(cpuinfo, "flags", "Features").split())


def cpu_maker(cpuinfo: Path = CPUINFO) -> str:
    """ "GenuineIntel", "AuthenticAMD"; "" where the kernel does not tell, as on Arm."""
    return _field(cpuinfo, "vendor_id")


def _field(cpuinfo: Path, *names: str) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() in names), "")


def is_slow_in_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """False too where the kernel does not tell what the CPU has."""
    flags = cpu_flags(cpuinfo)
    return bool(flags) and not flags >= FAST_X86 and not flags >= FAST_ARM

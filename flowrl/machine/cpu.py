"""What the kernel reports about this machine's CPU, and whether the CPU computes bfloat16 products fast.

torch hands such products to oneDNN if the CPU has AVX512 with the extensions below or, on Arm, bfloat16 instructions.
Otherwise it computes them in loops of its own. An AMD EPYC with only AVX2 then reaches 10 GFLOP/s per core, where
float32 reaches 90, so an update of SmolLM2-135M takes 69 s instead of 7 to 9.
"""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FAST_X86 = frozenset({"avx512bw", "avx512dq", "avx512vl"})
FAST_ARM = frozenset({"bf16"})


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The names of the CPU's features ("avx2", "bf16"); empty if the kernel does not report them."""
    return frozenset(_read_field(cpuinfo, "flags", "Features").split())


def describe_cpu(cpuinfo: Path = CPUINFO) -> str:
    """The CPU and what decides how fast it multiplies: "AMD EPYC without AVX512"."""
    flags, name = cpu_flags(cpuinfo), _read_field(cpuinfo, "model name") or "CPU"
    fast = [told for told, flag in (("AVX512", "avx512f"), ("AMX", "amx_bf16"), ("bf16", "bf16")) if flag in flags]
    return f"{name} with {' and '.join(fast)}" if fast else f"{name} without AVX512" if flags else name


def cpu_maker(cpuinfo: Path = CPUINFO) -> str:
    """ "GenuineIntel", "AuthenticAMD"; "" if the kernel does not report it, as on Arm."""
    return _read_field(cpuinfo, "vendor_id")


def _read_field(cpuinfo: Path, *names: str) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() in names), "")


def is_slow_in_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether bfloat16 products are slow on this CPU; False if the kernel does not report its features."""
    flags = cpu_flags(cpuinfo)
    return bool(flags) and not flags >= FAST_X86 and not flags >= FAST_ARM

"""What `flowrl doctor` finds out on one machine: packages, driver, devices, /dev/shm, compilers, bandwidths."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from typing import Literal

from flowrl.errors import ConfigError
from flowrl.graph.machine import ENOUGH, GB, Cluster, GpuLinks, gpu_names, most_files
from flowrl.machine.cpu import describe_cpu, is_slow_in_bfloat16
from flowrl.machine.orphans import run_program
from flowrl.nodes.generation.vllm_processes import check_vllm_version
from flowrl.training.engine.requirements import check_nvcc, check_python_headers
from flowrl.wire.connection import CurveKeys, local_ip

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """What was found; `remedy` says how to correct a problem."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measured values, by name."""

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.status in ("warning", "failed")), (self.name, self.status, self.remedy)


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, with its remedy below."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8} {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)


LEAST_DRIVER = 580
"""The packages are built for CUDA 13."""
LEAST_SHM_BYTES = GB
LEAST_FILES = 4096
"""A run opens a socket for each pair of processes, and vLLM some hundred files."""
COPIED_BYTES = 256 << 20
CHUNK_BYTES = 4 << 20
ROUNDS = 200
LEAST_SHM_RATE, LEAST_TCP_RATE = 0.3e9, 0.03e9
"""Bytes per second below which weights and messages have to wait for the memory or for the network."""


def machine_findings() -> Iterator[Finding]:
    """All findings, one after the other."""
    yield Finding("python", "ok", f"Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} cores")
    yield from find_slow_cpu()
    yield find_packages()
    yield _run_check("vllm", check_vllm_version, "vLLM")
    yield from find_devices()
    yield shared_memory()
    yield from find_compilers()
    yield open_files()
    yield shared_memory_rate()
    yield loopback_rate()


def find_slow_cpu() -> Iterator[Finding]:
    """A warning if this machine has to compute on a CPU that is slow in bfloat16."""
    if not gpu_names() and is_slow_in_bfloat16():
        found = f"this CPU ({describe_cpu()}) multiplies bfloat16 some ten times slower than float32"
        remedy = "train and sample in float32 (--dtype, --engine.dtype), which is the default here"
        yield Finding("bfloat16", "warning", found, remedy)


def find_packages() -> Finding:
    """Whether the installed versions of flowrl's dependencies are those that it asks for."""
    if foreign := _foreign():
        return Finding("packages", "failed", *foreign)
    try:
        wrong = list(_wrong_packages(requires("flowrl-engine") or ()))
    except PackageNotFoundError:
        found = "flowrl is imported from a directory that no package was installed from"
        return Finding("packages", "failed", found, "run make setup, or pip install -e . there")
    if wrong:
        return Finding("packages", "failed", "; ".join(wrong), "run make setup, or pip install . in a checkout")
    return Finding("packages", "ok", f"flowrl {version('flowrl-engine')} and all packages that it asks for")


def _foreign() -> tuple[str, str] | None:
    """(what is wrong, the remedy) if a distribution `flowrl` is installed: its files are imported in place of ours."""
    try:
        named = distribution("flowrl")
    except PackageNotFoundError:
        return None
    about = named.metadata["Summary"] or "without a description"
    remedy = "pip uninstall flowrl, and install flowrl again: pip install . in a checkout"
    return f"the distribution flowrl {named.version} ({about}) is not this project, whose name is flowrl-engine", remedy


def _wrong_packages(asked_for: Iterable[str]) -> Iterator[str]:
    from packaging.requirements import Requirement

    for text in asked_for:
        asked = Requirement(text)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(asked.name)
        except PackageNotFoundError:
            yield f"{asked.name} is missing"
            continue
        if not asked.specifier.contains(found, prereleases=True):
            yield f"{asked.name} is {found}, not {asked.specifier}"


def _run_check(name: str, check: Callable[[], object], found: str) -> Finding:
    """The finding of a check that raises ConfigError."""
    try:
        answer = check()
    except ConfigError as problem:
        told, _, remedy = str(problem).rpartition("; ")
        return Finding(name, "failed", told or remedy, remedy)
    return Finding(name, "ok", f"{found} {answer}" if isinstance(answer, str) else found)


def find_devices() -> Iterator[Finding]:
    """Driver, GPUs as torch sees them, and whether they reach each other's memory."""
    driver = _driver()
    count = Cluster.here().num_gpus
    if driver is None and not count:
        for name in ("driver", "gpus", "gpu links", "peer access"):
            yield Finding(name, "skipped", "no NVIDIA GPU here: models run on CPUs")
        return
    yield _driver_finding(driver)
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < count or not seen:
        remedy = "install the GPU packages (FLOWRL_DEVICE=gpu make setup, or pip install '.[gpu]' in a checkout)"
        yield Finding("gpus", "failed", f"{count} devices, of which torch {torch.__version__} sees {seen}", remedy)
        for name in ("gpu links", "peer access"):
            yield Finding(name, "skipped", "torch sees no GPU")
        return
    names = [torch.cuda.get_device_properties(index) for index in range(seen)]
    yield Finding("gpus", "ok", ", ".join(f"{one.name} {one.total_memory / GB:.1f} GiB" for one in names))
    yield links_finding(Cluster.here().machines[0].links)
    yield _peer_finding(seen, torch.cuda.can_device_access_peer)


def _driver() -> str | None:
    """Version of the NVIDIA driver, None without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = run_program(command, within_s=20)
        done.check_returncode()
        told = done.stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told.split()[0] if told.split() else None


def _driver_finding(driver: str | None) -> Finding:
    remedy = f"install an NVIDIA driver of version {LEAST_DRIVER} or newer, which CUDA 13 needs"
    if driver is None:
        return Finding("driver", "failed", "there are GPUs, but nvidia-smi does not answer", remedy)
    major = driver.partition(".")[0]
    if not major.isdigit() or int(major) < LEAST_DRIVER:
        return Finding("driver", "failed", f"version {driver}", remedy)
    return Finding("driver", "ok", f"version {driver}")


def links_finding(links: GpuLinks | None) -> Finding:
    """Which GPUs have NVLink between them, and which are on one NUMA node, as the plan of a run counts them."""
    if links is None:
        return Finding("gpu links", "skipped", "nvidia-smi topo -m gives no answer; a run places GPUs by their numbers")
    joined = [_span_text(group) for group in links.groups(links.has_nvlink) if len(group) > 1]
    found = [f"NVLink between {' | '.join(joined)}"] if joined else ["no NVLink"] if len(links) > 1 else []
    by_cores: dict[tuple[int, ...], list[int]] = {}
    for gpu, cores in enumerate(links.cores):
        by_cores.setdefault(cores, []).append(gpu)
    found += [f"{_span_text(gpus)} beside cores {_span_text(cores)}" for cores, gpus in by_cores.items() if cores]
    return Finding("gpu links", "ok", "; ".join(found) or "one GPU")


def _span_text(numbers: Sequence[int]) -> str:
    """0-3,8,9 for 0, 1, 2, 3, 8 and 9."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    spans = zip(starts, ends, strict=True)
    return ",".join(
        f"{low}-{high}" if high > low + 1 else ",".join(map(str, range(low, high + 1))) for low, high in spans
    )


def _peer_finding(count: int, reaches: Callable[[int, int], bool]) -> Finding:
    if count < 2:
        return Finding("peer access", "skipped", "one GPU")
    apart = [(one, other) for one in range(count) for other in range(one + 1, count) if not reaches(one, other)]
    if not apart:
        return Finding("peer access", "ok", f"all pairs of {count} GPUs")
    pairs = ", ".join(f"{one}-{other}" for one, other in apart[:4])
    remedy = "weights and gradients go through host memory there: see nvidia-smi topo -m, and IOMMU or ACS settings"
    return Finding("peer access", "warning", f"{len(apart)} pairs have none ({pairs})", remedy)


def shared_memory() -> Finding:
    """Room in /dev/shm for messages and weights."""
    room = Cluster.here().machines[0].shm_bytes
    remedy = "make it larger: docker run --shm-size=16g, an emptyDir with medium: Memory, or mount -o remount,size=16g"
    numbers = {"shm_bytes": float(room)}
    if room < LEAST_SHM_BYTES:
        return Finding("/dev/shm", "failed", f"{room / GB:.2f} GiB free, for weights and messages", remedy, numbers)
    return Finding("/dev/shm", "ok", f"{room / GB:.1f} GiB free", numbers=numbers)


def find_compilers() -> Iterator[Finding]:
    """The compilers that are needed for code compiled at its first use."""
    missing = [name for name in ("gcc", "g++") if shutil.which(name) is None]
    if missing:
        remedy = "install them, on Debian: apt-get install g++"
        yield Finding("compilers", "failed", f"{' and '.join(missing)} not found", remedy)
    else:
        yield Finding("compilers", "ok", "gcc, g++")
    yield _run_check("Python.h", lambda: check_python_headers("what Triton starts vLLM's kernels with"), "found")
    if Cluster.here().num_gpus:
        yield _run_check("nvcc", lambda: check_nvcc("DeepSpeed's async_io (--zero.nvme-path)"), "found, or not needed")
    else:
        yield Finding("nvcc", "skipped", "no NVIDIA GPU here")


def open_files() -> Finding:
    most = most_files()
    if most < LEAST_FILES:
        remedy = f"raise the hard limit: LimitNOFILE= of a service, docker run --ulimit nofile={ENOUGH}"
        return Finding("open files", "warning", f"at most {most}", remedy)
    return Finding("open files", "ok", f"at most {most}")


def shared_memory_rate() -> Finding:
    """Bytes per second that can be written to /dev/shm and read back."""
    data = bytes(CHUNK_BYTES)
    try:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            began = time.perf_counter()
            for _ in range(COPIED_BYTES // CHUNK_BYTES):
                file.write(data)
            file.seek(0)
            while file.readinto(bytearray(CHUNK_BYTES)):
                pass
            seconds = time.perf_counter() - began
    except OSError as error:
        return Finding("shared memory", "failed", f"/dev/shm cannot be written: {error}", "make it writable and larger")
    return _rate_finding("shared memory", 2 * COPIED_BYTES / seconds, LEAST_SHM_RATE, {})


def loopback_rate() -> Finding:
    """Round trip and bytes per second over tcp with CURVE, from this process to itself."""
    with Echo(CurveKeys.new()) as echo:
        round_trip_s, rate = measure_link(echo.url, echo.keys)
    return _rate_finding("loopback, CURVE", rate, LEAST_TCP_RATE, {"round_trip_s": round_trip_s})


def _rate_finding(name: str, rate: float, least: float, numbers: dict[str, float]) -> Finding:
    found = f"{rate / 1e9:.2f} GB/s" + "".join(f", round trip {1e6 * s:.0f} µs" for s in numbers.values())
    numbers = {**numbers, "bytes_per_s": rate}
    if rate < least:
        remedy = f"expected {least / 1e9:g} GB/s or more: look for other jobs, or for a limit of the container"
        return Finding(name, "warning", found, remedy, numbers)
    return Finding(name, "ok", found, numbers=numbers)


class Echo:
    """Answers on tcp with CURVE, in its own thread: a message of one byte with the same byte, other messages with their
    length."""

    def __init__(self, keys: CurveKeys, ip: str = "") -> None:
        import threading

        import zmq

        self.keys = keys
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        ip = ip or local_ip()
        self.url = f"tcp://{ip}:{self._socket.bind_to_random_port(f'tcp://{ip}')}"
        self._thread = threading.Thread(target=self._answer, name="flowrl-echo", daemon=True)
        self._thread.start()

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.term()  # ends the thread's wait, and returns when the thread has closed its socket
        self._thread.join()

    def _answer(self) -> None:
        import zmq

        try:
            while True:
                message = self._socket.recv()
                self._socket.send(message if len(message) == 1 else str(len(message)).encode())
        except zmq.ContextTerminated:
            self._socket.close(linger=0)


def measure_link(
    url: str, keys: CurveKeys, *, num_bytes: int = COPIED_BYTES // 4, within_s: float = 5.0
) -> tuple[float, float]:
    """(round trip in seconds, bytes per second) to an `Echo`. Raises ConfigError if it does not answer."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.REQ) as link:
        link.linger, link.rcvtimeo, link.sndtimeo = 0, int(1000 * within_s), int(1000 * within_s)
        link.curve_serverkey, link.curve_publickey, link.curve_secretkey = keys.public, keys.public, keys.secret
        link.connect(url)
        try:
            link.send(b"x")
            link.recv()
            began = time.perf_counter()
            for _ in range(ROUNDS):
                link.send(b"x")
                link.recv()
            half = time.perf_counter()
            data = bytes(CHUNK_BYTES)
            for _ in range(num_bytes // CHUNK_BYTES):
                link.send(data, copy=False)
                link.recv()
        except zmq.Again:
            raise ConfigError(f"{url} does not answer within {within_s:g} s; open tcp between the machines") from None
        return (half - began) / ROUNDS, num_bytes / (time.perf_counter() - half)

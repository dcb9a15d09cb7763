"""Runs a command and watches the memory of all of its processes.

A page that several processes map counts once: each of them has its proportional part (Pss of the kernel). Files in
/dev/shm that no process maps at the moment, such as weights that wait for their reader, count too.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import psutil

from flowrl.runtime.driver.resources import HOST_VARIABLE

EVERY_S = 1.0
"""Between two looks at the processes; each look takes some milliseconds per process."""
SHARED = "shared memory"


class CommandFailed(Exception):
    """A command that did not end well; the message has the end of its output."""


@dataclass(frozen=True)
class Watched:
    """A command that has ended."""

    seconds: float
    peak_bytes: int
    """Largest sum of memory over its processes at one time."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Process, by what it is for -> its bytes at that time; and `SHARED`."""


def watch(command: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path, limit_s: float) -> Watched:
    """Run `command` with its output in `log`; raises CommandFailed if it fails or takes longer than `limit_s`.

    The process and those it started are ended if the caller is interrupted or the limit is reached.
    """
    start, peak = monotonic(), Counter[str]()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(env), cwd=cwd)
        try:
            while (status := _ended(process)) is None and monotonic() - start < limit_s:
                peak = max(peak, memory_by_process(process), key=Counter.total)
        finally:
            _end(process)
    if status != 0:
        why = f"took longer than {limit_s:.0f} s" if status is None else f"ended with status {status}"
        end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise CommandFailed(f"{' '.join(command[:6])} … {why}; the end of {log}:\n{end}")
    return Watched(monotonic() - start, peak.total(), dict(peak.most_common()))


def memory_by_process(process: psutil.Process) -> Counter[str]:
    """Bytes of a process and of all that descend from it, by what they are for, and of the memory that they share."""
    found, mapped, pids = Counter[str](), 0, []
    for one in (process, *process.children(recursive=True)):
        try:
            told = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
            name = process_name(one)
        except (OSError, psutil.NoSuchProcess):
            continue  # it has ended meanwhile
        parts = {key: int(kib) << 10 for key, kib in re.findall(r"^Pss_(\w+): +(\d+) kB", told, re.MULTILINE)}
        found[name] += parts["Anon"] + parts["File"]
        mapped += parts["Shmem"]
        pids.append(one.pid)
    found[SHARED] = max(mapped, _segments_bytes(pids))
    return found


def process_name(process: psutil.Process) -> str:
    """What a process of a run is for: its host, vLLM's engine there, Ray, or the command itself."""
    title = " ".join(process.cmdline())
    host = process.environ().get(HOST_VARIABLE, "")
    if host:
        return f"{host}, vLLM's engine" if "EngineCore" in title else host
    return "Ray" if "/ray/" in title or title.startswith("ray::") else "driver" if "flowrl" in title else "others"


def _segments_bytes(pids: Iterable[int]) -> int:
    """Bytes of the weights and messages in /dev/shm that these processes have made; their names have the process."""
    made = re.compile(rf"flowrl-[^-]+-({'|'.join(map(str, pids))})-")
    files = [path for path in Path("/dev/shm").iterdir() if made.match(path.name)]
    total = 0
    for path in files:
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def _ended(process: psutil.Popen) -> int | None:
    """The exit status, or None if the process has not ended within `EVERY_S`."""
    try:
        return int(process.wait(EVERY_S))
    except psutil.TimeoutExpired:
        return None


def _end(process: psutil.Popen) -> None:
    """Ask the process to end, so that it can end its own; whatever still lives after a while is killed."""
    if not process.is_running():
        return
    below = process.children(recursive=True)
    process.terminate()
    _, living = psutil.wait_procs([process, *below], timeout=30)
    for one in living:
        one.kill()

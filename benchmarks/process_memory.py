"""Runs a command and watches the memory of all of its processes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import psutil

EVERY_S = 1.0
"""Between two looks at the processes; each look takes about a millisecond per process."""


class CommandFailed(Exception):
    """A command that did not end well; the message has the end of its output."""


@dataclass(frozen=True)
class Watched:
    """A command that has ended."""

    seconds: float
    peak_rss_bytes: int
    """Largest sum of resident memory over its processes at one time; pages that several share count in each."""


def watch(command: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path, limit_s: float) -> Watched:
    """Run `command` with its output in `log`; raises CommandFailed if it fails or takes longer than `limit_s`.

    The process and those it started are ended if the caller is interrupted or the limit is reached.
    """
    start, peak = monotonic(), 0
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(env), cwd=cwd)
        try:
            while (status := _ended(process)) is None and monotonic() - start < limit_s:
                peak = max(peak, resident_bytes(process))
        finally:
            _end(process)
    if status != 0:
        why = f"took longer than {limit_s:.0f} s" if status is None else f"ended with status {status}"
        end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise CommandFailed(f"{' '.join(command[:6])} … {why}; the end of {log}:\n{end}")
    return Watched(monotonic() - start, peak)


def resident_bytes(process: psutil.Process) -> int:
    """Sum over a process and all that descend from it, of those that live."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
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

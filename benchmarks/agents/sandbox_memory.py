"""How far the memory of a sandbox exceeds its limit before it is ended, and what looking at it costs.

    python -m benchmarks.agents.sandbox_memory --repetitions 5

Eight processes of a sandbox fill memory as fast as they can. What they hold is added up outside, every millisecond, by
its processes' proportional share. The second table is the processor time that the watching process takes while the
interpreter waits.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

from flowrl.environments.tools.sandbox.sandbox_process import SandboxEnded, SandboxProcess, SandboxSettings

MIB = 1 << 20
FILL = """
import mmap, os, time
for _ in range({processes}):
    if os.fork() == 0:
        held = []
        while True:
            one = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE)
            one.madvise({advice})
            for place in range(0, len(one), 4096):
                one[place] = 1
            held.append(one)
time.sleep(60)
"""
WAIT_S = 5.0


def held_bytes(watcher: int) -> int:
    """The private memory of all descendants of a process."""
    total, found = 0, [watcher]
    for pid in found:
        with suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            if pid != watcher:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
    return total


class Peak(threading.Thread):
    """The largest `held_bytes` until `stop`."""

    def __init__(self, watcher: int) -> None:
        super().__init__()
        self.watcher, self.most, self.over = watcher, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.001):
            self.most = max(self.most, held_bytes(self.watcher))


async def exceeded(limit_bytes: int, processes: int, *, huge: bool) -> int:
    """The largest memory of a sandbox with this limit."""
    process = SandboxProcess(SandboxSettings(memory_bytes=limit_bytes), seed=0)
    await process.start_sandbox()
    peak = Peak(process._process.pid)
    peak.start()
    with suppress(SandboxEnded):
        await process.run_code(FILL.format(processes=processes, advice=14 if huge else 15))
    peak.over.set()
    peak.join()
    await process.end_sandbox()
    return peak.most


async def watching_s() -> float:
    """Processor time of the watching process in a second in which the interpreter waits."""
    process = SandboxProcess(SandboxSettings(), seed=0)
    await process.start_sandbox()

    def used() -> float:
        fields = Path(f"/proc/{process._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    began_s, before = time.monotonic(), used()
    await process.run_code(f"import time; time.sleep({WAIT_S})")
    spent = (used() - before) / (time.monotonic() - began_s)
    await process.end_sandbox()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--processes", type=int, default=8)
    given = parser.parse_args()
    print("limit MiB  pages   largest MiB: median [least, most]")
    for limit in (256, 512, 1024):
        for huge in (False, True):
            most = [
                asyncio.run(exceeded(limit * MIB, given.processes, huge=huge)) / MIB for _ in range(given.repetitions)
            ]
            pages = "2 MiB" if huge else "4 KiB"
            print(f"{limit:9}  {pages}  {statistics.median(most):9.0f} [{min(most):.0f}, {max(most):.0f}]", flush=True)
    print(f"watching an interpreter that waits: {asyncio.run(watching_s()):.4f} of a core")


if __name__ == "__main__":
    main()

"""What a process an episode costs: milliseconds to its first observation and MiB, forked and as a fresh interpreter.

Memory is the process's own (USS: private pages), read after the first observation with all episodes alive. A fresh
interpreter imports flowrl's environments and makes the same one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from flowrl.environments import Action, Episodes, environment_rows

FRESH = """
import asyncio, sys
from flowrl.environments.environment_class import find_environment
env = find_environment(sys.argv[1]).make_environment()
asyncio.run(env.reset({}, int(sys.argv[2])))
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Options:
    name: str = "gymnasium/FrozenLake-v1"
    episodes: int = 32
    """Forked ones that are alive together."""
    fresh: int = 8
    repeats: int = 3


def own_mib(pid: int) -> float:
    """Private memory of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def children(pid: int | None) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def forked(options: Options) -> tuple[list[float], list[float], list[float]]:
    """For each episode: ms to its first observation, ms a step, MiB."""
    rows = environment_rows(options.name).train
    begin_ms, step_ms = [], []
    async with Episodes(options.name) as pool:
        episodes = []
        for row in rows[: options.episodes]:
            began_s = time.perf_counter()
            episodes.append(await pool.reset(row))
            begin_ms.append((time.perf_counter() - began_s) * 1000)
        mib = [own_mib(pid) for pid in children(pool.zygote_pid)]
        for episode in episodes:
            began_s = time.perf_counter()
            await episode.step(Action("0"))
            step_ms.append((time.perf_counter() - began_s) * 1000)
            await episode.close()
    return begin_ms, step_ms, mib


def fresh(options: Options) -> tuple[list[float], list[float]]:
    """For each interpreter: ms to its first observation, and MiB."""
    begin_ms, mib = [], []
    for seed in range(options.fresh):
        began_s = time.perf_counter()
        command = [sys.executable, "-c", FRESH, options.name, str(seed)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            begin_ms.append((time.perf_counter() - began_s) * 1000)
            mib.append(own_mib(process.pid))
            process.stdin.close()
    return begin_ms, mib


def main(options: Options) -> None:
    print(f"{'':14}{'':>12}{'median':>10}{'least':>10}{'most':>10}")
    for repeat in range(options.repeats):
        begin_ms, step_ms, mib = asyncio.run(forked(options))
        fresh_ms, fresh_mib = fresh(options)
        figures = {
            "forked": {"begin ms": begin_ms, "step ms": step_ms, "MiB": mib},
            "fresh": {"begin ms": fresh_ms, "MiB": fresh_mib},
        }
        for kind, columns in figures.items():
            for what, values in columns.items():
                middle = statistics.median(values)
                print(f"{kind:14}{what:>12}{middle:10.2f}{min(values):10.2f}{max(values):10.2f}")
                print(json.dumps({"repeat": repeat, "kind": kind, "what": what, "median": middle, "all": values}))


if __name__ == "__main__":
    main(tyro.cli(Options))

"""Rows in memory and rows that stay on disk: peak memory, time to read the file, and time of a row, in one run.

    python -m benchmarks.rows_on_disk --gigabytes 2

Writes a file of JSON lines into a temporary directory, and reads it in a process of its own for each way, several
times in turn. Reading is what every process of a run that needs rows does before the first step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import string
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from flowrl.tasks import Task, load_rows

LOOKED_UP = 10_000
Found = tuple[float, float, float, int]
"""Peak memory in MiB above that of the empty process, seconds of reading, milliseconds of a row, number of rows."""


def write(path: Path, num_bytes: int, text_bytes: int) -> None:
    """Rows with a prompt of `text_bytes` each, all different."""
    rng = random.Random(0)
    filler = "".join(rng.choices(string.ascii_letters + " ", k=text_bytes))
    with path.open("w") as file:
        number = 0
        while file.tell() < num_bytes:
            rows = ({"prompt": f"{n} {filler}", "answer": str(n)} for n in range(number, number + 1000))
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            number += 1000


def read(path: Path, where: str) -> Found:
    """What one way needs, measured in a new process."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(f"{path}:rows={where}", theirs))
    process.start()
    theirs.close()
    found: Found = mine.recv()
    process.join()
    return found


def _measured(name: str, target: Connection) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    rows = load_rows(Task(name)).train
    took = time.perf_counter() - start
    rng, start = random.Random(1), time.perf_counter()
    for _ in range(LOOKED_UP):
        _ = rows[rng.randrange(len(rows))].prompt
    each_ms = (time.perf_counter() - start) / LOOKED_UP * 1000
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target.send(((peak - before) / 1024, took, each_ms, len(rows)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--text-bytes", type=int, default=1000, help="of one prompt")
    parser.add_argument("--times", type=int, default=2)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "rows.jsonl"
        write(path, int(options.gigabytes * 1e9), options.text_bytes)
        found = {where: [] for where in ("memory", "disk")}  # type: dict[str, list[Found]]
        for _ in range(options.times):
            for where, results in found.items():
                results.append(read(path, where))
                print(json.dumps({"rows": where, "measured": results[-1]}), flush=True)
        print(f"\n{path.stat().st_size / 1e9:.2f} GB\n")
    print("| rows | training rows | peak MiB | reading s | one row ms |\n|---|---|---|---|---|")
    for where, results in found.items():
        peaks, times, each, numbers = zip(*results, strict=True)
        spread = f"{min(times):.0f}–{max(times):.0f}"
        print(f"| {where} | {numbers[0]} | {max(peaks):.0f} | {spread} | {statistics.median(each):.3f} |")


if __name__ == "__main__":
    main()

"""Rows in memory and rows that stay on disk: peak memory, time to read the file, and time of a row, in one run.

    python -m benchmarks.rows_on_disk --gigabytes 2
    python -m benchmarks.rows_on_disk --gigabytes 0.3 --formats jsonl.gz jsonl.zst csv json parquet

Writes a file of each format into a temporary directory, and reads it in a process of its own for each way, several
times in turn. Reading is what every process of a run that needs rows does before the first step; the first one that
leaves a compressed or Parquet file on disk also makes the copy that the others use, which is timed apart.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import string
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flowrl.tasks import Task, load_rows
from flowrl.tasks.spooled import plain_file

LOOKED_UP = 10_000
Table = list[dict[str, str]]
Found = tuple[float, float, float, int, float]
"""Peak memory in MiB above that of the empty process, seconds of reading, milliseconds of a row, number of rows, and
seconds of copying."""


def write(path: Path, num_bytes: int, text_bytes: int) -> int:
    """Rows with a prompt of `text_bytes` each, all different, `num_bytes` as JSON lines; the number of rows."""
    rng = random.Random(0)
    filler = "".join(rng.choices(string.ascii_letters + " ", k=text_bytes))
    rows = [{"prompt": f"{n} {filler}", "answer": str(n)} for n in range(max(1, num_bytes // (text_bytes + 40)))]
    form, _, packing = path.name.partition(".")[2].partition(".")
    WRITERS[form](path if not packing else path.with_suffix(""), rows)
    if packing:
        _pack(path.with_suffix(""), path)
    return len(rows)


def _lines(path: Path, rows: Table) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _array(path: Path, rows: Table) -> None:
    with path.open("w") as file:
        file.write("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def _csv(path: Path, rows: Table) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _parquet(path: Path, rows: Table) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path, Table], None]] = {
    "jsonl": _lines,
    "json": _array,
    "csv": _csv,
    "parquet": _parquet,
}


def _pack(plain: Path, packed: Path) -> None:
    import pyarrow

    codec = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}[packed.suffix]
    with plain.open("rb") as source, pyarrow.output_stream(packed, compression=codec) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    plain.unlink()


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
    begun = time.perf_counter()
    if name.endswith("rows=disk"):
        plain_file(Path(name.partition(":")[0]))
    copied = time.perf_counter()
    rows = load_rows(Task(name)).train
    took = time.perf_counter() - copied
    rng, start = random.Random(1), time.perf_counter()
    for _ in range(LOOKED_UP):
        _ = rows[rng.randrange(len(rows))].prompt
    each_ms = (time.perf_counter() - start) / LOOKED_UP * 1000
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target.send(((peak - before) / 1024, took, each_ms, len(rows), copied - begun))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--text-bytes", type=int, default=1000, help="of one prompt")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--formats", nargs="+", default=["jsonl"], help="such as jsonl.gz, csv, json, parquet")
    options = parser.parse_args(argv)
    lines = [
        "| format | file | copy | rows | training rows | peak MiB | copying s | reading s | one row ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for form in options.formats:
        with tempfile.TemporaryDirectory() as home:
            os.environ["FLOWRL_CACHE"] = f"{home}/cache"
            lines += measured(Path(home) / f"rows.{form}", int(options.gigabytes * 1e9), options)
    print("\n".join(["", *lines]))


def measured(path: Path, num_bytes: int, options: argparse.Namespace) -> list[str]:
    """The lines of the table for one format."""
    in_child(write, path, num_bytes, options.text_bytes)
    found: dict[str, list[Found]] = {where: [] for where in ("memory", "disk")}
    for _ in range(options.times):
        for where, results in found.items():
            results.append(read(path, where))
            print(json.dumps({"file": path.name, "rows": where, "measured": results[-1]}), flush=True)
    copy = sum(file.stat().st_size for file in (path.parent / "cache" / "rows").glob("*/rows"))
    lines = []
    for where, results in found.items():
        peaks, times, each, numbers, copies = zip(*results, strict=True)
        sizes = [f"{size / 1e9:.2f} GB" if size else "–" for size in (path.stat().st_size, copy * (where == "disk"))]
        cells = [path.name.partition(".")[2], *sizes, where, numbers[0], f"{max(peaks):.0f}", f"{max(copies):.0f}"]
        lines.append(
            f"| {' | '.join(map(str, cells))} | {min(times):.0f}–{max(times):.0f} | {statistics.median(each):.3f} |"
        )
    return lines


def in_child(function: Callable[..., Any], *args: Any) -> None:
    """Call it in a process of its own, which takes its memory with it."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()

"""Rows in memory and rows that stay on disk: peak memory, time to read the file, and time of a row, in one run.

    python -m benchmarks.data.rows_on_disk --gigabytes 2
    python -m benchmarks.data.rows_on_disk --gigabytes 0.3 --formats jsonl.gz jsonl.zst csv json parquet saved
    python -m benchmarks.data.rows_on_disk --gigabytes 0.3 --kinds mixture pairs labelled conversations texts

Writes a file of each format, or a directory with `save_to_disk`, for each kind of rows into a temporary directory, and
reads it in a process of its own for each way, several times in turn. Reading is what every process of a run that needs
rows does before the first step; of texts it is also the tokenizing, with a tokenizer of characters. The first process
that leaves a compressed file, Parquet or a saved dataset on disk also makes the copy that the others use, which is
timed apart.
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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flowrl.models.token_store import HeldTokens, TokenFile
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.models.tokens.text_tokens import text_tokens
from flowrl.nodes.sources.plain_text import TextPieces
from flowrl.tasks import Rows, Task, load_demonstrations, load_preferences, load_rows, load_texts
from flowrl.tasks.row_reading.rows_on_disk import plain_file

LOOKED_UP = 10_000
Table = list[dict[str, Any]]
Found = tuple[float, float, float, int, float]
"""Peak memory in MiB above that of the empty process, seconds of reading, milliseconds of a row, number of rows, and
seconds of copying."""


def _conversation(number: str, filler: str) -> dict[str, Any]:
    messages = [("user", number), ("assistant", filler), ("user", f"{number} again"), ("assistant", number)]
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


KINDS: dict[str, tuple[Callable[[str, str], dict[str, Any]], Callable[..., Rows]]] = {
    "prompts": (lambda number, filler: {"prompt": f"{number} {filler}", "answer": number}, load_rows),
    "mixture": (lambda number, filler: {"prompt": f"{number} {filler}", "answer": number}, load_rows),
    "pairs": (
        lambda number, filler: {"prompt": number, "chosen": filler, "rejected": number},
        partial(load_preferences, kind="pairs"),
    ),
    "labelled": (
        lambda number, filler: {"prompt": number, "completion": filler, "label": len(number) % 2 == 0},
        partial(load_preferences, kind="labelled"),
    ),
    "conversations": (_conversation, load_demonstrations),
    "texts": (lambda number, filler: {"text": f"{number} {filler}"}, load_texts),
}
"""Kind of rows -> a record from its number and a text, and what loads the rows."""


def write(path: Path, kind: str, num_bytes: int, text_bytes: int, first: int) -> None:
    """Rows with a text of `text_bytes` each, all different, `num_bytes` as JSON lines."""
    rng = random.Random(0)
    filler = "".join(rng.choices(string.ascii_letters + " ", k=text_bytes))
    make, _ = KINDS[kind]
    rows = [make(str(first + n), filler) for n in range(max(1, num_bytes // (text_bytes + 40)))]
    form, _, packing = path.name.partition(".")[2].partition(".")
    WRITERS[form](path if not packing else path.with_suffix(""), rows)
    if packing:
        _pack(path.with_suffix(""), path)


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


def _saved(path: Path, rows: Table) -> None:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(path)


WRITERS: dict[str, Callable[[Path, Table], None]] = {
    "jsonl": _lines,
    "json": _array,
    "csv": _csv,
    "parquet": _parquet,
    "saved": _saved,
}


def _pack(plain: Path, packed: Path) -> None:
    import pyarrow

    codec = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}[packed.suffix]
    with plain.open("rb") as source, pyarrow.output_stream(packed, compression=codec) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    plain.unlink()


def read(kind: str, paths: Sequence[Path], where: str) -> Found:
    """What one way needs, measured in a new process."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(kind, paths, where, theirs))
    process.start()
    theirs.close()
    found: Found = mine.recv()
    process.join()
    return found


def _measured(kind: str, paths: Sequence[Path], where: str, target: Connection) -> None:
    tokenizer = character_tokenizer() if kind == "texts" else None
    if any(path.is_dir() for path in paths):
        import datasets  # noqa: F401
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    if where == "disk":
        for path in paths:
            plain_file(path, "train")
    copied = time.perf_counter()
    share = 1 / len(paths)
    name = " + ".join(f"{share:g}*{path}:rows={where}" if len(paths) > 1 else f"{path}:rows={where}" for path in paths)
    rows: Any = KINDS[kind][1](Task(name)).train
    if kind == "texts":
        store = TokenFile() if where == "disk" else HeldTokens()
        rows = TextPieces(text_tokens(tokenizer, (row.prompt for row in rows)), store, 512, joined=True)
    took = time.perf_counter() - copied
    rng, start = random.Random(1), time.perf_counter()
    for _ in range(LOOKED_UP):
        _ = rows[rng.randrange(len(rows))].prompt_id
    each_ms = (time.perf_counter() - start) / LOOKED_UP * 1000
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target.send(((peak - before) / 1024, took, each_ms, len(rows), copied - begun))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--text-bytes", type=int, default=1000, help="of one prompt")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--formats", nargs="+", default=["jsonl"], help="such as jsonl.gz, csv, json, parquet")
    parser.add_argument("--kinds", nargs="+", default=["prompts"], choices=list(KINDS))
    options = parser.parse_args(argv)
    lines = [
        "| kind | format | file | copy | rows | training rows | peak MiB | copying s | reading s | one row ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in options.kinds:
        for form in options.formats:
            with tempfile.TemporaryDirectory() as home:
                os.environ["FLOWRL_CACHE"] = f"{home}/cache"
                number = 2 if kind == "mixture" else 1
                lines += measured(kind, [Path(home) / f"rows{n}.{form}" for n in range(number)], options)
    print("\n".join(["", *lines]))


def measured(kind: str, paths: Sequence[Path], options: argparse.Namespace) -> list[str]:
    """The lines of the table for one kind and format."""
    num_bytes = int(options.gigabytes * 1e9 / len(paths))
    for number, path in enumerate(paths):
        in_child(write, path, kind, num_bytes, options.text_bytes, number * num_bytes)
    found: dict[str, list[Found]] = {where: [] for where in ("memory", "disk")}
    for _ in range(options.times):
        for where, results in found.items():
            results.append(read(kind, paths, where))
            told = {"kind": kind, "files": [path.name for path in paths], "rows": where, "measured": results[-1]}
            print(json.dumps(told), flush=True)
    size, copy = _bytes_of(paths[0].parent, "rows*"), _bytes_of(paths[0].parent / "cache" / "rows", "*/rows")
    lines = []
    for where, results in found.items():
        peaks, times, each, numbers, copies = zip(*results, strict=True)
        sizes = [f"{one / 1e9:.2f} GB" if one else "–" for one in (size, copy * (where == "disk"))]
        cells = [kind, paths[0].name.partition(".")[2], *sizes, where, numbers[0]]
        cells += [f"{max(peaks):.0f}", f"{max(copies):.0f}"]
        lines.append(
            f"| {' | '.join(map(str, cells))} | {min(times):.0f}–{max(times):.0f} | {statistics.median(each):.3f} |"
        )
    return lines


def _bytes_of(home: Path, pattern: str) -> int:
    """Size of the files and directories that match."""
    found = [file for path in home.glob(pattern) for file in (path.rglob("*") if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in found if file.is_file())


def in_child(function: Callable[..., Any], *args: Any) -> None:
    """Call it in a process of its own, which takes its memory with it."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()

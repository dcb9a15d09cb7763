"""`rollouts/`: the samples that a run keeps, as Parquet files whose names say which steps they contain.

`train_FIRST-LAST_NUMBER.parquet` contains samples that were admitted, `held_out_FIRST-LAST_NUMBER.parquet` answers of
evaluations; FIRST and LAST are steps, and NUMBER grows with every file. `schema` defines the columns.

Invariants
- A file under its final name is complete: it is written under another name, which begins with a dot.
- The files of training samples have at most MOST_BYTES together: the oldest are removed. Files of evaluations stay.
- After a resume, no row describes work that the resume has undone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.runtime.samples.sample_record import TRAIN, SampleRecord

FOLDER = "rollouts"
MOST_BYTES = 8 << 30
ROWS_TOGETHER = 256
"""Rows that a reader decodes together."""
NAME = re.compile(r"(train|held_out)_(\d+)-(\d+)_(\d+)\.parquet")


@functools.cache
def schema() -> Any:
    """The columns, as pyarrow takes them."""
    import pyarrow as pa

    text, whole, number = pa.string(), pa.int64(), pa.float64()
    span = pa.struct([("tokens", pa.int32()), ("version", pa.int32())])
    columns = [
        ("sample_id", text),
        ("group_id", text),
        ("prompt_id", text),
        ("epoch", whole),
        ("member", whole),
        ("phase", text),
        ("task", text),
        ("step", whole),
        ("state", text),
        ("reason", text),
        ("prompt", text),
        ("response", text),
        ("prompt_tokens", whole),
        ("response_tokens", whole),
        ("truncated", pa.bool_()),
        ("reward", number),
        ("raw_reward", number),
        ("parts", pa.map_(text, number)),
        ("advantage", number),
        ("label", whole),
        ("correct", pa.bool_()),
        ("spans", pa.list_(span)),
        ("generator", text),
        ("token_ids", pa.list_(pa.int32())),
        ("closed_s", number),
    ]
    return pa.schema(columns)


@dataclass(frozen=True, order=True)
class RolloutFile:
    """One file, described by its name. Files are ordered by number, and so by the time at which they were written."""

    number: int
    path: Path
    held_out: bool
    first: int
    last: int


def rollout_files(run_dir: Path) -> list[RolloutFile]:
    """The files of a run, oldest first; [] if it has none."""
    found = []
    for path in (run_dir / FOLDER).glob("*.parquet"):
        if (match := NAME.fullmatch(path.name)) is not None:
            kind, first, last, number = match.groups()
            found.append(RolloutFile(int(number), path, kind == "held_out", int(first), int(last)))
    return sorted(found)


def write_rollouts(run_dir: Path, rows: Sequence[SampleRecord], number: int) -> int:
    """Write rows to files with numbers from `number` on; returns the next number. Raises what pyarrow raises."""
    (run_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)
    for kind, mine in (
        ("train", [row for row in rows if row["phase"] == TRAIN]),
        ("held_out", [row for row in rows if row["phase"] != TRAIN]),
    ):
        if mine:
            steps = [row["step"] for row in mine]
            name = f"{kind}_{min(steps):06}-{max(steps):06}_{number:06}.parquet"
            _write(run_dir / FOLDER / name, _table(mine))
            number += 1
    return number


def bound_rollouts(run_dir: Path, most_bytes: int = MOST_BYTES) -> bool:
    """Remove the oldest files of training samples until the rest fits. Returns whether one was removed."""
    files = [file for file in rollout_files(run_dir) if not file.held_out]
    sizes = [file.path.stat().st_size for file in files]
    excess = sum(sizes) - most_bytes
    for file, size in zip(files, sizes, strict=True):
        if excess <= 0:
            break
        file.path.unlink()
        excess -= size
    return sum(sizes) > most_bytes


def rewind_rollouts(run_dir: Path, until_s: float) -> None:
    """Remove the rows of samples whose state became known after `until_s`: a resumed run decides their state again.

    A file that cannot be read is renamed.
    """
    import pyarrow.compute as pc

    for file in rollout_files(run_dir):
        try:
            table = columns_of(file.path)
        except ConfigError:
            file.path.replace(file.path.with_name(f"{file.path.name}.damaged"))
            continue
        kept = table.filter(pc.less_equal(table["closed_s"], until_s))
        if not kept.num_rows:
            file.path.unlink()
        elif kept.num_rows < table.num_rows:
            _write(file.path, kept)


def columns_of(path: Path, names: Sequence[str] | None = None) -> Any:
    """These columns of a file, by default all. pyarrow's `read_table` would import pandas, which takes longer."""
    import pyarrow.parquet as pq

    with readable(path), pq.ParquetFile(path) as file:
        return file.read(columns=None if names is None else list(names))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Errors of pyarrow inside, for example for a damaged file, become a ConfigError that names the file."""
    try:
        yield
    except (OSError, ValueError, KeyError) as problem:
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise ConfigError(f"{path} cannot be read ({first}); remove it to see the others") from None


def _table(rows: Sequence[SampleRecord]) -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist([_row(row) for row in rows], schema=schema())


def _row(row: SampleRecord) -> SampleRecord:
    """A row as pyarrow takes it; names that `schema` does not have are left out there."""
    ids = row.get("token_ids")
    return row | {
        "parts": list(row.get("parts", {}).items()),
        "spans": [{"tokens": tokens, "version": version} for tokens, version in row.get("spans", ())],
        "token_ids": None if ids is None else np.frombuffer(ids, np.int32),
    }


def _write(path: Path, table: Any) -> None:
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.tmp")
    try:
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROWS_TOGETHER)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

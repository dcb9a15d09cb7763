"""`rollouts/`: the samples that a run keeps, as Parquet files whose names say which steps they contain.

`train_FIRST-LAST_NUMBER.parquet` contains samples that were admitted, `held_out_FIRST-LAST_NUMBER.parquet` answers of
evaluations; FIRST and LAST are steps, and NUMBER grows with every file. `schema` defines the columns.

Invariants
- A file under its final name is complete: it is written under another name, which begins with a dot.
- The files of training samples have at most MOST_BYTES together: the oldest are removed. Files of evaluations stay.
- After a resume, no row describes work that the resume has undone.

Queries do not read all of it: file names give the steps, and Parquet's statistics bound the rewards. Of most rows only
the columns by which rows are chosen are read; the chosen rows are read whole.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowrl.errors import ConfigError
from flowrl.runtime.samples.sample_notes import TRAIN, SampleRecord

FOLDER = "rollouts"
MOST_BYTES = 8 << 30
ROWS_TOGETHER = 256
"""Rows that a reader decodes together."""
NAME = re.compile(r"(train|held_out)_(\d+)-(\d+)_(\d+)\.parquet")


@functools.cache
def rollout_schema() -> Any:
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
    import pyarrow as pa

    (run_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)
    for kind, mine in (
        ("train", [row for row in rows if row["phase"] == TRAIN]),
        ("held_out", [row for row in rows if row["phase"] != TRAIN]),
    ):
        if mine:
            steps = [row["step"] for row in mine]
            name = f"{kind}_{min(steps):06}-{max(steps):06}_{number:06}.parquet"
            columns = [  # names that `schema` does not have are left out there
                row
                | {
                    "parts": list(row.get("parts", {}).items()),
                    "spans": [{"tokens": tokens, "version": version} for tokens, version in row.get("spans", ())],
                    "token_ids": None if (ids := row.get("token_ids")) is None else np.frombuffer(ids, np.int32),
                }
                for row in mine
            ]
            _write_table(run_dir / FOLDER / name, pa.Table.from_pylist(columns, schema=rollout_schema()))
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
            _write_table(file.path, kept)


def columns_of(path: Path, names: Sequence[str] | None = None) -> Any:
    """These columns of a file, by default all. pyarrow's `read_table` would import pandas, which takes longer."""
    import pyarrow.parquet as pq

    with convert_read_errors(path), pq.ParquetFile(path) as file:
        return file.read(columns=None if names is None else list(names))


@contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Errors of pyarrow inside, for example for a damaged file, become a ConfigError that names the file."""
    try:
        yield
    except (OSError, ValueError, KeyError) as problem:
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise ConfigError(f"{path} cannot be read ({first}); remove it to see the others") from None


def _write_table(path: Path, table: Any) -> None:
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.tmp")
    try:
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROWS_TOGETHER)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


SampleRow = Mapping[str, Any]
Order = Literal["last", "best", "worst", "failed"]
CHOOSING = ["sample_id", "step", "state", "reward"]
PAIRING = ("task", "prompt_id", "member")
"""The columns that two answers to one question have in common."""


@dataclass(frozen=True)
class SampleQuery:
    """Which rows to find. `held_out`: answers of evaluations instead of samples of the training."""

    step: int | None = None
    order: Order = "last"
    held_out: bool = False
    limit: int = 8


@dataclass(frozen=True)
class RowPlace:
    """The place of one row."""

    file: RolloutFile
    index: int
    reward: float | None
    step: int


def find_rows(run_dir: Path, query: SampleQuery) -> list[SampleRow]:
    """The rows that the query asks for. Without a step, the order "last" gives rows of the newest step kept.

    Raises ConfigError if nothing is kept.
    """
    files = _find_files(run_dir, query)
    if query.order in ("best", "worst"):
        return _read_rows(_find_extreme(files, query))
    if query.order == "failed":
        chosen = (place for file in reversed(files) for place in reversed([*_find_places(file, query)]))
        return _read_rows(list(itertools.islice(chosen, query.limit)))
    step = files[-1].last if query.step is None and files else query.step
    newest = SampleQuery(step, "last", query.held_out, query.limit)
    chosen = (place for file in files if file.first <= (step or 0) <= file.last for place in _find_places(file, newest))
    return _read_rows(list(itertools.islice(chosen, query.limit)))


def find_sample(run_dir: Path, sample_id: str) -> SampleRow | None:
    """The row of one sample; None if it is not kept."""
    for file in reversed(rollout_files(run_dir)):
        ids = columns_of(file.path, ["sample_id"])["sample_id"].to_pylist()
        if sample_id in ids:
            return _read_rows([RowPlace(file, ids.index(sample_id), None, file.first)])[0]
    return None


def find_pairs(run_dir: Path, step: int, other: int, *, limit: int) -> list[tuple[SampleRow, SampleRow]]:
    """Answers to the same questions at steps `other` and `step`, the largest changes of reward first.

    Held-out answers if the two steps have some in common, else samples of the training. Raises ConfigError if the steps
    have nothing in common.
    """
    for held_out in (True, False):
        files = [file for file in rollout_files(run_dir) if file.held_out == held_out]
        sides = []
        for one in (other, step):
            query = SampleQuery(one, held_out=held_out)
            places = [place for file in files if file.first <= one <= file.last for place in _find_places(file, query)]
            sides.append({tuple(row[name] for name in PAIRING): row for row in _read_rows(places)})
        if found := [(row, sides[1][key]) for key, row in sides[0].items() if key in sides[1]]:
            return sorted(found, key=lambda two: -abs((two[1]["reward"] or 0.0) - (two[0]["reward"] or 0.0)))[:limit]
    kept = sorted({step for file in rollout_files(run_dir) if file.held_out for step in (file.first, file.last)})
    told = f"; held-out answers are kept of the steps {', '.join(map(str, kept))}" if kept else ""
    raise ConfigError(f"steps {other} and {step} have no answers to the same prompts in {run_dir / FOLDER}{told}")


def _find_files(run_dir: Path, query: SampleQuery) -> list[RolloutFile]:
    """The files that may have rows of the query. Raises ConfigError if the run keeps none of their kind."""
    kept = [file for file in rollout_files(run_dir) if file.held_out == query.held_out]
    if not kept and not (run_dir / "config.json").is_file():
        raise ConfigError(
            f"{run_dir} is no run directory (no config.json there); name the one given to flowrl run --run-dir"
        )
    if not kept and query.held_out:
        raise ConfigError(
            f"{run_dir / FOLDER} has no held-out answers: the run has evaluated nothing yet (--evaluate N)"
        )
    if not kept:
        raise ConfigError(
            f"{run_dir / FOLDER} has no samples: none is finished yet, or the run was started with --keep-samples none "
            "or off; --held-out shows answers of evaluations"
        )
    files = [file for file in kept if query.step is None or file.first <= query.step <= file.last]
    if not files:
        steps = f"{min(file.first for file in kept)} to {max(file.last for file in kept)}"
        raise ConfigError(
            f"{run_dir / FOLDER} has no sample of step {query.step}; it has samples of steps {steps}; "
            "--keep-samples all keeps those of every step"
        )
    return files


def _find_extreme(files: Sequence[RolloutFile], query: SampleQuery) -> list[RowPlace]:
    """The places of the rows with the highest, or lowest, rewards; at equal rewards, newer rows come first."""
    sign = 1.0 if query.order == "best" else -1.0
    bounded = sorted(((_bound_rewards(file, sign), file.number, file) for file in files), reverse=True)
    best: list[tuple[float, int, int, RowPlace]] = []
    for bound, _, file in bounded:
        if bound == -math.inf or (len(best) == query.limit and (bound, file.last) <= best[-1][:2]):
            break
        scored = [
            (sign * place.reward, place.step, place.index, place)
            for place in _find_places(file, query)
            if place.reward is not None
        ]
        best = heapq.nlargest(query.limit, [*best, *scored], key=lambda entry: entry[:3])
    return [entry[3] for entry in best]


def _bound_rewards(file: RolloutFile, sign: float) -> float:
    """An upper bound of `sign` * reward over the rows of the file, where `sign` is 1 or -1.

    inf if the file's statistics give no bound, -inf if no row has a reward.
    """
    import pyarrow.parquet as pq

    with convert_read_errors(file.path):
        metadata = pq.read_metadata(file.path)
    column = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == "reward")
    bounds = []
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group)
        found = rows.column(column).statistics
        if found is not None and found.has_min_max:
            bounds.append(sign * (found.max if sign > 0 else found.min))
        else:
            none = found is not None and found.has_null_count and found.null_count == rows.num_rows
            bounds.append(-math.inf if none else math.inf)
    return max(bounds, default=-math.inf)


def _find_places(file: RolloutFile, query: SampleQuery) -> Iterator[RowPlace]:
    """The rows of the file that match the query's step; only failed ones if the query asks for those."""
    found = columns_of(file.path, CHOOSING).to_pydict()
    for index, (step, state, reward) in enumerate(zip(found["step"], found["state"], found["reward"], strict=True)):
        if query.step in (None, step) and (query.order != "failed" or state == "failed"):
            yield RowPlace(file, index, reward, step)


def _read_rows(places: Sequence[RowPlace]) -> list[SampleRow]:
    """Whole rows, in the order of `places`; only the row groups that have them are decoded."""
    import pyarrow.parquet as pq

    rows: dict[RowPlace, SampleRow] = {}
    for number, mine in itertools.groupby(sorted(places, key=lambda one: one.file.number), lambda one: one.file):
        wanted = list(mine)
        with convert_read_errors(number.path), pq.ParquetFile(number.path) as opened:
            start = 0
            for group in range(opened.num_row_groups):
                size = opened.metadata.row_group(group).num_rows
                inside = [place for place in wanted if start <= place.index < start + size]
                if inside:
                    table = opened.read_row_group(group)  # its `take` would import pandas, as would `read_table`
                    for place in inside:
                        (rows[place],) = table.slice(place.index - start, 1).to_pylist(maps_as_pydicts="strict")
                start += size
    return [rows[place] for place in places]

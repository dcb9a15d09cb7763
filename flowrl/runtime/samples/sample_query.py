"""Reads `rollouts/` without reading all of it: file names give the steps, and Parquet's statistics bound the rewards.

Of most rows only the columns by which rows are chosen are read; the chosen rows are read whole.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.errors import ConfigError
from flowrl.runtime.samples.rollout_files import FOLDER, RolloutFile, columns_of, readable, rollout_files

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


def find(run_dir: Path, query: SampleQuery) -> list[SampleRow]:
    """The rows that the query asks for. Without a step, the order "last" gives rows of the newest step kept.

    Raises ConfigError if nothing is kept.
    """
    files = _files(run_dir, query)
    if query.order in ("best", "worst"):
        return _read(_extreme(files, query))
    if query.order == "failed":
        chosen = (place for file in reversed(files) for place in reversed([*_places(file, query)]))
        return _read(list(itertools.islice(chosen, query.limit)))
    step = files[-1].last if query.step is None and files else query.step
    newest = SampleQuery(step, "last", query.held_out, query.limit)
    chosen = (place for file in files if file.first <= (step or 0) <= file.last for place in _places(file, newest))
    return _read(list(itertools.islice(chosen, query.limit)))


def find_sample(run_dir: Path, sample_id: str) -> SampleRow | None:
    """The row of one sample; None if it is not kept."""
    for file in reversed(rollout_files(run_dir)):
        ids = columns_of(file.path, ["sample_id"])["sample_id"].to_pylist()
        if sample_id in ids:
            return _read([RowPlace(file, ids.index(sample_id), None, file.first)])[0]
    return None


def pairs(run_dir: Path, step: int, other: int, *, limit: int) -> list[tuple[SampleRow, SampleRow]]:
    """Answers to the same questions at steps `other` and `step`, the largest changes of reward first.

    Held-out answers if the two steps have some in common, else samples of the training. Raises ConfigError if the steps
    have nothing in common.
    """
    for held_out in (True, False):
        sides = [_by_question(run_dir, SampleQuery(one, held_out=held_out)) for one in (other, step)]
        common = [key for key in sides[0] if key in sides[1]]
        if common:
            found = [(sides[0][key], sides[1][key]) for key in common]
            return sorted(found, key=lambda two: -abs(_reward(two[1]) - _reward(two[0])))[:limit]
    kept = sorted({step for file in rollout_files(run_dir) if file.held_out for step in (file.first, file.last)})
    told = f"; held-out answers are kept of the steps {', '.join(map(str, kept))}" if kept else ""
    raise ConfigError(f"steps {other} and {step} have no answers to the same prompts in {run_dir / FOLDER}{told}")


def _by_question(run_dir: Path, query: SampleQuery) -> dict[tuple[Any, ...], SampleRow]:
    step = query.step or 0
    files = [
        file for file in rollout_files(run_dir) if file.held_out == query.held_out and file.first <= step <= file.last
    ]
    rows = _read([place for file in files for place in _places(file, query)])
    return {tuple(row[name] for name in PAIRING): row for row in rows}


def _reward(row: SampleRow) -> float:
    return 0.0 if row["reward"] is None else float(row["reward"])


def _files(run_dir: Path, query: SampleQuery) -> list[RolloutFile]:
    """The files that may have rows of the query. Raises ConfigError if the run keeps none of their kind."""
    kept = [file for file in rollout_files(run_dir) if file.held_out == query.held_out]
    if not kept:
        raise ConfigError(_nothing(run_dir, held_out=query.held_out))
    files = [file for file in kept if query.step is None or file.first <= query.step <= file.last]
    if not files:
        steps = f"{min(file.first for file in kept)} to {max(file.last for file in kept)}"
        raise ConfigError(
            f"{run_dir / FOLDER} has no sample of step {query.step}; it has samples of steps {steps}; "
            "--keep-samples all keeps those of every step"
        )
    return files


def _nothing(run_dir: Path, *, held_out: bool) -> str:
    if not (run_dir / "config.json").is_file():
        return f"{run_dir} is no run directory (no config.json there); name the one given to flowrl run --run-dir"
    if held_out:
        return f"{run_dir / FOLDER} has no held-out answers: the run has evaluated nothing yet (--evaluate N)"
    return (
        f"{run_dir / FOLDER} has no samples: none is finished yet, or the run was started with --keep-samples none or "
        "off; --held-out shows answers of evaluations"
    )


def _extreme(files: Sequence[RolloutFile], query: SampleQuery) -> list[RowPlace]:
    """The places of the rows with the highest, or lowest, rewards; at equal rewards, newer rows come first."""
    sign = 1.0 if query.order == "best" else -1.0
    bounded = sorted(((_highest(file, sign), file.number, file) for file in files), reverse=True)
    best: list[tuple[float, int, int, RowPlace]] = []
    for bound, _, file in bounded:
        if bound == -math.inf or (len(best) == query.limit and (bound, file.last) <= best[-1][:2]):
            break
        scored = [
            (sign * place.reward, place.step, place.index, place)
            for place in _places(file, query)
            if place.reward is not None
        ]
        best = heapq.nlargest(query.limit, [*best, *scored], key=lambda entry: entry[:3])
    return [entry[3] for entry in best]


def _highest(file: RolloutFile, sign: float) -> float:
    """An upper bound of `sign` * reward over the rows of the file, where `sign` is 1 or -1.

    inf if the file's statistics give no bound, -inf if no row has a reward.
    """
    import pyarrow.parquet as pq

    with readable(file.path):
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


def _places(file: RolloutFile, query: SampleQuery) -> Iterator[RowPlace]:
    """The rows of the file that match the query's step; only failed ones if the query asks for those."""
    found = columns_of(file.path, CHOOSING).to_pydict()
    for index, (step, state, reward) in enumerate(zip(found["step"], found["state"], found["reward"], strict=True)):
        if query.step in (None, step) and (query.order != "failed" or state == "failed"):
            yield RowPlace(file, index, reward, step)


def _read(places: Sequence[RowPlace]) -> list[SampleRow]:
    """Whole rows, in the order of `places`; only the row groups that have them are decoded."""
    import pyarrow.parquet as pq

    rows: dict[RowPlace, SampleRow] = {}
    for number, mine in itertools.groupby(sorted(places, key=lambda one: one.file.number), lambda one: one.file):
        wanted = list(mine)
        with readable(number.path), pq.ParquetFile(number.path) as opened:
            start = 0
            for group in range(opened.num_row_groups):
                size = opened.metadata.row_group(group).num_rows
                inside = [place for place in wanted if start <= place.index < start + size]
                if inside:
                    table = opened.read_row_group(group)  # its `take` would import pandas, as would `read_table`
                    rows |= {place: _row(table, place.index - start) for place in inside}
                start += size
    return [rows[place] for place in places]


def _row(table: Any, index: int) -> SampleRow:
    (row,) = table.slice(index, 1).to_pylist(maps_as_pydicts="strict")
    return row  # type: ignore[no-any-return]

"""The tables of benchmarks/peers/trainers.py in Markdown, and their place in a page of the documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.trainer_systems import Found, StepJob, TrainerRun
from benchmarks.training.layouts import HEADS, Measured, Shape, row

BEGIN, END = "<!-- trainers: begin -->", "<!-- trainers: end -->"
COLUMNS = (
    "processor",
    "job",
    "dtype",
    "system",
    "runs",
    "s a step",
    "samples/s",
    "× TRL",
    "tokens a sample",
    "peak memory GiB",
)


@dataclass(frozen=True)
class TrainerResult:
    """One run, with the load of the machine just before it."""

    cell: TrainerRun
    found: Found
    load_before: float
    processor: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> TrainerResult:
        cell = {**record["cell"], "job": StepJob(**record["cell"]["job"])}
        return cls(TrainerRun(**cell), Found(**record["found"]), record["load_before"], record["processor"])


def table(results: Sequence[TrainerResult], steps: int, command: str) -> str:
    """A line for each processor, job, dtype and system, with medians and (smallest–largest) of the repetitions."""
    kinds = dict.fromkeys(map(_kind, results))
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for kind in kinds:
        here = [one for one in results if _kind(one) == kind]
        for system in sorted({one.cell.system for one in here}, reverse=True):
            lines.append(_line(here, system))
    loads = [one.load_before for one in results]
    told = f" The machine's load before a run was {min(loads):.1f} to {max(loads):.1f}." if loads else ""
    about = (
        f"Medians of the runs (smallest–largest), each over {steps} steps; × TRL compares runs of one repetition, "
        "and counts samples/s. Both systems sample in the dtype in which they train. Memory is that of all processes, "
        f"with shared memory counted once.{told}"
    )
    return "\n".join([about, "", *lines, "", f"    {command}", "", *_memory_lines(results)])


def _kind(one: TrainerResult) -> tuple[str, StepJob, str]:
    return one.processor, one.cell.job, one.cell.dtype


def _memory_lines(results: Sequence[TrainerResult]) -> Iterator[str]:
    """The memory of each process at the peak of a run: a table of the medians, in GiB."""
    yield from ("| dtype | system | process | GiB at the peak |", "|---|---|---|---|")
    for dtype, system in dict.fromkeys((one.cell.dtype, one.cell.system) for one in results):
        runs = [one.found.memory for one in results if (one.cell.dtype, one.cell.system) == (dtype, system)]
        sizes = {
            name: [run.get(name, 0) / 2**30 for run in runs] for name in dict.fromkeys(n for run in runs for n in run)
        }
        for name in sorted(sizes, key=lambda name: -median(sizes[name])):
            yield f"| {dtype} | {system} | {name} | {spread(sizes[name])} |"


def _line(results: Sequence[TrainerResult], system: str) -> str:
    runs = [one for one in results if one.cell.system == system]
    trl = {one.cell.repetition: one.found for one in results if one.cell.system == "trl"}
    gains = [
        one.found.samples_per_s / trl[one.cell.repetition].samples_per_s for one in runs if one.cell.repetition in trl
    ]
    cell, found = runs[0].cell, [one.found for one in runs]
    cells = (
        runs[0].processor,
        str(cell.job),
        cell.dtype,
        system,
        str(len(runs)),
        spread([one.step_s for one in found]),
        spread([one.samples_per_s for one in found]),
        spread(gains) if gains and system != "trl" else "–",
        spread([one.response_tokens for one in found], digits=1),
        spread([one.peak_bytes / 2**30 for one in found], digits=1),
    )
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float], *, digits: int = 2) -> str:
    """Median, and the smallest and the largest if there are several."""
    told = f"{median(values):.{digits}f}"
    return told if len(values) == 1 else f"{told} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def alone_table(path: Path) -> str:
    """The trainer alone, rows against trees, from what `benchmarks.training.layouts --json` wrote."""
    found = [_measured(json.loads(line)) for line in path.read_text().splitlines()]
    rows = {one.shape: one for one in found if one.way == "rows"}
    trees = {one.shape: one for one in found if one.way == "auto"}
    lines = [f"| {' | '.join(row(rows[shape], trees[shape]))} |" for shape in rows if shape in trees]
    about = "The trainer alone, one update: rows against trees (`python -m benchmarks.training.layouts`)."
    return "\n".join([about, "", f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}", *lines])


def _measured(record: Mapping[str, Any]) -> Measured:
    return Measured(**{**record, "shape": Shape(**record["shape"]), "seconds": tuple(record["seconds"])})

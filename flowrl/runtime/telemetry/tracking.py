"""What the sinks of metrics get besides numbers: the names of the run there, and a few of its samples."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.errors import ConfigError

COLUMNS = ("step", "task", "prompt", "response", "reward", "advantage", "state")
MOST_CHARACTERS = 2000
"""Largest number of characters shown: the last ones of a prompt, the first ones of a response."""
PROJECT = "flowrl"


@dataclass(frozen=True)
class Tracking:
    """Names of a run in W&B and Trackio, and the samples that the sinks of `--track` get."""

    project: str = ""
    """Project; empty: WANDB_PROJECT or TRACKIO_PROJECT, else flowrl."""
    entity: str = ""
    """User or team of W&B; empty: WANDB_ENTITY, else W&B's default."""
    group: str = ""
    """Group of runs; empty: WANDB_RUN_GROUP, else none."""
    name: str = ""
    """Name of the run; empty: WANDB_NAME, else the name of the run directory."""
    samples: int = 8
    """Samples in each table; 0: no tables."""
    samples_every: int = 25
    """Steps between tables of samples; every evaluation also has one. 0: only evaluations."""

    def __post_init__(self) -> None:
        for name in ("samples", "samples_every"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"--tracking.{name.replace('_', '-')} is {getattr(self, name)}; it has to be 0 or more"
                )

    def named(self, field_name: str, *variables: str) -> str | None:
        """The option, else the first of these environment variables that is set, else None."""
        found: str = getattr(self, field_name)
        return found or next((value for name in variables if (value := os.environ.get(name))), None)


@dataclass
class SampleTables:
    """Collects the rows of the next tables: those of training, and those of an evaluation."""

    tracking: Tracking
    _trained: list[Mapping[str, Any]] = field(default_factory=list)
    _held_out: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a kept sample. The last samples of training are shown, and the first ones of an evaluation."""
        most = self.tracking.samples
        if row["state"] != "held_out":
            self._trained = [*self._trained, row][-most:] if most else []
        elif len(self._held_out) < most:
            self._held_out.append(row)

    def of_step(self, step: int) -> list[list[Any]]:
        """The table that is due at a step; [] if none is."""
        every = self.tracking.samples_every
        if not every or (step - 1) % every:
            return []
        rows, self._trained = self._trained, []
        return table(rows)

    def of_evaluation(self) -> list[list[Any]]:
        """The table of an evaluation that has ended."""
        rows, self._held_out = self._held_out, []
        return table(rows)


def table(rows: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """Rows with the columns COLUMNS."""
    return [
        [
            row["step"],
            row.get("task", ""),
            row["prompt"][-MOST_CHARACTERS:],
            row["response"][:MOST_CHARACTERS],
            row.get("reward"),
            row.get("advantage"),
            row["state"] + (f": {row['reason']}" if row.get("reason") else ""),
        ]
        for row in rows
    ]


def markdown(rows: Sequence[Sequence[Any]]) -> str:
    """A table as TensorBoard's text plug-in shows it."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    for mark, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(mark, instead)
    return text

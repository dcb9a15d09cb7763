"""Sinks for a run's metrics, in addition to `metrics.jsonl`: TensorBoard, Weights & Biases, Trackio.

Each sink needs its own package, which is imported only when the sink is requested. Besides numbers, a sink gets the
names of the run there and tables with a few of its samples.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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

    def find_name(self, field_name: str, *variables: str) -> str | None:
        """The option, else the first of these environment variables that is set, else None."""
        found: str = getattr(self, field_name)
        return found or next((value for name in variables if (value := os.environ.get(name))), None)


@dataclass
class SampleTables:
    """Collects the rows of the next tables: those of training, and those of an evaluation."""

    tracking: Tracking
    _trained: list[Mapping[str, Any]] = field(default_factory=list)
    _held_out: list[Mapping[str, Any]] = field(default_factory=list)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add a kept sample. The last samples of training are shown, and the first ones of an evaluation."""
        most = self.tracking.samples
        if row["state"] != "held_out":
            self._trained = [*self._trained, row][-most:] if most else []
        elif len(self._held_out) < most:
            self._held_out.append(row)

    def take_trained(self, step: int) -> list[list[Any]]:
        """The table that is due at a step; [] if none is."""
        every = self.tracking.samples_every
        if not every or (step - 1) % every:
            return []
        rows, self._trained = self._trained, []
        return table_rows(rows)

    def take_held_out(self) -> list[list[Any]]:
        """The table of an evaluation that has ended."""
        rows, self._held_out = self._held_out, []
        return table_rows(rows)


def table_rows(rows: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
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


def format_markdown(rows: Sequence[Sequence[Any]]) -> str:
    """A table as TensorBoard's text plug-in shows it."""

    def escape_cell(value: Any) -> str:
        text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        for mark, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\n", "<br>")):
            text = text.replace(mark, instead)
        return text

    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows]
    return "\n".join("| " + " | ".join(escape_cell(value) for value in line) + " |" for line in lines)


class Sink(Protocol):
    """Receives the numbers of each step, and now and then a table of samples with the columns COLUMNS."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in `RUN/tensorboard`. Tables are texts, in a separate event file."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], tracking: Tracking) -> None:
        self._folder = str(run_dir / "tensorboard")
        self._texts: Any = None
        self._writer = _import_module("tensorboard", "tensorboard.summary").Writer(str(run_dir / "tensorboard"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        event, summary, tensor, tensor_shape = (
            _import_module("tensorboard", f"tensorboard.compat.proto.{name}_pb2")
            for name in ("event", "summary", "tensor", "tensor_shape")
        )
        if self._texts is None:
            writer = _import_module("tensorboard", "tensorboard.summary.writer.event_file_writer")
            self._texts = writer.EventFileWriter(self._folder, filename_suffix=".samples")
        shape = tensor_shape.TensorShapeProto(dim=[tensor_shape.TensorShapeProto.Dim(size=1)])
        text = tensor.TensorProto(dtype="DT_STRING", string_val=[format_markdown(rows).encode()], tensor_shape=shape)
        metadata = _import_module("tensorboard", "tensorboard.plugins.text.metadata").create_summary_metadata(name, "")
        value = summary.Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=text)
        self._texts.add_event(event.Event(wall_time=time.time(), step=step, summary=summary.Summary(value=[value])))

    def close(self) -> None:
        self._writer.close()
        if self._texts is not None:
            self._texts.close()


ID_FILE = "tracking_id"
"""File of a run directory with the id that the run has in W&B and Trackio."""


def tracking_id(run_dir: Path) -> str:
    """The id of this run in W&B and Trackio: made once, so that `--resume` continues this run and no other."""
    file = run_dir / ID_FILE
    if not file.exists() or not file.read_text(encoding="utf-8").strip():
        temporary = run_dir / f".{ID_FILE}.tmp"
        temporary.write_text(secrets.token_hex(4), encoding="utf-8")
        temporary.replace(file)
    return file.read_text(encoding="utf-8").strip()


class WandB:
    """A W&B run with the id of the run directory; a resumed run continues it. WANDB_MODE=offline keeps it local."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], tracking: Tracking) -> None:
        self._wandb = _import_module("wandb", "wandb")
        try:
            self._run = self._wandb.init(
                project=tracking.find_name("project", "WANDB_PROJECT") or PROJECT,
                entity=tracking.find_name("entity", "WANDB_ENTITY"),
                group=tracking.find_name("group", "WANDB_RUN_GROUP"),
                name=tracking.find_name("name", "WANDB_NAME") or run_dir.resolve().name,
                id=tracking_id(run_dir),
                resume="allow",
                dir=str(run_dir),
                config=dict(config),
            )
        except self._wandb.Error as problem:
            raise ConfigError(
                f"metrics go to wandb, which refuses: {problem}; log in there, or set WANDB_MODE=offline"
            ) from None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({name: self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])}, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in Trackio's local database, named after the directory unless it is given a name.

    Trackio finds the run to continue by its name, so the name ends with the id.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], tracking: Tracking) -> None:
        self._trackio = _import_module("trackio", "trackio")
        self._run = self._trackio.init(  # its module knows the run only in the task that started it
            project=tracking.find_name("project", "TRACKIO_PROJECT") or PROJECT,
            name=f"{tracking.find_name('name') or run_dir.resolve().name}-{tracking_id(run_dir)}",
            group=tracking.find_name("group"),
            resume="allow",
            config=dict(config),
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        table = self._trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: Mapping[str, Callable[[Path, Mapping[str, Any], Tracking], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def check_sinks(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown sink, or if its package is not installed. Imports nothing."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"no metrics sink is called {name!r}; there are {', '.join(SINKS)}")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a directory of that name is not a package
            raise ConfigError(f"metrics go to {name}, which is not installed; pip install {name}")


def require_logins(names: Sequence[str]) -> None:
    """Raise ConfigError for a sink that needs a login if the user is not logged in. Contacts no server."""
    if "wandb" not in names:
        return
    wandb = _import_module("wandb", "wandb")
    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "metrics go to wandb, where nobody is logged in; run wandb login, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline"
        )


def open_sinks(
    names: Sequence[str], run_dir: Path, config: Mapping[str, Any], tracking: Tracking | None = None
) -> list[Sink]:
    """Open the sinks of these names. Raises ConfigError for an unknown sink or a missing package."""
    check_sinks(names)
    return [SINKS[name](run_dir, config, tracking or Tracking()) for name in names]


def _import_module(package: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"metrics go to {package}, which is not installed ({error.name} is missing); pip install {package}"
        ) from None

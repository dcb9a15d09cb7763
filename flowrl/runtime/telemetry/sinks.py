"""Sinks for a run's metrics, in addition to `metrics.jsonl`: TensorBoard, Weights & Biases, Trackio.

Each sink needs its own package, which is imported only when the sink is requested.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowrl.errors import ConfigError


class Sink(Protocol):
    """Receives the numbers of each step."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in `RUN/tensorboard`."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._writer = _import("tensorboard", "tensorboard.summary").Writer(str(run_dir / "tensorboard"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A W&B run named after the directory; a resumed run continues it. WANDB_MODE=offline keeps it local."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        wandb = _import("wandb", "wandb")
        name = run_dir.resolve().name
        self._run = wandb.init(
            project="flowrl", name=name, id=name, resume="allow", dir=str(run_dir), config=dict(config)
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A Trackio run named after the directory, in Trackio's local database."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._trackio = _import("trackio", "trackio")
        self._trackio.init(project="flowrl", name=run_dir.resolve().name, resume="allow", config=dict(config))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._trackio.log(dict(scalars), step=step)

    def close(self) -> None:
        self._trackio.finish()


SINKS: Mapping[str, Callable[[Path, Mapping[str, Any]], Sink]] = {
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


def open_sinks(names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> list[Sink]:
    """Open the sinks of these names. Raises ConfigError for an unknown sink or a missing package."""
    check_sinks(names)
    return [SINKS[name](run_dir, config) for name in names]


def _import(package: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"metrics go to {package}, which is not installed ({error.name} is missing); pip install {package}"
        ) from None

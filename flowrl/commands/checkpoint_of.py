"""Finds a trained model from the run or checkpoint that contains it."""

from __future__ import annotations

from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.runtime.checkpoints.checkpoint import steps_of
from flowrl.runtime.checkpoints.rundir import recorded_best


def model_dir(path: Path) -> Path:
    """`path` if it is a model, or the best or newest checkpoint of a run directory. Raises ConfigError."""
    if (path / "adapter_config.json").is_file() or (path / "checkpoints").is_dir():
        return _of_run(path) if (path / "checkpoints").is_dir() else path
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}; name a run, a checkpoint, or a model directory")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is no model directory: config.json is missing; name a run, a checkpoint, or a model")
    return path


def _of_run(run_dir: Path) -> Path:
    best = recorded_best(run_dir)
    if best is not None and (run_dir / best.checkpoint).is_dir():
        return run_dir / best.checkpoint
    found = steps_of(run_dir / "checkpoints")
    if not found:
        raise ConfigError(f"{run_dir} has no checkpoint yet; wait for one, or name another run")
    return found[-1][1]

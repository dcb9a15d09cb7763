"""Finds a trained model from the run or checkpoint that contains it."""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.runtime.checkpoints.best import BEST
from flowrl.runtime.checkpoints.checkpoint import steps_of


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
    if (run_dir / BEST).is_file():
        best = run_dir / str(json.loads((run_dir / BEST).read_text())["checkpoint"])
        if best.is_dir():
            return best
    found = steps_of(run_dir / "checkpoints")
    if not found:
        raise ConfigError(f"{run_dir} has no checkpoint yet; wait for one, or name another run")
    return found[-1][1]

"""Directories of models: the one of a run or checkpoint, and one that a command writes completely, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.runtime.checkpoints.checkpoint import steps_of
from flowrl.runtime.checkpoints.rundir import recorded_best


def model_dir(path: Path) -> Path:
    """`path` if it is a model, or the best or newest checkpoint of a run directory. Raises ConfigError."""
    if (path / "checkpoints").is_dir():
        best = recorded_best(path)
        if best is not None and (path / best.checkpoint).is_dir():
            return path / best.checkpoint
        found = steps_of(path / "checkpoints")
        if not found:
            raise ConfigError(f"{path} has no checkpoint yet; wait for one, or name another run")
        return found[-1][1]
    if (path / "adapter_config.json").is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}; name a run, a checkpoint, or a model directory")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is no model directory: config.json is missing; name a run, a checkpoint, or a model")
    return path


def require_free(target: Path) -> None:
    """Raise ConfigError unless a directory can be written at `target`."""
    if target.name in ("", ".."):  # `.`, `..` and `/` cannot be replaced
        raise ConfigError(f"{target} is no name for a directory to write; name a new one, such as ./model")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists; name another directory, or remove it")


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """An empty directory next to `target` that takes its place at the end of the block, and is removed if that fails.

    What a killed command has left in it is removed first. Raises ConfigError if `target` exists and is not an empty
    directory, or for an OSError, which may also be one of a file that is read for it.
    """
    require_free(target)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if target.is_dir():
            target.rmdir()
        temporary.replace(target)
    except OSError as error:
        if _is_of_another(error, target, temporary):
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror}; nothing was written to {target}"
            ) from None
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}; name another directory") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_of_another(error: OSError, target: Path, temporary: Path) -> bool:
    """Whether the error names a file that is neither written for `target` nor a directory above it."""
    if not isinstance(error.filename, str | Path):
        return False
    file, written = Path(error.filename).absolute(), (target.absolute(), temporary.absolute())
    return not any(one.is_relative_to(file) or file.is_relative_to(one) for one in written)

"""Directories that a command writes: they exist completely, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.errors import ConfigError


def require_free(target: Path) -> None:
    """Raise ConfigError unless a directory can be written at `target`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists; name another directory, or remove it")


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """An empty directory next to `target` that takes its place at the end of the block, and is removed if that fails.

    What a killed command has left in it is removed first. Raises ConfigError if `target` exists and is not an empty
    directory, or for an OSError.
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
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}; name another directory") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

"""Room on a disk for what is written there, and what is said if there is none."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.errors import ConfigError, FlowrlError
from flowrl.hub.hub_problems import gigabytes

RESERVE_BYTES = 1 << 30
"""What a file leaves free on the disk of the cache."""
CHECKED_BYTES = 64 << 20
"""Bytes between two looks at the disk."""
FULL = (errno.ENOSPC, errno.EDQUOT)
LEFT_BYTES = 64 << 20
"""A disk with less free than this, after a write to it has failed, is called full."""


@contextmanager
def told_if_full(what: str, directory: Path, otherwise: str) -> Iterator[None]:
    """Turn the error of a write below `directory` into one sentence, if its disk is full.

    torch and safetensors have errors of their own for that, which name neither the disk nor the file. `otherwise` is
    what the user can do. Raises FlowrlError; another error stays as it is.
    """
    try:
        yield
    except Exception as failure:  # of whatever library writes
        free = shutil.disk_usage(_existing(directory)).free
        by_number = isinstance(failure, OSError) and failure.errno in FULL
        if not by_number and free >= LEFT_BYTES:
            raise
        raise FlowrlError(
            f"{what} cannot be written to {directory}: its disk is full ({gigabytes(free)} free); {otherwise}"
        ) from failure


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.absolute().parents) if path.exists())


class DiskRoom:
    """The disk below one file in `home` while it is written.

    `what` is kept in the file, and `otherwise` is what can be done beside naming another disk.
    """

    def __init__(self, what: str, home: Path, otherwise: str = "") -> None:
        self._what, self._home, self._otherwise = what, home, otherwise
        self.num_bytes = self._checked = 0
        """Bytes written, of which the writer tells."""

    def require(self) -> None:
        """Raise ConfigError if the disk has no room for more; it is looked at every CHECKED_BYTES."""
        if self.num_bytes < self._checked:
            return
        self._checked = self.num_bytes + CHECKED_BYTES
        free = shutil.disk_usage(self._home).free
        if free < RESERVE_BYTES + CHECKED_BYTES:
            raise self._full(f"{gigabytes(free)} are free, of which {gigabytes(RESERVE_BYTES)} stay free")

    def refused(self, problem: OSError) -> ConfigError:
        """The error of a file that cannot be written."""
        said = problem.strerror or str(problem)
        if problem.errno in FULL:
            return self._full(said)
        return ConfigError(
            f"{self._what} cannot be kept in {self._home}, for {problem.filename or self._home} cannot be read or "
            f"written ({said}); name a directory of yours in FLOWRL_CACHE{self._otherwise}"
        )

    def _full(self, found: str) -> ConfigError:
        return ConfigError(
            f"{self._what} cannot be kept in {self._home} after {gigabytes(self.num_bytes)} ({found}); name a "
            f"directory on a larger disk in FLOWRL_CACHE{self._otherwise}"
        )

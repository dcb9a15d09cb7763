"""Paths as users write them, whether their disk has room for what is written there, and the errors for a full disk."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.errors import ConfigError, FlowrlError
from flowrl.hub import gb_text

RESERVE_BYTES = 1 << 30
"""Bytes that must stay free on the cache's disk when a file is written."""
CHECKED_BYTES = 64 << 20
"""Bytes written between two checks of the disk's free space."""
FULL = (errno.ENOSPC, errno.EDQUOT)
LEFT_BYTES = 64 << 20
"""A disk with less free space than this after a failed write counts as full."""


@contextmanager
def told_if_full(what: str, directory: Path, otherwise: str) -> Iterator[None]:
    """Replace the error of a write below `directory` by one sentence, if its disk is full.

    torch and safetensors raise their own errors for a full disk, which name neither the disk nor the file. `otherwise`
    says what the user can do. Raises FlowrlError for a full disk; any other error passes unchanged.
    """
    try:
        yield
    except Exception as failure:  # any library may be writing
        existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        by_number = isinstance(failure, OSError) and failure.errno in FULL
        if not by_number and free >= LEFT_BYTES:
            raise
        raise FlowrlError(
            f"{what} cannot be written to {directory}: its disk is full ({gb_text(free)} free); {otherwise}"
        ) from failure


class DiskRoom:
    """The free space on the disk of `home` while one file is written there.

    `what` names the content of the file, and `otherwise` what the user can do other than naming another disk.
    """

    def __init__(self, what: str, home: Path, otherwise: str = "") -> None:
        self._what, self._home, self._otherwise = what, home, otherwise
        self.num_bytes = self._checked = 0
        """Bytes written so far; the writer updates this."""

    def require_room(self) -> None:
        """Raise ConfigError if the disk has no room for more; the disk is checked once every CHECKED_BYTES."""
        if self.num_bytes < self._checked:
            return
        self._checked = self.num_bytes + CHECKED_BYTES
        free = shutil.disk_usage(self._home).free
        if free < RESERVE_BYTES + CHECKED_BYTES:
            raise self._describe_full(f"{gb_text(free)} are free, of which {gb_text(RESERVE_BYTES)} stay free")

    def describe_refused(self, problem: OSError) -> ConfigError:
        """The error of a file that cannot be written."""
        said = problem.strerror or str(problem)
        if problem.errno in FULL:
            return self._describe_full(said)
        return ConfigError(
            f"{self._what} cannot be kept in {self._home}, for {problem.filename or self._home} cannot be read or "
            f"written ({said}); name a directory of yours in FLOWRL_CACHE{self._otherwise}"
        )

    def _describe_full(self, found: str) -> ConfigError:
        return ConfigError(
            f"{self._what} cannot be kept in {self._home} after {gb_text(self.num_bytes)} ({found}); name a "
            f"directory on a larger disk in FLOWRL_CACHE{self._otherwise}"
        )


def user_path(text: str) -> Path:
    """The path. Raises ConfigError if it begins with the home directory of an unknown user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        home = Path(text).parts[0]
        raise ConfigError(
            f"{text} begins with {home}, and there is no user of that name with a home directory here; write the path "
            "in full, or ./ before it"
        ) from None

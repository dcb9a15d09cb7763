"""The advisory lock on a directory's `.lock`: one process at a time writes there.

The file holds the number of the process that has the lock. The kernel releases the lock when that process dies, for any
reason.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flowrl.errors import ConfigError

LOCK = ".lock"


class DirectoryLock:
    """The lock of a directory, which the user named with `option`; `holder` says what has it in an error."""

    def __init__(self, directory: Path, *, option: str, holder: str) -> None:
        """Take the lock. Raises ConfigError if another process has it, OSError if the file cannot be written."""
        self.path = directory / LOCK
        self._file: IO[str] = open(self.path, "a+", encoding="utf-8", opener=_private_file)  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = (
                f"{option} {directory} is in use by {holder} of process {self._owner()}; wait for it to end, or name "
                "another directory"
            )
        except OSError as error:
            problem = (
                f"{option} {directory} cannot be locked ({error.strerror}); name a directory on a file system with "
                "file locks"
            )
        else:
            return
        self.release()
        raise ConfigError(problem)

    def sign(self) -> None:
        """Write this process's number into the file."""
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        self._file.close()

    def _owner(self) -> str:
        self._file.seek(0)
        return self._file.read().strip() or "unknown"


@contextmanager
def locked(directory: Path, *, option: str, holder: str) -> Iterator[None]:
    """The directory, created and locked. Raises ConfigError if another process has it, or if it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = DirectoryLock(directory, option=option, holder=holder)
        lock.sign()
    except OSError as error:
        raise unwritable(directory, error, option=option) from None
    try:
        yield
    finally:
        lock.release()


def unwritable(directory: Path, error: OSError, *, option: str = "--run-dir") -> ConfigError:
    """The problem of a directory in which nothing can be created."""
    return ConfigError(f"{option} {directory} cannot be written: {error.strerror}; name another")


def _private_file(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

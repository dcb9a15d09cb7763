"""DeepSpeed's async_io reads and writes data offloaded to a disk; it is compiled at its first use on a machine.

torch guards such a build by a lock file. If a process is killed while it compiles, the file stays, and every later
process waits forever. Here only one process at a time builds, under a lock that is released when the process ends. So a
lock file of torch that is found under this lock has no owner and can be removed.
"""

from __future__ import annotations

import fcntl
from pathlib import Path


def build_async_io() -> None:
    """Compile async_io, or load the existing build. Takes minutes once; other processes of the machine wait."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    directory = _directory()
    with (directory.parent / "flowrl-async_io.lock").open("w", encoding="utf-8") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        (directory / "lock").unlink(missing_ok=True)
        AsyncIOBuilder().load(verbose=False)


def is_built() -> bool:
    """Whether async_io is already compiled on this machine."""
    return any(_directory().glob("*.so"))


def _directory() -> Path:
    """The directory into which torch compiles it."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(AsyncIOBuilder.NAME, verbose=False))

"""DeepSpeed's async_io, which reads and writes what is offloaded to a disk: compiled on a machine's first use.

torch guards such a build by a file that stays where a process was killed while it compiled, and everybody after
it waits for ever. Here one process at a time builds, under a lock that ends with its process: a guard that is
found then belongs to nobody.
"""

from __future__ import annotations

import fcntl
from pathlib import Path


def build_async_io() -> None:
    """Compile it, or load what is there. Minutes, once; other processes of the machine wait meanwhile."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    directory = _directory()
    with (directory.parent / "flowrl-async_io.lock").open("w") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        (directory / "lock").unlink(missing_ok=True)
        AsyncIOBuilder().load(verbose=False)


def is_built() -> bool:
    """Whether a machine's first use lies behind it."""
    return any(_directory().glob("*.so"))


def _directory() -> Path:
    """Where torch compiles it to."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(AsyncIOBuilder.NAME, verbose=False))

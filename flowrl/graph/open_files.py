"""Open files: how many a process of a run needs, and how many its machine lets it have.

Every process of a run is connected to every other, so the number grows with the number of processes. The shell's limit
is often 1,024, and a process may raise it itself up to the hard limit.
"""

from __future__ import annotations

import resource

from flowrl.errors import ConfigError

OF_A_PEER = 5
"""Descriptors for a peer on another machine: one for the socket, two for its monitor, and one for the stream in each
direction. A peer on the same machine takes 3."""
OF_A_PROCESS = 256
"""Descriptors that a process opens in addition: libraries, devices, shared memory, data."""
ENOUGH = 1 << 16
"""No limit is raised further, because some programs go through all descriptors that they may have when they start
another program."""


def most_files() -> int:
    """The most descriptors that this process can have after `raise_limit`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_number(soft), min(_number(hard), ENOUGH))


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many files as `most_files`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _number(soft) < (most := most_files()):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def files_needed(num_peers: int) -> int:
    """Descriptors of a process that is connected to `num_peers` others."""
    return OF_A_PROCESS + OF_A_PEER * num_peers


def files_problem(num_peers: int, most: int) -> str:
    """The error if a process with `num_peers` peers can have at most `most` descriptors; "" if these are enough."""
    if (needed := files_needed(num_peers)) <= most:
        return ""
    return (
        f"a process that is connected to {num_peers} others needs {needed} open files, and this machine allows {most}; "
        f"raise the hard limit (ulimit -Hn, LimitNOFILE= of a service, docker run --ulimit nofile={needed}), or use "
        "fewer replicas"
    )


def require_files(num_peers: int) -> None:
    """Raise ConfigError if this process cannot have the descriptors for `num_peers` peers."""
    if problem := files_problem(num_peers, most_files()):
        raise ConfigError(problem)


def _number(limit: int) -> int:
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit

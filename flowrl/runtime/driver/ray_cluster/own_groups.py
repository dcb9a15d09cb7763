"""Puts Ray's processes into their own process groups, so that a signal to the driver's group reaches only the driver.

`timeout` and some job schedulers send SIGTERM to the whole process group of a command. Ray's raylet then ends at once,
and ends the run before the driver can write its checkpoint. Ray has no option for this; it blocks only SIGINT.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def own_groups() -> Iterator[None]:
    """Inside, each process that Ray's library starts leads a process group, which its children share.

    A version of Ray that starts its processes by a class not known here keeps them in the driver's group.
    """
    from ray._private import services

    start = getattr(services, "ConsolePopen", None)
    if start is None:
        yield
        return
    services.ConsolePopen = partial(start, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = start

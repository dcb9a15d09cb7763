"""A local Ray without processes that nobody asks: its API server, its autoscaler, and what reads logs for the driver.

`include_dashboard=False` leaves the API server there, as a process that reports statistics of use and for which
`ray.init` waits. On two cores a start takes 3.8 to 4.8 s without the three processes, and 6.2 to 7.4 s with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ALWAYS = ("start_api_server", "start_monitor")
LOGS = "start_log_monitor"


@contextmanager
def lean_head(*, logs: bool) -> Iterator[None]:
    """Inside, Ray's library starts no such process for its head. `logs`: the driver prints what other processes print.

    A Ray that starts them by other methods than those known here has them.
    """
    from ray._private.node import Node

    names = [name for name in (*ALWAYS, *(() if logs else (LOGS,))) if hasattr(Node, name)]
    starts = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(Node, name, start)


def _start_nothing(node: Any, **settings: Any) -> None:
    return

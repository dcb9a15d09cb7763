"""A local Ray without the processes that flowrl does not use: API server, autoscaler, and log reader for the driver.

With `include_dashboard=False`, Ray still starts the API server, which then reports usage statistics, and `ray.init`
waits for it. On two cores a start takes 3.8 to 4.8 s without the three processes, and 6.2 to 7.4 s with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ALWAYS = ("start_api_server", "start_monitor")
LOGS = "start_log_monitor"


@contextmanager
def lean_head(*, logs: bool) -> Iterator[None]:
    """Inside, Ray's library starts none of these processes for its head; with `logs`, it starts the log reader.

    A version of Ray that starts these processes by methods that are not known here still starts them.
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

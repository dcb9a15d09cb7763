"""Chooses the address at which the ranks of a gang meet."""

from __future__ import annotations

import socket


def meeting_place(*, alone: bool) -> str:
    """ "host:port" on this machine, free at the moment, at which the ranks of a gang can meet.

    `alone`: all ranks are on this machine.
    """
    address = "127.0.0.1" if alone else _this_machine()
    with socket.socket() as probe:
        probe.bind((address, 0))
        return f"{address}:{probe.getsockname()[1]}"


def _this_machine() -> str:
    import ray

    return str(ray.util.get_node_ip_address())

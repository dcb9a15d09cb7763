"""Chooses the address at which the ranks of a gang meet."""

from __future__ import annotations

import socket

from flowrl.channel.links.address import local_ip


def meeting_place(*, alone: bool) -> str:
    """ "host:port" on this machine, free at the moment, at which the ranks of a gang can meet.

    `alone`: all ranks are on this machine.
    """
    address = "127.0.0.1" if alone else local_ip()
    with socket.socket() as probe:
        probe.bind((address, 0))
        return f"{address}:{probe.getsockname()[1]}"

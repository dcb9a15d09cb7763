"""Removes the files on this machine that runs with killed processes left behind."""

from __future__ import annotations

from flowrl.channel.links.address import run_name
from flowrl.channel.links.presence import places
from flowrl.channel.links.run_files import clear, found, remove_deserted


def sweep() -> list[str]:
    """Remove segments and sockets of this user's runs that have no live process. Returns their paths."""
    return [str(path) for place in places() for run in found(place) for path in remove_deserted(place, run)]


def remove_run(run_id: str) -> list[str]:
    """Remove all files of one run, even if one of its processes is alive. For the driver, once every host has ended."""
    return [str(path) for place in places() for path in clear(place, run_name(run_id))]

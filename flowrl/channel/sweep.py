"""Removing what runs left on this machine whose processes were killed."""

from __future__ import annotations

from flowrl.channel.address import run_name
from flowrl.channel.presence import clear, found, places, remove_deserted


def sweep() -> list[str]:
    """Remove segments and sockets of this user's runs that have no process any more; returns their paths."""
    return [str(path) for place in places() for run in found(place) for path in remove_deserted(place, run)]


def remove_run(run_id: str) -> list[str]:
    """Remove what is left of one run, whoever lives: for its driver, once every host has ended."""
    return [str(path) for place in places() for path in clear(place, run_name(run_id))]

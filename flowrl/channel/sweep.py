"""Removing what runs left on this machine whose processes were killed."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from flowrl.channel.address import run_prefix, socket_root
from flowrl.channel.slab import SHM

NAME = re.compile(r"^(?:flowrl-)?[0-9a-f]{10}-(?P<pid>\d+)(?:-|$)")


def sweep() -> list[str]:
    """Remove segments and sockets of this user's runs whose driver is gone; returns their paths."""
    removed = []
    for path, pid in _found():
        if not _alive(pid, path):
            _remove(path)
            removed.append(str(path))
    return removed


def clear(run_id: str, driver_pid: int) -> list[str]:
    """Remove what is left of one run, whoever lives: for its driver, once every host has ended."""
    prefix = run_prefix(run_id, driver_pid)
    left = [path for path, _ in _found() if path.name.removeprefix("flowrl-").split("-", 2)[:2] == prefix.split("-")]
    for path in left:
        _remove(path)
    return [str(path) for path in left]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_run(run_id: str, driver_pid: int) -> None:
    """Remove what processes of this run left on this machine that were killed. The run has ended."""
    prefix = run_prefix(run_id, driver_pid)
    for path in SHM.glob(f"flowrl-{prefix}-*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(socket_root() / prefix, ignore_errors=True)


def _found() -> Iterator[tuple[Path, int]]:
    candidates = [*SHM.glob("flowrl-*"), *socket_root().iterdir()]
    for path in candidates:
        match = NAME.match(path.name)
        if match and path.stat().st_uid == os.getuid():
            yield path, int(match["pid"])


def _alive(pid: int, path: Path) -> bool:
    """The process that made `path` lives: `pid` exists and is not a younger process of that number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    except FileNotFoundError:
        return False
    if fields[0] == "Z":
        return False
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    started_s = time.time() - uptime_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return started_s <= path.stat().st_mtime + 1.0

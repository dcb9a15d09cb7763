"""Recognizes a start of flowrl's own Ray for which the machine was too slow.

Ray's raylet waits for the ports of its agents, which are Python processes that import modules for seconds, and ends
itself if the ports are not known within 15 s. That limit is a constant of Ray 2.60 (ray-project/ray#65983). On a busy
machine, or where files come from a cold disk, a later start finds the files in memory.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

STARTS = 3
"""Largest number of times that Ray is started."""
SAID = "Timed out waiting for file"
"""What the raylet logs before it ends itself; the rest of the line names the file of a port."""
WHY = "Ray's raylet gave up its start, because its agents were not ready within the 15 s that it waits for them"
AGAIN = f"{WHY}: the machine is busy or its disk is slow. Ray is started again"
TOO_OFTEN = f"{WHY}, {STARTS} times in a row: the machine is too busy. Try again when less runs on it"


def was_too_slow(logs: Path, process: str) -> bool:
    """Whether Ray's process with this name, whose logs are in `logs`, has ended because the machine was too slow."""
    with suppress(OSError):
        return process == "raylet" and SAID in (logs / "raylet.err").read_text(errors="replace", encoding="utf-8")
    return False

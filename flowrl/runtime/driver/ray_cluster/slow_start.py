"""A start of flowrl's own Ray that the machine was too slow for.

Ray's raylet waits for the ports of its agents, which are Python processes that import for seconds, and ends itself when
they do not come within 15 s. That is a constant of Ray 2.60 (ray-project/ray#65983). On a busy machine, or where files
come from a cold disk, a later start finds them in memory.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

STARTS = 3
"""How often Ray is started at most."""
SAID = "Timed out waiting for file"
"""What the raylet says before it ends itself; the rest is the file of a port."""
WHY = "Ray's raylet gave its start up, because its agents were not ready within the 15 s that it waits for them"
AGAIN = f"{WHY}: the machine is busy or its disk is slow. Ray is started again"
TOO_OFTEN = f"{WHY}, {STARTS} times in a row: the machine is too busy. Try again when less runs on it"


def was_too_slow(logs: Path, process: str) -> bool:
    """Whether the process of Ray with this name, whose logs are in `logs`, has ended for that reason."""
    with suppress(OSError):
        return process == "raylet" and SAID in (logs / "raylet.err").read_text(errors="replace")
    return False

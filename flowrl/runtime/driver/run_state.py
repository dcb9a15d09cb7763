"""What changes in a run and concerns several parts of the driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunState:
    """The state of one run."""

    version: int
    """The main trainer's newest version that is booked."""
    interrupted: bool = False
    """Admission has ended before the last step; what is in flight is finished."""
    running: bool = False
    """All nodes are set up."""

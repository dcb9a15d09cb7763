"""The changing state of a run that several parts of the driver use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunState:
    """The state of one run."""

    version: int
    """The main trainer's newest version that is booked."""
    interrupted: bool = False
    """Whether admission has ended before the last step; the groups in flight are finished."""
    running: bool = False
    """Whether all nodes are set up."""

"""What the command line says about a run besides the graph's own config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunOptions:
    """Options of `flowrl run`."""

    steps: int | None = None
    """Stop after this version; None: when the data end."""
    run_dir: Path | None = None
    """Where the run's records go; None: runs/GRAPH-TIME."""
    resume: bool = False
    """Go on from the newest checkpoint in `run_dir`."""
    save_every: int = 0
    """A checkpoint every n steps; 0: only the one at the end."""
    keep: int = 2
    """Checkpoints kept; 0: all."""
    seed: int = 0
    """Order of the data, sampling and initial values follow from it."""
    plain: bool = False
    """Plain lines instead of the live view."""
    track: tuple[str, ...] = ()
    """Further sinks of the metrics: tensorboard, wandb, trackio."""

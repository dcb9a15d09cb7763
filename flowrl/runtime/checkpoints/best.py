"""The best checkpoint so far, by held-out score: `best.json` in the run directory names it.

`best.json` is replaced after its checkpoint is complete and before an older one is removed, so it names an existing
checkpoint even if the run is killed at any time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.runtime.checkpoints.whole_file import write_whole

BEST = "best.json"
FIGURE = "score"
"""The figure that decides: the mean verdict on the held-out answers of the first task."""


@dataclass(frozen=True)
class Best:
    """The `score` of the weights in `checkpoint` (relative to the run directory)."""

    step: int
    score: float
    checkpoint: str

    @classmethod
    def of(cls, step: int, figures: Mapping[str, float]) -> Best:
        """The result of an evaluation of the weights of `step`."""
        return cls(step, figures[FIGURE], f"checkpoints/step_{step:06d}")

    def beats(self, other: Best | None) -> bool:
        """Whether this one is better; at equal scores the earlier one stays."""
        return other is None or self.score > other.score

    def write(self, run_dir: Path) -> None:
        """Write `best.json` completely or not at all."""
        write_whole(run_dir / BEST, json.dumps(asdict(self), indent=2) + "\n")


def read_best(run_dir: Path, *, newest_step: int) -> Best | None:
    """The best checkpoint up to `newest_step`; None if there is none, or if it was removed. Raises ConfigError if
    `best.json` is damaged."""
    best = recorded_best(run_dir)
    return best if best is not None and best.step <= newest_step and (run_dir / best.checkpoint).is_dir() else None


def recorded_best(run_dir: Path) -> Best | None:
    """What `best.json` says; None without the file. Raises ConfigError if it is damaged."""
    path = run_dir / BEST
    if not path.is_file():
        return None
    try:
        best = Best(**json.loads(path.read_text(encoding="utf-8")))
        if isinstance(best.step, int) and isinstance(best.score, int | float) and isinstance(best.checkpoint, str):
            return best
        why = "its values have other types"
    except (OSError, ValueError, TypeError, RecursionError) as problem:
        why = str(problem)
    raise ConfigError(
        f"{path} is damaged ({why}); restore it from a copy, or remove it: the best checkpoint is then that of the "
        "evaluations to come"
    )

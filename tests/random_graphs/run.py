"""One seed: run, judged, and made smaller."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from flowrl.errors import GraphError
from tests.random_graphs.graph import Config
from tests.random_graphs.life import live
from tests.random_graphs.oracle import Violation, violations
from tests.random_graphs.shape import FEATURES

MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one: runs write and sync a lot."""


@dataclass(frozen=True)
class Verdict:
    """On one seed."""

    seed: int
    without: str
    outcome: str
    """held, failed, or refused (by the check)."""
    violations: list[Violation] = field(default_factory=list)
    lives: int = 0
    crashes: int = 0

    def told(self, shrunk: Verdict | None = None) -> str:
        """Everything that is needed to look at it."""
        verdict = shrunk or self
        lines = [f"{violation.kind}: {violation.text}" for violation in verdict.violations]
        without = f" --without {verdict.without}" if verdict.without else ""
        graph = Config(verdict.seed, verdict.without).shape.describe()
        return "\n".join(
            [graph, *lines, f"again: python -m tests.random_graphs --only {verdict.seed}{without}", "-" * 40]
        )


def judge(seed: int, without: str = "") -> Verdict:
    """Run the graph of a seed and say what was wrong."""
    config = Config(seed, without)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None, prefix="random-graphs-") as directory:
        try:
            endings = live(config, Path(directory))
        except GraphError as error:
            return Verdict(seed, without, "refused", [Violation("check", str(error))])
        found = violations(config.shape, endings)
    crashes = sum(ending.crashed for ending in endings)
    return Verdict(seed, without, "failed" if found else "held", found, len(endings), crashes)


def smaller(verdict: Verdict) -> Verdict:
    """The same seed without the features that its first kind of violation does not need."""
    kind = verdict.violations[0].kind
    for feature in FEATURES:
        without = ",".join(filter(None, (verdict.without, feature)))
        if feature in verdict.without.split(","):
            continue
        less = judge(verdict.seed, without)
        if less.outcome == "failed" and less.violations[0].kind == kind:
            verdict = less
    return verdict

"""`Finding`: the answer to one question of `flowrl doctor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """What was found; `remedy` says how to correct a problem."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measured values, by name."""

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.status in ("warning", "failed")), (self.name, self.status, self.remedy)


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, with its remedy below."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8} {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)

"""What an audit finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong.

    `kind` is state, tokens, uses, losses, versions, bound, groups, tickets, steps, evaluations, metrics, checkpoints
    or chain.
    """

    kind: str
    text: str

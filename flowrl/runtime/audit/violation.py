"""The form of an audit's findings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One violation of a rule.

    `kind` is state, tokens, uses, losses, versions, bound, spans, requests, episodes, groups, tickets, steps,
    evaluations, metrics, checkpoints or chain.
    """

    kind: str
    text: str

"""Weighted sums written as text: `0.7*this + 0.3*that as name`. Rewards and mixtures of tasks are such sums."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from flowrl.errors import ConfigError

PLUS = re.compile(r"(?<!\S)\+(?!\S)")
"""A plus sign between blanks, so that `a+b` in a name or an option does not match."""
TERM = re.compile(r"(?:(?P<weight>[-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*\*\s*)?(?P<text>.*?)(?:\s+as\s+(?P<name>\S+))?")


@dataclass(frozen=True)
class Term:
    """One summand; `name` is "" if the text gives none."""

    text: str
    weight: float = 1.0
    name: str = ""


def terms(text: str) -> tuple[Term, ...]:
    """The summands of `text`. Raises ConfigError for an empty summand and for a weight that is not a number."""
    return tuple(_term(part.strip(), text) for part in PLUS.split(text))


def parse_weights(what: str, text: str) -> dict[str, float]:
    """NAME=WEIGHT,NAME=WEIGHT as a mapping. Raises ConfigError, which names `what`, for any other text."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not math.isfinite(weight):
            raise ConfigError(f"{what} has {part!r}; write NAME=WEIGHT,NAME=WEIGHT")
        found[name.strip()] = weight
    return found


def _term(part: str, whole: str) -> Term:
    match = TERM.fullmatch(part)
    if match is None or not match["text"]:
        raise ConfigError(f"{whole!r} has an empty summand; write WEIGHT*THIS + WEIGHT*THAT as NAME")
    try:
        weight = float(match["weight"] or 1)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ConfigError(f"{whole!r}: the weight {match['weight']} is no number; write WEIGHT*THIS + WEIGHT*THAT")
    return Term(match["text"], weight, match["name"] or "")

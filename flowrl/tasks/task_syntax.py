"""How tasks, environments and rewards are written as text.

Options follow a name, `SOURCE:key=value,key=value`. Rewards and mixtures of tasks are weighted sums:
`0.7*this + 0.3*that as name`.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.errors import ConfigError

_PIECE = re.compile(r"""(?<=[=\[({:,\s])(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|.""", re.DOTALL)
"""A text in quotes, or one character."""


def split_name(name: str) -> tuple[str, str]:
    """The source, and the text of its options."""
    source, colon, options = name.partition(":")
    return (source, options) if colon else (name, "")


def parse_options(what: str, text: str) -> Mapping[str, Any]:
    """The options of a name; values are Python literals where they parse as such, else text.

    A value in quotes may have commas. `what` names the owner in errors, as "task 'arithmetic:digits'". Raises
    ConfigError.
    """
    found: dict[str, Any] = {}
    for part in filter(None, _split_options(text)):
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ConfigError(f"{what}: {part!r} is no option; write them as SOURCE:key=value,key=value")
        try:
            found[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            found[key.strip()] = value.strip()
    return found


def write_option(key: str, value: str) -> str:
    """The text of one option, `key=value`, with the value in quotes if it would otherwise be read as something else."""
    plain = f"{key}={value}"
    try:
        read = parse_options("", plain)
    except ConfigError:
        read = {}
    return plain if read == {key: value} else f"{key}={value!r}"


def _split_options(text: str) -> Iterator[str]:
    """The texts between those commas that are outside brackets and quotes."""
    start = depth = 0
    for piece in _PIECE.finditer(text):
        depth = max(0, depth + (piece[0] in ("[", "(", "{")) - (piece[0] in ("]", ")", "}")))
        if piece[0] == "," and depth == 0:
            yield text[start : piece.start()]
            start = piece.end()
    yield text[start:]


def take_options(what: str, name: str, taken: Collection[str]) -> tuple[str, Mapping[str, Any]]:
    """The name without the options in `taken`, and those options of it with their values. Raises ConfigError."""
    source, text = split_name(name)
    own = {key: value for key, value in parse_options(what, text).items() if key in taken} if text else {}
    if not own:
        return name, {}
    parts = [part for part in _split_options(text) if part.partition("=")[0].strip() not in own]
    return (f"{source}:{','.join(parts)}" if parts else source), own


# Weighted sums


PLUS = re.compile(r"(?<!\S)\+(?!\S)")
"""A plus sign between blanks, so that `a+b` in a name or an option does not match."""
TERM = re.compile(r"(?:(?P<weight>[-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*\*\s*)?(?P<text>.*?)(?:\s+as\s+(?P<name>\S+))?")


@dataclass(frozen=True)
class Term:
    """One summand; `name` is "" if the text gives none."""

    text: str
    weight: float = 1.0
    name: str = ""


def parse_sum(text: str) -> tuple[Term, ...]:
    """The summands of `text`. Raises ConfigError for an empty summand and for a weight that is not a number."""
    terms = []
    for part in PLUS.split(text):
        match = TERM.fullmatch(part.strip())
        if match is None or not match["text"]:
            raise ConfigError(f"{text!r} has an empty summand; write WEIGHT*THIS + WEIGHT*THAT as NAME")
        try:
            weight = float(match["weight"] or 1)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):
            raise ConfigError(f"{text!r}: the weight {match['weight']} is no number; write WEIGHT*THIS + WEIGHT*THAT")
        terms.append(Term(match["text"], weight, match["name"] or ""))
    return tuple(terms)


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

"""Options in a name, `SOURCE:key=value,key=value`, as tasks and environments have them."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from typing import Any

from flowrl.errors import ConfigError

_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^\[(]*[\])])")


def split_name(name: str) -> tuple[str, str]:
    """The source, and the text of its options."""
    source, colon, options = name.partition(":")
    return (source, options) if colon else (name, "")


def parse_options(what: str, text: str) -> Mapping[str, Any]:
    """The options of a name; values are Python literals where they parse as such, else text.

    `what` names the owner in errors, as "task 'arithmetic:digits'". Raises ConfigError.
    """
    return dict(_option(what, part) for part in _COMMA_OUTSIDE_BRACKETS.split(text) if part)


def take_options(what: str, name: str, taken: Collection[str]) -> tuple[str, Mapping[str, Any]]:
    """The name without the options `taken`, and those of them that it has. Raises ConfigError."""
    source, text = split_name(name)
    own = {key: value for key, value in parse_options(what, text).items() if key in taken} if text else {}
    if not own:
        return name, {}
    parts = [part for part in _COMMA_OUTSIDE_BRACKETS.split(text) if part.partition("=")[0].strip() not in own]
    return (f"{source}:{','.join(parts)}" if parts else source), own


def _option(what: str, part: str) -> tuple[str, Any]:
    key, equals, text = part.partition("=")
    if not equals or not key.strip().isidentifier():
        raise ConfigError(f"{what}: {part!r} is no option; write them as SOURCE:key=value,key=value")
    try:
        return key.strip(), ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return key.strip(), text.strip()

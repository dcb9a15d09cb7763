"""Options in a name, `SOURCE:key=value,key=value`, as tasks and environments have them."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
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
    return dict(_option(what, part) for part in _parts(text) if part)


def option_text(key: str, value: str) -> str:
    """The text of one option, `key=value`, with the value in quotes if it would otherwise be read as something else."""
    plain = f"{key}={value}"
    try:
        read = parse_options("", plain)
    except ConfigError:
        read = {}
    return plain if read == {key: value} else f"{key}={value!r}"


def _parts(text: str) -> Iterator[str]:
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
    parts = [part for part in _parts(text) if part.partition("=")[0].strip() not in own]
    return (f"{source}:{','.join(parts)}" if parts else source), own


def _option(what: str, part: str) -> tuple[str, Any]:
    key, equals, text = part.partition("=")
    if not equals or not key.strip().isidentifier():
        raise ConfigError(f"{what}: {part!r} is no option; write them as SOURCE:key=value,key=value")
    try:
        return key.strip(), ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return key.strip(), text.strip()

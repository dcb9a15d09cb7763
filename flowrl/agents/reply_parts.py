"""What a parser of replies is given, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.models.tokens.chat import Messages


class UnreadableReply(Exception):
    """A call in a reply cannot be read; the text says why."""


@dataclass(frozen=True)
class SampledText:
    """What a parser is given."""

    whole: str
    """The text with its special tokens, including the end."""
    body: str
    """The text without the special token that ended it."""
    ids: tuple[int, ...]
    """Empty if the reply was given as text."""
    context: str
    tools: Messages


@dataclass(frozen=True)
class ReplyParts:
    """What a parser found. A call should be a mapping with `name`, `arguments` (a mapping or JSON text) and maybe
    `id`."""

    content: str
    reasoning: str = ""
    calls: Sequence[Any] = ()


Extract = Callable[[SampledText], ReplyParts]
"""May raise any exception, depending on the text."""

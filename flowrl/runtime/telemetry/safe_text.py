"""Makes text of a model safe to show in a terminal."""

from __future__ import annotations

import unicodedata

REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder the text around them."""


def shown(text: str) -> str:
    """`text` with escapes instead of the characters that would move the cursor, change colours or reorder the text."""
    return "".join(_escaped(character) if _is_unsafe(character) else character for character in text)


def _is_unsafe(character: str) -> bool:
    if character in "\n\t":
        return False
    return unicodedata.category(character) in ("Cc", "Cs") or character in REORDERING


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()

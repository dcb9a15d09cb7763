"""Text for people: nothing in it reaches a terminal as a command, and every charset can show it.

Texts come from models, rows, file names and other programs. `print_text` prints them, and where rich does, it is a
`SafeConsole` (`view`): both write `shown` text, and only the colours that flowrl itself chooses. What a stream's
charset lacks is replaced, once `replace_unwritable` has told the stream so.
"""

from __future__ import annotations

import codecs
import os
import sys
import unicodedata
from typing import TextIO

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


PLAIN = {"→": "->", "←": "<-", "×": "x", "…": "...", "–": "-", "—": "-", "≤": "<=", "≥": ">=", "·": "-", "’": "'"}
"""Characters of flowrl's own texts -> what stands for them in a charset that lacks them."""
REPLACED = "flowrl-readable"
"""The name of the error handler that replaces."""


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    found = (PLAIN.get(character) or character.encode("ascii", "backslashreplace").decode() for character in part)
    return "".join(found), error.end


codecs.register_error(REPLACED, _replaced)


def replace_unwritable() -> None:
    """From now on, standard streams of this process, and of those that it starts, replace what their charset lacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=REPLACED)
    charset = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{charset}:backslashreplace"  # an empty one is that of the locale


def print_text(
    *parts: object, stream: TextIO | None = None, sep: str = " ", end: str = "\n", flush: bool = False
) -> None:
    """Print like `print`; the only way in which texts for people get to a stream without rich."""
    text = sep.join(map(str, parts))
    print(shown(text), file=stream, end=end, flush=flush)

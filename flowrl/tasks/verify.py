"""Built-in rewards. Any function with the same signature, named `file.py:function`, can replace them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrl.tasks.checks.written_numbers import is_same


def exact_match(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response equals the answer, ignoring blanks around either, else 0; numbers are compared as numbers."""
    return [float(is_same(response, str(right))) for response, right in zip(responses, answer, strict=True)]

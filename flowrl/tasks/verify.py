"""Built-in rewards. Any function with the same signature, named `file.py:function`, can replace them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def exact_match(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response equals the answer, ignoring blanks around either, else 0."""
    return [float(response.strip() == str(right).strip()) for response, right in zip(responses, answer, strict=True)]

"""The reward of trainers.py, which flowrl and TRL both call: 1 if the answer's number is the last one."""

import re
from collections.abc import Sequence
from typing import Any


def correct(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float]:
    """1 or 0 for each completion, which is a text or a list with one message."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(last_number(text) == str(truth)) for text, truth in zip(texts, answer, strict=True)]


def last_number(text: str) -> str | None:
    found: list[str] = re.findall(r"-?\d+", text)
    return found[-1] if found else None

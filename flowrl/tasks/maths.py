"""Compares answers mathematically with math-verify: `1/2` equals `0.5`; surrounding text is ignored.

The reference may be only an answer or a worked solution that ends with `#### 72` (GSM8K) or
`\\boxed{72}` (MATH). In a response the last such answer counts, else its last formula or number.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.errors import ConfigError

MARK = "####"
SECONDS = 5


def score(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response's last answer equals the reference, else 0."""
    return [float(equal(response, str(right))) for response, right in zip(responses, answer, strict=True)]


def equal(response: str, answer: str) -> bool:
    """Whether both denote the same number, set, interval or formula."""
    from math_verify import verify

    said = _parsed(_last(response))
    return bool(said) and bool(verify(_right(answer), said, timeout_seconds=SECONDS))


@functools.lru_cache(maxsize=4096)
def _right(answer: str) -> list[Any]:
    return _parsed(_last(answer))


def _last(text: str) -> str:
    """The text after the last GSM8K mark; the whole text if there is no mark."""
    return text.rpartition(MARK)[2].strip()


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=SECONDS))


def check(answers: Mapping[str, str]) -> None:
    """Raise ConfigError if math-verify is missing, or finds nothing in the first of `answers`, which are by place."""
    try:
        import math_verify  # noqa: F401
    except ImportError:
        raise ConfigError(
            "check=math compares answers with math-verify, which is not installed; pip install math-verify"
        ) from None
    place, answer = next(iter(answers.items()), ("", ""))
    if answers and not _right(answer):
        raise ConfigError(
            f"{place}: check=math finds no number or formula in the answer {answer[:60]!r}; name the column that has "
            "one with answer=, or leave check=math out"
        )

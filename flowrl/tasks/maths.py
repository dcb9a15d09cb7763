"""Compares answers mathematically with math-verify: `1/2` equals `0.5`; surrounding text is ignored.

The reference may be only an answer, with or without `$...$` (`3\\sqrt{13}`, `[-2,7]`), or a worked solution that ends
with `#### 72` (GSM8K) or `\\boxed{72}` (MATH). In a response the last such answer counts, else its last formula or
number.

math-verify reads LaTeX only between delimiters; of other text it takes a number. So a text that is nothing but a
formula is put between them first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.written_numbers import MARK, MARKED, in_digits

SECONDS = 5
MOST_FORMULA = 400
"""Characters of a text that may be nothing but a formula."""
DELIMITED = re.compile(r"\\boxed|(?<!\\)\\[(\[]|(?<!\\)\$.*(?<!\\)\$", re.DOTALL)
NAMED = re.compile(r"\\(?:text\w*|mbox|mathrm|operatorname\*?|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
"""Letters that LaTeX takes for no product of variables: commands, and words inside of them."""
WORD = re.compile(
    r"(?<![A-Za-z\d\\^_)}])(?!(?:and|or)\b)(?:[A-Za-z]{3,}(?![A-Za-z\d^_({])|[A-Za-z]{2}(?=\s+\d))|\d\s+(?!or\b)[A-Za-z]{2}\b"
)
"""A word of prose: letters that stand alone, unlike those of `3xyz` and `sin(x)`."""
SPACED = re.compile(r"(?<=\d)(?:\\[,!]|,\\!\s*|\{,\})(?=\d{3}(?!\d))")
"""Between the thousands of a number in LaTeX."""


def score(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response's last answer equals the reference, else 0."""
    return [float(equal(response, str(right))) for response, right in zip(responses, answer, strict=True)]


def prepare() -> None:
    """Import math-verify, and let it build its parser; nothing where it is missing, which `check` tells."""
    with suppress(ImportError):
        equal("1", "1")


def equal(response: str, answer: str) -> bool:
    """Whether both denote the same number, set, interval or formula."""
    from math_verify import verify

    said = _read(_marked(response) or response)
    return bool(said) and bool(verify(_right(answer), said, timeout_seconds=SECONDS))


@functools.lru_cache(maxsize=4096)
def _right(answer: str) -> list[Any]:
    return _read(_reference(answer))


def _reference(answer: str) -> str:
    """What stands for the answer in a reference: what follows its last mark, or all of it."""
    return _marked(answer) or answer.rpartition(MARK)[2].strip()


def _marked(text: str) -> str | None:
    """The line after the last GSM8K mark that is an answer; a heading of Markdown, with words, is none."""
    for part in reversed(text.split(MARK)[1:]):
        line = part.strip().partition("\n")[0].strip()
        if _is_formula(line) or MARKED.match(f"{MARK}{line}"):
            return line
    return None


def _is_formula(text: str) -> bool:
    """Whether the text is one line of mathematics without prose."""
    if len(text) > MOST_FORMULA or "\n" in text or not any(map(str.isalnum, text)):
        return False
    return not WORD.search(NAMED.sub(" ", text))


def _read(text: str) -> list[Any]:
    from math_verify import parse

    text = SPACED.sub("", in_digits(text.strip()))
    return list(parse(_delimited(text) if _is_formula(text) else text, parsing_timeout=SECONDS))


def _delimited(formula: str) -> str:
    """The formula as math-verify reads it; of a calculation (`2 * 9 = 18`) what it comes to."""
    if DELIMITED.search(formula):
        return formula
    calculation, _, result = formula.rpartition("=")
    result = formula if re.search("[A-Za-z]", NAMED.sub(" ", calculation)) else result
    plain = re.sub(r"\\?\$", "", result)
    return f"${plain}$"


def check(answers: Mapping[str, str]) -> None:
    """Raise ConfigError if math-verify is missing, or finds nothing in one of `answers`, which are by place."""
    try:
        import math_verify  # noqa: F401
    except ImportError:
        raise ConfigError(
            "check=math compares answers with math-verify, which is not installed; pip install math-verify"
        ) from None
    wrong = [place for place, answer in answers.items() if not is_readable(answer)]
    if wrong:
        raise ConfigError(
            f"{wrong[0]}: check=math finds no number or formula in the answer {answers[wrong[0]][:60]!r} "
            f"({len(wrong)} of {len(answers)} have none); leave such rows out with malformed=skip, name another "
            "column with answer=, or leave check=math out"
        )


def is_readable(answer: str) -> bool:
    """Whether math-verify finds something. It always does in a formula and in text with a digit, which is most of them:
    it need not be asked, which takes it some milliseconds for each."""
    text = _reference(answer)
    return _is_formula(text) or bool(re.search("[0-9]", text)) or bool(_right(answer))

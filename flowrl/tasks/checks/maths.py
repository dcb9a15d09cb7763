"""Compares answers mathematically with math-verify: `1/2` equals `0.5`; surrounding text is ignored.

The reference may be only an answer, with or without `$...$` (`3\\sqrt{13}`, `[-2,7]`), or a worked solution that ends
with `#### 72` (GSM8K) or `\\boxed{72}` (MATH). In a response the last such answer counts, else its last formula or
number.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.checks.answer_checks import box_of
from flowrl.tasks.checks.bare_formulas import bare_formulas, delimited, has_formula, prose
from flowrl.tasks.checks.written_numbers import MARK, MARKED

SECONDS = 5
ITEM = re.compile(r"\A-\s+(?=[$€£¥₹]?\.?\d)")
"""The mark of an item in a Markdown list. It is removed only from responses: in a reference answer, `- 12` is -12."""
LATEX = re.compile(r"[\\{|]")
SPACED_BOX = re.compile(r"\\boxed\s+\{")
"""A box with a blank before its brace, which LaTeX allows and math-verify does not read."""


def score(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response's last answer equals the reference, else 0."""
    return [float(equal(response, str(right))) for response, right in zip(responses, answer, strict=True)]


def prepare() -> None:
    """Import math-verify and let it build its parser. Does nothing if math-verify is missing; `check` reports that."""
    with suppress(ImportError):
        equal("1", "1")


def equal(response: str, answer: str) -> bool:
    """Whether both denote the same number, set, interval or formula."""
    from math_verify import verify

    said = _read(_marked(response) or ITEM.sub("", response.strip()))
    if said and verify(_right(answer), said, timeout_seconds=SECONDS):
        return True
    return response.strip() == answer.strip() != ""


@functools.lru_cache(maxsize=4096)
def _right(answer: str) -> list[Any]:
    return _read(_reference(answer))


def _reference(answer: str) -> str:
    """The answer within a reference: what follows its last mark, or the whole reference."""
    return _marked(answer) or answer.rpartition(MARK)[2].strip()


def _marked(text: str) -> str | None:
    """The rest of the line after the last GSM8K mark that an answer follows; if a box comes later, the text after that
    line. None if no mark is followed by an answer.

    A Markdown heading with words is no answer. A heading without words is none either if a box comes later.
    """
    end = len(text)
    while (mark := text.rfind(MARK, 0, end)) >= 0:
        line, _, rest = text[mark + len(MARK) : end].strip().partition("\n")
        if bare_formulas(line) or MARKED.match(f"{MARK}{line.strip()}"):
            rest = rest + text[end:]
            return line.strip() if box_of(rest) is None else rest
        end = mark
    return None


def _read(text: str) -> list[Any]:
    """What math-verify finds: values, and the texts that they were parsed from; only the text where it cannot parse
    LaTeX."""
    text = SPACED_BOX.sub(r"\\boxed{", text)
    found = [one for formula in bare_formulas(text) for one in _parsed(delimited(formula))] or _parsed(prose(text))
    if found and all(isinstance(one, str) for one in found) and not LATEX.search(found[0]):
        found += _parsed(prose(found[0]))  # it is no LaTeX, so it may be a number with a word
    return found


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=SECONDS))


def check(answers: Mapping[str, str]) -> None:
    """Raise ConfigError if math-verify is missing, or finds nothing in one of `answers` (place -> answer)."""
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
    """Whether math-verify finds something in the answer. math-verify itself is not called: it takes some milliseconds
    for each answer, and it refuses to run outside the main thread, but nodes load their rows in other threads."""
    return has_formula(_reference(answer))

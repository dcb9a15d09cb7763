"""Checks of a response against the reference answer, by name: `FILE:check=gsm8k`.

`exact` compares the whole texts and `math` formulas (flowrl.tasks.maths). Here are those that look for the answer in
the response and need no package: `gsm8k`, the last number, or the one after `####`; `boxed`, the last \\boxed{...};
`choice`, the letter of a multiple choice. `code` runs programs against tests (flowrl.tasks.code_tests).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.code_tests import given_tests

MARK = "####"
NUMBER = re.compile(r"(?:(?<!\d)-)?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)")
BOX = "\\boxed{"
BRACES = re.compile(r"\\boxed\{|[{}]")
# Possessive: of a run of blanks, which each of them could take, none gives anything back.
SAID = re.compile(r"(?i:answer|choice|option)(?i:\s++is)?+\s*+[:=]?+\s*+\**+\s*+[(\[]?+([A-Z])\b(?!['’])")
ALONE = re.compile(r"\s*\(?\[?([A-Za-z])(?:[\])]|[.:](?!\w)|\s*$)")


def gsm8k(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response's number equals the reference's; commas, signs of currency and trailing zeros do not count."""
    return _scores(number_of, responses, answer)


def boxed(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response's last box holds the reference; blanks and the way to write a number do not count."""
    return [
        float((found := box_of(said)) is not None and plain_of(found) == plain_of(_boxed_or_all(str(right))))
        for said, right in zip(responses, answer, strict=True)
    ]


def choice(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response chooses the reference's letter. A reference that is a number counts from 0 for A."""
    return [
        float((found := letter_of(said)) is not None and found == right_letter(right))
        for said, right in zip(responses, answer, strict=True)
    ]


def _scores(found: Callable[[str], Any], responses: Sequence[str], answer: Sequence[Any]) -> list[float]:
    return [
        float((right := found(str(one))) is not None and found(said) == right)
        for said, one in zip(responses, answer, strict=True)
    ]


def number_of(text: str) -> Decimal | None:
    """The number after the last ####, else the last number of the text."""
    numbers = NUMBER.findall(text.rpartition(MARK)[2] if MARK in text else text)
    marked = MARK in text
    if not numbers:
        return None
    try:
        return Decimal(numbers[0 if marked else -1].replace(",", ""))
    except InvalidOperation:
        return None


def box_of(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces are closed; takes time in proportion to the text."""
    opened: list[int] = []
    """Where the content of each open brace begins; 0 for one that is no box."""
    last, found = 0, None
    for brace in BRACES.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[0] == BOX else 0)
        elif opened and (start := opened.pop()) > last:
            last, found = start, text[start : brace.start()]
    return found


def _boxed_or_all(text: str) -> str:
    found = box_of(text)
    return text if found is None else found


def plain_of(text: str) -> Decimal | str:
    """A number as such; other text without blanks, dollar signs and \\text{...} around it."""
    bare = re.sub(r"\s+|\$|\\[,!;]|\\(?=%)", "", text)
    bare = re.sub(r"^\\(?:text|mathrm|textbf)\{(.*)\}$", r"\1", bare).rstrip(".")
    return Decimal(bare.replace(",", "")) if NUMBER.fullmatch(bare) else bare


def letter_of(text: str) -> str | None:
    """The letter that the response ends up with: in a box, after "answer", or as all that is said."""
    box = box_of(text)
    if box is not None:
        said = re.fullmatch(r"\s*(?:\\text\{)?\(?([A-Za-z])\)?\}?\s*", box)
        return said.group(1).upper() if said else None
    if said_last := SAID.findall(text):
        return str(said_last[-1]).upper()
    alone = ALONE.match(text)
    return alone.group(1).upper() if alone else None


def right_letter(answer: Any) -> str | None:
    """The letter of a reference: itself, or counted from 0 for A."""
    text = str(answer).strip().strip("().").upper()
    if text.isdecimal() and int(text) < 26:
        return chr(ord("A") + int(text))
    return text if len(text) == 1 and "A" <= text <= "Z" else letter_of(str(answer))


CHECKS: dict[str, str] = {
    "exact": "flowrl.tasks.verify:exact_match",
    "math": "flowrl.tasks.maths:score",
    "gsm8k": "flowrl.tasks.answer_checks:gsm8k",
    "boxed": "flowrl.tasks.answer_checks:boxed",
    "choice": "flowrl.tasks.answer_checks:choice",
    "code": "flowrl.environments.tools.code_answers:code",
}
"""Check -> the reward function that does it."""
OF_MIXTURE, OF_MIXTURE_WITH_CODE = "flowrl.tasks.mixture:score", "flowrl.tasks.mixture:score_with_code"
"""The functions that ask the verifiers of a mixture's sources; the second one where some have check=code."""
NEEDED: dict[str, tuple[str, Callable[[str], object]]] = {
    "gsm8k": ("a number", number_of),
    "choice": ("a letter, or a number that counts from 0 for A", right_letter),
    "code": ("tests (a list of asserts, code, or inputs and outputs)", given_tests),
}
STRUCTURED = ("code",)
"""Checks whose answers may be lists or mappings."""


def check_references(check: str, answers: Mapping[str, str]) -> None:
    """Raise ConfigError if an answer of a task, by its place, cannot be what the check compares with."""
    if check not in NEEDED:
        return
    wanted, find = NEEDED[check]
    wrong = [place for place, text in answers.items() if find(text) is None]
    if wrong:
        raise ConfigError(
            f"{wrong[0]}: the answer is {answers[wrong[0]][:60]!r}, and check={check} needs {wanted} in every answer "
            f"({len(wrong)} of {len(answers)} have none); name the column that has it with answer=, or choose "
            "another check"
        )

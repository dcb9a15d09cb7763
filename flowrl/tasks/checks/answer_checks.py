"""Checks of a response against the reference answer, by name: `FILE:check=gsm8k`.

`exact` compares whole texts, and `math` compares formulas (flowrl.tasks.checks.maths). This module has the checks that
look for the answer in the response and need no package: `gsm8k` compares the last number, or the one after `####`;
`boxed`, the last \\boxed{...}; `choice`, the letter of a multiple choice. `code` runs programs against tests
(flowrl.tasks.checks.code_tests).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.checks.written_numbers import NUMBER, decimal_of, number_of, reference_number

BRACES = re.compile(r"\\boxed\s*\{|[{}]")
# Possessive quantifiers: several parts of the pattern can match the same run of blanks, and none of them backtracks.
OPENED = r"""(?:\\(?:text|math)\w*+\{|[*\s(\[$"'])*+"""
LETTER = rf"[*_\s]*+(?P<sign>(?i:is\b)[*\s]*+[:=]?+|[:=])?+{OPENED}(?i:(?:option|choice)\b)?+{OPENED}"
LETTER += r"(?!I\b(?(sign)(?!)|\s+(?!is\b)[a-z]))(?P<letter>[A-Z])\b(?!['’])"
"""The letter may follow "is", a colon, an equals sign or nothing. After nothing, the I of "the option I chose" is no
letter."""
SMALL = rf"[*_\s]*+(?:(?i:is\b)[*\s]*+)?+(?P<colon>[:=][*_\s]*+)?+{OPENED}(?:(?i:option|choice)\b)?+{OPENED}"
SMALL += r"(?P<small>[a-z])(?:(?<=\(.)\)|(?(colon)(?=[)\]}]|[*_$\"'.]*+[ \t]*+$|[.:]\s)|(?!)))"
"""A small letter in parentheses, or after a colon if the line ends with it or it is marked as an option: `b) Paris`."""
ANSWERED = re.compile(f"(?i:answer)(?:{LETTER}|{SMALL})", re.MULTILINE)
OPTED = re.compile(f"(?i:option|choice){LETTER}(?P<small>(?!))?")
ALONE = re.compile(r"[\s*]*+[(\[]?+([A-Za-z])(?:[\])]|\**+[.:](?!\w)|[\s*]*+$)")
AROUND = re.compile(r"\\(?:text|math)\w*+\s*+\{|\\[ ,;!]|[{}$~]")
"""What LaTeX puts around a letter in a box."""


def gsm8k(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response's number equals the reference's; commas, currency signs and trailing zeros are ignored."""
    return [
        float((right := reference_number(str(one))) is not None and number_of(said) == right)
        for said, one in zip(responses, answer, strict=True)
    ]


def boxed(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response's last box holds the reference; blanks and the notation of a number are ignored."""
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


def box_of(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces are closed; takes time in proportion to the text."""
    opened: list[int] = []
    """Where the content of each open brace begins; 0 for a brace that opens no box."""
    last, found = 0, None
    for brace in BRACES.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[0] != "{" else 0)
        elif opened and (start := opened.pop()) > last:
            last, found = start, text[start : brace.start()]
    return found


def _boxed_or_all(text: str) -> str:
    found = box_of(text)
    return text if found is None else found


def plain_of(text: str) -> Decimal | str:
    """A number as a Decimal; other text without blanks, dollar signs and a \\text{...} around it."""
    text = re.sub(r"\$|\\!|\\(?=%)", "", re.sub(r"\{,\}|,\\!\s*", ",", text))
    text = re.sub(r"^\\(?:text|mathrm|textbf)\{(.*)\}$", r"\1", re.sub(r"\\[,;]", " ", text).strip()).rstrip(".")
    digits = re.sub(r"(?<!,)\s+", "", text)  # a blank after a comma separates the numbers of a pair
    number = decimal_of(digits) if NUMBER.fullmatch(digits) else None
    return re.sub(r"\s+", "", text) if number is None else number


def letter_of(text: str) -> str | None:
    """The letter in the last box, if there is a box. Otherwise the letter after the last "answer", else the one that
    the text begins with, as in `B` or `B. Paris`, else the one after the last "option" or "choice"."""
    box = box_of(text)
    if box is not None:
        return _letter_alone(AROUND.sub(" ", box))
    return _last_letter(ANSWERED, text) or _letter_alone(text) or _last_letter(OPTED, text)


def _last_letter(pattern: re.Pattern[str], text: str) -> str | None:
    letters = [found["letter"] or found["small"] for found in pattern.finditer(text)]
    return letters[-1].upper() if letters else None


def _letter_alone(text: str) -> str | None:
    alone = ALONE.match(text)
    return alone[1].upper() if alone else None


def right_letter(answer: Any) -> str | None:
    """The letter that a reference gives: as a letter, as a number that counts from 0 for A, or within a text."""
    text = _bare(answer).upper()
    if text.isdecimal() and int(text) < 26:
        return chr(ord("A") + int(text))
    return text if len(text) == 1 and "A" <= text <= "Z" else letter_of(str(answer))


def _bare(answer: Any) -> str:
    return str(answer).strip().strip("().")


CHECKS: dict[str, str] = {
    "exact": "flowrl.tasks.verify:exact_match",
    "math": "flowrl.tasks.checks.maths:score",
    "gsm8k": "flowrl.tasks.checks.answer_checks:gsm8k",
    "boxed": "flowrl.tasks.checks.answer_checks:boxed",
    "choice": "flowrl.tasks.checks.answer_checks:choice",
    "code": "flowrl.environments.tools.code_answers:code",
}
"""Check -> the reward function that does it."""
OF_MIXTURE, OF_MIXTURE_WITH_CODE = "flowrl.tasks.mixture:score", "flowrl.tasks.mixture:score_with_code"
"""The functions that ask the verifiers of a mixture's sources; the second one if some of them have check=code."""
NEEDED: dict[str, tuple[str, Callable[[str], object]]] = {
    "gsm8k": ("a number", reference_number),
    "choice": ("a letter, or a number that counts from 0 for A", right_letter),
}
STRUCTURED = ("code",)
"""Checks whose answers may be lists or mappings."""


def check_references(check: str, answers: Mapping[str, str]) -> None:
    """Raise ConfigError if one of `answers` (place -> answer) cannot be what the check compares with."""
    if check not in NEEDED:
        return
    wanted, find = NEEDED[check]
    wrong = [place for place, text in answers.items() if find(text) is None]
    if wrong:
        raise ConfigError(
            f"{wrong[0]}: the answer is {answers[wrong[0]][:60]!r}, and check={check} needs {wanted} in every answer "
            f"({len(wrong)} of {len(answers)} have none); name the column that has it with answer=, "
            "choose another check, or leave such rows out with malformed=skip"
        )
    if check == "choice":
        _refuse_both(answers)


def _refuse_both(answers: Mapping[str, str]) -> None:
    """Raise ConfigError if some rows have letters and others numbers: such numbers mostly count from 1, as in ARC."""
    numbers = [place for place, text in answers.items() if _bare(text).isdecimal()]
    letters = [place for place, text in answers.items() if not _bare(text).isdecimal()]
    if numbers and letters:
        raise ConfigError(
            f"{numbers[0]}: the answer is {answers[numbers[0]]!r}, and that of {letters[0]} is "
            f"{answers[letters[0]][:60]!r}; check=choice counts numbers from 0 for A, which is seldom meant where "
            f"other rows have letters; write letters in all rows ({len(numbers)} of {len(answers)} have numbers)"
        )

"""Checks of a response against the reference answer, by name: `FILE:check=gsm8k`.

This module has the checks that need no package: `exact` compares whole texts; `gsm8k`, the last number, or the one
after `####`; `boxed`, the last \\boxed{...}; `choice`, the letter of a multiple choice. `math` compares formulas
(flowrl.tasks.checks.maths), and `code` runs programs against tests (flowrl.tasks.checks.code_tests). Each is a reward
function; any function with the same signature, named `file.py:function`, can replace it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from flowrl.errors import ConfigError

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


def exact_match(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response equals the answer, ignoring blanks around either, else 0; numbers are compared as numbers."""
    return [float(is_same_answer(response, str(right))) for response, right in zip(responses, answer, strict=True)]


def gsm8k(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response's number equals the reference's; commas, currency signs and trailing zeros are ignored."""
    return [
        float((right := reference_number(str(one))) is not None and number_of(said) == right)
        for said, one in zip(responses, answer, strict=True)
    ]


def boxed(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response's last box holds the reference; blanks and the notation of a number are ignored."""
    found = []
    for said, right in zip(map(box_of, responses), map(str, answer), strict=True):
        needed = box_of(right)
        is_right = said is not None and comparable_text(said) == comparable_text(right if needed is None else needed)
        found.append(float(is_right))
    return found


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


def comparable_text(text: str) -> Decimal | str:
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
        return _lone_letter(AROUND.sub(" ", box))
    return _last_letter_of(ANSWERED, text) or _lone_letter(text) or _last_letter_of(OPTED, text)


def _last_letter_of(pattern: re.Pattern[str], text: str) -> str | None:
    letters = [found["letter"] or found["small"] for found in pattern.finditer(text)]
    return letters[-1].upper() if letters else None


def _lone_letter(text: str) -> str | None:
    alone = ALONE.match(text)
    return alone[1].upper() if alone else None


def right_letter(answer: Any) -> str | None:
    """The letter that a reference gives: as a letter, as a number that counts from 0 for A, or within a text."""
    text = _bare_answer(answer).upper()
    if text.isdecimal() and int(text) < 26:
        return chr(ord("A") + int(text))
    return text if len(text) == 1 and "A" <= text <= "Z" else letter_of(str(answer))


def _bare_answer(answer: Any) -> str:
    return str(answer).strip().strip("().")


# Numbers as texts write them: with commas, currency signs, exponents, and GSM8K's mark in front of the last one


MARK = "####"
BLANKS = " \u00a0\u2009\u202f"
SPACED = rf"(?<![\d.,])[1-9]\d{{0,2}}(?:[{BLANKS}]\d{{3}})+(?!\d)"
"""A number whose thousands are separated by blanks: `12 345`."""
UNSIGNED = rf"(?:(?:{SPACED}|\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}}\b)?"
SIGN = r"(?:(?<!\d)[-−](?:\\?\$)?)?"
NUMBER = re.compile(f"{SIGN}{UNSIGNED}")
FRACTION = rf"(?:[ \t]+\d+)?(?:[ \t]*/[ \t]*{UNSIGNED})+"
TOKEN = re.compile(f"({SIGN}{UNSIGNED})({FRACTION})?")
"""A number, and what makes it part of a fraction. A fraction is no number here: `1/2`, `2 1/2`."""
BEFORE = r"(?:[\s*$(]|\\[$(]|\\boxed\s*\{)*+"
MARKED = re.compile(f"{MARK}{BEFORE}((?>{SIGN}{UNSIGNED}))((?>{FRACTION}))?+(?![.):][ \\t]+\\S)")
"""The mark with a number directly after it that is not the number of a heading (`#### 3. Total`)."""
INTEGER = rf"(?:{SPACED}|[1-9]\d{{0,2}}(?:,\d{{3}})+|[1-9]\d*|0)"
WHOLE_NUMBER = re.compile(rf"[-+−]?(?:{INTEGER}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?")
"""A text that is only a number. Digits after a leading 0 are none: `007` is a code, or in another base."""
EXPONENT = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,3}")


def number_of(text: str) -> Decimal | None:
    """The number directly after the last #### that has one, else the last number of the text."""
    found = MARKED.findall(text) or TOKEN.findall(text)
    return decimal_of(found[-1][0]) if found and not found[-1][1] else None


def reference_number(text: str) -> Decimal | None:
    """The number of a reference; None if it has a mark and no number after the last one."""
    return number_of(text) if TOKEN.search(text.rpartition(MARK)[2]) else None


def is_same_answer(said: str, right: str) -> bool:
    """Whether both are the same text, apart from blanks around them, or numbers of the same value (`72.0`, `72`)."""
    said, right = said.strip(), right.strip()
    if said == right:
        return True
    numbers = [decimal_of(text) if WHOLE_NUMBER.fullmatch(text) else None for text in (said, right)]
    return None not in numbers and numbers[0] == numbers[1]


def decimal_of(number: str) -> Decimal | None:
    """The value of a text that NUMBER or WHOLE_NUMBER matches."""
    try:
        return Decimal(re.sub(rf"[,$\\{BLANKS}]", "", number).replace("−", "-"))
    except InvalidOperation:
        return None


def in_digits(text: str) -> str:
    """A number with an exponent, as data files write small and large ones, in plain digits; other text unchanged."""
    return format(Decimal(text), "f") if EXPONENT.fullmatch(text) else text


# Checks by name


CHECKS: dict[str, str] = {
    "exact": "flowrl.tasks.checks.answer_checks:exact_match",
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
    if check == "choice":  # such numbers mostly count from 1, as in ARC
        numbers = [place for place, text in answers.items() if _bare_answer(text).isdecimal()]
        letters = [place for place, text in answers.items() if not _bare_answer(text).isdecimal()]
        if numbers and letters:
            raise ConfigError(
                f"{numbers[0]}: the answer is {answers[numbers[0]]!r}, and that of {letters[0]} is "
                f"{answers[letters[0]][:60]!r}; check=choice counts numbers from 0 for A, which is seldom meant where "
                f"other rows have letters; write letters in all rows ({len(numbers)} of {len(answers)} have numbers)"
            )

"""Numbers as texts write them: with commas, currency signs, exponents, and GSM8K's mark in front of the last one."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

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
WHOLE = rf"(?:{SPACED}|[1-9]\d{{0,2}}(?:,\d{{3}})+|[1-9]\d*|0)"
PLAIN = re.compile(rf"[-+−]?(?:{WHOLE}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?")
"""A text that is only a number. Digits after a leading 0 are none: `007` is a code, or in another base."""
EXPONENT = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,3}")


def number_of(text: str) -> Decimal | None:
    """The number directly after the last #### that has one, else the last number of the text."""
    found = MARKED.findall(text) or TOKEN.findall(text)
    return decimal_of(found[-1][0]) if found and not found[-1][1] else None


def reference_number(text: str) -> Decimal | None:
    """The number of a reference; None if it has a mark and no number after the last one."""
    return number_of(text) if TOKEN.search(text.rpartition(MARK)[2]) else None


def is_same(said: str, right: str) -> bool:
    """Whether both are the same text, apart from blanks around them, or numbers of the same value (`72.0`, `72`)."""
    said, right = said.strip(), right.strip()
    if said == right:
        return True
    numbers = [decimal_of(text) if PLAIN.fullmatch(text) else None for text in (said, right)]
    return None not in numbers and numbers[0] == numbers[1]


def decimal_of(number: str) -> Decimal | None:
    """The value of a text that NUMBER or PLAIN matches."""
    try:
        return Decimal(re.sub(rf"[,$\\{BLANKS}]", "", number).replace("−", "-"))
    except InvalidOperation:
        return None


def in_digits(text: str) -> str:
    """A number with an exponent, as data files write small and large ones, in plain digits; other text unchanged."""
    return format(Decimal(text), "f") if EXPONENT.fullmatch(text) else text

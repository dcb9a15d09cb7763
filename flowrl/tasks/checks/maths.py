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
from flowrl.tasks.checks.answer_checks import MARK, MARKED, box_of, in_digits

SECONDS = 5
ITEM = re.compile(r"\A-\s+(?=[$€£¥₹]?\.?\d)")
"""The mark of an item in a Markdown list. It is removed only from responses: in a reference answer, `- 12` is -12."""
LATEX = re.compile(r"[\\{|]")
SPACED_BOX = re.compile(r"\\boxed\s+\{")
"""A box with a blank before its brace, which LaTeX allows and math-verify does not read."""


def score(prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[Any]) -> list[float]:
    """1 if the response's last answer equals the reference, else 0."""
    return [float(is_equal(response, str(right))) for response, right in zip(responses, answer, strict=True)]


def prepare() -> None:
    """Import math-verify and let it build its parser. Does nothing if math-verify is missing; `check` reports that."""
    with suppress(ImportError):
        is_equal("1", "1")


def is_equal(response: str, answer: str) -> bool:
    """Whether both denote the same number, set, interval or formula."""
    from math_verify import verify

    said = _read_formulas(_marked_answer(response) or ITEM.sub("", response.strip()))
    if said and verify(_read_right(answer), said, timeout_seconds=SECONDS):
        return True
    return response.strip() == answer.strip() != ""


@functools.lru_cache(maxsize=4096)
def _read_right(answer: str) -> list[Any]:
    return _read_formulas(_answer_in(answer))


def _answer_in(answer: str) -> str:
    """The answer within a reference: what follows its last mark, or the whole reference."""
    return _marked_answer(answer) or answer.rpartition(MARK)[2].strip()


def _marked_answer(text: str) -> str | None:
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


def _read_formulas(text: str) -> list[Any]:
    """What math-verify finds: values, and the texts that they were parsed from; only the text where it cannot parse
    LaTeX."""
    text = SPACED_BOX.sub(r"\\boxed{", text)
    found = [one for formula in bare_formulas(text) for one in _parse_latex(delimit_formula(formula))]
    found = found or _parse_latex(readable_prose(text))
    if found and all(isinstance(one, str) for one in found) and not LATEX.search(found[0]):
        found += _parse_latex(readable_prose(found[0]))  # it is no LaTeX, so it may be a number with a word
    return found


def _parse_latex(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=SECONDS))


def check_formulas(answers: Mapping[str, str]) -> None:
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
    text = _answer_in(answer)
    formulas = bare_formulas(text)
    return bool(IN_PROSE.search(readable_prose(text))) if not formulas or DELIMITED.search(formulas[0]) else True


# Texts that are nothing but a formula
#
# math-verify reads LaTeX only between delimiters; from other text it extracts a number. So a bare formula, an answer
# of a data file or a short response, is put between delimiters, without what Markdown and people write around it:
# `**12**`, `x: 12`, `€12`, `12 m/s`. Everything else is read as mathematics: `12!` is a factorial, `5 < 12` a relation,
# and `- 12` is -12.


MOST_CHARACTERS = 400
DELIMITED = re.compile(r"\\boxed|(?<!\\)\\[(\[]|(?<!\\)\$.*(?<!\\)\$", re.DOTALL)
NAMED = re.compile(r"\\(?:text\w*|mbox|mathrm|operatorname\*?|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
"""Letters that LaTeX does not read as a product of variables: commands, and words inside their braces."""
WORD = re.compile(
    r"(?<![A-Za-z\d\\^_)}])(?!(?:and|or)\b)(?:[A-Za-z]{3,}(?![A-Za-z\d^_({])|[A-Za-z]{2}(?=\s+\d))|\d\s+(?!or\b)[A-Za-z]{2}\b"
)
"""A word of prose: letters attached to nothing else, unlike those of `3xyz` and `sin(x)`."""
SPACED = re.compile(r"(?<=\d)(?:\\[,!]|,\\!\s*|\{,\})(?=\d{3}(?!\d))")
"""Separators between the thousands of a number in LaTeX."""
CHARACTERS = re.compile(r"[\sA-Za-z\dΑ-Ωα-ωϑϕ+\-−–*/^=<>≤≥≠≈≡±∓×÷√∅∪∩∈∉⊂⊆∑∏∫∂°′″%!?.,:;()\[\]{}|\\&'\"_$~→⇒]*")
"""The characters of formulas. Any other character means prose: a letter of another script, or # before a number."""
NUMBERS = re.compile(r"\d\s+\d")
"""Two numbers with only blanks between them."""
MARKUP = re.compile(r"\*\*|~~")

EMPHASIS = re.compile(r"(\*{1,3}|_{1,3}|`{1,3})(?=\S)((?:(?!\1).)+)(?<=\S)\1[.,:;!?]?")
LABEL = re.compile(r"\A(?:[~≈]\s*(?=\.?\d)|[A-Za-z][\w()]*:\s+(?=-?[\d.$\\])|\(?[A-Za-z][).]\s+(?=-?[\d.$]))")
"""What may be written before an answer: `x: 12`, `(a) 12`, `~12`."""
POWER = re.compile(r"(?<=[\w)])(?<!\*\w)(?:\*\*| \*\* )(-?\d++(?:\.\d++)?|[A-Za-z]|\([^()*]*\))(?![\w*])")
"""A power as programs write it. Not Markdown's emphasis, nor the first `**` of `2**3**2`, which math-verify reads."""
THOUSANDS = re.compile(r"(?<![\w.,])[1-9]\d{0,2}(?: \d{3})+(?![\d.,]*\d)")
MIXED = re.compile(r"(?<![\d.,/])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\.?\d)")
MIXED_LATEX = re.compile(r"(?<!\d)-?\d++\\frac\{\d+\}\{\d+\}")
ROOT = re.compile(r"√\s*(\d+|[A-Za-z]|\([^()]*\))")
CURRENCIES = "€£¥₹₽₪₩₫฿¢"
SIGNS = str.maketrans(
    dict.fromkeys(CURRENCIES, "")
    | {"²": "^2", "³": "^3", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}"}
    | {"·": "\\cdot ", "∞": "\\infty ", "∅": "\\emptyset "}
)

MONEY = rf"(?:\\?\$|[{CURRENCIES}])"
NUMBER = r"(?:\d[\d.,]*(?:/\d+)?|\.\d+)"
STUCK = r"(?:[kc]?m/[sh]|[kcdm]m)(?:\^?\{?-?[23]\}?|[²³])?"
"""Units that can mean nothing else directly after a number, without a blank, unlike those in `3V/h`."""
UNIT = r"(?:[kcdmµμ]?[mgsLlNJWVAK]|hr?|C|F|Hz|Pa|mi|ft|in|lb|oz)(?:\^?\{?-?\d\}?|[²³])?"
PER = rf"(?:\s*[/·]\s*{UNIT})*"
QUANTITY = re.compile(
    rf"([-−]?){MONEY}\s*([-−]?{NUMBER}){PER}|([-−]?{NUMBER})(?:\s+{UNIT}{PER}|\s*{MONEY}{PER}|{STUCK})"
)
"""A number with a currency, or with a unit after a blank; its groups are the sign and the number."""
IN_PROSE = re.compile(
    rf"(?:^|[\s=])(?:\*\*)?{MONEY}?-?\(?-?\.?\d|\\frac{{-?[\d.,]+}}{{-?\d|\\boxed\s*{{\s*[^\s{{}}]|\$\s*[^$\s][^$\n]*\$"
    r"|\\[(\[]\s*(?!\\[)\]])\S"
)
"""What math-verify extracts from a text with words: the beginning of a number, or LaTeX between delimiters."""


def readable_notation(text: str) -> str:
    """The text with notation that math-verify does not read rewritten into notation that it reads: numbers, powers,
    Unicode, money."""
    text = THOUSANDS.sub(lambda found: found[0].replace(" ", ""), SPACED.sub("", in_digits(text.strip())))
    text = MIXED.sub(r"\1\\frac{\2}{\3}", ROOT.sub(r"\\sqrt{\1}", POWER.sub(r"^\1", text)))
    return text.translate(SIGNS)


def readable_prose(text: str) -> str:
    """A text with words, in a form that math-verify reads."""
    text = readable_notation(text).replace("\\$", "")
    return text if DELIMITED.search(text) else MIXED_LATEX.sub(r"$\g<0>$", text)


def bare_formulas(text: str) -> tuple[str, ...]:
    """The readings of a text that is a formula: without what is written around the formula, and unchanged, since `3 V`
    may mean three times V. () for prose, and for LaTeX that is not closed.

    No formula is parsed here: math-verify takes milliseconds for one, and for some seconds. So this function may be
    called for every row.
    """
    if len(text) > MOST_CHARACTERS or "\n" in text.strip():
        return ()
    text = text.strip()
    while emphasised := EMPHASIS.fullmatch(text):
        text = emphasised[2]
    without_label = LABEL.sub("", text, count=1)
    left, equals, right = without_label.rpartition("=")
    if quantity := QUANTITY.fullmatch(right.strip()):
        without_label = left + equals + "".join(filter(None, quantity.groups()))
    found = dict.fromkeys(map(readable_notation, (without_label, text)))
    return tuple(filter(_is_mathematics, found))


def delimit_formula(formula: str) -> str:
    """The formula between the delimiters that math-verify needs; of a calculation (`2 * 9 = 18`) only the result."""
    if DELIMITED.search(formula):
        return formula
    calculation, _, result = formula.rpartition("=")
    result = formula if re.search("[A-Za-z]", NAMED.sub(" ", calculation)) else result
    bare = re.sub(r"\\?\$", "", result)
    return f"${bare}$"


def _is_mathematics(text: str) -> bool:
    if not any(map(str.isalnum, text)) or not CHARACTERS.fullmatch(text) or MARKUP.search(text):
        return False
    braces = re.sub(r"\\[{}]", "", text)
    opened, closed = (len(re.findall(rf"\\{side}(?![A-Za-z])", text)) for side in ("left", "right"))
    is_closed = braces.count("{") == braces.count("}") and opened == closed
    numbers_apart = "\\" not in text and NUMBERS.search(text)
    return is_closed and not numbers_apart and not WORD.search(NAMED.sub(" ", text))

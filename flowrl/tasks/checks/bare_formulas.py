"""Texts that are nothing but a formula: an answer of a data file, or a short response.

math-verify reads LaTeX only between delimiters; from other text it extracts a number. So a bare formula is put between
delimiters, without what Markdown and people write around it: `**12**`, `x: 12`, `€12`, `12 m/s`. Everything else is
read as mathematics: `12!` is a factorial, `5 < 12` a relation, and `- 12` is -12.
"""

from __future__ import annotations

import re

from flowrl.tasks.checks.written_numbers import in_digits

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


def plain(text: str) -> str:
    """The text with notation that math-verify does not read rewritten into notation that it reads: numbers, powers,
    Unicode, money."""
    text = THOUSANDS.sub(lambda found: found[0].replace(" ", ""), SPACED.sub("", in_digits(text.strip())))
    text = MIXED.sub(r"\1\\frac{\2}{\3}", ROOT.sub(r"\\sqrt{\1}", POWER.sub(r"^\1", text)))
    return text.translate(SIGNS)


def prose(text: str) -> str:
    """A text with words, in a form that math-verify reads."""
    text = plain(text).replace("\\$", "")
    return text if DELIMITED.search(text) else MIXED_LATEX.sub(r"$\g<0>$", text)


def bare_formulas(text: str) -> tuple[str, ...]:
    """The readings of a text that is a formula: without what is written around the formula, and unchanged, since `3 V`
    may mean three times V. () for prose, and for LaTeX that is not closed.

    No formula is parsed here: math-verify takes milliseconds for one, and for some seconds. So this function may be
    called for every row.
    """
    if len(text) > MOST_CHARACTERS or "\n" in text.strip():
        return ()
    text = _without_emphasis(text.strip())
    found = dict.fromkeys(map(plain, (_without_unit(LABEL.sub("", text, count=1)), text)))
    return tuple(filter(_is_mathematics, found))


def has_formula(text: str) -> bool:
    """Whether math-verify finds a formula or number in the text."""
    formulas = bare_formulas(text)
    return bool(IN_PROSE.search(prose(text))) if not formulas or DELIMITED.search(formulas[0]) else True


def delimited(formula: str) -> str:
    """The formula between the delimiters that math-verify needs; of a calculation (`2 * 9 = 18`) only the result."""
    if DELIMITED.search(formula):
        return formula
    calculation, _, result = formula.rpartition("=")
    result = formula if re.search("[A-Za-z]", NAMED.sub(" ", calculation)) else result
    bare = re.sub(r"\\?\$", "", result)
    return f"${bare}$"


def _without_emphasis(text: str) -> str:
    while emphasised := EMPHASIS.fullmatch(text):
        text = emphasised[2]
    return text


def _without_unit(text: str) -> str:
    left, equals, right = text.rpartition("=")
    if quantity := QUANTITY.fullmatch(right.strip()):
        return left + equals + "".join(filter(None, quantity.groups()))
    return text


def _is_mathematics(text: str) -> bool:
    if not any(map(str.isalnum, text)) or not CHARACTERS.fullmatch(text) or MARKUP.search(text):
        return False
    numbers_apart = "\\" not in text and NUMBERS.search(text)
    return _is_closed(text) and not numbers_apart and not WORD.search(NAMED.sub(" ", text))


def _is_closed(text: str) -> bool:
    braces = re.sub(r"\\[{}]", "", text)
    opened, closed = (len(re.findall(rf"\\{side}(?![A-Za-z])", text)) for side in ("left", "right"))
    return braces.count("{") == braces.count("}") and opened == closed

"""Three hundred texts that data hold and examples do not: blanks of every kind at both ends, control tokens, other
scripts, NUL, 100 KB."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

BLANKS = (
    *("", " ", "  ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\n\n\n\n", "\u00a0", "\u2028", "\u2029"),
    *("\u3000", "\x0b", "\x0c", "\x85", "\u200b", "\ufeff", "\u2009 ", "\x1c"),
)
CORES = (
    *("Hello", "42", "x = 1\n\n\ny = 2", "a\tb", "\\boxed{4}", "{{ 1 + 1 }}{% if %}", "{'a': \"b\"}", "#### 7"),
    *("\U0001f642", "\U0001f469\u200d\U0001f680\ufe0f", "\U0001f1eb\U0001f1f7", "e\u0301\u0327", "\ufffd"),
    *("\u4e2d\u6587\u3002", "\u202e\u05e9\u05dc\u05d5\u05dd", "\u0627\u0644\u0633\u0644\u0627\u0645\u200f!"),
    *(
        "\u0e20\u0e32\u0e29\u0e32",
        "nul\0nul",
        "\0",
        "\x07\x1b[31m",
        "<think>\nhm\n</think>\n\n4",
        "</think>",
        "<think>",
    ),
    *(
        "<think>",
        "user\n",
        "Human: a\n\nAssistant: b",
        "<|im_",
        "|>",
        "<|unknown|>",
        "<b>4</b>",
        "[/INST] 4",
        "</s",
        "<>",
    ),
    *("<tool_call>\n{}\n</tool_call>", "-" * 500, "\n" * 50 + "x", "\\n\\u0000", "'\"`$&"),
)
LONG = ("a " * 50_000, "\u4e2d" * 33_000, "\n\n" + "x" * 100_000 + "\n")
NUM_ROWS = 300


def odd_texts(control: Sequence[str]) -> list[str]:
    """The texts, all different; some hold tokens of `control`, at their beginning, in their middle, at their end."""
    told = [text for token in control[:8] for text in (f"{token} a", f"a {token} b", f"a{token}", f"a{token}\n")]
    told += [*BLANKS[1:], *LONG]
    pairs = itertools.product(BLANKS, CORES)
    spread = [(lead, core) for number, (lead, core) in enumerate(pairs) if number % 2 == 0]
    for number, (lead, core) in enumerate(spread):
        told.append(f"{lead}{core}{BLANKS[(7 * number + 3) % len(BLANKS)]}")
    return list(dict.fromkeys(told))[:NUM_ROWS]

"""Programs in responses, and the tests that an answer holds for them: `FILE:check=code`.

An answer is one of
- a list of pieces of code, each of which raises if the program is wrong: asserts, as MBPP's `test_list`;
- a text of such code, as HumanEval's `test`, whose function `check` is then called with the function that the column
  `entry_point` names;
- a mapping of `inputs` and `outputs`, lists of the same length: what the program reads, and what it has to print.

Lists and mappings may be written as JSON text. They are run by `flowrl.environments.tools.code_answers`: each piece,
and the program with each input, for at most `case_s`, and all of them for at most `total_s`. Both are options of the
task, `FILE:check=code,case_s=10,total_s=120`, or columns of a row.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN_FENCE = re.compile(r"^[ \t]*+```[ \t]*+(?:python3?+|py)?+[ \t]*+\n", re.MULTILINE | re.IGNORECASE)
CLOSE_FENCE = re.compile(r"^[ \t]*+```[ \t]*+$", re.MULTILINE)
CASE_S = 6.0
"""For one test, with the start of an interpreter."""
TOTAL_S = 60.0
"""For all tests of one response."""
ENDING_S = 5.0
"""For what a call does besides: its process ends the last interpreter, and answers."""


def limits(case_s: Any = None, total_s: Any = None) -> tuple[float, float]:
    """The limits of a row with these columns; what is no time is the default."""
    case, total = (one if is_time(one) else usual for one, usual in ((case_s, CASE_S), (total_s, TOTAL_S)))
    return float(case), float(total)


def call_s(columns: Sequence[Mapping[str, Any]]) -> float:
    """The longest that a call takes whose samples have these columns, as many at a time as there are cores."""
    longest = max((limits(total_s=row.get("total_s"))[1] for row in columns), default=0.0)
    return math.ceil(len(columns) / (os.cpu_count() or 1)) * longest + ENDING_S


def is_time(value: Any) -> bool:
    """Whether this is a number of seconds above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(frozen=True)
class CodeTests:
    """What a program is tried with: pieces of code, or inputs with the outputs that they need."""

    pieces: tuple[str, ...] = ()
    cases: tuple[tuple[str, str], ...] = ()


def program_of(response: str) -> str:
    """The last fenced block of Python, also one that is not closed; without a fence the whole response."""
    program, at = None, 0
    while (opened := OPEN_FENCE.search(response, at)) and (closed := CLOSE_FENCE.search(response, opened.end())):
        program, at = response[opened.end() : closed.start()], closed.end()
    if program is not None:
        return program
    return response[opened.end() :] if opened else response


def given_tests(answer: Any, entry_point: str | None = None) -> CodeTests | None:
    """The tests that an answer holds, None if it holds none. `entry_point` is the function that `check` is given."""
    found = _structured(answer)
    if isinstance(found, Mapping):
        return _cases(found)
    if isinstance(found, Sequence) and not isinstance(found, str):
        pieces = tuple(found)
        return CodeTests(pieces) if pieces and all(map(_is_code, pieces)) else None
    if not _is_code(found):
        return None
    called = f"\ncheck({entry_point})" if entry_point and re.search(r"^def check\(", found, re.MULTILINE) else ""
    return CodeTests((f"{found}{called}",))


def _structured(answer: Any) -> Any:
    """The list or mapping that a text holds as JSON, else the answer itself."""
    if not isinstance(answer, str) or not answer.lstrip().startswith(("[", "{")):
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return answer


def _cases(answer: Mapping[str, Any]) -> CodeTests | None:
    inputs, outputs = answer.get("inputs"), answer.get("outputs")
    if not all(isinstance(one, Sequence) and not isinstance(one, str) for one in (inputs, outputs)):
        return None
    assert inputs is not None and outputs is not None
    texts = all(isinstance(one, str) for one in (*inputs, *outputs))
    if not inputs or len(inputs) != len(outputs) or not texts:
        return None
    return CodeTests(cases=tuple(zip(inputs, outputs, strict=True)))


def _is_code(text: Any) -> bool:
    if not isinstance(text, str) or not text.strip():
        return False
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False

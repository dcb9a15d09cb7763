"""Programs in responses, and the tests that an answer holds for them: `FILE:check=code`.

An answer is one of
- a list of pieces of code, each of which raises if the program is wrong: asserts, as MBPP's `test_list`;
- a text of such code; HumanEval's `test`, whose function `check` is then called with the function that the column
  `entry_point` names, unless the code calls it; or BigCodeBench's `test`, a `unittest.TestCase`, which is then run;
- a mapping of `inputs` and `outputs`, lists of the same length: what the program reads, and what it has to print.

Lists and mappings may be written as JSON text. The tests are run by `flowrl.environments.tools.code_answers`: each
piece, and the program with each input, for at most `case_s` seconds, and all of them for at most `total_s` seconds.
Both limits are options of the task, `FILE:check=code,case_s=10,total_s=120`, or columns of a row.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.checks.code_pieces import NoTests, completed

FENCE = re.compile(r"^[ \t]*+(```+)([^`\n]*+)(?:\n|\Z)", re.MULTILINE)
PYTHON = re.compile(r"\s*(?:\{?\.?(?:python[23]?|py[23]?)\b.*)?", re.IGNORECASE)
"""What follows the opening fence of a program: a name of Python, or nothing."""
CASE_S = 6.0
"""Seconds for one test, including the start of an interpreter."""
TOTAL_S = 60.0
"""Seconds for all tests of one response."""
ENDING_S = 5.0
"""Seconds for the rest of a call: its process ends the last interpreter and sends the answer."""


def limits(case_s: Any = None, total_s: Any = None) -> tuple[float, float]:
    """The limits of a row with these columns; a value that is no time is replaced by the default."""
    case, total = (one if is_time(one) else usual for one, usual in ((case_s, CASE_S), (total_s, TOTAL_S)))
    return float(case), float(total)


def call_s(columns: Sequence[Mapping[str, Any]]) -> float:
    """The longest time, in seconds, of a call for samples with these columns; as many run at a time as there are
    cores."""
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
    """The last fenced block that names Python, else the last block that names no language, else the whole response. A
    block that is not closed counts only if there is no closed one of its kind."""
    ordered = sorted(_blocks(response), key=lambda block: block[:2])
    return ordered[-1][2] if ordered else response


def _blocks(response: str) -> Iterator[tuple[bool, bool, str]]:
    """(whether it names Python, whether it is closed, its text) of each block of Python or without a language."""
    opened: re.Match[str] | None = None
    for fence in FENCE.finditer(response):
        if opened is None or (_names_python(fence) and not _names_python(opened)):
            opened = fence
        elif len(fence[1]) >= len(opened[1]) and not fence[2].strip():
            if PYTHON.fullmatch(opened[2]):
                yield _names_python(opened), True, response[opened.end() : fence.start()]
            opened = None
    if opened is not None and PYTHON.fullmatch(opened[2]):
        yield _names_python(opened), False, response[opened.end() :]


def _names_python(fence: re.Match[str]) -> bool:
    """Whether this fence names Python. If so, a program begins here, even if a block of another kind is still open."""
    return bool(fence[2].strip() and PYTHON.fullmatch(fence[2]))


def given_tests(answer: Any, entry_point: str | None = None) -> CodeTests | None:
    """The tests that an answer holds, None if it holds none. `entry_point` is the function that `check` is given."""
    found = _read(answer, entry_point)
    return None if isinstance(found, NoTests) else found


def check(answers: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise ConfigError if a row has no tests. `answers` are the answers and entry points of the rows, by place."""
    read = ((place, _read(*given)) for place, given in answers.items())
    wrong = {place: found for place, found in read if isinstance(found, NoTests)}
    for place, missing in wrong.items():
        raise ConfigError(
            f"{place}: the answer is {str(answers[place][0])[:60]!r}, and check=code needs {missing.needed} "
            f"({len(wrong)} of {len(answers)} have none); {missing.fix}, or leave such rows out with malformed=skip"
        )


def missing_tests(answer: Any, entry_point: Any) -> str:
    """What an answer lacks to serve as tests of a program; "" if nothing."""
    found = _read(answer, entry_point)
    return found.needed if isinstance(found, NoTests) else ""


def _read(answer: Any, entry_point: Any) -> CodeTests | NoTests:
    found = _structured(answer)
    pieces = (found,) if isinstance(found, str) else found
    try:
        if isinstance(found, Mapping):
            return _cases(found)
        if not isinstance(pieces, Sequence) or not pieces or not all(isinstance(one, str) for one in pieces):
            raise NoTests()
        return CodeTests(completed(pieces, entry_point))
    except NoTests as missing:
        return missing


def _structured(answer: Any) -> Any:
    """The list or mapping that a text holds as JSON, else the answer itself."""
    if not isinstance(answer, str) or not answer.lstrip().startswith(("[", "{")):
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return answer


def _cases(answer: Mapping[str, Any]) -> CodeTests:
    inputs, outputs = answer.get("inputs"), answer.get("outputs")
    if not all(isinstance(one, Sequence) and not isinstance(one, str) for one in (inputs, outputs)):
        raise NoTests()
    assert inputs is not None and outputs is not None
    texts = all(isinstance(one, str) for one in (*inputs, *outputs))
    if not inputs or len(inputs) != len(outputs) or not texts:
        raise NoTests()
    return CodeTests(cases=tuple(zip(inputs, outputs, strict=True)))

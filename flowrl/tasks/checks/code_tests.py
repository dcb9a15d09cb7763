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

import ast
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flowrl.errors import ConfigError

FENCE = re.compile(r"^[ \t]*+(```+)([^`\n]*+)(?:\n|\Z)", re.MULTILINE)
PYTHON = re.compile(r"\s*(?:\{?\.?(?:python[23]?|py[23]?)\b.*)?", re.IGNORECASE)
"""What follows the opening fence of a program: a name of Python, or nothing."""
CASE_S = 6.0
"""Seconds for one test, including the start of an interpreter."""
TOTAL_S = 60.0
"""Seconds for all tests of one response."""
ENDING_S = 5.0
"""Seconds for the rest of a call: its process ends the last interpreter and sends the answer."""


def time_limits(case_s: Any = None, total_s: Any = None) -> tuple[float, float]:
    """The limits of a row with these columns; a value that is no time is replaced by the default."""
    case, total = (one if is_time(one) else usual for one, usual in ((case_s, CASE_S), (total_s, TOTAL_S)))
    return float(case), float(total)


def call_s(columns: Sequence[Mapping[str, Any]]) -> float:
    """The longest time, in seconds, of a call for samples with these columns; as many run at a time as there are
    cores."""
    longest = max((time_limits(total_s=row.get("total_s"))[1] for row in columns), default=0.0)
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
    blocks: list[tuple[bool, bool, str]] = []
    """(whether it names Python, whether it is closed, its text) of each block of Python or without a language."""
    opened: re.Match[str] | None = None
    for fence in FENCE.finditer(response):
        if opened is None or (_names_python(fence) and not _names_python(opened)):
            opened = fence
        elif len(fence[1]) >= len(opened[1]) and not fence[2].strip():
            if PYTHON.fullmatch(opened[2]):
                blocks.append((_names_python(opened), True, response[opened.end() : fence.start()]))
            opened = None
    if opened is not None and PYTHON.fullmatch(opened[2]):
        blocks.append((_names_python(opened), False, response[opened.end() :]))
    return sorted(blocks, key=lambda block: block[:2])[-1][2] if blocks else response


def _names_python(fence: re.Match[str]) -> bool:
    """Whether this fence names Python. If so, a program begins here, even if a block of another kind is still open."""
    return bool(fence[2].strip() and PYTHON.fullmatch(fence[2]))


def given_tests(answer: Any, entry_point: str | None = None) -> CodeTests | None:
    """The tests that an answer holds, None if it holds none. `entry_point` is the function that `check` is given."""
    found = _read_tests(answer, entry_point)
    return None if isinstance(found, NoTests) else found


def check_tests(answers: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise ConfigError if a row has no tests. `answers` are the answers and entry points of the rows, by place."""
    read = ((place, _read_tests(*given)) for place, given in answers.items())
    wrong = {place: found for place, found in read if isinstance(found, NoTests)}
    for place, missing in wrong.items():
        raise ConfigError(
            f"{place}: the answer is {str(answers[place][0])[:60]!r}, and check=code needs {missing.needed} "
            f"({len(wrong)} of {len(answers)} have none); {missing.fix}, or leave such rows out with malformed=skip"
        )


def missing_tests(answer: Any, entry_point: Any) -> str:
    """What an answer lacks to serve as tests of a program; "" if nothing."""
    found = _read_tests(answer, entry_point)
    return found.needed if isinstance(found, NoTests) else ""


def _read_tests(answer: Any, entry_point: Any) -> CodeTests | NoTests:
    found = answer
    if isinstance(answer, str) and answer.lstrip().startswith(("[", "{")):  # a list or mapping as JSON text
        with suppress(ValueError, RecursionError):
            found = json.loads(answer)
    if isinstance(found, Mapping):
        inputs, outputs = found.get("inputs"), found.get("outputs")
        if not all(isinstance(one, Sequence) and not isinstance(one, str) for one in (inputs, outputs)):
            return NoTests()
        assert inputs is not None and outputs is not None
        texts = all(isinstance(one, str) for one in (*inputs, *outputs))
        if not inputs or len(inputs) != len(outputs) or not texts:
            return NoTests()
        return CodeTests(cases=tuple(zip(inputs, outputs, strict=True)))
    pieces = (found,) if isinstance(found, str) else found
    if not isinstance(pieces, Sequence) or not pieces or not all(isinstance(one, str) for one in pieces):
        return NoTests()
    try:
        return CodeTests(complete_pieces(pieces, entry_point))
    except NoTests as missing:
        return missing


# Code that tests a program, completed so that running it calls the program
#
# HumanEval's `test` only defines a function `check`, so a call with the row's entry point is added here, unless the
# code itself calls `check`. BigCodeBench's `test` only defines a `unittest.TestCase`, so code that runs its tests is
# added here. Code that only defines something and calls nothing would pass every program.


SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
INERT = SCOPES | ast.Import | ast.ImportFrom | ast.Pass
RUN_CASES = """
import io as _io, unittest as _unittest
_found = map(_unittest.defaultTestLoader.loadTestsFromTestCase, ({names},))
_outcome = _unittest.TextTestRunner(_io.StringIO()).run(_unittest.TestSuite(_found))
assert _outcome.testsRun and _outcome.wasSuccessful()
"""


class NoTests(Exception):
    """An answer has nothing that can tell a right program from a wrong one. Says what is needed, and which change fixes
    it."""

    def __init__(
        self,
        needed: str = "tests (a list of asserts, code, or inputs and outputs) in every answer",
        fix: str = "name the column that has it with answer=, or choose another check",
    ) -> None:
        super().__init__(needed)
        self.needed, self.fix = needed, fix


def complete_pieces(pieces: Sequence[str], entry_point: str | None) -> tuple[str, ...]:
    """The pieces with the missing calls added. Raises NoTests."""
    done = [_with_case_runner(piece) for piece in pieces]
    bodies = [ast.parse(piece).body for piece in done]
    everything = [node for body in bodies for node in body]
    if "check" not in _names_reached(everything):
        for number, body in enumerate(bodies):
            if not _defines_check(body):
                continue
            if not entry_point:
                raise NoTests(
                    "the function that check(), which this code defines, is called with",
                    "name it in a column entry_point, or call check() in the tests",
                )
            call = f"check({entry_point})"
            try:
                ast.parse(call, mode="eval")
            except (SyntaxError, ValueError):
                raise NoTests(
                    f"a function to call check() with, where entry_point is {entry_point!r}", "correct that column"
                ) from None
            done[number] += f"\n{call}"
    if done == list(pieces) and not any(map(_does_something, everything)):
        raise NoTests(
            "tests that run, where this code only defines something", "add asserts or calls, or make it a TestCase"
        )
    return tuple(done)


def _with_case_runner(text: str) -> str:
    """The piece with its test cases run at its end, and without a runner of its own: `unittest.main()`, which finds no
    tests in the interpreter of a sandbox, and the usual `if` around it. Raises NoTests."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoTests() from None
    if not tree.body:
        raise NoTests()
    cases: list[str] = []
    """The classes that inherit from unittest.TestCase, directly or through one another."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            if any(base.endswith("TestCase") or base in cases for base in bases):
                cases.append(node.name)
    if not cases:
        return text
    kept = []
    for node in tree.body:
        if isinstance(node, ast.If):
            is_runner = ast.unparse(node.test).startswith("__name__ ==")
        else:
            called = node.value if isinstance(node, ast.Expr) else None
            is_runner = isinstance(called, ast.Call) and ast.unparse(called.func) in ("unittest.main", "main")
        kept += [] if is_runner else [node]
    text = text if len(kept) == len(tree.body) else ast.unparse(ast.Module(kept, []))
    return text + RUN_CASES.format(names=", ".join(cases))


def _names_reached(body: Sequence[ast.stmt]) -> set[str]:
    """The names that this code uses when it runs, including those inside the functions and classes that it uses."""
    defined = [node for node in body if isinstance(node, SCOPES)]
    left: list[ast.stmt] = [node for node in body if not isinstance(node, SCOPES)]
    found: set[str] = set()
    while left:
        used = {one.id for one in ast.walk(left.pop()) if isinstance(one, ast.Name)} - found
        found |= used
        left += [node for node in defined if node.name in used]
    return found


def _defines_check(body: Iterable[ast.stmt]) -> bool:
    """Whether a function `check` is defined that can be called with the function to be tested."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            positional = [*node.args.posonlyargs, *node.args.args]
            takes_some = bool(positional or node.args.vararg)
            if takes_some and len(positional) - len(node.args.defaults) <= 1 and None not in node.args.kw_defaults:
                return True
    return False


def _does_something(node: ast.AST) -> bool:
    """Whether the statement does more than define something."""
    if isinstance(node, INERT):
        return False
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
        return any(isinstance(one, ast.Call) for one in ast.walk(node))
    if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
        inner = (getattr(node, name, []) for name in ("body", "handlers", "orelse", "finalbody"))
        return any(_does_something(one) for part in inner for one in part)
    return True

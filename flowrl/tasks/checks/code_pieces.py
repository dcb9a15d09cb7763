"""Code that tests a program, completed so that running it calls the program.

HumanEval's `test` only defines a function `check`, so a call with the row's entry point is added here, unless the code
itself calls `check`. BigCodeBench's `test` only defines a `unittest.TestCase`, so code that runs its tests is added
here. Code that only defines something and calls nothing would pass every program.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

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


def completed(pieces: Sequence[str], entry_point: str | None) -> tuple[str, ...]:
    """The pieces with the missing calls added. Raises NoTests."""
    done = [_with_cases_run(piece, _parsed(piece)) for piece in pieces]
    bodies = [ast.parse(piece).body for piece in done]
    everything = [node for body in bodies for node in body]
    if "check" not in _reached(everything):
        done = [
            f"{piece}\n{_check_call(entry_point)}" if _defines_check(body) else piece
            for piece, body in zip(done, bodies, strict=True)
        ]
    if done == list(pieces) and not any(map(_runs, everything)):
        raise NoTests(
            "tests that run, where this code only defines something", "add asserts or calls, or make it a TestCase"
        )
    return tuple(done)


def _parsed(text: str) -> ast.Module:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoTests() from None
    if not tree.body:
        raise NoTests()
    return tree


def _with_cases_run(text: str, tree: ast.Module) -> str:
    """The piece with its test cases run at its end, and without a runner of its own."""
    cases = _case_names(tree.body)
    if not cases:
        return text
    kept = [node for node in tree.body if not _is_runner(node)]
    text = text if len(kept) == len(tree.body) else ast.unparse(ast.Module(kept, []))
    return text + RUN_CASES.format(names=", ".join(cases))


def _case_names(body: Iterable[ast.stmt]) -> list[str]:
    """The classes that inherit from unittest.TestCase, directly or through one another."""
    found: list[str] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            if any(base.endswith("TestCase") or base in found for base in bases):
                found.append(node.name)
    return found


def _is_runner(node: ast.stmt) -> bool:
    """`unittest.main()`, which finds no tests in the interpreter of a sandbox, and the usual `if` around it."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test).startswith("__name__ ==")
    return _is_call(node, "unittest.main") or _is_call(node, "main")


def _is_call(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == name


def _reached(body: Sequence[ast.stmt]) -> set[str]:
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
    return any(isinstance(node, ast.FunctionDef) and node.name == "check" and _takes_one(node.args) for node in body)


def _takes_one(parameters: ast.arguments) -> bool:
    """Whether a function with these parameters can be called with one argument."""
    positional = [*parameters.posonlyargs, *parameters.args]
    some = bool(positional or parameters.vararg)
    return some and len(positional) - len(parameters.defaults) <= 1 and None not in parameters.kw_defaults


def _check_call(entry_point: str | None) -> str:
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
    return call


def _runs(node: ast.AST) -> bool:
    """Whether the statement does more than define something."""
    if isinstance(node, INERT):
        return False
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
        return any(isinstance(one, ast.Call) for one in ast.walk(node))
    if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
        inner = (getattr(node, name, []) for name in ("body", "handlers", "orelse", "finalbody"))
        return any(_runs(one) for part in inner for one in part)
    return True

"""Finds tools by name: built-in ones, and a user's as `FILE.py:NAME` or `package.module:NAME`. The tool `calculator` is
here: arithmetic in bounded time and memory.

Its expression is parsed with `ast` and never executed as code. Whole numbers are exact, and the quotient of two is
whole if the division has no remainder. All operands and results are bounded; a power that is certainly too large is
refused before it is computed.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
import re
from collections.abc import Callable
from dataclasses import fields

from flowrl.environments.tools.collection import Tools
from flowrl.environments.tools.mcp_server import McpServer
from flowrl.environments.tools.sandbox import PythonTool
from flowrl.environments.tools.tool import ToolError, ToolSource
from flowrl.errors import ConfigError
from flowrl.tasks.task_syntax import parse_options
from flowrl.tasks.user_code import load_user_module

MOST_CHARACTERS = 1000
MOST_BITS = 10_000
"""Maximum bits of a whole number: some 3,000 digits, which Python still prints."""
DIGITS = 15
"""Significant digits of a number that is not whole."""

Number = int | float


def calculator(expression: str) -> str:
    """Calculates the value of an arithmetic expression. Whole numbers are exact.

    Args:
        expression: Numbers, the operators + - * / // % **, and parentheses, as in (3 + 4) * 12.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ToolError(f"The expression has {len(expression)} characters; at most {MOST_CHARACTERS} are allowed.")
    try:
        value = evaluate_node(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        raise ToolError(f"This is no arithmetic expression: {expression[:80]!r}. {KNOWN}") from None
    except (RecursionError, MemoryError):
        raise ToolError("The expression is nested too deep.") from None
    except ZeroDivisionError:
        raise ToolError("Division by zero.") from None
    except OverflowError:
        raise ToolError(TOO_LARGE) from None
    return str(value) if isinstance(value, int) else f"{value:.{DIGITS}g}"


TOO_LARGE = "The result is too large."
KNOWN = "Use numbers, + - * / // % ** and parentheses."


def evaluate_node(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return check_bounds(number)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return evaluate_node(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate_node(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return check_bounds(OPERATIONS[type(op)](evaluate_node(left), evaluate_node(right)))
    raise ToolError(f"{ast.unparse(node)[:80]!r} is not allowed here. {KNOWN}")


def check_bounds(number: Number) -> Number:
    fits = number.bit_length() <= MOST_BITS if isinstance(number, int) else math.isfinite(number)
    if not fits:
        raise ToolError(TOO_LARGE)
    return number


def divide_exactly(a: Number, b: Number) -> Number:
    whole = isinstance(a, int) and isinstance(b, int) and b != 0 and a % b == 0
    return a // b if whole else a / b


def raise_to_power(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and a.bit_length() * b > 2 * MOST_BITS:
        raise ToolError(
            TOO_LARGE
        )  # n bits to the power of b give more than (n - 1) * b bits, which is at least half of n * b
    power = a**b
    if isinstance(power, complex):
        raise ToolError(f"{a} ** {b} is no real number.")
    return power


OPERATIONS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: divide_exactly,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: raise_to_power,
}
"""Operands are bounded, so all operations but a power are quick, and their results have at most twice the bits."""


PLUS_OUTSIDE_QUOTES = re.compile(r"""\+(?=(?:[^'"]|'[^']*'|"[^"]*")*$)""")


BUILT_IN = ("calculator", "mcp", "python")


def named_tools(text: str) -> Tools:
    """The tools of names that are joined by `+` outside quotes, as in `calculator+tools.py:search`. A user's name
    refers to a function, a `ToolSource`, a list of these, or `Tools`. Raises ConfigError."""
    return Tools([tool for name in PLUS_OUTSIDE_QUOTES.split(text) for tool in find_named(name.strip())])


def find_named(name: str) -> Tools:
    built_in, _, rest = name.partition(":")
    if built_in == "calculator":
        if rest:
            raise ConfigError(f"the tool calculator has no options, and {rest!r} follows its name; remove it")
        return Tools([calculator])
    if built_in == "mcp":
        return Tools([McpServer(rest)])
    if built_in == "python":
        options, known = parse_options(f"tool {name!r}", rest), [field.name for field in fields(PythonTool)]
        for key in options:
            if key not in known:
                raise ConfigError(f"the tool python has no option {key!r}; it has {', '.join(known)}")
        return Tools([PythonTool(**options)])
    where, colon, wanted = name.rpartition(":")
    if not colon or not where or not wanted:
        close = difflib.get_close_matches(built_in, BUILT_IN, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(BUILT_IN)}, and your own: FILE.py:NAME"
        raise ConfigError(f"there is no tool {name!r}; {hint}")
    found = getattr(load_user_module(where, owner="tool"), wanted, None)
    if isinstance(found, Tools):
        return found
    if isinstance(found, list | tuple):
        return Tools(found)
    if callable(found) or isinstance(found, ToolSource):
        return Tools([found])
    raise ConfigError(f"{where} has no tools {wanted!r}; define a function, a list of functions, or Tools of that name")

"""An agent for graphs/agent_openai.py: it answers a question of arithmetic, and may use a calculator first.

It knows OpenAI's library and nothing of flowrl, so it can be run against any server of that API.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

from openai import APIStatusError, AsyncOpenAI

CALLS = 8
"""Maximum number of calls in an episode."""
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates the value of an arithmetic expression. Whole numbers are exact.",
        "parameters": {
            "properties": {
                "expression": {
                    "description": "Numbers, the operators + - * / // % **, and parentheses, as in (3 + 4) * 12.",
                    "type": "string",
                }
            },
            "required": ["expression"],
            "type": "object",
        },
    },
}
MOST_EXPONENT = 64
LARGEST = 10**1000
Number = int | float


async def play(client: AsyncOpenAI, task: Mapping[str, Any]) -> dict[str, float]:
    """The reward is 1 for the right answer."""
    messages: list[Any] = list(task["messages"])
    calls = 0
    while calls < CALLS:
        try:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        except APIStatusError as problem:
            if problem.code not in ("limit_reached", "context_length_exceeded"):
                raise
            break
        reply = answer.choices[0].message
        if not reply.tool_calls:
            right = (reply.content or "").strip() == task["answer"]
            return {"reward": float(right), "tool_calls": calls}
        messages.append(reply.to_dict())
        for call in reply.tool_calls:
            assert call.type == "function"
            calls += 1
            text = calculated(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return {"reward": 0.0, "tool_calls": calls}


def calculated(name: str, arguments: str) -> str:
    """The tool's answer; if the policy made a mistake, the answer says what is wrong."""
    if name != "calculator":
        return f"There is no tool {name}; the tools are calculator."
    try:
        return str(value(ast.parse(str(json.loads(arguments)["expression"]).strip(), mode="eval").body))
    except (ValueError, KeyError, TypeError, SyntaxError, ArithmeticError, RecursionError) as problem:
        return f"This cannot be calculated: {problem}."


def value(node: ast.expr) -> Number:
    """The value of an arithmetic expression. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return bounded(OPERATIONS[type(op)](value(left), value(right)))
    raise ValueError(f"{ast.unparse(node)[:80]} is not allowed here")


def bounded(number: Number) -> Number:
    """`number`, unless it is too large: a policy may ask for anything, and the next operation has to be quick."""
    if not abs(number) <= LARGEST:  # with `not`, so that NaN is refused as well
        raise ValueError("the result is too large")
    return number


def divided(a: Number, b: Number) -> Number:
    """A quotient that is whole stays exact."""
    return a // b if b and a % b == 0 else a / b


def power(a: Number, b: Number) -> Number:
    if abs(b) > MOST_EXPONENT:
        raise ValueError(f"the exponent {b} is above {MOST_EXPONENT}")
    found = a**b
    if isinstance(found, complex):
        raise ValueError(f"{a} ** {b} is no real number")
    return found


OPERATIONS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: divided,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: power,
}

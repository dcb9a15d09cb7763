"""Tools: how functions are described, how calls end, and what the calculator refuses."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.environments import MalformedValue, Observation, ToolCall
from flowrl.environments.protocol import without_middle
from flowrl.environments.tools import ToolError, ToolResult, Tools, named_tools
from flowrl.environments.tools.collection import call_within
from flowrl.environments.tools.named_tools import MOST_BITS, calculator
from flowrl.errors import ConfigError
from tests.environments.tool_cases import COLLECTION, add, every, misbehaves, waits

CASES = "tests/environments/tool_cases.py"
pytestmark = pytest.mark.timeout(60)


def called(tools: Tools, name: str, limit_s: float | None = None, /, **arguments: Any) -> ToolResult:
    return asyncio.run(tools.execute(ToolCall(name, arguments), limit_s=limit_s))


# Descriptions


def test_a_function_is_described_by_its_hints_and_docstring() -> None:
    (found,) = Tools([add]).descriptions
    assert found == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first one."},
                    "b": {"type": "integer", "default": 1, "description": "The second one, which may be left out."},
                },
                "required": ["a"],
            },
        },
    }
    assert Observation(tools=Tools([add, every]).descriptions).tools[0] == found


def test_every_type_has_its_schema() -> None:
    (found,) = Tools([every]).descriptions
    assert found["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "share": {"type": "number"},
            "flag": {"type": "boolean"},
            "unit": {"enum": ["m", "km"], "type": "string"},
            "numbers": {"items": {"type": "number"}, "type": "array"},
            "sizes": {"additionalProperties": {"type": "integer"}, "type": "object"},
            "schema": {"additionalProperties": True, "default": {}, "type": "object"},
            "maximum": {"nullable": True, "type": "integer"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 0},
        },
        "required": ["text", "share", "flag", "unit", "numbers", "sizes"],
    }


def undocumented(a: int) -> int:
    return a


def unhinted(a) -> int:  # type: ignore[no-untyped-def]
    """Has no hint."""
    return int(a)


def indescribable(a: threading.Lock) -> None:
    """Takes a lock."""


def anything(a: Any) -> None:
    """Takes anything."""


def listed(*a: int) -> None:
    """Takes many."""


def unknown(a: "NoSuchName") -> None:  # type: ignore[name-defined]  # noqa: F821, UP037
    """Takes what is nowhere."""


def misdescribed(a: int) -> None:
    """Takes a.

    Args:
        b: Is not there.
    """


def größer(a: int) -> None:
    """Has a name of its own."""


def odd_default(a: int = object()) -> None:  # type: ignore[assignment]
    """Has a default that is no JSON."""


REFUSED: dict[Callable[..., Any], str] = {
    undocumented: "tool undocumented has no docstring",
    unhinted: "the parameter a of tool unhinted has no type hint; write a: str",
    indescribable: "the type hints of tool indescribable cannot be described as JSON Schema",
    anything: "anything cannot be described as JSON Schema (the hint of a says nothing)",
    listed: "tool listed has the parameter a, which a call cannot give by name",
    unknown: "the type hints of tool unknown cannot be read (name 'NoSuchName' is not defined)",
    misdescribed: "the docstring of tool misdescribed describes b, which it does not take",
    größer: "größer is no function with a name that a policy can call",
    odd_default: "the type hints of tool odd_default cannot be described",
    len: "len is no function",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_a_function_that_cannot_be_described_is_named(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as error:
        Tools([function])
    assert REFUSED[function] in str(error.value)


def optional(a: Optional[str] = None, b: list[int] | None = None) -> str:  # noqa: UP045
    """Takes what may be missing."""
    return f"{a} {b}"


def test_an_optional_argument_may_be_missing_or_null() -> None:
    tools = Tools([optional])
    assert set(tools.descriptions[0]["function"]["parameters"]) == {"type", "properties"}
    assert called(tools, "optional").text == "None None"
    assert called(tools, "optional", a=None, b=[1]).text == "None [1]"
    assert called(tools, "optional", a=1).failed


def test_limits_and_names_are_checked() -> None:
    for make, says in (
        (lambda: Tools([add], call_s=0), "call_s of tools is 0; it has to be above 0"),
        (lambda: Tools([add], observation_bytes=10), "observation_bytes of tools is 10; it has to be at least 64"),
        (lambda: Tools([add, add]), "two tools have the name add"),
        (lambda: named_tools("calculatr"), "there is no tool 'calculatr'; did you mean calculator?"),
        (lambda: named_tools("calculator+"), "there is no tool ''; there are calculator, mcp, python, and your own"),
        (lambda: named_tools("no/such.py:add"), "the tool's file no/such.py does not exist"),
        (lambda: named_tools(f"{CASES}:subtract"), "has no tools 'subtract'; define a function"),
        (lambda: named_tools(f"{CASES}:NUMBER"), "has no tools 'NUMBER'; define a function"),
        (lambda: named_tools(f"{CASES}:FUNCTIONS+{CASES}:add"), "two tools have the name add"),
    ):
        with pytest.raises(ConfigError) as error:
            make()
        assert says in str(error.value)


def test_tools_are_found_by_name_with_their_own_limits() -> None:
    tools = {tool.name: tool for tool in named_tools(f"calculator + {CASES}:MIXED")}
    assert list(tools) == ["calculator", "misbehaves", "waits", "add"]
    assert [tool.call_s for tool in tools.values()] == [10.0, 0.2, 0.2, 10.0]


# Calls


def test_a_call_is_executed() -> None:
    assert called(Tools([add]), "add", a=2) == ToolResult("3")
    assert called(Tools([add]), "add", a=10**40, b=-1) == ToolResult("9" * 40)
    given = {
        "text": "é",
        "share": 1,
        "flag": False,
        "unit": "km",
        "numbers": [1, 2.5],
        "sizes": {"a": 1},
        "schema": {"x": [None]},
    }
    assert json.loads(called(Tools([every]), "every", **given).text) == {**given, "m": None}


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({}, "add needs the argument a."),
    ({"a": "2"}, "The argument a of add is '2': Input should be a valid integer."),
    ({"a": 2.5}, "The argument a of add is 2.5: Input should be a valid integer."),
    ({"a": True}, "The argument a of add is True: Input should be a valid integer."),
    ({"a": None}, "The argument a of add is None: Input should be a valid integer."),
    ({"a": 1, "c": 2}, "add has no argument 'c'; its arguments are: a, b."),
    ({"b": 1, "c": 2}, "add needs the argument a. add has no argument 'c'; its arguments are: a, b."),
    ({"a": "x" * 100}, f"The argument a of add is '{'x' * 56}...: Input should be a valid integer."),
    ({"a": "\ud800"}, "The arguments of add are no JSON object: Invalid JSON"),
    ({"a": math.nan}, "The argument a of add is nan"),
    ({"a": {1, 2}}, "The arguments of add are no JSON: TypeError: Object of type set"),
]


@pytest.mark.parametrize(("arguments", "says"), MISFITS)
def test_arguments_that_do_not_fit_are_said_to_the_policy(arguments: dict[str, Any], says: str) -> None:
    found = called(Tools([add]), "add", **arguments)
    assert found.failed and found.text.startswith(says)


def test_a_nested_argument_is_named_by_its_place() -> None:
    given = {"text": "", "share": 1.0, "flag": True, "unit": "inch", "numbers": [1, "x"], "sizes": {"a": 1.5}}
    assert called(Tools([every]), "every", **given).text == (
        "The argument unit of every is 'inch': Input should be 'm' or 'km'. "
        "The argument numbers.1 of every is 'x': Input should be a valid number. "
        "The argument sizes.a of every is 1.5: Input should be a valid integer."
    )


def test_an_unknown_name_is_said_to_the_policy() -> None:
    found = called(Tools([add, misbehaves]), "s" * 300, a=1)
    assert found.failed and found.text.endswith("s...; the tools are: add, misbehaves.") and len(found.text) < 120


def test_arguments_that_are_no_mapping_do_not_fit() -> None:
    call = ToolCall("add", [1, 2])  # type: ignore[arg-type]
    assert asyncio.run(Tools([add]).execute(call)).text.startswith("The arguments of add are no JSON object")


ENDS = {
    "raise": "misbehaves raised LookupError: no such thing",
    "answer": "There is nothing.",
    "exit": "misbehaves called sys.exit(3).",
    "memory": "misbehaves raised MemoryError",
    "deep": "misbehaves raised RecursionError: maximum recursion depth exceeded",
    "digits": "misbehaves raised ValueError: Exceeds the limit",
    "loop": "misbehaves was stopped: it took more than 0.2 s.",
    "sleep": "misbehaves was stopped: it took more than 0.2 s.",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_tool_that_fails_is_a_text(how: str) -> None:
    before = signal.getsignal(signal.SIGALRM)
    begun = time.monotonic()
    found = called(COLLECTION, "misbehaves", how=how)
    assert found.failed and found.text.startswith(ENDS[how])
    assert time.monotonic() - begun < 5.0
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_an_alarm_that_is_caught_comes_again() -> None:
    assert called(COLLECTION, "misbehaves", how="swallow").text.startswith("misbehaves was stopped")


def test_results_are_shortened_and_become_text() -> None:
    assert called(COLLECTION, "misbehaves", how="object") == ToolResult('{"found": [1, null, "(1+2j)"]}')
    assert called(COLLECTION, "misbehaves", how="half") == ToolResult("a?b")
    long = called(COLLECTION, "misbehaves", how="long")
    assert not long.failed and len(long.text.encode()) <= 200 and " bytes left out]" in long.text


def test_an_asynchronous_tool_is_cancelled_at_its_limit() -> None:
    assert called(COLLECTION, "waits", seconds=0).text == "waited"
    assert called(COLLECTION, "waits", seconds=100).text == "waits was stopped: it took more than 0.2 s."
    assert called(COLLECTION, "waits", 0.05, seconds=100).text == "waits was stopped: it took more than 0.05 s."
    assert called(COLLECTION, "waits", seconds=-1) == ToolResult("waits cancelled itself.", failed=True)


def test_a_call_without_time_left_is_not_made() -> None:
    assert called(Tools([add]), "add", 0.0, a=1) == ToolResult("add was not called: no time is left.", failed=True)


def test_a_cancellation_from_outside_passes() -> None:
    async def scenario() -> None:
        running = asyncio.create_task(Tools([waits]).execute(ToolCall("waits", {"seconds": 100})))
        await asyncio.sleep(0)  # the task begins
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())


def test_a_synchronous_tool_in_another_thread_is_refused() -> None:
    found: list[ToolResult] = []
    thread = threading.Thread(target=lambda: found.append(called(Tools([add]), "add", a=1)))
    thread.start()
    thread.join()
    assert found[0].failed and "runs in the main thread" in found[0].text


def test_an_alarm_after_the_end_does_nothing() -> None:
    """It arrives while the function's caller, and no more the function, is running."""
    assert call_within(5.0, int) == 0
    handlers: list[Any] = []
    call_within(5.0, lambda: handlers.append(signal.getsignal(signal.SIGALRM)))
    inside = handlers[0].__closure__[0].cell_contents
    assert handlers[0](signal.SIGALRM, inside) is None


# What is shown


@given(text=st.text(), most=st.integers(64, 300))
def test_the_middle_is_left_out(text: str, most: int) -> None:
    long = text * 50
    shown = without_middle(long, most)
    whole = long.encode("utf-8", "replace").decode()
    assert len(shown.encode()) <= most
    if len(whole.encode()) <= most:
        assert shown == whole
    else:
        head, _, tail = shown.partition("\n[")
        number, _, end = tail.partition(" bytes left out]\n")
        assert number.isdigit() and whole.startswith(head) and whole.endswith(end)
    with pytest.raises(MalformedValue):
        Observation("\ud800")
    Observation(without_middle("\ud800", most))


# Calculator

CALCULATED = {
    "1+2*3": "7",
    " (3 + 4) * 12 ": "84",
    "7/2": "3.5",
    "6/3": "2",
    "-7//2": "-4",
    "-7%3": "2",
    "2**-1": "0.5",
    "0.1+0.2": "0.3",
    "5.5//2": "2",
    "-2**2": "-4",
    "+3": "3",
    "1_000": "1000",
    "1e3": "1000",
    "1**99999999999": "1",
    "(-1)**99999999999": "-1",
    "0**99999999999": "0",
    "2**9999": str(2**9999),
    "10**300/10**299": "10",
    "12345678901234567890*98765432109876543210": str(12345678901234567890 * 98765432109876543210),
}


@pytest.mark.parametrize("expression", CALCULATED)
def test_the_calculator_calculates(expression: str) -> None:
    assert calculator(expression) == CALCULATED[expression]


UNCALCULATED = {
    "7+5=": "This is no arithmetic expression: '7+5='. Use numbers",
    "": "This is no arithmetic expression: ''",
    "\0": "This is no arithmetic expression",
    "\ud800": "This is no arithmetic expression",
    "(" * 300: "This is no arithmetic expression",
    "-" * 999 + "1": "The expression is nested too deep.",
    "1" * 1001: "The expression has 1001 characters; at most 1000 are allowed.",
    "1/0": "Division by zero.",
    "0**-1": "Division by zero.",
    "5%0": "Division by zero.",
    "5//0.0": "Division by zero.",
    "2**10000": "The result is too large.",
    "9**9**9": "The result is too large.",
    "9**9**9**9**9": "The result is too large.",
    "(2**9000)*(2**9000)": "The result is too large.",
    "10**3000/7": "The result is too large.",
    "1e308*10": "The result is too large.",
    "1e999": "The result is too large.",
    "2.0**99999": "The result is too large.",
    "2**9000*1.5": "The result is too large.",
    "(-8)**(1/3)": "-8 ** 0.3333333333333333 is no real number.",
    "1j": "'1j' is not allowed here.",
    "True": "'True' is not allowed here.",
    "'a'*9": "\"'a'\" is not allowed here.",
    "x": "'x' is not allowed here.",
    "__import__('os')": "\"__import__('os')\" is not allowed here.",
    "1<2": "'1 < 2' is not allowed here.",
    "2^3": "'2 ^ 3' is not allowed here.",
    "~2": "'~2' is not allowed here.",
    "[1]": "'[1]' is not allowed here.",
    "1 if 2 else 3": "'1 if 2 else 3' is not allowed here.",
}


@pytest.mark.parametrize("expression", UNCALCULATED)
def test_the_calculator_refuses_in_a_sentence(expression: str) -> None:
    with pytest.raises(ToolError) as error:
        calculator(expression)
    assert str(error.value).startswith(UNCALCULATED[expression])


pieces = st.sampled_from(["**", "*", "/", "//", "%", "+", "-", "(", ")", "9", "2", "0", "1.5", "99999", " "])


@given(expression=st.lists(pieces, max_size=40).map("".join))
def test_the_calculator_ends_soon_with_a_number_or_a_sentence(expression: str) -> None:
    begun = time.process_time()
    try:
        found = calculator(expression)
    except ToolError:
        pass
    else:
        assert math.isfinite(float(found)) if "e" in found else len(found) <= MOST_BITS // 3
    assert time.process_time() - begun < 1.0


@given(a=st.integers(-(10**20), 10**20), b=st.integers(-(10**20), 10**20))
def test_whole_numbers_are_exact(a: int, b: int) -> None:
    assert calculator(f"({a}) * ({b}) + ({a}) - ({b})") == str(a * b + a - b)
